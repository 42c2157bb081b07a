"""Arguments of a command in their plain form, parsed from the command's declaration without Typer's parser.

Typer converts all values with pydantic, whose import takes longer than most commands run. Arguments are plain if they
are words, flags and `--option value` with valid values; all other forms, help and errors are left to Typer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import Parameter, signature
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo

_WHOLE = re.compile(r"[0-9]+")
_DECIMAL = re.compile(r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?")


class _NotPlainError(Exception):
    """Typer must parse these arguments."""


@dataclass(slots=True)
class _Declared:
    """A parameter of a command: its declaration, the type of a single value, and the values given."""

    info: OptionInfo | ArgumentInfo
    kind: Any
    is_list: bool
    default: Any
    given: list[Any] = field(default_factory=list)

    @property
    def value(self) -> Any:
        """The list of values if the parameter takes several, else the last value given or the default."""
        if not self.given and self.default is Parameter.empty:
            raise _NotPlainError
        value = self.default if not self.given else self.given if self.is_list else self.given[-1]
        return value if self.info.callback is None else self.info.callback(value)


def plain_arguments(function: Callable[..., int], words: Sequence[str]) -> dict[str, Any] | None:
    """Return the value of each parameter of a command as Typer would; None if Typer must parse the words."""
    declared = {name: _declared(parameter) for name, parameter in signature(function).parameters.items()}
    options = {flag: one for name, one in declared.items() for flag in _flags(name, one)}
    arguments = [one for one in declared.values() if isinstance(one.info, ArgumentInfo)]
    try:
        _assign(words, options, arguments)
        return {name: one.value for name, one in declared.items()}
    except _NotPlainError:
        return None


def _assign(words: Sequence[str], options: Mapping[str, _Declared], arguments: list[_Declared]) -> None:
    """Assign the words to parameters; an argument that takes several words must be the last one."""
    remaining = iter(words)
    for word in remaining:
        one = options.get(word)
        if one is not None and one.kind is bool:
            one.given.append(True)
            continue
        text = word if one is None else next(remaining, "-")
        if one is None and arguments:
            one = arguments[0] if arguments[0].is_list else arguments.pop(0)
        if one is None or text.startswith("-"):
            raise _NotPlainError
        one.given.append(_converted(text, one))


def _declared(parameter: Parameter) -> _Declared:
    annotation, info = get_args(parameter.annotation)
    alternatives = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    (kind,) = (one for one in alternatives if one is not NoneType)
    is_list = get_origin(kind) is list
    if is_list:
        (kind,) = get_args(kind)
    return _Declared(info, kind, is_list, parameter.default)


def _flags(name: str, one: _Declared) -> tuple[str, ...]:
    if isinstance(one.info, ArgumentInfo):
        return ()
    # In `Annotated`, the first name of an option is stored where otherwise its default is.
    names: list[Any] = [*([] if one.info.default is ... else [one.info.default]), *(one.info.param_decls or ())]
    return tuple(names) or (f"--{name.replace('_', '-')}",)


def _converted(text: str, one: _Declared) -> Any:
    kind = one.kind
    if kind in {str, Path}:
        return kind(text)
    if issubclass(kind, StrEnum) and text in {*kind}:
        return kind(text)
    if (kind is int and _WHOLE.fullmatch(text)) or (kind is float and _DECIMAL.fullmatch(text)):
        number = kind(text)
        lowest, highest = one.info.min, one.info.max
        if isfinite(number) and (lowest is None or number >= lowest) and (highest is None or number <= highest):
            return number
    raise _NotPlainError
