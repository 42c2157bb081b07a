"""Load targets of OpenADR 2.0b events: which signals are supported, and what they ask for.

Events are dictionaries as openleadr parses them. Nothing in them is trusted: missing values, values of the wrong type
and impossible values are refused with a one-line reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError
from gpuenergyd_fleet.decisions.grid_event import MAX_REASON_CHARS, GridEvent, LoadUnit, event_problem

OPENADR_SOURCE = "openadr"
NUM_LEVELS = 3
"""Number of levels of the signal SIMPLE above the normal level, 0."""
_MAX_INTERVALS = 50
_SCALES = {"none": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class SiteTerms:
    """Terms that the site has agreed with the grid operator outside the events."""

    capacity_w: float | None = None
    """The site's capacity, to which shares of capacity refer."""
    level_percents: tuple[float, ...] = ()
    """Highest load at levels 1, 2, ... of SIMPLE, in percent of the load before the event."""


def event_id_of(event: Any) -> str:
    """Return the operator's id of an event for messages, shortened and printable."""
    try:
        text = str(event["event_descriptor"]["event_id"])
    except (KeyError, TypeError):
        return "without an id"
    return ascii(text[:70])[1:-1]


def load_targets(event: Any, terms: SiteTerms, now_s: float) -> tuple[GridEvent, ...]:
    """Return the load targets of an event that have not ended, one per interval; empty if it was cancelled.

    Raises:
        UsageError: the event is invalid, is a test, or has no supported signal.
    """
    try:
        return _load_targets(event, terms, now_s)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"malformed event: {type(error).__name__}: {str(error)[:80]!r}") from None


def _load_targets(event: Mapping[str, Any], terms: SiteTerms, now_s: float) -> tuple[GridEvent, ...]:
    descriptor = event["event_descriptor"]
    if descriptor.get("event_status") in {"cancelled", "completed"}:
        return ()
    if descriptor.get("test_event") in {True, "true"}:
        raise UsageError("a test event is not followed")
    problems = []
    for signal in _listed(event["event_signals"]):
        try:
            return _of_signal(event, signal, terms, now_s)
        except UsageError as error:
            problems.append(str(error))
    raise UsageError("; ".join(problems[:3]) or "an event without signals")


def _of_signal(
    event: Mapping[str, Any], signal: Mapping[str, Any], terms: SiteTerms, now_s: float
) -> tuple[GridEvent, ...]:
    descriptor, intervals = event["event_descriptor"], _listed(signal["intervals"])
    if not 0 < len(intervals) <= _MAX_INTERVALS:
        raise UsageError(f"{count_text(len(intervals), 'interval')}; 1 to {_MAX_INTERVALS} are valid")
    event_id = str(descriptor["event_id"])
    reason = _printable(descriptor.get("vtn_comment") or "")
    found = []
    for number, (start_s, end_s, payload) in enumerate(_timed(intervals, event["active_period"])):
        asked = _asked(signal, payload, terms)
        if asked is None or end_s <= now_s:
            continue
        target = GridEvent(
            event_id if len(intervals) == 1 else f"{event_id}.{number + 1}",
            start_s,
            end_s,
            *asked,
            reason=reason,
            source=OPENADR_SOURCE,
        )
        if (problem := event_problem(target, now_s)) is not None:
            raise UsageError(problem)
        found.append(target)
    return tuple(found)


def _timed(intervals: Sequence[Mapping[str, Any]], period: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    """Yield start, end and payload of each interval; an interval without a start follows the previous one."""
    next_s = _instant_s(period["dtstart"])
    for interval in intervals:
        begin = interval.get("dtstart")
        start_s = next_s if begin is None else _instant_s(begin)
        duration = interval.get("duration")
        if duration is None and len(intervals) == 1:
            duration = period["duration"]
        if not isinstance(duration, timedelta) or duration <= timedelta(0):
            raise UsageError("an interval without an end; gpuenergyd follows events that end")
        next_s = start_s + duration.total_seconds()
        yield start_s, next_s, float(interval["signal_payload"])


def _asked(signal: Mapping[str, Any], payload: float, terms: SiteTerms) -> tuple[float, LoadUnit] | None:
    """Return the highest permitted load with its unit; None if the payload asks for nothing."""
    match str(signal["signal_name"]).upper(), signal["signal_type"]:
        case "LOAD_DISPATCH", "setpoint":
            return payload * _watts_per_unit(signal.get("measurement")), LoadUnit.W
        case "LOAD_DISPATCH", "multiplier":
            return 100 * payload, LoadUnit.PERCENT
        case "LOAD_CONTROL", "x-loadControlCapacity":
            if terms.capacity_w is None:
                raise UsageError("x-loadControlCapacity is a share of the site's capacity; set --capacity-w")
            return payload * terms.capacity_w, LoadUnit.W
        case "SIMPLE", "level":
            if payload == 0:
                return None
            if payload not in range(1, len(terms.level_percents) + 1):
                raise UsageError(f"level {payload:g} of SIMPLE has no agreed load; set --simple-levels")
            return terms.level_percents[int(payload) - 1], LoadUnit.PERCENT
        case name, kind:
            raise UsageError(
                f"signal {name[:40]!r} of type {str(kind)[:40]!r}; valid: LOAD_DISPATCH setpoint and multiplier,"
                " LOAD_CONTROL x-loadControlCapacity, SIMPLE level"
            )


def _watts_per_unit(measurement: Any) -> float:
    if not isinstance(measurement, Mapping) or measurement.get("unit") != "W":
        raise UsageError("LOAD_DISPATCH setpoint without a power in W as its unit")
    scale = measurement.get("scale") or "none"
    if scale not in _SCALES:
        raise UsageError(f"scale {str(scale)[:20]!r} of a power; valid: {', '.join(_SCALES)}")
    return _SCALES[scale]


def _instant_s(at: Any) -> float:
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise UsageError("a begin that is not a time with its zone")
    return at.timestamp()


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _printable(text: Any) -> str:
    """Return a comment as one line, with unprintable characters replaced by blanks."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:MAX_REASON_CHARS]).strip()
