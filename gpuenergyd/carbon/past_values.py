"""Weeks of past values, fetched once: a forecast needs eight days of history, and is better with five weeks.

Theory of operation. The last five weeks are divided into windows that a provider answers in one request. After a
successful fetch, one window whose hours are largely unknown is asked for, the newest first, and never again by the same
process: what a provider does not have, it does not have a minute later either.
"""

import logging
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpuenergyd.carbon.fetched_file import KEPT_HISTORY, Fetched, FetchState
from gpuenergyd.carbon.sources.source import CarbonSource, PastSource
from gpuenergyd.carbon.sources.web import SourceError, SourceProblem
from gpuenergyd.errors import CarbonSourceError

_LOG = logging.getLogger("gpuenergyd.carbon.fetcher")

LEAST_COVERED_RATIO = 0.9
"""A window with fewer known hours is asked for; providers have gaps of their own."""


@dataclass(slots=True)
class PastValues:
    """The windows that have been asked for."""

    _asked: set[datetime] = field(default_factory=set)
    """Ends of windows."""
    _newest_end_at: datetime | None = None
    _is_refused: bool = False

    def fetch_missing(self, source: CarbonSource, known: Fetched, now_at: datetime) -> Fetched:
        """Return the known values with those of one window that was missing; unchanged if there is none to ask for."""
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
        merged = {sample.valid_from_at: sample for sample in reply.samples}
        merged |= {sample.valid_from_at: sample for sample in known.samples}
        kept = [at for at in sorted(merged) if at > now_at - KEPT_HISTORY]
        return replace(known, samples=tuple(merged[at] for at in kept))

    def _missing_end(self, known: Fetched, now_at: datetime, window: timedelta) -> datetime | None:
        """Return the end of the newest window with too few known values that was not asked for; None without one."""
        if self._newest_end_at is None:
            self._newest_end_at = now_at.replace(minute=0, second=0, microsecond=0)
        end_at = self._newest_end_at
        while end_at - window >= now_at - KEPT_HISTORY - window / 7:
            if end_at not in self._asked:
                covered = sum(
                    (
                        min(sample.valid_to_at, end_at) - max(sample.valid_from_at, end_at - window)
                        for sample in known.samples
                        if sample.valid_from_at < end_at and sample.valid_to_at > end_at - window
                    ),
                    timedelta(),
                )
                if covered < LEAST_COVERED_RATIO * window:
                    return end_at
            end_at -= window
        return None
