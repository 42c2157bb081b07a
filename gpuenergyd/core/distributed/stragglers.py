"""Stragglers: the slowest replica of a training, and the pace at which the other replicas may run.

Replicas synchronise once per iteration: replicas faster than the slowest wait for it and can run slower to save energy,
until it has recovered. The comparison uses each replica's own time at full speed (`core/distributed/pace.py`), so a
replica that waits or was slowed down by a plan is not a straggler. Otherwise two replicas that follow the pace of a
third would keep each other slow after it has recovered.

Readings scatter, on a busy host by many percent. A replica is therefore a straggler only if the mean of its last two,
four or eight readings differs from that of the waiting replica by more than a multiple of its standard error. Where
single readings are too noisy to follow, the median over more of them is. A straggler that recovers soon was probably
noise: the next one needs twice as many readings. After one slow reading a replica is suspected: plans are prepared.
A replica whose iterations are shorter than the slower one's does not wait for it: both train independently.

Paces come from jobs of this daemon and, through clients, from replicas elsewhere. Time is an argument, in host
monotonic seconds; a pace expires unless it is updated.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean, median, median_low

from gpuenergyd.core.measurement.robust import MEDIAN_PER_MEAN_ERROR, NORMAL_PER_MAD

_KEPT_READINGS = 16
"""Number of readings of a replica from which its scatter is estimated."""
_MIN_DIFFERENCES = 3
"""Least number of differences between successive readings from which scatter is computed; below, it counts as 0."""
_NORMAL_PER_MEDIAN = NORMAL_PER_MAD / math.sqrt(2)
"""Ratio of the standard deviation to the median absolute difference of two readings, for a normal distribution."""
_AT_SIGMA = 4.0
"""A reading further off than this many standard deviations is not noise."""
_ENTER_SIGMA = 4.5
"""Threshold for a mean of readings, in its standard errors; higher, because it is tested often."""
_SUSPECT_SIGMA = 2.0
"""Threshold for one reading of a suspected straggler; low, because the only cost is a plan that may go unused."""
_ENTER_MEANS = (2, 4, 8)
"""Numbers of readings whose mean may show a straggler: few react quickly, many detect it in noise."""
_MEDIAN_READINGS = 8
_MEDIAN_SIGMA = MEDIAN_PER_MEAN_ERROR / math.sqrt(_MEDIAN_READINGS)
"""Standard error of the median of `_MEDIAN_READINGS` readings, relative to their standard deviation."""
_SHORT_READINGS = 12
"""A straggler that recovers within this number of readings was probably noise."""
_MAX_ENTER_READINGS = 64
_LEAST_WAITED_RATIO = 0.5
"""Share of the difference to a slower replica by which iterations are longer if they wait for it: half, for noise."""


@dataclass(frozen=True, slots=True)
class StragglerRules:
    """Thresholds of straggler detection; ratios are relative to the waiting replica's own pace."""

    enter_ratio: float = 0.03
    """A replica slower by more than this is a straggler; smaller differences are drift and noise."""
    enter_readings: int = 2
    """Consecutive readings above `enter_ratio` that make a straggler: a single one may be a stall."""
    leave_ratio: float = 0.015
    """A straggler slower by less than this in one reading has recovered."""
    change_ratio: float = 0.01
    """Minimum change of the pace to follow: a faster pace after one reading, a slower one after `enter_readings`."""
    silent_s: float = 10.0
    silent_iterations: float = 5.0
    """A replica's report expires after this many of its iterations, but not before `silent_s`."""

    def counts_for_s(self, iteration_s: float) -> float:
        """Return how long a report of a replica with this iteration time is valid."""
        return max(self.silent_s, self.silent_iterations * iteration_s)


@dataclass(frozen=True, slots=True)
class Pace:
    """Own iteration time of a replica, with the replica's name and the time of the reading."""

    own_time_s: float
    replica: str
    at_mono_s: float
    iteration_time_s: float | None = None
    """How long its newest iteration took, waits for others included; None if unknown."""


@dataclass(frozen=True, slots=True)
class StragglerChange:
    """New straggler pace of a job; `pace` is None if there is no straggler any more."""

    job_id: str
    pace: Pace | None
    reason: str


@dataclass(slots=True)
class _Waiting:
    """The straggler that a replica waits for, and recent readings of slower replicas."""

    straggler: Pace | None = None
    readings: list[Pace] = field(default_factory=list)
    num_readings: int = 0
    """Readings since the replica began to wait."""
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_READINGS))
    """The last readings of the straggler since it became the slowest."""
    enter_readings: int = 0
    """Readings required before its next straggler is recognised; 0 means the number in the rules."""

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
        """Follow another pace; from here on only readings taken at the new pace are used."""
        self.readings = [*self.readings, pace][-num_readings:]
        self.times_s.clear()
        self.times_s.extend(reading.own_time_s for reading in self.readings)

    def end(self, rules: StragglerRules) -> Pace | None:
        """Stop waiting; return the straggler waited for. After a short one the next requires more readings."""
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
    """For each job id, the slowest replica on other hosts that the job's client knows."""
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _readings_s: dict[str, deque[float]] = field(default_factory=dict)
    """For each replica, its last readings, without repetitions of the same value."""
    _iterations_s: dict[str, deque[float]] = field(default_factory=dict)
    """For each replica, how long its last iterations took."""

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
        self._iterations_s.pop(job_id, None)
        self._readings_s.pop(_elsewhere_of(job_id), None)
        return self.expire_paces(now_mono_s)

    def update_pace(self, pace: Pace) -> tuple[StragglerChange, ...]:
        """Update the pace of a job of this daemon; return the resulting changes."""
        self._paces[pace.replica] = pace
        self._keep(pace.replica, pace.own_time_s)
        if pace.iteration_time_s is not None:
            self._iterations_s.setdefault(pace.replica, deque(maxlen=_MEDIAN_READINGS)).append(pace.iteration_time_s)
        mine = self._changes((pace.replica,), pace.at_mono_s, reading=None)
        return mine + self._changes(self._waiting.keys() - {pace.replica}, pace.at_mono_s, reading=pace)

    def update_pace_elsewhere(
        self, job_id: str, pace: Pace | None, now_mono_s: float, *, is_news: bool = True
    ) -> tuple[StragglerChange, ...]:
        """Update the slowest pace on other hosts, as reported to one job; None if there is none any more.

        With `is_news` False the pace is a known one: its lifetime is extended, but it is not another reading.
        """
        if pace is None:
            self._elsewhere.pop(job_id, None)
        else:
            self._elsewhere[job_id] = pace
            self._keep(_elsewhere_of(job_id), pace.own_time_s)
        return self._changes((job_id,), now_mono_s, reading=pace if is_news else None)

    def suspected_time_s(self, job_id: str, now_mono_s: float) -> float | None:
        """Return the pace of a suspected straggler, by its last reading; None without one, or if one is confirmed.

        A job may prepare a plan for that pace, in case the next reading confirms it.
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
        """Return the straggler with its pace from now on, which is at most the fastest of the last readings."""
        before, rules = waiting.straggler, self.rules
        sigma = self._sigma_of(job_id, slowest)
        num_needed = max(waiting.enter_readings, rules.enter_readings)
        least = min(waiting.readings[-num_needed:], key=lambda pace: pace.own_time_s, default=slowest)
        is_settled = len(waiting.readings) >= num_needed
        if before is None:
            is_slow = least.own_time_s > own.own_time_s * (1 + rules.enter_ratio)
            is_seen = is_settled and is_slow and self._is_no_noise(waiting, own, sigma)
            return least if is_seen and self._waits_for(least, own, len(waiting.readings)) else None
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
        """Return whether some mean of recent readings is further from the waiting replica's own than noise explains."""
        own_s = list(self._readings_s.get(own.replica, (own.own_time_s,)))
        both_sigma = math.hypot(_scatter_ratio(own_s), sigma)
        times_s = [pace.own_time_s for pace in waiting.readings]
        for num in (num for num in _ENTER_MEANS if num <= len(times_s)):
            # Not less than the newest: both replicas may have become slower together.
            usual_s = max(own.own_time_s, mean(own_s[-num:]))
            # Without the longest reading, which may be a stall.
            is_beyond = mean(sorted(times_s[-num:])[:-1]) > usual_s * (1 + _ENTER_SIGMA * both_sigma / math.sqrt(num))
            if is_beyond:
                return True
        return False

    def _waits_for(self, slower: Pace, own: Pace, num_readings: int) -> bool:
        """Return whether a replica's newest iterations show that it waits for a slower one; elsewhere, always."""
        is_here = slower.replica in self._paces
        num_seen = max(1, num_readings - 1)  # the iteration of the newest reading may not have ended here
        newest_s = list(self._iterations_s.get(own.replica, ()))[-num_seen:] if is_here else []
        waited_s = median_low(newest_s) - own.own_time_s if newest_s else math.inf
        return waited_s >= _LEAST_WAITED_RATIO * (slower.own_time_s - own.own_time_s)

    def _keep(self, replica: str, own_time_s: float) -> None:
        """Keep a reading for the scatter estimate; ignore a repetition of the same value."""
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
    """Return the relative standard deviation of readings, estimated from differences of successive ones.

    A change of pace is only one difference among many and hardly affects it.
    """
    differences = [abs(b / a - 1) for a, b in pairwise(readings_s)]
    return _NORMAL_PER_MEDIAN * median(differences) if len(differences) >= _MIN_DIFFERENCES else 0.0
