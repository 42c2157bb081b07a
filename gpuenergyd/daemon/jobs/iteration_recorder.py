"""Records a job's iterations: into the history database, for the carbon service, and for the status."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.core.job.issued_plans import MAX_PLANS_KEPT
from gpuenergyd.core.job.messages import RecordIteration
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.estimates import ESTIMATE_EVERY_NS, estimate_record
from gpuenergyd.daemon.ports import HistoryPort, IterationWatcher, ReplicasPort, RunningJob
from gpuenergyd.store.records import IterationRecord

_TIMELINES_PER_PLAN = 12
_TIMELINE_EVERY = 96
"""A multiple of the strides of `client/timing/thinning.py`, so that the iteration is a timed one."""
_REPEAT_EVERY = 50


@dataclass(slots=True)
class TimelineSelection:
    """Chooses the iterations whose timelines are stored: the first of each plan, and one in 96 of all."""

    _num_of_plan: Counter[str | None] = field(default_factory=Counter)

    def select(self, observation: IterationObservation) -> bool:
        """Return whether the timeline of an iteration is stored, and count it if so."""
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
    """Records the iterations of one job; calls `repeat_question` after every fiftieth one."""

    runner: RunningJob
    history: HistoryPort
    replicas: ReplicasPort
    repeat_question: Callable[[], None]
    watcher: IterationWatcher | None = None
    """The carbon service; None for a member of a pipeline across hosts, whose leader counts for all."""
    timeline: tuple[int, tuple[ObservedSpan, ...]] | None = None
    """The index and the spans of the last iteration whose instructions were timed."""
    _estimate_due_mono_ns: int = 0
    _timelines: TimelineSelection = field(default_factory=TimelineSelection)

    def record(self, command: RecordIteration) -> None:
        observation, began_at = command.observation, utc_at(command.began_mono_ns)
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
                # At a straggler's pace the plan neither saves nor loses time.
                is_regular=observation.is_own,
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
        """Record what the status shows of the job's saving, so that reports show the same."""
        job = self.runner.job
        record = estimate_record(self.runner.job_id, job.estimate(), job.account)
        if record is not None:
            self.history.write(record)
