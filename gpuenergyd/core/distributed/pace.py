"""Pace of a replica: its iteration time at full speed without waits, estimated while it runs at any clocks.

Replicas of a training end each iteration together, so all iteration times equal that of the slowest replica. Replicas
differ in the times of their instructions. Each instruction class is scaled to full speed by the measured slowness of
its clock, and the pipeline's iteration time is computed from these times. The estimate is therefore independent of the
replica's own plan and of waits for other replicas; a throttled GPU increases it. Time between instructions (optimizer,
gradient reduction) is included with its usual value, and so are gradient communications that are instructions.

Slowness is learned from plans: the time at a clock divided by the time at full speed just before. If a GPU becomes
slower or faster in between (a straggler begins or recovers), the change would be mistaken for an effect of the clock.
A reading is therefore used only if it is physically possible, agrees with neighbouring clocks, and the next time at
full speed agrees with the one before.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import mean, median

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass
from gpuenergyd.core.pipeline.plan import TRIALS, PlanPurpose
from gpuenergyd.core.pipeline.timeline import makespan_s

_USUAL_SHARE = 5
"""Divisor of the rank that gives the usual overhead: the lower quintile, because waits only add time."""
_KEPT_OVERHEADS = 64
_OUTLIER_RATIO = 1.3
"""An instruction that takes more than this multiple of its usual time was disturbed."""
_WAIT_RATIO = 0.01
"""A wait shorter than this share of an iteration is treated as noise."""


_RECENT = 3
"""Number of full-speed iterations used as reference for slowness: few, because a GPU may change."""
_READINGS = 4
"""Number of readings per clock used for its slowness; before later readings the GPU may have changed."""
_CHANGED_RATIO = 0.05
"""The GPU has changed if a full-speed time changes by more, or a reading differs more from its neighbours."""


@dataclass(slots=True)
class ClockSlowness:
    """Slowness of one replica's GPUs at each clock, by instruction class."""

    _full_speed_s: dict[InstructionClass, deque[float]] = field(default_factory=dict)
    _readings: dict[InstructionClass, dict[int, list[float]]] = field(default_factory=dict)
    _unconfirmed: dict[InstructionClass, list[int]] = field(default_factory=dict)
    """Clocks of the readings since the last time at full speed."""
    _top_clock_mhz: dict[InstructionClass, int] = field(default_factory=dict)

    def learn_full_speed(self, samples: Iterable[InstructionSample]) -> None:
        """Learn the times at full speed, the reference of later readings; drop readings that they contradict."""
        for sample in samples:
            key = sample.instruction_class
            clocks_mhz = {share.sm_clock_mhz for share in sample.shares}
            top_mhz = self._top_clock_mhz[key] = max(self._top_clock_mhz.get(key, 0), *clocks_mhz)
            if clocks_mhz == {top_mhz}:
                recent_s = self._full_speed_s.setdefault(key, deque(maxlen=_RECENT))
                if recent_s and abs(sample.time_s / median(recent_s) - 1) > _CHANGED_RATIO:
                    self._drop_unconfirmed(key)
                    recent_s.clear()
                self._unconfirmed.pop(key, None)
                recent_s.append(sample.time_s)

    def learn(self, samples: Iterable[InstructionSample]) -> None:
        """Learn the slowness of the clocks at which the instructions of an iteration ran."""
        for sample in samples:
            key = sample.instruction_class
            recent_s = self._full_speed_s.get(key)
            main = sample.main_share
            known = self._readings.setdefault(key, {}).setdefault(main.sm_clock_mhz, [])
            if not recent_s or main.sm_clock_mhz == self._top_clock_mhz[key] or len(known) >= _READINGS:
                continue
            # The other shares ran at other clocks; if their slowness is unknown, time is assumed inverse to the clock.
            rest = sum(
                share.time_s / (self.at(key, share.sm_clock_mhz) or self._largest(key, share.sm_clock_mhz))
                for share in sample.shares
                if share is not main
            )
            done_ratio = 1.0 - rest / median(recent_s)
            slowness = main.time_s / done_ratio / median(recent_s) if done_ratio > 0 else math.inf
            if self._is_plausible(key, main.sm_clock_mhz, slowness):
                known.append(slowness)
                self._unconfirmed.setdefault(key, []).append(main.sm_clock_mhz)

    def at(self, key: InstructionClass, sm_clock_mhz: int) -> float | None:
        """Return the ratio of the time at a clock to that at full speed; None outside the measured clocks."""
        return self._at(key, sm_clock_mhz, except_mhz=0)

    def _at(self, key: InstructionClass, sm_clock_mhz: int, *, except_mhz: int) -> float | None:
        """Return the slowness at a clock, leaving out the readings of `except_mhz`."""
        top_mhz = self._top_clock_mhz.get(key)
        if top_mhz is None:
            return None
        if sm_clock_mhz == top_mhz:
            return 1.0
        known = {mhz: median(seen) for mhz, seen in self._readings.get(key, {}).items() if seen}
        known.pop(except_mhz, None)
        known[top_mhz] = 1.0
        above = min((mhz for mhz in known if mhz >= sm_clock_mhz), default=None)
        below = max((mhz for mhz in known if mhz <= sm_clock_mhz), default=None)
        if above is None or below is None:
            return None
        if above == below:
            return known[above]
        # Linear in the cycle time: exact where memory and compute times add up.
        share = (1 / sm_clock_mhz - 1 / above) / (1 / below - 1 / above)
        return known[above] + share * (known[below] - known[above])

    def _is_plausible(self, key: InstructionClass, sm_clock_mhz: int, slowness: float) -> bool:
        """Return whether a slowness is between 1 and the inverse clock ratio, and close to that of nearby clocks."""
        if not 1 - _CHANGED_RATIO <= slowness <= (1 + _CHANGED_RATIO) * self._largest(key, sm_clock_mhz):
            return False
        expected = self._at(key, sm_clock_mhz, except_mhz=sm_clock_mhz)
        return expected is None or abs(slowness / expected - 1) <= _CHANGED_RATIO

    def _drop_unconfirmed(self, key: InstructionClass) -> None:
        """Drop the readings since the last time at full speed, unless there are no other readings."""
        readings, unconfirmed = self._readings.get(key, {}), self._unconfirmed.get(key, [])
        if sum(map(len, readings.values())) > len(unconfirmed):
            for sm_clock_mhz in unconfirmed:
                readings[sm_clock_mhz].pop()

    def _largest(self, key: InstructionClass, sm_clock_mhz: int) -> float:
        return self._top_clock_mhz[key] / sm_clock_mhz


@dataclass(slots=True)
class PaceEstimator:
    """Pace estimator of one replica; `own_time_s` is None until it has run at full speed."""

    own_time_s: float | None = None
    iteration_time_s: float | None = None
    """How long the newest iteration took."""
    num_readings: int = 0
    """Number of times that `own_time_s` has been estimated."""
    _slowness: ClockSlowness = field(default_factory=ClockSlowness)
    _overheads_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_OVERHEADS))

    @property
    def overhead_s(self) -> float | None:
        """Usual time of an iteration without a running instruction, waits for other replicas excluded."""
        known = sorted(self._overheads_s)
        return known[len(known) // _USUAL_SHARE] if known else None

    def observe(
        self,
        observation: IterationObservation,
        purpose: PlanPurpose | None,
        graph: DependencyGraph,
        *,
        is_at_straggler_pace: bool = False,
        least_overhead_s: float | None = None,
    ) -> IterationObservation:
        """Update the estimate; return the iteration with its wait for other replicas filled in.

        Args:
            observation: the iteration; without `busy_s`, only the slowness of clocks is learned.
            purpose: purpose of its plan.
            graph: dependency graph of the pipeline without latencies.
            is_at_straggler_pace: whether a straggler is known to set the pace.
            least_overhead_s: smallest overhead among the other replicas, None if unknown; time beyond it is a wait.
        """
        samples, self.iteration_time_s = observation.instruction_samples, observation.iteration_time_s
        if purpose is PlanPurpose.BASELINE:
            self._slowness.learn_full_speed(samples)
        observed = observation
        if observation.busy_s is not None:
            # A negative overhead comes from an inexact `busy_s` and is not used for the usual overhead.
            overhead_s = observation.iteration_time_s - observation.busy_s
            if overhead_s >= 0 and not is_at_straggler_pace:
                self._overheads_s.append(overhead_s)
            own_s = self.overhead_s if self._overheads_s else max(0.0, overhead_s)
            usual_s = min(o for o in (own_s, least_overhead_s) if o is not None)
            waited_s = overhead_s - usual_s
            is_wait = waited_s > _WAIT_RATIO * observation.iteration_time_s
            observed = replace(
                observation, waited_s=waited_s if is_wait else 0.0, is_at_straggler_pace=is_at_straggler_pace
            )
            if purpose not in TRIALS:  # the slowness of its clocks is still being learned
                self._estimate(samples, graph, usual_s)
        if purpose in {*TRIALS, PlanPurpose.TUNED}:
            # Last, so that no sample is scaled by its own slowness.
            self._slowness.learn(samples)
        return observed

    def _estimate(self, samples: Iterable[InstructionSample], graph: DependencyGraph, overhead_s: float) -> None:
        """Estimate the replica's own time by scaling instructions to full speed, if all slownesses are known."""
        found: dict[InstructionClass, list[float]] = defaultdict(list)
        for sample in samples:
            key = sample.instruction_class
            if key.kind.waits_for_ranks:  # part of the overhead
                found[key] = [0.0]
                continue
            at_full_speed_s = 0.0
            for share in sample.shares:
                slowness = self._slowness.at(key, share.sm_clock_mhz)
                if slowness is None:
                    return
                at_full_speed_s += share.time_s / slowness
            found[key] += [at_full_speed_s] * sample.count
        times_s = {key: _mean_of_usual(times_s) for key, times_s in found.items()}
        if all(key in times_s for key in graph.classes):
            class_times_s = [times_s[key] for key in graph.classes]
            busy_s = makespan_s(graph, [class_times_s[key] for key in graph.class_of])
            self.own_time_s = busy_s + overhead_s
            self.num_readings += 1


def _mean_of_usual(times_s: list[float]) -> float:
    """Return the mean without outliers: one of the times may include a wait for another replica."""
    usual_s = median(times_s)
    return mean(time_s for time_s in times_s if time_s <= _OUTLIER_RATIO * usual_s)
