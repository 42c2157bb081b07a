"""Renders tables, code and pages in Markdown."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells may contain Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def code(text: str) -> str:
    """Return text as inline code."""
    return f"`{text}`" if text else ""


def block(text: str, language: str) -> str:
    """Return text as a code block."""
    return f"```{language}\n{text.strip()}\n```\n"


def page(title: str, *parts: str) -> str:
    """Return a page with a title and parts."""
    return "\n".join([f"# {title}\n", *(part.rstrip() + "\n" for part in parts)])
