"""Reads dataclasses from untrusted JSON values, checking that every value has its type and numbers are finite.

The daemon's codec ignores unknown fields and turns integers into floats. A proof allows neither, because its verdict is
compared byte for byte.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gpuenergyd.count_text import count_text
from gpuenergyd_prove.errors import ProofError

T = TypeVar("T")
_LARGEST = 2**53
"""Largest permitted number, up to which JSON's integers are exact."""


def read_as(kind: type[T], values: object, where: str = "") -> T:
    """Return a dataclass from a JSON object, with lists converted to tuples.

    Raises:
        ProofError: a field is missing or unknown, or has a value of the wrong type; the message names it.
    """
    name = where or kind.__name__
    if not isinstance(values, Mapping):
        raise ProofError(f"{name} is {_shown(values)}; expected an object")
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    if unknown := sorted(values.keys() - known.keys()):
        raise ProofError(f"{name} has the unknown field {_shown(unknown[0])}")
    for field in known.values():
        if field.name not in values and field.default is MISSING:
            raise ProofError(f"{name} has no field {field.name!r}")
    return kind(**{key: _value(hints[key], values[key], f"{name}.{key}") for key in known if key in values})


def read_rows(kind: type[T], rows: object, where: str) -> tuple[T, ...]:
    """Return dataclasses from a list of lists, each with the values of all fields in order.

    Raises:
        ProofError: a row has the wrong length, or a value of the wrong type; the message names it.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # T is a dataclass
    if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != len(names) for row in rows):
        raise ProofError(f"{where} is not a list of lists of {count_text(len(names), 'value')}: {', '.join(names)}")
    hints = get_type_hints(kind)
    types = [hints[name] for name in names]
    return tuple(
        kind(*(_value(hint, value, f"{where}.{name}") for hint, value, name in zip(types, row, names, strict=True)))
        for row in rows
    )


def _value(kind: Any, value: object, where: str) -> Any:
    if get_origin(kind) is UnionType:
        inner = [part for part in get_args(kind) if part is not NoneType]
        return None if value is None else _value(inner[0], value, where)
    if get_origin(kind) is tuple:
        own = get_args(kind)
        if not isinstance(value, list | tuple) or (own[-1] is not Ellipsis and len(value) != len(own)):
            raise ProofError(f"{where} is {_shown(value)}; expected a list")
        kinds = [own[0]] * len(value) if own[-1] is Ellipsis else own
        return tuple(_value(each, part, where) for each, part in zip(kinds, value, strict=True))
    if is_dataclass(kind) and isinstance(kind, type):
        return read_as(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return value  # written as an integer, and must be written so again
    if type(value) is not kind or (kind in {int, float} and not _is_number(value)):
        raise ProofError(f"{where} is {_shown(value)}; expected a value of type {getattr(kind, '__name__', kind)}")
    return value


def _is_number(value: Any) -> bool:
    return math.isfinite(value) and abs(value) <= _LARGEST


def _shown(value: object) -> str:
    return f"{value!r:.40}"
