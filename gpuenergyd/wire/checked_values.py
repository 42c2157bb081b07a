"""Numbers from files: finite, whole where they must be, and named with their place when they are not."""

import math

from gpuenergyd.errors import ProfileError

MAX_STAGES = 4096


def number(where: str, name: str, value: object) -> float:
    """Return a finite number from a CSV cell or a JSON value.

    Raises:
        ProfileError: it is none; the message begins with `where`.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError  # noqa: TRY004, TRY301  one message for all that is no number
        found = float(value)
    except (ValueError, OverflowError):
        raise ProfileError(f"{where}: {name} {short(value)}: not a number") from None
    if not math.isfinite(found):
        raise ProfileError(f"{where}: {name} {short(value)}: must be a finite number")
    return found


def whole(where: str, name: str, value: object) -> int:
    """Return a whole number from a CSV cell or a JSON value.

    Raises:
        ProfileError: it is none.
    """
    found = number(where, name, value)
    if found != int(found):
        raise ProfileError(f"{where}: {name} {short(value)}: must be a whole number")
    return int(found)


def short(value: object) -> str:
    """Return a value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
