"""What a source may pass on: numbers in range, on intervals that make sense, not from the future."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuenergyd.carbon.sources.source import SourceReply
from gpuenergyd.carbon.sources.web import Problem, SourceError
from gpuenergyd.core.carbon.intensity import (
    GRAMS_PER_POUND,
    CarbonSignal,
    IntensitySample,
    SampleStatus,
    checked_intensity,
)
from gpuenergyd.errors import CarbonSourceError

CLOCK_TOLERANCE = timedelta(minutes=10)
STALE_AFTER = timedelta(hours=24)
_MAX_SHOWN = 5
UNITS = {"lbs_co2_per_mwh": GRAMS_PER_POUND / 1000.0, "g_co2_per_kwh": 1.0, "kg_co2_per_mwh": 1.0}
"""What one of a unit is in g/kWh."""


@dataclass(frozen=True, slots=True)
class RawValue:
    """One value as a provider wrote it; `g_per_kwh` may be anything."""

    from_at: datetime
    to_at: datetime
    g_per_kwh: object
    status: SampleStatus


def checked_reply(signal: CarbonSignal, values: Iterable[RawValue], now_at: datetime) -> SourceReply:
    """Return the values that can be used; those that cannot are named with the reason.

    Raises:
        SourceError: nothing can be used.
    """
    samples: list[IntensitySample] = []
    forecast: list[IntensitySample] = []
    rejected: list[str] = []
    problem = Problem.EMPTY
    for value in values:
        try:
            number = checked_intensity(value.g_per_kwh, signal.kind)
        except CarbonSourceError as error:
            rejected.append(f"{value.from_at:%Y-%m-%dT%H:%MZ}: {error}")
            problem = Problem.BAD_VALUE
            continue
        sample = IntensitySample(value.from_at, value.to_at, number, value.status)
        if value.status is SampleStatus.FORECAST:
            forecast.append(sample)
        elif value.from_at > now_at + CLOCK_TOLERANCE:
            rejected.append(f"{value.from_at:%Y-%m-%dT%H:%MZ}: lies in the future of this host's clock")
            problem = Problem.CLOCK
        else:
            samples.append(sample)
    if not samples and not forecast:
        why = rejected[0] if rejected else "no values"
        raise SourceError(problem, f"{signal.source}: zone {signal.zone}: {why}")
    samples.sort(key=lambda sample: sample.valid_from_at)
    forecast.sort(key=lambda sample: sample.valid_from_at)
    is_stale = not samples or now_at - samples[-1].valid_to_at > STALE_AFTER
    return SourceReply(tuple(samples), tuple(forecast), tuple(rejected[:_MAX_SHOWN]), is_stale)


def in_g_per_kwh(name: str, value: object, unit: object) -> object:
    """Return a value in g/kWh; what is no number stays what it is, for the range check to refuse.

    Raises:
        SourceError: the unit is not one we know.
    """
    if not isinstance(unit, str) or unit not in UNITS:
        raise SourceError(Problem.WRONG_UNIT, f"{name}: unit {unit!r:.40} is none of {', '.join(UNITS)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value * UNITS[unit]


def check_zone(name: str, asked: str, answered: object) -> None:
    """Check that a reply is about the zone asked for.

    Raises:
        SourceError: it is about another one.
    """
    if answered != asked:
        raise SourceError(Problem.WRONG_ZONE, f"{name}: asked for zone {asked!r}, got {answered!r:.40}")


def instant(name: str, text: object) -> datetime:
    """Return a stamp as an instant in UTC.

    Raises:
        SourceError: it is no stamp with a time zone.
    """
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        at = None
    if at is None or at.utcoffset() is None:
        raise SourceError(Problem.NOT_PARSED, f"{name}: {text!r:.40} is no time with a zone, e.g. 2026-01-31T12:00Z")
    return at.astimezone(UTC)


def part(name: str, holder: Any, key: str) -> Any:
    """Return a member of a JSON object.

    Raises:
        SourceError: there is no such object or member.
    """
    if not isinstance(holder, Mapping) or key not in holder:
        shown = ", ".join(map(str, holder))[:60] if isinstance(holder, Mapping) else type(holder).__name__
        raise SourceError(Problem.NOT_PARSED, f"{name}: reply has no {key!r}, only {shown or 'nothing'}")
    return holder[key]


def rows(name: str, holder: Any, key: str) -> Sequence[Any]:
    """Return a list in a JSON object.

    Raises:
        SourceError: it is no list, or empty.
    """
    found = part(name, holder, key)
    if not isinstance(found, list):
        raise SourceError(Problem.NOT_PARSED, f"{name}: {key!r} is {type(found).__name__}, not a list")
    if not found:
        raise SourceError(Problem.EMPTY, f"{name}: {key!r} is empty")
    return found
