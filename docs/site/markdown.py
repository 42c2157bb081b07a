"""Tables, code and text in Markdown."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells may hold Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def code(text: str) -> str:
    """Return text as code within a line."""
    return f"`{text}`" if text else ""


def block(text: str, language: str) -> str:
    """Return text as a block of code."""
    return f"```{language}\n{text.strip()}\n```\n"


def page(title: str, *parts: str) -> str:
    """Return a page."""
    return "\n".join([f"# {title}\n", *(part.rstrip() + "\n" for part in parts)])
