"""Pace of a replica: its iteration time at full speed and without waits, estimated at any clocks.

Replicas of a training end each iteration together, so that their iteration times are equal: that of the slowest. They
differ in the times of their instructions. These are scaled to full speed class by class, by the measured slowness of
each clock, and put into the pipeline's order. The estimate is therefore independent of the replica's own plan and of
waits for other replicas; a throttled GPU increases it. Time between instructions (optimizer, gradient reduction) counts
with its usual value, and so does gradient communication that is an instruction of its own.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import mean, median

from gpuenergyd.core.distributed.slowness import ClockSlowness
from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.timeline import makespan_s

_USUAL_SHARE = 5
"""The usual time between instructions is the lower quintile of the observed ones: waits come on top."""
_KEPT_OVERHEADS = 64
_OUTLIER_RATIO = 1.3
"""An instruction longer than this ratio of the usual time was disturbed."""
_WAIT_RATIO = 0.01
"""Share of an iteration below which a wait is noise."""


@dataclass(slots=True)
class PaceEstimator:
    """Pace estimator of one replica; `own_time_s` is None until it has run at full speed."""

    own_time_s: float | None = None
    num_readings: int = 0
    """Number of estimates of `own_time_s` so far."""
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
        """Update the estimate; return the iteration with its wait for other replicas.

        Args:
            observation: the iteration; without `busy_s` only the slowness of clocks is learned.
            purpose: purpose of its plan.
            graph: dependency graph of the pipeline without latencies.
            is_at_straggler_pace: whether a straggler is known to set the pace.
            least_overhead_s: least overhead among the other replicas, None if unknown; time beyond it is a wait.
        """
        samples = observation.instruction_samples
        if purpose is PlanPurpose.BASELINE:
            self._slowness.learn_full_speed(samples)
        observed = observation
        if observation.busy_s is not None:
            # A negative overhead is an error of `busy_s`, which is not exact: it says nothing of the usual one.
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
            if purpose is not PlanPurpose.PROFILE:  # the slowness of its clocks is still being learned
                self._estimate(samples, graph, usual_s)
        if purpose in {PlanPurpose.PROFILE, PlanPurpose.TUNED}:
            # Last, so that no sample is scaled by its own slowness.
            self._slowness.learn(samples)
        return observed

    def _estimate(self, samples: Iterable[InstructionSample], graph: DependencyGraph, overhead_s: float) -> None:
        """Estimate the own time from instructions scaled to full speed, if the slowness of their clocks is known."""
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
