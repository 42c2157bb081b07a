"""Validation of numbers in files; errors name the place and the value."""

import math

from gpuenergyd.errors import ProfileError

MAX_STAGES = 4096


def number(where: str, name: str, value: object) -> float:
    """Return a CSV cell or JSON value as a finite number.

    Raises:
        ProfileError: the value is not a finite number; the message starts with `where`.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError  # noqa: TRY004, TRY301  one message for all invalid values
        found = float(value)
    except (ValueError, OverflowError):
        raise ProfileError(f"{where}: {name} {short(value)}: not a number") from None
    if not math.isfinite(found):
        raise ProfileError(f"{where}: {name} {short(value)}: must be a finite number")
    return found


def whole(where: str, name: str, value: object) -> int:
    """Return a CSV cell or JSON value as an integer, or raise ProfileError if it is not one."""
    found = number(where, name, value)
    if found != int(found):
        raise ProfileError(f"{where}: {name} {short(value)}: must be a whole number")
    return int(found)


def short(value: object) -> str:
    """Return a value for an error message, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
