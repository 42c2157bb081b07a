"""The terminal for people: no colour when piped, nothing wrapped in the middle of a path."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def people_console() -> "Console":
    """Return the console for people: no colour when piped, nothing wrapped in the middle of a path."""
    from rich.console import Console  # noqa: PLC0415  scripts ask for JSON and shall not wait for it

    return Console(soft_wrap=False, highlight=False)
