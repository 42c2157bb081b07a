"""Query parameters as zeusd takes them: exact words, nothing missing, nothing unknown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuenergyd.errors import UsageError

_MAX_UNSIGNED = 2**32 - 1
_DIGITS = re.compile(r"[0-9]{1,10}")
_MAX_IDS = 256


class BadParameterError(UsageError):
    """A parameter that is missing, unknown or malformed; the message names it."""


@dataclass(slots=True)
class Parameters:
    """The parameters of one request; each is taken once, and `done` refuses what nobody took."""

    given: Mapping[str, str]
    _taken: set[str] = field(default_factory=set)

    def unsigned(self, name: str) -> int:
        """Return a whole number of 32 bits.

        Raises:
            BadParameterError: it is missing, or something else.
        """
        word = self._take(name)
        if _DIGITS.fullmatch(word) is None or int(word) > _MAX_UNSIGNED:
            raise BadParameterError(f"{name}: {word[:40]!r} is no whole number from 0 to {_MAX_UNSIGNED}")
        return int(word)

    def boolean(self, name: str) -> bool:
        """Return what `true` or `false` says.

        Raises:
            BadParameterError: it is missing, or says something else.
        """
        word = self._take(name)
        if word not in {"true", "false"}:
            raise BadParameterError(f"{name}: {word[:40]!r} is neither true nor false")
        return word == "true"

    def clock_range(self) -> tuple[int, int]:
        """Return the lowest and the highest clock.

        Raises:
            BadParameterError: one is missing or malformed, or they are in the wrong order.
        """
        low_mhz, high_mhz = self.unsigned("min_clock_mhz"), self.unsigned("max_clock_mhz")
        if low_mhz > high_mhz:
            raise BadParameterError(f"min_clock_mhz: {low_mhz} is above max_clock_mhz, {high_mhz}")
        return low_mhz, high_mhz

    def gpu_ids(self, *, is_required: bool) -> tuple[int, ...]:
        """Return GPU indices in the order given, each once; none where the parameter is absent and need not be there.

        Raises:
            BadParameterError: it is missing, or no list of indices.
        """
        if not is_required and "gpu_ids" not in self.given:
            return ()
        words = [word.strip() for word in self._take("gpu_ids").split(",")]
        if len(words) > _MAX_IDS or not all(_DIGITS.fullmatch(word) for word in words):
            raise BadParameterError("gpu_ids: a list of GPU indices is expected, such as 0,1,2")
        return tuple(dict.fromkeys(int(word) for word in words))

    def done(self) -> None:
        """Refuse what was not asked for.

        Raises:
            BadParameterError: there is such a parameter.
        """
        for name in self.given:
            if name not in self._taken:
                raise BadParameterError(f"{name[:40]}: unknown parameter")

    def _take(self, name: str) -> str:
        self._taken.add(name)
        try:
            return self.given[name]
        except KeyError:
            raise BadParameterError(f"{name}: this parameter is missing") from None
