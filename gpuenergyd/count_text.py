"""Counts with a noun in singular or plural: `1 rank`, `4 ranks`, `2 microbatches`; used in all output and errors."""


def count_text(number: float, what: str) -> str:
    """Return a number with its noun; `what` is the singular, such as `data-parallel rank`."""
    shown = number if isinstance(number, int) else f"{number:g}"
    return f"{shown} {what if number == 1 else _plural(what)}"


def _plural(what: str) -> str:
    if what.endswith(("ch", "s", "sh", "x")):
        return f"{what}es"
    if what.endswith("y") and not what.endswith(("ay", "ey", "oy")):
        return f"{what[:-1]}ies"
    return f"{what}s"
