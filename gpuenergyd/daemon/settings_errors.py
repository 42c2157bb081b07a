"""Messages about invalid settings: the nearest valid name, and pydantic's reasons as one plain clause."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

_NEAR_RATIO = 0.8
"""Least similarity at which one name is taken for a misspelling of the other."""
_REASONS = {
    "dict_type": "must be a table",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "datetime_from_date_parsing": "must be a time such as 2026-01-31T08:00:00Z",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
}
_PREFIXES = {"Value error, ": "", "Input should be ": "must be ", "String should ": "must "}


def unknown_text(key: str, valid: Collection[str]) -> str:
    """Return which names are valid instead of an unknown one: the nearest, or all if none is near."""
    near = nearest(key, valid)
    return f"did you mean {near!r}?" if near is not None else f"valid: {', '.join(sorted(valid))}"


def nearest(key: str, valid: Collection[str]) -> str | None:
    """Return the name that `key` is a misspelling of, None if none is similar."""
    return next(iter(get_close_matches(key, valid, n=1, cutoff=_NEAR_RATIO)), None)


def reason_text(error: Mapping[str, Any]) -> str:
    """Return the reason of a pydantic error as a clause such as `must be 'control' or 'observe'`."""
    if (known := _REASONS.get(error["type"])) is not None:
        return known
    message = str(error["msg"])
    for prefix, plain in _PREFIXES.items():
        if message.startswith(prefix):
            return plain + message.removeprefix(prefix)
    return message
