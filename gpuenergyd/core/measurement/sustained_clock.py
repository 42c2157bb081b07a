"""The clock that a GPU at its power limit sustains: its full speed, whatever the highest supported clock is.

A GPU at its limit chooses its clock, and moves it every few milliseconds; a lock above it changes nothing.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from gpuenergyd.core.measurement.observation import CapReadings, IterationObservation
from gpuenergyd.count_text import count_text

_LEAST_READINGS = 4
_LEAST_RATIO = 0.1
"""Share of the readings below which the limit is met by chance, as in the first second of a job."""
_ALL_WORK_RATIO = 0.8
_MOST_MOVED_RATIO = 0.06
"""Largest change of a sustained clock that temperature and chance explain; beyond it, the limit has changed."""
_SCATTER_RATIO = 0.055
"""Relative scatter of clock readings at the power limit, measured on one H200."""


@dataclass(frozen=True, slots=True)
class SustainedClock:
    """What the iterations at full speed show of a GPU that its power limit holds."""

    sm_clock_mhz: float
    """Mean clock while the limit holds it."""
    capped_ratio: float
    """Share of the time at the limit."""
    busy_ratio: float
    """Share of the time in instructions that compute."""
    num_kinds: int
    """Number of kinds of instruction that compute, which may differ in power."""
    num_capped: int
    """Readings at the limit."""

    @property
    def holds_all_work(self) -> bool:
        """Whether the limit holds the clock of all that the GPU computes, not only of some kinds of instructions."""
        return self.capped_ratio >= _ALL_WORK_RATIO * self.busy_ratio

    def __str__(self) -> str:
        return f"at its power limit {100 * self.capped_ratio:.0f} % of the time; sustains {self.sm_clock_mhz:,.0f} MHz"


def sustained_text(sustained: Mapping[int, SustainedClock]) -> str:
    """Return what a job's GPUs sustain at their power limits; empty if none is at its limit."""
    if not sustained:
        return ""
    fastest = max(sustained.values(), key=lambda clock: clock.sm_clock_mhz)
    slowest = min(sustained.values(), key=lambda clock: clock.sm_clock_mhz)
    if fastest == slowest:
        return str(fastest)
    times = sorted(100 * clock.capped_ratio for clock in sustained.values())
    return (
        f"{count_text(len(sustained), 'stage')} at the power limit {times[0]:.0f} to {times[-1]:.0f} % of the time;"
        f" they sustain {slowest.sm_clock_mhz:,.0f} to {fastest.sm_clock_mhz:,.0f} MHz"
    )


@dataclass(frozen=True, slots=True)
class MovedClocks:
    """How the clocks that power limits hold have moved between two sets of iterations at full speed, by rank.

    A GPU at its limit becomes faster and slower with its temperature, which is no change of the job: the same
    number of clock cycles then takes another time.
    """

    ratios: Mapping[int, float]
    """Later clock over earlier one, of the ranks whose clock has hardly moved; others count as changed."""
    error_ratio: float
    """Two standard errors of a ratio."""

    @property
    def of_all_ratio(self) -> float:
        """Mean over the ranks."""
        return fmean(self.ratios.values()) if self.ratios else 1.0


def moved_clocks(before: Iterable[IterationObservation], now: Iterable[IterationObservation]) -> MovedClocks:
    """Return how clocks have moved between iterations at full speed."""
    then, later = sustained_clocks(before), sustained_clocks(now)
    ratios = {rank: later[rank].sm_clock_mhz / clock.sm_clock_mhz for rank, clock in then.items() if rank in later}
    ratios = {rank: ratio for rank, ratio in ratios.items() if abs(ratio - 1) <= _MOST_MOVED_RATIO}
    errors = [math.sqrt(1 / then[rank].num_capped + 1 / later[rank].num_capped) for rank in ratios]
    return MovedClocks(ratios, 2 * _SCATTER_RATIO * max(errors, default=0.0))


def sustained_clocks(full_speed: Iterable[IterationObservation]) -> dict[int, SustainedClock]:
    """Return the sustained clock of each rank whose GPU was at its power limit in iterations at full speed."""
    windows = [rank for observation in full_speed if observation.is_regular for rank in observation.ranks]
    readings: dict[int, list[CapReadings]] = defaultdict(list)
    for window in windows:
        if window.cap is not None:
            readings[window.pp_rank].append(window.cap)
    found = {}
    for pp_rank, clocks in readings.items():
        num, num_capped = sum(reading.num for reading in clocks), sum(reading.num_capped for reading in clocks)
        if num_capped >= max(_LEAST_READINGS, _LEAST_RATIO * num):
            clock_mhz = sum(reading.num_capped * reading.capped_sm_clock_mhz for reading in clocks) / num_capped
            timed = [window for window in windows if window.pp_rank == pp_rank and window.time_at]
            computing = [[at for at in rank.time_at if at.kind is not None and not at.kind.is_wait] for rank in timed]
            timed_s = sum(window.window_s for window in timed)
            busy_s = sum(sum(at.time_s for at in window) for window in computing)
            kinds = {(at.kind, at.chunk_index) for window in computing for at in window}
            found[pp_rank] = SustainedClock(
                clock_mhz, num_capped / num, busy_s / timed_s if timed_s else 1.0, max(1, len(kinds)), num_capped
            )
    return found
