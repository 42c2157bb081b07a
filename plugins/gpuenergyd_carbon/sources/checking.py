"""Validation of the providers' values: numbers in range, valid intervals, no measurements from the future."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuenergyd.core.carbon.intensity import CarbonSignal, IntensitySample, SampleStatus
from gpuenergyd.errors import CarbonSourceError
from gpuenergyd_carbon.rules.hourly_values import GRAMS_PER_POUND, checked_intensity
from gpuenergyd_carbon.sources.source import SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem

CLOCK_TOLERANCE = timedelta(minutes=10)
STALE_AFTER = timedelta(hours=24)
_MAX_SHOWN = 5
_MAX_MW = 1e6
"""More than any area generates with one plant type."""
_FIRST_YEAR, _LAST_YEAR = 1990, 2200
UNITS = {"lbs_co2_per_mwh": GRAMS_PER_POUND / 1000.0, "g_co2_per_kwh": 1.0, "kg_co2_per_mwh": 1.0}
"""Conversion factors to g/kWh."""


@dataclass(frozen=True, slots=True)
class RawValue:
    """A provider's value before validation; `g_per_kwh` may be any JSON value."""

    from_at: datetime
    to_at: datetime
    g_per_kwh: object
    status: SampleStatus


@dataclass(frozen=True, slots=True)
class HeldBack:
    """An interval whose value cannot be computed yet, e.g. an hour of which the provider has published only a part."""

    from_at: datetime
    reason: str


def read_rows(rows_of_reply: Iterable[Any], read: Callable[[Any], RawValue | None]) -> Iterator[RawValue | SourceError]:
    """Yield the value of each row, or the error if the row is invalid; a row that `read` turns into None is skipped."""
    for row in rows_of_reply:
        try:
            value = read(row)
        except SourceError as error:
            yield error
        else:
            if value is not None:
                yield value


def checked_reply(
    signal: CarbonSignal, values: Iterable[RawValue | HeldBack | SourceError], now_at: datetime
) -> SourceReply:
    """Return the valid values, and the reasons for rejecting the others.

    An error among the values concerns a single row, or one of several requests. Values that are held back are reported
    only if no valid value is left.

    Raises:
        SourceError: no value is valid.
    """
    samples: list[IntensitySample] = []
    forecast: list[IntensitySample] = []
    rejected: list[str] = []
    held_back: list[str] = []
    failure: SourceError | None = None
    problem = SourceProblem.EMPTY
    for value in values:
        if isinstance(value, SourceError):
            rejected.append(str(value))
            failure = failure or value
            continue
        if isinstance(value, HeldBack):
            held_back.append(f"{value.from_at:%Y-%m-%dT%H:%MZ}: {value.reason}")
            continue
        try:
            number = checked_intensity(value.g_per_kwh, signal.kind)
        except CarbonSourceError as error:
            rejected.append(f"{value.from_at:%Y-%m-%dT%H:%MZ}: {error}")
            problem = SourceProblem.BAD_VALUE
            continue
        sample = IntensitySample(value.from_at, value.to_at, number, value.status)
        if value.status is SampleStatus.FORECAST:
            forecast.append(sample)
        elif value.from_at > now_at + CLOCK_TOLERANCE:
            rejected.append(f"{value.from_at:%Y-%m-%dT%H:%MZ}: is in the future of this host's clock")
            problem = SourceProblem.CLOCK
        else:
            samples.append(sample)
    if not samples and not forecast:
        if failure is not None:
            raise failure
        why = next((texts[0] for texts in (rejected, held_back[::-1]) if texts), "no values")
        raise SourceError(problem, f"{signal.source}: zone {signal.zone}: {why}")
    samples.sort(key=lambda sample: sample.valid_from_at)
    forecast.sort(key=lambda sample: sample.valid_from_at)
    is_stale = not samples or now_at - samples[-1].valid_to_at > STALE_AFTER
    return SourceReply(tuple(samples), tuple(forecast), tuple(rejected[:_MAX_SHOWN]), is_stale)


def in_g_per_kwh(name: str, value: object, unit: object) -> object:
    """Return a value in g/kWh; values that are no numbers are returned unchanged, for the range check to reject.

    Raises:
        SourceError: the unit is unknown.
    """
    if not isinstance(unit, str) or unit not in UNITS:
        raise SourceError(SourceProblem.WRONG_UNIT, f"{name}: unknown unit {unit!r:.40}; known: {', '.join(UNITS)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value * UNITS[unit]


def generated(name: str, value: object, unit: str) -> float:
    """Return the generation of one plant type in an hour, or raise SourceError if it is no number in range."""
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        number = math.nan
    if not abs(number) <= _MAX_MW:
        raise SourceError(
            SourceProblem.BAD_VALUE, f"{name}: generation {value!r:.40} is not a number of {unit} in range"
        )
    return number


def check_zone(name: str, asked: str, answered: object) -> None:
    """Check that a reply is for the requested zone, or raise SourceError."""
    if answered != asked:
        raise SourceError(SourceProblem.WRONG_ZONE, f"{name}: requested zone {asked!r}, got {answered!r:.40}")


def instant(name: str, text: object) -> datetime:
    """Return an ISO 8601 time in UTC, or raise SourceError if the text is not a time with a time zone."""
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        at = None
    if at is None or at.utcoffset() is None:
        raise SourceError(
            SourceProblem.NOT_PARSED, f"{name}: {text!r:.40} is no time with zone, e.g. 2026-01-31T12:00Z"
        )
    return checked_year(name, at).astimezone(UTC)


def checked_year(name: str, at: datetime) -> datetime:
    """Return an instant, or raise SourceError if its year is so far off that it must be wrong."""
    if not _FIRST_YEAR <= at.year <= _LAST_YEAR:
        raise SourceError(SourceProblem.BAD_VALUE, f"{name}: {at.year} is no year of a carbon intensity")
    return at


def part(name: str, holder: Any, key: str) -> Any:
    """Return a member of a JSON object.

    Raises:
        SourceError: `holder` is not an object, or has no such member.
    """
    if not isinstance(holder, Mapping) or key not in holder:
        shown = ", ".join(map(str, holder))[:60] if isinstance(holder, Mapping) else type(holder).__name__
        raise SourceError(SourceProblem.NOT_PARSED, f"{name}: reply has no {key!r}, only {shown or 'nothing'}")
    return holder[key]


def rows(name: str, holder: Any, key: str) -> Sequence[Any]:
    """Return a list in a JSON object, or raise SourceError if there is none or it is empty."""
    found = part(name, holder, key)
    if not isinstance(found, list):
        raise SourceError(SourceProblem.NOT_PARSED, f"{name}: {key!r} is {type(found).__name__}, not a list")
    if not found:
        raise SourceError(SourceProblem.EMPTY, f"{name}: {key!r} is empty")
    return found
