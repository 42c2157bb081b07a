"""Fifteen months of past values, fetched once: a forecast needs eight days, and from 400 days on uses the season.

Theory of operation. The last 65 weeks are divided into windows, each of which a provider returns in one request. After
each successful fetch, the newest window that lacks many of its hours is requested, but only once per process, since a
provider that has no values for it will not have them a minute later either. Values older than a few days are kept as
hourly means, since some providers send twelve values per hour.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpuenergyd.core.carbon.intensity import HOUR, IntensitySample, SampleStatus
from gpuenergyd.errors import CarbonSourceError
from gpuenergyd_carbon.fetched_file import KEPT_AS_SENT, KEPT_HISTORY, Fetched, FetchState
from gpuenergyd_carbon.rules.hourly_values import hourly_series
from gpuenergyd_carbon.sources.source import CarbonSource, PastSource
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem

_LOG = logging.getLogger("gpuenergyd_carbon.fetching.fetcher")

LEAST_COVERED_RATIO = 0.9
"""A window is requested if a smaller part of it is known; the rest allows for gaps in the provider's own data."""


def kept_samples(
    older: Sequence[IntensitySample], newer: Sequence[IntensitySample], *, now_at: datetime
) -> tuple[IntensitySample, ...]:
    """Return the values of the last 65 weeks by time, old ones as hourly means; `newer` values replace `older` ones."""
    merged = {sample.valid_from_at: sample for sample in older}
    merged |= {sample.valid_from_at: sample for sample in newer}
    as_sent_from_at = (now_at - KEPT_AS_SENT).replace(minute=0, second=0, microsecond=0)
    recent = [sample for at, sample in merged.items() if at >= as_sent_from_at]
    past = [sample for at, sample in merged.items() if now_at - KEPT_HISTORY < at < as_sent_from_at]
    hourly = [sample for sample in past if sample.valid_to_at - sample.valid_from_at == HOUR]
    hourly += _hourly([sample for sample in past if sample.valid_to_at - sample.valid_from_at != HOUR])
    return tuple(sorted([*hourly, *recent], key=lambda sample: sample.valid_from_at))


def _hourly(samples: Sequence[IntensitySample]) -> list[IntensitySample]:
    series = hourly_series("", samples)
    if series is None:
        return []
    estimated = {
        sample.valid_from_at.replace(minute=0) for sample in samples if sample.status is not SampleStatus.MEASURED
    }
    hours = ((series.first_hour_at + k * HOUR, value) for k, value in enumerate(series.values) if math.isfinite(value))
    return [
        IntensitySample(at, at + HOUR, value, SampleStatus.ESTIMATED if at in estimated else SampleStatus.MEASURED)
        for at, value in hours
    ]


@dataclass(slots=True)
class PastValues:
    """Fetches missing past values, one window at a time, and remembers which windows were requested."""

    _asked: set[datetime] = field(default_factory=set)
    """Ends of the windows that were requested."""
    _newest_end_at: datetime | None = None
    _is_refused: bool = False

    def fetch_missing(self, source: CarbonSource, known: Fetched, now_at: datetime) -> Fetched:
        """Return the known values with those of one missing window added; unchanged if none is left to request."""
        if self._is_refused or known.status.state is FetchState.FAILED or not isinstance(source, PastSource):
            return known
        end_at = self._missing_end(known, now_at, source.past_window)
        if end_at is None:
            return known
        self._asked.add(end_at)
        try:
            reply = source.fetch_past(end_at - source.past_window, end_at)
        except CarbonSourceError as error:
            refusals = {SourceProblem.UNAUTHORIZED, SourceProblem.FORBIDDEN, SourceProblem.NOT_FOUND}
            self._is_refused = isinstance(error, SourceError) and error.problem in refusals
            _LOG.info("source=%s no values of the week before %s: %s", source.signal.source, end_at.date(), error)
            return known
        except Exception as error:  # noqa: BLE001  a third-party source may raise anything
            self._is_refused = True
            _LOG.warning("source=%s past values: %s in source", source.signal.source, type(error).__name__)
            return known
        return replace(known, samples=kept_samples(reply.samples, known.samples, now_at=now_at))

    def _missing_end(self, known: Fetched, now_at: datetime, window: timedelta) -> datetime | None:
        """Return the end of the newest window that lacks values and was not requested yet; None if there is none."""
        if self._newest_end_at is None:
            self._newest_end_at = now_at.replace(minute=0, second=0, microsecond=0)
        newest_end_at = self._newest_end_at
        covered: Counter[int] = Counter()  # seconds, by window; an interval counts where it begins
        for sample in known.samples:
            number = -((sample.valid_from_at - newest_end_at) // window) - 1
            covered[number] += round((sample.valid_to_at - sample.valid_from_at).total_seconds())
        for number in range(KEPT_HISTORY // window):
            end_at = newest_end_at - number * window
            if end_at not in self._asked and covered[number] < LEAST_COVERED_RATIO * window.total_seconds():
                return end_at
        return None
