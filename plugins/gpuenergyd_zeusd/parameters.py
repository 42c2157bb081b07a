"""Parsing of zeusd's query parameters: all required, unknown ones refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuenergyd.errors import UsageError

_MAX_UNSIGNED = 2**32 - 1
_DIGITS = re.compile(r"[0-9]{1,10}")
_MAX_IDS = 256


class BadParameterError(UsageError):
    """A missing, unknown or malformed query parameter; the message names it."""


@dataclass(slots=True)
class Parameters:
    """The query parameters of one request; `done` refuses parameters that were not read."""

    given: Mapping[str, str]
    _read: set[str] = field(default_factory=set)

    def unsigned(self, name: str) -> int:
        """Return a 32-bit unsigned integer parameter.

        Raises:
            BadParameterError: it is missing or no such integer.
        """
        word = self._value(name)
        if _DIGITS.fullmatch(word) is None or int(word) > _MAX_UNSIGNED:
            raise BadParameterError(f"{name}: {word[:40]!r} is not an integer from 0 to {_MAX_UNSIGNED}")
        return int(word)

    def boolean(self, name: str) -> bool:
        """Return a boolean parameter, `true` or `false`.

        Raises:
            BadParameterError: it is missing or has another value.
        """
        word = self._value(name)
        if word not in {"true", "false"}:
            raise BadParameterError(f"{name}: {word[:40]!r} is neither true nor false")
        return word == "true"

    def clock_range(self) -> tuple[int, int]:
        """Return `min_clock_mhz` and `max_clock_mhz`.

        Raises:
            BadParameterError: one is missing or malformed, or the minimum is above the maximum.
        """
        low_mhz, high_mhz = self.unsigned("min_clock_mhz"), self.unsigned("max_clock_mhz")
        if low_mhz > high_mhz:
            raise BadParameterError(f"min_clock_mhz: {low_mhz} is above max_clock_mhz, {high_mhz}")
        return low_mhz, high_mhz

    def indices(self, name: str = "gpu_ids", *, is_required: bool) -> tuple[int, ...]:
        """Return GPU or CPU indices without duplicates, in order; empty if an optional parameter is absent.

        Raises:
            BadParameterError: it is missing or not a list of indices.
        """
        if not is_required and name not in self.given:
            return ()
        words = [word.strip() for word in self._value(name).split(",")]
        if len(words) > _MAX_IDS or not all(_DIGITS.fullmatch(word) for word in words):
            raise BadParameterError(f"{name}: {self.given[name][:40]!r} is not a list of indices such as 0,1,2")
        return tuple(dict.fromkeys(int(word) for word in words))

    def done(self) -> None:
        """Check that every parameter of the request was read.

        Raises:
            BadParameterError: the request has an unknown parameter.
        """
        for name in self.given:
            if name not in self._read:
                raise BadParameterError(f"{name[:40]}: unknown parameter")

    def _value(self, name: str) -> str:
        self._read.add(name)
        try:
            return self.given[name]
        except KeyError:
            raise BadParameterError(f"{name}: missing parameter") from None
