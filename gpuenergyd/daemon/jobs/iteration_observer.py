"""A job's iterations as they are observed: once its GPUs' energy covers them, told to all who want to know."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median

from gpuenergyd.core.distributed.pace import PaceEstimator
from gpuenergyd.core.distributed.straggler_savings import StragglerSavingEstimator
from gpuenergyd.core.job.issued_plans import MAX_PLANS_KEPT
from gpuenergyd.core.job.messages import IterationObserved, ObserveIteration
from gpuenergyd.core.job.savings import MeasuredSaving
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import ObservedSpan, iteration_window, observe_iteration
from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.ports import JobServices, ReplicasPort, RunningJob
from gpuenergyd.store.records import IterationRecord

_MAX_PENDING = 64
_TIMELINES_PER_PLAN = 12
_TIMELINE_EVERY = 100
_FIGURES_KEPT = 512


@dataclass(frozen=True, slots=True)
class _Pending:
    """An iteration that waits until its GPUs' energy counters cover it."""

    command: ObserveIteration
    deadline_mono_ns: int


@dataclass(slots=True)
class ObservedIterations:
    """What one job's iterations showed, and those that still wait."""

    services: JobServices
    num_iterations_for: Counter[PlanPurpose] = field(default_factory=Counter)
    timeline: tuple[int, tuple[ObservedSpan, ...]] | None = None
    """The last observed iteration and its spans."""
    pace: PaceEstimator = field(default_factory=PaceEstimator)
    extrinsic: StragglerSavingEstimator = field(default_factory=StragglerSavingEstimator)
    replicas: ReplicasPort | None = None
    """The other replicas of its training; None while none is known."""
    tuned_figures: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=_FIGURES_KEPT))
    _num_timelines: Counter[str | None] = field(default_factory=Counter)
    _pending: deque[_Pending] = field(default_factory=deque)
    _num_observed: int = 0
    _saving: tuple[int, MeasuredSaving | None] | None = None
    _graph: DependencyGraph | None = None

    def add(self, command: ObserveIteration) -> None:
        """Observe an iteration as soon as its energy is known."""
        limit_ns = round(self.services.observation_limit_s * 1e9)
        self._pending.append(_Pending(command, time.monotonic_ns() + limit_ns))

    def observe_one_if_covered(self, runner: RunningJob) -> IterationObservation | None:
        """Observe the oldest pending iteration if its energy is known by now, or waited for long enough."""
        if self._pending and (self._is_covered(self._pending[0], runner) or len(self._pending) > _MAX_PENDING):
            return self._observe(self._pending.popleft().command, runner)
        return None

    def observe_all(self, runner: RunningJob) -> None:
        """Observe what waits, covered or not: the job is over."""
        while self._pending:
            self._observe(self._pending.popleft().command, runner)

    def forget_pending(self) -> None:
        """Observe no iteration that is under way: what was measured of it is not all of it."""
        self._pending.clear()

    def tuned_medians(self) -> tuple[float | None, float | None]:
        """Return median time and energy over the last regular tuned iterations."""
        energies = [energy_j for _, energy_j in self.tuned_figures if energy_j is not None]
        return (
            median(time_s for time_s, _ in self.tuned_figures) if self.tuned_figures else None,
            median(energies) if energies else None,
        )

    def saving(self, runner: RunningJob) -> MeasuredSaving | None:
        """Return what the plans in force are measured to save; computed once per observed iteration."""
        if self._saving is None or self._saving[0] != self._num_observed:
            self._saving = self._num_observed, runner.job.saving()
        return self._saving[1]

    def _is_covered(self, pending: _Pending, runner: RunningJob) -> bool:
        if time.monotonic_ns() >= pending.deadline_mono_ns:
            return True
        end_ns = iteration_window(pending.command.ranks[0]).end_ns
        return all(self.services.gpus[view.gpu_uuid].counter.covers(end_ns) for view in runner.job.gpus.values())

    def _observe(self, command: ObserveIteration, runner: RunningJob) -> IterationObservation:
        job = runner.job
        gpus = {pp_rank: self.services.gpus[view.gpu_uuid] for pp_rank, view in job.gpus.items()}
        if self._graph is None:
            assert job.schedule is not None
            self._graph = dependency_graph(job.schedule)
        observation, spans = observe_iteration(
            ranks=command.ranks,
            graph=self._graph,
            clocks={pp_rank: gpu.clocks for pp_rank, gpu in gpus.items()},
            counters={pp_rank: gpu.counter for pp_rank, gpu in gpus.items()},
            plan_id=command.plan_id,
            is_regular=command.is_regular,
            has_replicas=self.replicas is not None,
        )
        observation = self.pace.observe(
            observation,
            job.purpose_of(observation.plan_id),
            self._graph,
            is_at_straggler_pace=job.target.is_forced,
            least_overhead_s=self.replicas.least_overhead_s(runner) if self.replicas is not None else None,
        )
        runner.take(IterationObserved(observation))
        if self.replicas is not None:
            self.replicas.observed(runner)
        self._num_observed += 1
        known = job.observations[-1] if job.observations else observation
        if known.iteration_index == observation.iteration_index:
            observation = known
        self._tell(observation, spans, iteration_window(command.ranks[0]).begin_ns, runner)
        return observation

    def _tell(
        self, observation: IterationObservation, spans: tuple[ObservedSpan, ...], begin_ns: int, runner: RunningJob
    ) -> None:
        purpose = runner.job.purpose_of(observation.plan_id)
        is_for_straggler = runner.job.plans.is_for_straggler(observation.plan_id)
        self.extrinsic.add(observation, purpose, is_plan_for_straggler=is_for_straggler)
        if self.services.watcher is not None:
            self.services.watcher.iteration_done(runner, observation, purpose, utc_at(begin_ns))
        self.timeline = (observation.iteration_index, spans)
        if observation.is_regular and purpose is not None:
            self.num_iterations_for[purpose] += 1
            if purpose is PlanPurpose.TUNED and not observation.is_at_straggler_pace:
                self.tuned_figures.append((observation.iteration_time_s, observation.energy_j))
        self.services.history.write(
            IterationRecord(
                job_id=runner.job_id,
                iteration_index=observation.iteration_index,
                started_at=utc_at(begin_ns),
                iteration_time_s=observation.iteration_time_s,
                energy_j=observation.energy_j,
                plan_id=observation.plan_id,
                plan_purpose=purpose,
                # What a straggler imposes is neither saved nor lost by the plan.
                is_regular=observation.is_own,
                spans=spans if self._keeps_timeline(observation) else (),
            )
        )

    def _keeps_timeline(self, observation: IterationObservation) -> bool:
        """Return whether the history gets the spans too: of a few iterations of each plan, and of some of all."""
        num_of_plan = self._num_timelines.pop(observation.plan_id, 0)
        is_kept = (
            observation.is_regular and num_of_plan < _TIMELINES_PER_PLAN
        ) or observation.iteration_index % _TIMELINE_EVERY == 0
        self._num_timelines[observation.plan_id] = num_of_plan + is_kept
        if len(self._num_timelines) > MAX_PLANS_KEPT:
            del self._num_timelines[next(iter(self._num_timelines))]
        return is_kept
