"""Energy attribution: splits each GPU's energy by second and by owner.

A slice ends at every full second and at every change of owner. Slices never overlap and leave no gap between the first
sample and the last cut, so the sum over jobs and idle time is the GPU's energy. The energy of a slice is measured if
the energy counter covers it; estimated if only power was sampled, or if the counter covers only a whole gap without
samples; and missing otherwise. Missing energy is None, never zero.
"""

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpuenergyd.core.measurement.telemetry import EnergyCounter

_NS_PER_S = 1_000_000_000
_GRACE_NS = 2 * _NS_PER_S
"""Longest wait for a counter update after the end of a slice; then the slice is closed without the counter."""
_GAP_SLICE_LENGTHS_S = (1, 60, 3600, 86_400)
_MAX_GAP_SLICES = 120


@dataclass(frozen=True, slots=True)
class EnergySlice:
    """Energy of one GPU in an interval with one owner, at most one second long while samples arrive.

    `job_id` is empty while the GPU is idle. At most one of `energy_j` (measured by the counter) and `estimated_j` has a
    value. The three durations add up to the length of the interval.
    """

    started_at: datetime
    begin_mono_ns: int
    end_mono_ns: int
    job_id: str
    energy_j: float | None
    estimated_j: float | None
    measured_s: float
    estimated_s: float
    missing_s: float
    mean_power_w: float | None
    max_power_w: float | None
    mean_sm_clock_mhz: float | None
    num_samples: int


@dataclass(slots=True)
class _OpenSlice:
    """A slice whose end or energy is not known yet; `second` is its wall-clock second."""

    second: datetime
    started_at: datetime
    begin_ns: int
    job_id: str
    num_samples: int = 0
    powers_w: list[float] = field(default_factory=list)
    clocks_mhz: list[int] = field(default_factory=list)


@dataclass(slots=True)
class EnergyAttribution:
    """Attribution of one GPU's energy: samples in, slices out once they are final."""

    _open: deque[_OpenSlice] = field(default_factory=deque)
    _last_sample_ns: int = 0

    def add_sample(
        self, *, mono_ns: int, at: datetime, job_id: str, power_w: float | None, sm_clock_mhz: int | None
    ) -> None:
        """Add a sample; `at` is the wall-clock instant of `mono_ns`. Out-of-order samples are ignored."""
        last = self._open[-1] if self._open else None
        if last is not None and mono_ns <= self._last_sample_ns:
            return
        second = at.replace(microsecond=0)
        if last is None or last.second != second or last.job_id != job_id:
            begin_ns = mono_ns
            if last is not None:
                self._fill_gap(mono_ns, at, last.job_id)
                if last.second != second:
                    # Even if the wall clock was set back, the cut comes after the last sample.
                    begin_ns = max(mono_ns - at.microsecond * 1000, self._last_sample_ns)
            started_at = at - timedelta(microseconds=(mono_ns - begin_ns) // 1000)
            last = _OpenSlice(second, started_at, begin_ns, job_id)
            self._open.append(last)
        self._last_sample_ns = mono_ns
        last.num_samples += 1
        if power_w is not None:
            last.powers_w.append(power_w)
        if sm_clock_mhz is not None:
            last.clocks_mhz.append(sm_clock_mhz)

    def _fill_gap(self, mono_ns: int, at: datetime, job_id: str) -> None:
        """Split a gap without samples into slices, over which the counter's energy is spread."""
        this_second_ns = mono_ns - at.microsecond * 1000
        gap_s = (this_second_ns - self._last_sample_ns) / _NS_PER_S
        step_s = next((s for s in _GAP_SLICE_LENGTHS_S if gap_s / s <= _MAX_GAP_SLICES), _GAP_SLICE_LENGTHS_S[-1])
        second = at.replace(microsecond=0)
        for k in range(min(int(gap_s / step_s), _MAX_GAP_SLICES), 0, -1):
            begin_ns = this_second_ns - k * step_s * _NS_PER_S
            if begin_ns > self._open[-1].begin_ns:
                begun = second - timedelta(seconds=k * step_s)
                self._open.append(_OpenSlice(begun, begun, begin_ns, job_id))

    def completed_slices(self, now_ns: int, counter: EnergyCounter) -> tuple[EnergySlice, ...]:
        """Return the ended slices whose energy is known or will never be known."""
        done: list[EnergySlice] = []
        while len(self._open) > 1:
            open_slice, end_ns = self._open[0], self._open[1].begin_ns
            if not counter.covers(end_ns) and now_ns < end_ns + _GRACE_NS:
                break
            self._open.popleft()
            counted_j = counter.energy_j(open_slice.begin_ns, end_ns)
            done.append(_closed(open_slice, end_ns, counted_j, counter.max_power_w))
        return tuple(done)


def _closed(open_slice: _OpenSlice, end_ns: int, counted_j: float | None, max_power_w: float) -> EnergySlice:
    length_s = (end_ns - open_slice.begin_ns) / _NS_PER_S
    mean_power_w = _mean(open_slice.powers_w)
    energy_j = estimated_j = None
    measured_s = estimated_s = missing_s = 0.0
    if counted_j is not None and open_slice.num_samples:
        energy_j, measured_s = counted_j, length_s
    elif counted_j is not None:
        # The counter spans the gap, but the distribution of the energy within it is unknown.
        estimated_j, estimated_s = counted_j, length_s
    elif mean_power_w is not None:
        # Readings may exceed the maximal power limit for a moment, but not the mean over a second.
        estimated_j, estimated_s = min(mean_power_w, max_power_w) * length_s, length_s
    else:
        missing_s = length_s
    return EnergySlice(
        started_at=open_slice.started_at,
        begin_mono_ns=open_slice.begin_ns,
        end_mono_ns=end_ns,
        job_id=open_slice.job_id,
        energy_j=energy_j,
        estimated_j=estimated_j,
        measured_s=measured_s,
        estimated_s=estimated_s,
        missing_s=missing_s,
        mean_power_w=mean_power_w,
        max_power_w=max(open_slice.powers_w, default=None),
        mean_sm_clock_mhz=_mean(open_slice.clocks_mhz),
        num_samples=open_slice.num_samples,
    )


def _mean(values: list[float] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None
