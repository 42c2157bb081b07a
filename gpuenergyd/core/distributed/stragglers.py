"""Stragglers: the slowest replica of a training, and the pace at which the other replicas may run.

Replicas synchronise once per iteration: replicas faster than the slowest wait for it and can run slower to save energy,
until it has recovered. The comparison uses the time of each replica by itself at full speed
(`core/distributed/pace.py`), so that a replica that waits or that a plan has slowed down is no straggler. Otherwise two
replicas that follow a third one's pace would hold each other there.

Readings scatter, on a busy host by many percent. A straggler is therefore one by its last two, four or eight readings
if their mean is further from that of the waiting replica than a multiple of its standard error, and a median over more
readings is followed where single ones are not. A straggler that recovers soon was probably noise: the next one of that
replica needs twice as many readings. A single slow reading makes a replica suspected: plans may be prepared for it.

Paces come from jobs of this daemon and, through clients, from replicas elsewhere. Time is an argument, in host
monotonic seconds; a pace expires unless it is updated.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean, median

from gpuenergyd.core.measurement.robust import MEDIAN_PER_MEAN_ERROR, NORMAL_PER_MAD

_KEPT_READINGS = 16
"""Readings of a replica that its scatter is estimated from."""
_MIN_DIFFERENCES = 3
"""Differences of successive readings below which a scatter is not known, and counts as none."""
_NORMAL_PER_MEDIAN = NORMAL_PER_MAD / math.sqrt(2)
"""Standard deviation over the median absolute difference of two readings, for a normal distribution."""
_AT_SIGMA = 4.0
"""Distance of a reading, in standard deviations of the scatter, beyond which it is no noise."""
_ENTER_SIGMA = 4.5
"""The same for a mean of readings, in its standard errors: there are many chances for a false alarm."""
_SUSPECT_SIGMA = 2.0
"""The same for one reading of a suspected straggler, which has no consequence but a plan that may be of no use."""
_ENTER_MEANS = (2, 4, 8)
"""Numbers of readings whose mean may show a straggler: few are soon there, many show it in noise."""
_MEDIAN_READINGS = 8
_MEDIAN_SIGMA = MEDIAN_PER_MEAN_ERROR / math.sqrt(_MEDIAN_READINGS)
"""Standard error of the median of that number of readings over their standard deviation."""
_SHORT_READINGS = 12
"""A straggler that recovers within this number of readings was probably noise."""
_MAX_ENTER_READINGS = 64


@dataclass(frozen=True, slots=True)
class StragglerRules:
    """Thresholds of straggler detection; ratios are relative to the waiting replica's own pace."""

    enter_ratio: float = 0.03
    """A replica slower by more than this is a straggler; smaller differences are drift and noise."""
    enter_readings: int = 2
    """Consecutive readings above `enter_ratio`: a single one may be a stall."""
    leave_ratio: float = 0.015
    """A straggler slower by less than this in one reading has recovered."""
    change_ratio: float = 0.01
    """Minimum change of the pace to follow: a faster pace at the first reading, a slower one after `enter_readings`."""
    silent_s: float = 10.0
    silent_iterations: float = 5.0
    """What a replica says expires after this many of its iterations, but not before `silent_s`."""

    def counts_for_s(self, iteration_s: float) -> float:
        """Return how long what a replica with such iterations says counts."""
        return max(self.silent_s, self.silent_iterations * iteration_s)


@dataclass(frozen=True, slots=True)
class Pace:
    """Iteration time of a replica by itself, with the replica's name and the time of the reading."""

    own_time_s: float
    replica: str
    at_mono_s: float


@dataclass(frozen=True, slots=True)
class StragglerChange:
    """New straggler pace of a job; `pace` is None if there is no straggler any more."""

    job_id: str
    pace: Pace | None
    reason: str


@dataclass(slots=True)
class _Waiting:
    """Straggler that a replica waits for, and recent readings of slower replicas."""

    straggler: Pace | None = None
    readings: list[Pace] = field(default_factory=list)
    num_readings: int = 0
    """Readings since the replica began to wait."""
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_READINGS))
    """The last readings of the straggler since it became the slowest."""
    enter_readings: int = 0
    """Readings that its next straggler needs; 0: as many as the rules say."""

    def begin(self, straggler: Pace) -> None:
        self.straggler, self.num_readings = straggler, 0
        self.times_s.clear()

    def read(self, slowest: Pace) -> None:
        """Add a reading of the slowest replica."""
        if self.straggler is not None and self.straggler.replica != slowest.replica:
            self.times_s.clear()
        self.readings = [*self.readings, slowest][-_MAX_ENTER_READINGS:]
        self.times_s.append(slowest.own_time_s)
        self.num_readings += 1

    def change(self, pace: Pace, num_readings: int) -> None:
        """Follow another pace; only its own readings, the last ones, say whether it holds."""
        self.readings = [*self.readings, pace][-num_readings:]
        self.times_s.clear()
        self.times_s.extend(reading.own_time_s for reading in self.readings)

    def end(self, rules: StragglerRules) -> Pace | None:
        """Wait no longer; return the straggler until now. After a short one the next needs more readings."""
        before, self.straggler = self.straggler, None
        self.readings.clear()
        if before is not None:
            is_short = self.num_readings < _SHORT_READINGS
            longer = min(2 * max(self.enter_readings, rules.enter_readings), _MAX_ENTER_READINGS)
            self.enter_readings = longer if is_short else 0
        return before


@dataclass(slots=True)
class ReplicaGroup:
    """Replicas of one training: paces in, changes of the straggler pace out."""

    rules: StragglerRules = field(default_factory=StragglerRules)
    _paces: dict[str, Pace] = field(default_factory=dict)
    _elsewhere: dict[str, Pace] = field(default_factory=dict)
    """By job id, the slowest replica elsewhere that the job's client knows."""
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _readings_s: dict[str, deque[float]] = field(default_factory=dict)
    """By replica, its last different readings."""

    @property
    def job_ids(self) -> frozenset[str]:
        return frozenset(self._waiting)

    def join(self, job_id: str) -> None:
        """Add a job of this daemon."""
        self._waiting.setdefault(job_id, _Waiting())

    def leave(self, job_id: str, now_mono_s: float) -> tuple[StragglerChange, ...]:
        """Remove a job; return the changes for the others."""
        self._waiting.pop(job_id, None)
        self._paces.pop(job_id, None)
        self._elsewhere.pop(job_id, None)
        self._readings_s.pop(job_id, None)
        self._readings_s.pop(_elsewhere_of(job_id), None)
        return self.expire_paces(now_mono_s)

    def update_pace(self, pace: Pace) -> tuple[StragglerChange, ...]:
        """Update the pace of a job of this daemon; return the resulting changes."""
        self._paces[pace.replica] = pace
        self._keep(pace.replica, pace.own_time_s)
        mine = self._changes((pace.replica,), pace.at_mono_s, reading=None)
        return mine + self._changes(self._waiting.keys() - {pace.replica}, pace.at_mono_s, reading=pace)

    def update_pace_elsewhere(
        self, job_id: str, pace: Pace | None, now_mono_s: float, *, is_news: bool = True
    ) -> tuple[StragglerChange, ...]:
        """Update the slowest pace elsewhere, as reported to one job; None if there is none any more.

        A pace that is not new (`is_news` False) extends its lifetime and is not another reading.
        """
        if pace is None:
            self._elsewhere.pop(job_id, None)
        else:
            self._elsewhere[job_id] = pace
            self._keep(_elsewhere_of(job_id), pace.own_time_s)
        return self._changes((job_id,), now_mono_s, reading=pace if is_news else None)

    def suspected_time_s(self, job_id: str, now_mono_s: float) -> float | None:
        """Return the pace of a replica that may be a straggler by its last reading; None without, or with a known one.

        A job may prepare for it: the next reading confirms it, or does not.
        """
        waiting, own = self._waiting.get(job_id), self._paces.get(job_id)
        slowest = self._slowest_of_others(job_id, now_mono_s)
        if waiting is None or own is None or slowest is None or waiting.straggler is not None:
            return None
        sigmas = (_scatter_ratio(self._readings_s.get(own.replica, ())), self._sigma_of(job_id, slowest))
        ratio = max(self.rules.enter_ratio, _SUSPECT_SIGMA * math.hypot(*sigmas))
        return slowest.own_time_s if slowest.own_time_s > own.own_time_s * (1 + ratio) else None

    def expire_paces(self, now_mono_s: float) -> tuple[StragglerChange, ...]:
        """Return the changes due to expired paces; call it about once a second."""
        return self._changes(tuple(self._waiting), now_mono_s, reading=None)

    def _changes(
        self, job_ids: Iterable[str], now_mono_s: float, *, reading: Pace | None
    ) -> tuple[StragglerChange, ...]:
        changes = (self._change(job_id, now_mono_s, reading) for job_id in sorted(job_ids))
        return tuple(change for change in changes if change is not None)

    def _change(self, job_id: str, now_mono_s: float, reading: Pace | None) -> StragglerChange | None:
        waiting, own = self._waiting.get(job_id), self._paces.get(job_id)
        if waiting is None or own is None:
            return None
        slowest = self._slowest_of_others(job_id, now_mono_s)
        slower_ratio = slowest.own_time_s / own.own_time_s - 1 if slowest is not None else 0.0
        if slowest is None or slower_ratio < self.rules.leave_ratio:
            was = waiting.end(self.rules)
            if was is None:
                return None
            why = "sends no reports or has left" if slowest is None else f"now takes {slowest.own_time_s:.4g} s"
            return StragglerChange(
                job_id, None, f"straggler recovered: {was.replica} {why}, this replica {own.own_time_s:.4g} s"
            )
        if slowest is reading:
            waiting.read(slowest)
        before = waiting.straggler
        now = self._straggler(job_id, waiting, slowest, own)
        if now is before or now is None:
            return None
        if before is None:
            waiting.begin(now)
        waiting.straggler = now
        return StragglerChange(
            job_id,
            now,
            f"straggler: {now.replica} takes {now.own_time_s:.4g} s per iteration, this replica {own.own_time_s:.4g} s",
        )

    def _straggler(self, job_id: str, waiting: _Waiting, slowest: Pace, own: Pace) -> Pace | None:
        """Return the straggler pace from now on: at most the fastest of the last readings."""
        before, rules = waiting.straggler, self.rules
        sigma = self._sigma_of(job_id, slowest)
        num_needed = max(waiting.enter_readings, rules.enter_readings)
        least = min(waiting.readings[-num_needed:], key=lambda pace: pace.own_time_s, default=slowest)
        is_settled = len(waiting.readings) >= num_needed
        if before is None:
            is_slow = least.own_time_s > own.own_time_s * (1 + rules.enter_ratio)
            return least if is_settled and is_slow and self._is_no_noise(waiting, own, sigma) else None
        change_ratio = max(rules.change_ratio, _AT_SIGMA * sigma)
        if slowest.own_time_s < before.own_time_s * (1 - change_ratio):
            waiting.change(slowest, 1)
            return slowest
        if is_settled and least.own_time_s > before.own_time_s * (1 + change_ratio):
            waiting.change(least, num_needed)
            return least
        usual_s = median(waiting.times_s) if len(waiting.times_s) == _MEDIAN_READINGS else before.own_time_s
        usual_ratio = max(rules.change_ratio, _AT_SIGMA * _MEDIAN_SIGMA * sigma)
        is_changed = abs(usual_s / before.own_time_s - 1) > usual_ratio
        return replace(slowest, own_time_s=usual_s) if is_changed else before

    def _is_no_noise(self, waiting: _Waiting, own: Pace, sigma: float) -> bool:
        """Return whether some mean of the last readings is further from the waiting replica's than chance explains."""
        own_s = list(self._readings_s.get(own.replica, (own.own_time_s,)))
        both_sigma = math.hypot(_scatter_ratio(own_s), sigma)
        times_s = [pace.own_time_s for pace in waiting.readings]
        for num in (num for num in _ENTER_MEANS if num <= len(times_s)):
            # Not less than the newest: both replicas may have become slower together.
            usual_s = max(own.own_time_s, mean(own_s[-num:]))
            # Without the longest, which may be a stall.
            is_beyond = mean(sorted(times_s[-num:])[:-1]) > usual_s * (1 + _ENTER_SIGMA * both_sigma / math.sqrt(num))
            if is_beyond:
                return True
        return False

    def _keep(self, replica: str, own_time_s: float) -> None:
        """Keep a reading for the scatter; the same value again is no new one."""
        kept = self._readings_s.setdefault(replica, deque(maxlen=_KEPT_READINGS))
        if not kept or kept[-1] != own_time_s:
            kept.append(own_time_s)

    def _sigma_of(self, job_id: str, pace: Pace) -> float:
        """Return the scatter of another replica's readings."""
        is_local = self._paces.get(pace.replica) is pace
        return _scatter_ratio(self._readings_s.get(pace.replica if is_local else _elsewhere_of(job_id), ()))

    def _slowest_of_others(self, job_id: str, now_mono_s: float) -> Pace | None:
        others = [pace for other, pace in self._paces.items() if other != job_id]
        if job_id in self._elsewhere:
            others.append(self._elsewhere[job_id])
        alive = [pace for pace in others if now_mono_s - pace.at_mono_s <= self.rules.counts_for_s(pace.own_time_s)]
        return max(alive, key=lambda pace: pace.own_time_s, default=None)


def _elsewhere_of(job_id: str) -> str:
    return f"{job_id}, elsewhere"


def _scatter_ratio(readings_s: Sequence[float]) -> float:
    """Return the standard deviation of readings, relative to them, from the differences of successive ones.

    A change of the pace is one difference among many and hardly counts.
    """
    differences = [abs(b / a - 1) for a, b in pairwise(readings_s)]
    return _NORMAL_PER_MEDIAN * median(differences) if len(differences) >= _MIN_DIFFERENCES else 0.0
