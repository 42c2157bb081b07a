"""What an iteration of a replica would take at full speed and alone, whatever clocks it runs at, whoever it waits for.

Replicas of a training end each iteration together, so their iteration times are all the same: the slowest one's. What
tells them apart is how long their instructions take. Those are brought to full speed class by class, by how much
longer each clock was seen to make them, and put back into the pipeline's order. A replica that a plan has slowed down
is therefore as fast here as without the plan, and one that waits as fast as without the wait; one whose GPU is
throttled is slower. Time between instructions (optimizer, gradient reduction) is the same for all of them and counted
as it usually is.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import mean, median

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd.core.policy_api.previous_run import PreviousRun

_RECENT = 3
"""Full-speed iterations that a clock's slowness is taken against: few, because a GPU may have changed since."""
_READINGS = 4
"""After so many readings of one clock its slowness is known; later ones might be of a GPU that has changed."""
_USUAL_SHARE = 5
"""The usual time between instructions is the lower fifth of those seen: waits come on top of it."""
_OVERHEADS = 64
_OUTLIER_RATIO = 1.3
"""Of the usual time, or of what the clock can explain: what takes longer was disturbed."""
_WAIT_RATIO = 0.01
"""Waiting for less than this share of an iteration is chance."""


@dataclass(slots=True)
class PaceEstimator:
    """Of one replica; `own_time_s` is None until it has run at full speed."""

    own_time_s: float | None = None
    num_readings: int = 0
    """How often `own_time_s` has been read; between two readings it is what was known before."""
    _full_speed_s: dict[InstructionClass, deque[float]] = field(default_factory=dict)
    _slowness: dict[InstructionClass, dict[int, list[float]]] = field(default_factory=dict)
    _top_clock_mhz: dict[InstructionClass, int] = field(default_factory=dict)
    _overheads_s: deque[float] = field(default_factory=lambda: deque(maxlen=_OVERHEADS))

    @property
    def overhead_s(self) -> float | None:
        """Time of an iteration in which no instruction runs, waits for other replicas left out."""
        known = sorted(self._overheads_s)
        return known[len(known) // _USUAL_SHARE] if known else None

    def recall(self, model: PreviousRun) -> None:
        """Learn from what an earlier run showed how much longer each clock takes."""
        for observation in model.full_speed:
            self._learn_full_speed(observation.instruction_samples)
        for observation in model.profile:
            self._learn_slowness(observation.instruction_samples)
        self._full_speed_s.clear()

    def note(
        self,
        observation: IterationObservation,
        purpose: PlanPurpose | None,
        graph: DependencyGraph,
        *,
        is_at_straggler_pace: bool = False,
        least_overhead_s: float | None = None,
    ) -> IterationObservation:
        """Take an iteration; return it with what it waited for other replicas.

        Args:
            observation: the iteration; of one without `busy_s` only clocks are learned, and it comes back as it is.
            purpose: what it was for.
            graph: the pipeline's, without latencies.
            is_at_straggler_pace: whether a straggler is known to set the pace.
            least_overhead_s: the least overhead among the other replicas, where that is known: what is beyond it has
                been a wait from the start.
        """
        samples = observation.instruction_samples
        if purpose is PlanPurpose.BASELINE:
            self._learn_full_speed(samples)
        noted = observation
        if observation.busy_s is not None:
            overhead_s = observation.iteration_time_s - observation.busy_s
            if not is_at_straggler_pace:
                self._overheads_s.append(overhead_s)
            # Less than none would be an error of `busy_s`, which need not be exact.
            usual_s = max(0.0, min(o for o in (self.overhead_s, least_overhead_s, overhead_s) if o is not None))
            waited_s = overhead_s - usual_s
            is_wait = waited_s > _WAIT_RATIO * observation.iteration_time_s
            noted = replace(
                observation, waited_s=waited_s if is_wait else 0.0, is_at_straggler_pace=is_at_straggler_pace
            )
            if purpose is not PlanPurpose.PROFILE:  # what its clocks cost is only being learned
                self._read(samples, graph, usual_s)
        if purpose is PlanPurpose.PROFILE:
            # Last, so that no reading is judged by itself.
            self._learn_slowness(samples)
        return noted

    def _learn_full_speed(self, samples: Iterable[InstructionSample]) -> None:
        for sample in samples:
            key = sample.instruction_class
            clocks_mhz = {share.sm_clock_mhz for share in sample.shares}
            top_mhz = self._top_clock_mhz[key] = max(self._top_clock_mhz.get(key, 0), *clocks_mhz)
            if clocks_mhz == {top_mhz}:
                self._full_speed_s.setdefault(key, deque(maxlen=_RECENT)).append(sample.time_s)

    def _learn_slowness(self, samples: Iterable[InstructionSample]) -> None:
        for sample in samples:
            key = sample.instruction_class
            recent_s = self._full_speed_s.get(key)
            main = sample.main_share
            known = self._slowness.setdefault(key, {}).setdefault(main.sm_clock_mhz, [])
            if not recent_s or main.sm_clock_mhz == self._top_clock_mhz[key] or len(known) >= _READINGS:
                continue
            # The rest of it ran at other clocks; where their slowness is not known yet, as if time went with the clock.
            rest = sum(
                share.time_s / (self._slowness_at(key, share.sm_clock_mhz) or self._steepest(key, share.sm_clock_mhz))
                for share in sample.shares
                if share is not main
            )
            done_ratio = 1.0 - rest / median(recent_s)
            slowness = main.time_s / done_ratio / median(recent_s) if done_ratio > 0 else math.inf
            if slowness <= _OUTLIER_RATIO * self._steepest(key, main.sm_clock_mhz):
                known.append(slowness)

    def _read(self, samples: Iterable[InstructionSample], graph: DependencyGraph, overhead_s: float) -> None:
        """Take what these instructions would have taken at full speed, where the slowness of their clocks is known."""
        found: dict[InstructionClass, list[float]] = defaultdict(list)
        for sample in samples:
            key = sample.instruction_class
            at_full_speed_s = 0.0
            for share in sample.shares:
                slowness = self._slowness_at(key, share.sm_clock_mhz)
                if slowness is None:
                    return
                at_full_speed_s += share.time_s / slowness
            found[key] += [at_full_speed_s] * sample.count
        times_s = {key: _mean_of_usual(times_s) for key, times_s in found.items()}
        if all(instruction.instruction_class in times_s for instruction in graph.instructions):
            busy_s = makespan_s(graph, [times_s[instruction.instruction_class] for instruction in graph.instructions])
            self.own_time_s = busy_s + overhead_s
            self.num_readings += 1

    def _slowness_at(self, key: InstructionClass, sm_clock_mhz: int) -> float | None:
        """Return how much longer an instruction takes at a clock than at full speed; None beyond what was seen."""
        top_mhz = self._top_clock_mhz.get(key)
        if top_mhz is None:
            return None
        if sm_clock_mhz == top_mhz:
            return 1.0
        known = {mhz: median(seen) for mhz, seen in self._slowness.get(key, {}).items() if seen}
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

    def _steepest(self, key: InstructionClass, sm_clock_mhz: int) -> float:
        return self._top_clock_mhz[key] / sm_clock_mhz


def _mean_of_usual(times_s: list[float]) -> float:
    """Return the mean of what is not much longer than usual: a wait for another replica may hide in one of them."""
    usual_s = median(times_s)
    return mean(time_s for time_s in times_s if time_s <= _OUTLIER_RATIO * usual_s)
