"""Checks carbon intensities, and averages samples of any length over hours."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries, IntensitySample, SampleStatus, SignalKind
from gpuenergyd.errors import CarbonSourceError

GRAMS_PER_POUND = 453.59237
MAX_AVERAGE_G_PER_KWH = 2000.0
MAX_MARGINAL_G_PER_KWH = 3000.0
"""Above all recorded values of any grid: a larger value has a wrong unit or comes from a broken reply."""
_STATUS_RANK = {status: rank for rank, status in enumerate(SampleStatus)}


def checked_intensity(value: object, kind: SignalKind = SignalKind.AVERAGE) -> float:
    """Return a carbon intensity in g/kWh as a float.

    Raises:
        CarbonSourceError: the value is not a number, negative, or larger than any grid's.
    """
    limit = MAX_MARGINAL_G_PER_KWH if kind is SignalKind.MARGINAL else MAX_AVERAGE_G_PER_KWH
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        shown = "null" if value is None else f"{value!r:.40}"
        raise CarbonSourceError(f"carbon intensity {shown} is not a number from 0 to {limit:g} g/kWh ({kind})")
    return float(value)


def hourly_series(zone: str, samples: Iterable[IntensitySample]) -> HourlySeries | None:
    """Return time-weighted hourly means, using the sample of best status for each interval; None without samples.

    An hour is NaN if samples cover less than half of it.
    """
    best: dict[datetime, IntensitySample] = {}
    for sample in samples:
        known = best.get(sample.valid_from_at)
        if known is None or _STATUS_RANK[sample.status] <= _STATUS_RANK[known.status]:
            best[sample.valid_from_at] = sample
    if not best:
        return None
    sums: dict[datetime, tuple[float, float]] = {}
    for sample in best.values():
        begin = sample.valid_from_at.astimezone(UTC)
        end = sample.valid_to_at.astimezone(UTC)
        while begin < end:
            hour = begin.replace(minute=0, second=0, microsecond=0)
            until = min(end, hour + HOUR)
            weight_s = (until - begin).total_seconds()
            total, known_s = sums.get(hour, (0.0, 0.0))
            sums[hour] = (total + weight_s * sample.carbon_intensity_g_per_kwh, known_s + weight_s)
            begin = until
    first, last = min(sums), max(sums)
    hours = [first + k * HOUR for k in range((last - first) // HOUR + 1)]
    values = [sums[hour][0] / sums[hour][1] if hour in sums and sums[hour][1] >= 1800.0 else math.nan for hour in hours]
    is_fixed = all(sample.status is SampleStatus.STATIC for sample in best.values())
    return HourlySeries(zone, first, values=tuple(values), is_fixed=is_fixed)
