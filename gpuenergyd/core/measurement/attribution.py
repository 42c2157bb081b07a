"""Whose every joule is: one GPU's time, cut at every second and at every change of owner, and what each piece cost.

Pieces never overlap and leave no gap between the first sample and the last cut, so whatever is added up over jobs and
idle time is what the GPU used. A piece is measured where the energy counter spans it, estimated where only power was
read or where nothing was and the counter spans the whole gap, and missing otherwise: missing is never zero.
"""

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpuenergyd.core.measurement.telemetry import EnergyCounter

_NS_PER_S = 1_000_000_000
_GRACE_NS = 2 * _NS_PER_S
"""How long a piece waits for the counter to pass its end before it is closed without."""
_GAP_STEPS_S = (1, 60, 3600, 86_400)
_MAX_GAP_PIECES = 120


@dataclass(frozen=True, slots=True)
class EnergySlice:
    """What one GPU did for one job (empty: for nobody) in one piece of time, at most a second while samples come.

    `energy_j` is what the counter measured, `estimated_j` what was estimated; of both at most one is not None. The
    three durations add up to the length of the piece.
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
class _Open:
    """A piece whose end, or whose energy, is not known yet; `second` is the wall-clock second it belongs to."""

    second: datetime
    started_at: datetime
    begin_ns: int
    job_id: str
    num_samples: int = 0
    powers_w: list[float] = field(default_factory=list)
    clocks_mhz: list[int] = field(default_factory=list)


@dataclass(slots=True)
class EnergyAttribution:
    """The ledger of one GPU; fed by every sample, gives out pieces once nothing can change them."""

    _pieces: deque[_Open] = field(default_factory=deque)
    _last_sample_ns: int = 0

    def take(self, *, mono_ns: int, at: datetime, job_id: str, power_w: float | None, sm_clock_mhz: int | None) -> None:
        """Note a sample: `at` is the wall-clock instant of `mono_ns`. One that comes out of order changes nothing."""
        last = self._pieces[-1] if self._pieces else None
        if last is not None and mono_ns <= self._last_sample_ns:
            return
        second = at.replace(microsecond=0)
        if last is None or last.second != second or last.job_id != job_id:
            begin_ns = mono_ns
            if last is not None:
                self._fill_gap(mono_ns, at, last.job_id)
                if last.second != second:
                    # A wall clock that was set back still cuts after the last sample.
                    begin_ns = max(mono_ns - at.microsecond * 1000, self._last_sample_ns)
            started_at = at - timedelta(microseconds=(mono_ns - begin_ns) // 1000)
            last = _Open(second, started_at, begin_ns, job_id)
            self._pieces.append(last)
        self._last_sample_ns = mono_ns
        last.num_samples += 1
        if power_w is not None:
            last.powers_w.append(power_w)
        if sm_clock_mhz is not None:
            last.clocks_mhz.append(sm_clock_mhz)

    def _fill_gap(self, mono_ns: int, at: datetime, job_id: str) -> None:
        """Cut a time without samples into pieces, so that what the counter says of it is spread over it."""
        this_second_ns = mono_ns - at.microsecond * 1000
        gap_s = (this_second_ns - self._last_sample_ns) / _NS_PER_S
        step_s = next((s for s in _GAP_STEPS_S if gap_s / s <= _MAX_GAP_PIECES), _GAP_STEPS_S[-1])
        second = at.replace(microsecond=0)
        for k in range(min(int(gap_s / step_s), _MAX_GAP_PIECES), 0, -1):
            begin_ns = this_second_ns - k * step_s * _NS_PER_S
            if begin_ns > self._pieces[-1].begin_ns:
                begun = second - timedelta(seconds=k * step_s)
                self._pieces.append(_Open(begun, begun, begin_ns, job_id))

    def complete(self, now_ns: int, counter: EnergyCounter) -> tuple[EnergySlice, ...]:
        """Return the pieces that are over and whose energy is known, or will not become known."""
        done: list[EnergySlice] = []
        while len(self._pieces) > 1:
            piece, end_ns = self._pieces[0], self._pieces[1].begin_ns
            if not counter.covers(end_ns) and now_ns < end_ns + _GRACE_NS:
                break
            self._pieces.popleft()
            done.append(_closed(piece, end_ns, counter.energy_j(piece.begin_ns, end_ns)))
        return tuple(done)


def _closed(piece: _Open, end_ns: int, counted_j: float | None) -> EnergySlice:
    length_s = (end_ns - piece.begin_ns) / _NS_PER_S
    mean_power_w = _mean(piece.powers_w)
    energy_j = estimated_j = None
    measured_s = estimated_s = missing_s = 0.0
    if counted_j is not None and piece.num_samples:
        energy_j, measured_s = counted_j, length_s
    elif counted_j is not None:
        # The counter spans the gap, but nobody saw how the energy was spread over it.
        estimated_j, estimated_s = counted_j, length_s
    elif mean_power_w is not None:
        estimated_j, estimated_s = mean_power_w * length_s, length_s
    else:
        missing_s = length_s
    return EnergySlice(
        started_at=piece.started_at,
        begin_mono_ns=piece.begin_ns,
        end_mono_ns=end_ns,
        job_id=piece.job_id,
        energy_j=energy_j,
        estimated_j=estimated_j,
        measured_s=measured_s,
        estimated_s=estimated_s,
        missing_s=missing_s,
        mean_power_w=mean_power_w,
        max_power_w=max(piece.powers_w, default=None),
        mean_sm_clock_mhz=_mean(piece.clocks_mhz),
        num_samples=piece.num_samples,
    )


def _mean(values: list[float] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None
