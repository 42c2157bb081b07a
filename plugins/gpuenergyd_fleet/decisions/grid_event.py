"""Grid events: a grid operator asks a fleet to limit its load from a start until an end.

Instants are seconds since 1970 UTC.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

MAX_EVENT_ID_CHARS = 64
MAX_REASON_CHARS = 200
MAX_AHEAD_S = 366 * 86_400.0
"""How far in the future an event may begin."""
MAX_DURATION_S = 7 * 86_400.0
MAX_LOAD_W = 1e11
MAX_OPEN_EVENTS = 100
"""Most events of a fleet that have not ended."""


class LoadUnit(StrEnum):
    """Unit of a load target."""

    W = "W"
    KW = "kW"
    MW = "MW"
    PERCENT = "percent"
    """Percent of the mean load before the event began."""


_WATTS = {LoadUnit.W: 1.0, LoadUnit.KW: 1e3, LoadUnit.MW: 1e6}


@dataclass(frozen=True, slots=True)
class GridEvent:
    """A load target: the fleet draws at most `value` from `start_s` until just before `end_s`, best effort."""

    event_id: str
    """The operator's correlation id; a later event with the same id replaces this one."""
    start_s: float
    end_s: float
    value: float
    unit: LoadUnit
    reason: str = ""
    is_cancelled: bool = False
    issued_s: float = 0.0
    """When the operator sent it; an older version never replaces a newer one."""
    source: str = ""
    baseline_w: float | None = None
    """Mean load before the event began; None before that, or if not measured."""

    def limit_w(self, load_w: float) -> float:
        """Return the highest permitted load in watts.

        Args:
            load_w: the present load, to which a percentage refers while there is no baseline.
        """
        if self.unit is LoadUnit.PERCENT:
            return self.value / 100 * (load_w if self.baseline_w is None else self.baseline_w)
        return self.value * _WATTS[self.unit]

    def is_active(self, at_s: float) -> bool:
        return not self.is_cancelled and self.start_s <= at_s < self.end_s


def event_problem(event: GridEvent, now_s: float) -> str | None:
    """Return what is wrong with an event received now, and what would be valid; None if nothing is wrong."""
    return next(_problems(event, now_s), None)


def _problems(event: GridEvent, now_s: float) -> Iterator[str]:
    name = event.event_id
    if not 0 < len(name) <= MAX_EVENT_ID_CHARS or not (name.isascii() and name.isprintable()) or " " in name:
        yield f"event_id {name!r:.70}: valid are 1 to {MAX_EVENT_ID_CHARS} printable ASCII characters without blanks"
    if len(event.reason) > MAX_REASON_CHARS or not event.reason.isprintable():
        yield f"reason: must be one printable line of at most {MAX_REASON_CHARS} characters"
    if not (math.isfinite(event.start_s) and math.isfinite(event.end_s)):
        yield "start and end must be finite times"
    if event.end_s <= event.start_s:
        yield "the end must be after the start"
    if event.end_s - event.start_s > MAX_DURATION_S:
        yield f"{event.end_s - event.start_s:g} s long; at most {MAX_DURATION_S:g} s are valid"
    if event.end_s <= now_s:
        yield "the end is in the past"
    if event.start_s > now_s + MAX_AHEAD_S:
        yield f"begins in {event.start_s - now_s:g} s; at most {MAX_AHEAD_S:g} s ahead are valid"
    most = 100.0 if event.unit is LoadUnit.PERCENT else MAX_LOAD_W / _WATTS[event.unit]
    if not (math.isfinite(event.value) and 0 < event.value <= most):
        yield f"value = {event.value:g} {event.unit}: valid are finite values above 0 up to {most:g} {event.unit}"


def replaces(event: GridEvent, before: GridEvent | None) -> bool:
    """Return whether a valid event replaces the known one with its id, which a repetition or older version does not."""
    if before is None:
        return True
    same = (event.start_s, event.end_s, event.value, event.unit, event.reason, event.is_cancelled) == (
        before.start_s,
        before.end_s,
        before.value,
        before.unit,
        before.reason,
        before.is_cancelled,
    )
    return not same and event.issued_s >= before.issued_s


def least_limit_w(events: Iterable[GridEvent], at_s: float, load_w: float) -> float:
    """Return the lowest limit of the events in force at an instant, which may overlap; infinity if there are none."""
    return min((event.limit_w(load_w) for event in events if event.is_active(at_s)), default=math.inf)
