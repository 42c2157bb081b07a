"""Iterations of a job: matched with GPU samples once all energy counters cover them, then recorded."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.issued_plans import MAX_PLANS_KEPT
from gpuenergyd.core.job.measurements.savings import SavingEstimate
from gpuenergyd.core.job.messages import Event, IterationObserved, ObserveIteration, RecordIteration
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.measurement.iteration_observation import observe_iteration
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.stages import stage_clocks, stage_energy
from gpuenergyd.core.measurement.telemetry import ObservedSpan, RankIteration, iteration_window
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.figures import FiguresOfJob
from gpuenergyd.daemon.ports import HistoryPort, IterationWatcher, JobServices, ReplicasPort, RunningJob
from gpuenergyd.store.records import EstimateRecord, IterationRecord

_MAX_PENDING = 512
"""Enough for iterations of 3 ms that end while the daemon waits for energy readings."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """An iteration that waits until its GPUs' energy counters cover it."""

    command: ObserveIteration
    deadline_mono_ns: int


@dataclass(slots=True)
class IterationObserver:
    """Iterations of one job that wait for their energy; `handle` passes events to the job's state machine."""

    runner: RunningJob
    services: JobServices
    replicas: ReplicasPort
    handle: Callable[[Event], None]
    _pending: deque[_Pending] = field(default_factory=deque)
    _previous: tuple[RankIteration, ...] = ()
    """The ranks' reports of the iteration that was observed last."""

    def observe(self, command: ObserveIteration) -> None:
        """Observe an iteration as soon as its energy is known."""
        limit_ns = round(self.services.observation_limit_s * 1e9)
        self._pending.append(_Pending(command, time.monotonic_ns() + limit_ns))
        self.observe_one_if_covered()

    def observe_one_if_covered(self) -> bool:
        """Observe the oldest pending iteration if its energy is known or its time limit has passed."""
        if self._pending and (self._is_covered(self._pending[0]) or len(self._pending) > _MAX_PENDING):
            self.handle(self._observed(self._pending.popleft().command))
            return True
        return False

    def remaining(self) -> Iterator[IterationObserved]:
        """Yield the pending iterations of an ended job, whether or not their energy is known."""
        while self._pending:
            yield self._observed(self._pending.popleft().command)

    def drop_pending(self) -> None:
        """Drop the pending iterations, whose measurements are incomplete."""
        self._pending.clear()

    @property
    def _ranks(self) -> JobRanks:
        return self.runner.job.ranks

    def _is_covered(self, pending: _Pending) -> bool:
        if time.monotonic_ns() >= pending.deadline_mono_ns:
            return True
        end_ns = iteration_window(pending.command.ranks[0]).end_ns
        return all(self.services.gpus[gpu_uuid].counter.covers(end_ns) for gpu_uuid in self._ranks.gpu_uuids)

    def _observed(self, command: ObserveIteration) -> IterationObserved:
        gpus = {
            pp_rank: [self.services.gpus[gpu_uuid] for gpu_uuid in gpu_uuids]
            for pp_rank, gpu_uuids in self._ranks.gpu_uuids_by_stage.items()
        }
        has_replicas = self.replicas.has_replicas(self.runner.job_id)
        follows = self._previous and self._previous[0].iteration_index + 1 == command.ranks[0].iteration_index
        observation, spans = observe_iteration(
            ranks=command.ranks,
            graph=self.runner.job.graph_under(command.plan_id),
            clocks={pp_rank: stage_clocks([gpu.clocks for gpu in ranks]) for pp_rank, ranks in gpus.items()},
            counters={pp_rank: stage_energy([gpu.counter for gpu in ranks]) for pp_rank, ranks in gpus.items()},
            plan_id=command.plan_id,
            is_regular=command.is_regular,
            has_replicas=has_replicas,
            previous=self._previous if follows else (),
        )
        self._previous = command.ranks
        least_overhead_s = self.replicas.least_overhead_s(self.runner) if has_replicas else None
        began_ns = iteration_window(command.ranks[0]).begin_ns
        return IterationObserved(observation, began_ns, spans, least_overhead_s)


_TIMELINES_PER_PLAN = 12
_TIMELINE_EVERY = 96
"""A multiple of the strides in `client/thinning.py`, so that such an iteration is always timed."""
_REPEAT_EVERY = 50


@dataclass(slots=True)
class TimelineSelection:
    """Chooses the iterations whose timelines are stored: the first of each plan, and one in 96 of all."""

    _num_of_plan: Counter[str | None] = field(default_factory=Counter)

    def select(self, observation: IterationObservation) -> bool:
        """Return whether to store the timeline of an iteration, and count it if so."""
        num_of_plan = self._num_of_plan.pop(observation.plan_id, 0)
        is_selected = (
            observation.is_regular and num_of_plan < _TIMELINES_PER_PLAN
        ) or observation.iteration_index % _TIMELINE_EVERY == 0
        self._num_of_plan[observation.plan_id] = num_of_plan + is_selected
        if len(self._num_of_plan) > MAX_PLANS_KEPT:
            del self._num_of_plan[next(iter(self._num_of_plan))]
        return is_selected


@dataclass(slots=True)
class IterationRecorder:
    """Records the iterations of one job; calls `repeat_question` after every 50 of them."""

    runner: RunningJob
    history: HistoryPort
    replicas: ReplicasPort
    repeat_question: Callable[[], None]
    watcher: IterationWatcher | None = None
    """The carbon service; None for a member of a pipeline across hosts, whose leader accounts for all members."""
    timeline: tuple[int, tuple[ObservedSpan, ...]] | None = None
    """The index and the spans of the last iteration whose instructions were timed."""
    num_estimated: int = 0
    """Iterations of estimated energy, since the daemon started."""
    figures: FiguresOfJob = field(init=False)
    _estimate_due_mono_ns: int = 0
    _timelines: TimelineSelection = field(default_factory=TimelineSelection)

    def __post_init__(self) -> None:
        self.figures = FiguresOfJob(self.runner.job)

    def record(self, command: RecordIteration) -> None:
        observation, began_at = command.observation, utc_at(command.began_mono_ns)
        low_j, high_j = observation.estimated_range_j or (None, None)
        self.num_estimated += low_j is not None
        self.figures.totals = self.figures.totals.plus(observation)
        if self.watcher is not None:
            self.watcher.iteration_done(self.runner, observation, command.purpose, began_at)
        if command.spans:
            self.timeline = (observation.iteration_index, command.spans)
        self.history.write(
            IterationRecord(
                job_id=self.runner.job_id,
                iteration_index=observation.iteration_index,
                started_at=began_at,
                iteration_time_s=observation.iteration_time_s,
                energy_j=observation.energy_j,
                plan_id=observation.plan_id,
                plan_purpose=command.purpose,
                # An iteration at a straggler's pace shows no saving or slowdown of the plan.
                is_regular=observation.is_own,
                energy_low_j=low_j,
                energy_high_j=high_j,
                spans=command.spans if command.spans and self._timelines.select(observation) else (),
            )
        )
        now_ns = time.monotonic_ns()
        if now_ns >= self._estimate_due_mono_ns:
            self._estimate_due_mono_ns = now_ns + ESTIMATE_EVERY_NS
            self.record_estimate()
        self.replicas.compare_pace(self.runner)
        if observation.iteration_index % _REPEAT_EVERY == 0:
            self.repeat_question()

    def record_estimate(self) -> None:
        """Record the job's saving as the status shows it, so that reports agree with the status."""
        job = self.runner.job
        record = estimate_record(self.runner.job_id, job.estimate(), job.account)
        if record is not None:
            totals = self.figures.totals
            tokens = (totals.num_tokens, totals.tokens_energy_j) if totals.num_tokens else (None, None)
            self.history.write(replace(record, num_tokens=tokens[0], tokens_energy_j=tokens[1]))


ESTIMATE_EVERY_NS = 2_000_000_000
"""Time between two records of a running job's estimate; a last one is recorded when the job ends."""


def estimate_record(
    job_id: str, estimate: SavingEstimate | None, account: TimeAccount | None = None
) -> EstimateRecord | None:
    """Return the record of an estimate, with the time that the daemon has cost the job; None without an estimate."""
    if estimate is None:
        return None
    compared, (saving, slowdown) = estimate.saving, estimate.ratios
    return EstimateRecord(
        job_id=job_id,
        since_iteration=estimate.since_iteration,
        baseline_time_s=estimate.baseline_time_s,
        baseline_energy_j=estimate.baseline_energy_j,
        iteration_time_s=estimate.iteration_time_s,
        energy_per_iteration_j=estimate.energy_j,
        num_compared_baseline_iterations=compared.num_full_speed if compared else None,
        num_compared_tuned_iterations=compared.num_tuned if compared else None,
        saving_ratio=saving.estimate if saving else None,
        saving_low_ratio=saving.low if saving else None,
        saving_high_ratio=saving.high if saving else None,
        slowdown_ratio=slowdown.estimate if slowdown else None,
        slowdown_low_ratio=slowdown.low if slowdown else None,
        slowdown_high_ratio=slowdown.high if slowdown else None,
        cost_s=account.cost_s if account else None,
        cost_ratio=account.cost_ratio if account else None,
        num_experiments=account.num_experiments if account else None,
    )
