"""One job in motion: its events go to the state machine one by one, and its commands are carried out in order."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import assert_never

from gpuenergyd.core.job import Job
from gpuenergyd.core.messages import (
    AskPolicy,
    Command,
    ControlLost,
    EndJob,
    Event,
    GpuViewChanged,
    IterationObserved,
    JobPhase,
    KeepModel,
    LeaseGpus,
    ModelRecalled,
    ObserveIteration,
    PlanDecided,
    PolicyFailed,
    RecordNotice,
    RecordPhase,
    RestoreGpus,
    SendPlan,
    StragglerChanged,
)
from gpuenergyd.core.observation import IterationObservation
from gpuenergyd.core.pace import PaceGauge
from gpuenergyd.core.pipeline import DependencyGraph, dependency_graph
from gpuenergyd.core.plan import ClockPlan, PlanPurpose, untuned_plan
from gpuenergyd.core.policy import JobView
from gpuenergyd.core.savings import MeasuredSaving
from gpuenergyd.core.telemetry import ObservedSpan, RankIteration, iteration_window, observe_iteration
from gpuenergyd.daemon.gpus import Gpu, utc_at
from gpuenergyd.daemon.hand_over import HandedRunner
from gpuenergyd.daemon.model_memory import packed, signature_of
from gpuenergyd.daemon.policy_link import PolicyFailure
from gpuenergyd.daemon.ports import JobServices, ReplicasPort
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link import GpuHealth, LeaseOwner, RestoreResult
from gpuenergyd.store.records import ControlEventRecord, IterationRecord, JobEndRecord, ModelRecord, PlanRecord
from gpuenergyd.wire.messages import PlanSlice

log = logging.getLogger(__name__)

_MAX_PENDING = 64
_TIMELINES_PER_PLAN = 12
_TIMELINE_EVERY = 100
_FIGURES_KEPT = 512
_IMAGINE_EVERY = 50
"""Iterations between two looks at what would be saved, and at whether clocks may be set by now."""
_RECALL_LIMIT_S = 5.0
_WAITING = "waiting for the plan of the whole pipeline"
_WOULD_BE_EPOCH = -1
"""No rank ever follows it; each would-be plan of a job takes the place of the one before."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """An iteration that waits until its GPUs' energy counters cover it."""

    command: ObserveIteration
    deadline_mono_ns: int


@dataclass(slots=True)
class JobRunner:
    """Owns one `Job`; everything here runs on the event loop.

    `slices[r]` are the plans that rank r has not been given yet, `given[r]` is the newest that it was given. Clock
    records of rank r count while `accepts(epoch)`.
    """

    job: Job
    services: JobServices
    owner: LeaseOwner
    on_end: Callable[["JobRunner"], None]
    is_part: bool = False
    """One rank of a pipeline that is planned as a whole elsewhere: its policy is what is posted."""
    posted: ClockPlan | None = None
    """The plan of a part that its pipeline's leader decided last."""
    created_mono_ns: int = field(default_factory=time.monotonic_ns)
    last_report_mono_ns: int | None = None
    last_epoch: int = 0
    pidfds: dict[int, int] = field(default_factory=dict)
    """Of the processes that are in the job now, by rank; owned by `Jobs`."""
    pids: dict[int, int] = field(default_factory=dict)
    """Of the same."""
    slices: dict[int, list[PlanSlice]] = field(default_factory=dict)
    given: dict[int, PlanSlice] = field(default_factory=dict)
    num_iterations_for: Counter[PlanPurpose] = field(default_factory=Counter)
    timeline: tuple[int, tuple[ObservedSpan, ...]] | None = None
    """The last observed iteration and its spans."""
    pace: PaceGauge = field(default_factory=PaceGauge)
    replicas: ReplicasPort | None = None
    """The other replicas of its training; None while none is known."""
    would_be: ClockPlan | None = None
    """What the policy would aim for where no clock may be set; without a prediction it says why there is none."""
    _is_policy_waited_for: bool = False
    _wants_from_epoch: int | None = None
    _is_suspended: bool = False
    _tuned_figures: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=_FIGURES_KEPT))
    _num_timelines: Counter[str | None] = field(default_factory=Counter)
    _pending: deque[_Pending] = field(default_factory=deque)
    _commands: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)
    _num_observed: int = 0
    _saving: tuple[int, MeasuredSaving | None] | None = None
    _graph: DependencyGraph | None = None
    _task: asyncio.Task[None] | None = None
    _policy_task: asyncio.Task[None] | None = None

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.job.description.job_id

    def start(self) -> None:
        """Begin to carry out commands."""
        self._task = asyncio.create_task(self._carry_out_all(), name=f"job {self.job_id}")

    def take(self, event: Event) -> None:
        """Give the job an event and queue what follows.

        Raises:
            JobError: the event contradicts what this job is; the job is unchanged.
        """
        for command in self.job.handle(event):
            self._commands.put_nowait(command)

    def accepts(self, plan_epoch: int) -> bool:
        """Return whether clock records of a plan count: leased, not suspended, and sent after the last restore."""
        return self._wants_from_epoch is not None and not self._is_suspended and plan_epoch >= self._wants_from_epoch

    @property
    def holds_clocks(self) -> bool:
        """Whether GPUs of this job may be running at clocks of ours."""
        return self._wants_from_epoch is not None and not self._is_suspended

    @property
    def is_observing(self) -> bool:
        """Whether clocks of this job's GPUs may not be set, by order or because one of them cannot be controlled."""
        known = [self.services.gpus.known(view.gpu_uuid) for view in self.job.gpus.values()]
        return self.services.is_observing or any(gpu and gpu.health is GpuHealth.OBSERVE_ONLY for gpu in known)

    @property
    def is_suspended(self) -> bool:
        """Whether the job fell silent and its GPUs run at full speed until it speaks."""
        return self._is_suspended

    def plans_for(self, iteration: RankIteration) -> tuple[PlanSlice, ...]:
        """Return what the reply to a rank's report carries: the plans it has not been given yet, oldest first.

        A reply may be lost on its way. So the newest plan that was given is given again to a rank that ran an iteration
        of it by an older one; taking a plan twice changes nothing.
        """
        given = self.given.get(iteration.pp_rank)
        new = tuple(self.slices.pop(iteration.pp_rank, ()))
        if new:
            self.given[iteration.pp_rank] = new[-1]
        is_lost = (
            given is not None
            and iteration.plan_epoch < given.plan_epoch
            and iteration.iteration_index >= given.apply_at_iteration
        )
        return (given, *new) if given is not None and is_lost else new

    def tuned_medians(self) -> tuple[float | None, float | None]:
        """Return median time and energy over the last regular tuned iterations."""
        energies = [energy_j for _, energy_j in self._tuned_figures if energy_j is not None]
        return (
            median(time_s for time_s, _ in self._tuned_figures) if self._tuned_figures else None,
            median(energies) if energies else None,
        )

    def observe_one_if_covered(self) -> bool:
        """Observe the oldest pending iteration if its energy is known by now, or waited for long enough."""
        if self._pending and (self._is_covered(self._pending[0]) or len(self._pending) > _MAX_PENDING):
            self._observe(self._pending.popleft().command)
            return True
        return False

    def saving(self) -> MeasuredSaving | None:
        """Return what the plans in force are measured to save; computed once per observed iteration."""
        if self._saving is None or self._saving[0] != self._num_observed:
            self._saving = self._num_observed, self.job.saving()
        return self._saving[1]

    def forget_unobserved(self) -> None:
        """Observe no iteration that is under way: what was measured of it is not all of it."""
        self._pending.clear()

    def gpu_changed(self, gpu: Gpu) -> None:
        """Tell the job what was learned about one of its GPUs."""
        for pp_rank, view in self.job.gpus.items():
            if view.gpu_uuid == gpu.identity.gpu_uuid:
                self.take(GpuViewChanged(pp_rank, gpu.view()))

    def straggler_changed(self, straggler_time_s: float | None, reason: str) -> None:
        """Tell the job what the slowest replica of its training imposes on it, None when nothing any more."""
        before_s = self.job.target.straggler_time_s
        log.info("job %s: %s", self.job_id, reason)
        self._record("straggler", "core", reason, before=_pace_text(before_s), after=_pace_text(straggler_time_s))
        self.take(StragglerChanged(straggler_time_s, reason))

    def control_lost(self, reason: str) -> None:
        """Take the job to full speed because its clocks cannot be set."""
        if self.holds_clocks:
            self._wants_from_epoch = None
            self.take(ControlLost(reason))

    async def suspend(self, reason: str) -> None:
        """Give the GPUs of a job that has fallen silent their full speed; the job itself stays as it is."""
        if self.holds_clocks:
            self._is_suspended = True
            await self._restore(self._gpu_uuids(), reason)

    async def resume(self) -> None:
        """Lease the GPUs again: the job speaks."""
        if self._is_suspended and not self.job.is_ended:
            self._is_suspended = False
            await self._lease(self._gpu_uuids())

    async def finish(self, limit_s: float) -> None:
        """Wait until an ended job's last commands are carried out, then stop."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=limit_s)
        tasks = [task for task in (self._policy_task, self._task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- from one daemon to the next ---

    async def pause(self, limit_s: float) -> HandedRunner:
        """Carry out what is queued, then nothing more, and return what the next daemon has to know."""
        if self._task is not None:
            queue = asyncio.create_task(self._commands.join())
            await asyncio.wait({queue, self._task}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            queue.cancel()
        await self.finish(0.0)
        return HandedRunner(
            owner=self.owner,
            created_mono_ns=self.created_mono_ns,
            last_report_mono_ns=self.last_report_mono_ns,
            last_epoch=self.last_epoch,
            slices=self.slices,
            given=self.given,
            num_iterations_for=dict(self.num_iterations_for),
            timeline=self.timeline,
            tuned_figures=tuple(self._tuned_figures),
            wants_from_epoch=self._wants_from_epoch,
            is_suspended=self._is_suspended,
        )

    def recall(self, handed: HandedRunner) -> None:
        """Know what the runner of this job knew in an earlier daemon."""
        self.created_mono_ns = handed.created_mono_ns
        self.last_report_mono_ns = handed.last_report_mono_ns
        self.last_epoch = handed.last_epoch
        self.slices, self.given = handed.slices, handed.given
        self.num_iterations_for.update(handed.num_iterations_for)
        self.timeline = handed.timeline
        self._tuned_figures.extend(handed.tuned_figures)
        self._wants_from_epoch = handed.wants_from_epoch
        self._is_suspended = handed.is_suspended

    # --- commands ---

    async def _carry_out_all(self) -> None:
        while True:
            command = await self._commands.get()
            try:
                await self._carry_out(command)
            except Exception:
                log.exception("job %s: %s failed", self.job_id, type(command).__name__)
                self.control_lost(f"{type(command).__name__} failed in the daemon")
            finally:
                self._commands.task_done()
            if isinstance(command, EndJob):
                return

    async def _carry_out(self, command: Command) -> None:
        match command:
            case ObserveIteration():
                limit_ns = round(self.services.observation_limit_s * 1e9)
                self._pending.append(_Pending(command, time.monotonic_ns() + limit_ns))
                self.observe_one_if_covered()
            case AskPolicy():
                self._is_policy_waited_for = True
                self._answer(command.view)
            case SendPlan():
                self._send_plan(command)
            case LeaseGpus():
                await self._lease(command.gpu_uuids)
            case RestoreGpus():
                self._wants_from_epoch = None
                self._is_suspended = False
                await self._restore(command.gpu_uuids, command.reason)
            case RecordPhase():
                log.info("job %s: %s (%s)", self.job_id, command.phase, command.reason)
                self._record("phase", "core", command.reason, after=command.phase)
                if command.phase is JobPhase.WARMUP and not self.is_part:
                    await self._recall()
            case RecordNotice():
                log.info("job %s: %s", self.job_id, command.reason)
                self._record("notice", "core", command.reason)
            case KeepModel():
                if not self.is_part:
                    await self._keep_model(command)
            case EndJob():
                await self._end(command.reason)
            case _:
                assert_never(command)

    def _answer(self, view: JobView) -> None:
        """Let the policy decide; where no clock may be set, let it say what it would aim for while the job waits."""
        if self.is_part:
            self._answer_with_posted()
            return
        work = self._imagine(view) if self.is_observing else self._ask_policy(view)
        self._policy_task = asyncio.create_task(work)

    def post(self, plan: ClockPlan) -> None:
        """Have a part follow a plan: at once where its job follows plans now, else as soon as it does."""
        self.posted = plan
        if self.job.phase in {JobPhase.PROFILING, JobPhase.TUNED}:
            self._answer_with_posted()

    async def slices_soon(self, limit_s: float) -> tuple[PlanSlice, ...]:
        """Return what a part's rank has not been given yet, once what is queued is carried out or the limit over."""
        queue = asyncio.create_task(self._commands.join())
        await asyncio.wait({queue}, timeout=limit_s)
        queue.cancel()
        new = tuple(self.slices.pop(0, ()))
        if new:
            self.given[0] = new[-1]
        return new

    def _answer_with_posted(self) -> None:
        untuned = untuned_plan("waiting", reason=_WAITING)
        plan = untuned if self.posted is None or self.is_observing else self.posted
        self.take(PlanDecided(plan))

    async def _ask_policy(self, view: JobView) -> None:
        self._is_policy_waited_for = False
        answer = await self.services.policy.next_plan(self.job_id, self.job.description.policy, view)
        self.take(PolicyFailed(answer.reason) if isinstance(answer, PolicyFailure) else PlanDecided(answer))

    async def _imagine(self, view: JobView) -> None:
        policy = self.job.description.policy
        answer = await self.services.policy.next_plan(self.job_id, policy, replace(view, can_set_clocks=False))
        if isinstance(answer, PolicyFailure):
            self.would_be = untuned_plan("would-be", reason=f"policy {policy} failed: {answer.reason}")
        elif answer.purpose is PlanPurpose.PROFILE:
            self.would_be = untuned_plan("would-be", reason=f"policy {policy} cannot say without trying clocks")
        else:
            self.would_be = answer if answer.predicted is None else replace(answer, purpose=PlanPurpose.WOULD_BE)
        if self.would_be.purpose is PlanPurpose.WOULD_BE:
            now = utc_at(time.monotonic_ns())
            self.services.history.write(
                PlanRecord(self.job_id, _WOULD_BE_EPOCH, self.would_be, now, self.job.num_iterations)
            )

    async def _recall(self) -> None:
        """Give the job what an earlier run of it showed; meanwhile its first iterations wait to be observed."""
        if self.services.models is None:
            return
        recalling = self.services.models.recall(signature_of(self.job, self.owner.uid))
        try:
            model = await asyncio.wait_for(recalling, _RECALL_LIMIT_S)
        except TimeoutError:
            log.warning("job %s: the history took too long to say what is known of it", self.job_id)
            return
        if model is not None and not self.job.is_ended:
            self._record("recall", "core", f"what job {model.job_id} showed", after=f"{len(model.profile)} iterations")
            self.pace.recall(model)
            self.take(ModelRecalled(model))

    async def _keep_model(self, command: KeepModel) -> None:
        blob = await asyncio.to_thread(packed, command.model)
        now = utc_at(time.monotonic_ns())
        self.services.history.write(ModelRecord(signature_of(self.job, self.owner.uid), self.job_id, now, blob))

    def _imagine_again(self) -> None:
        """Ask again for what the policy would aim for, or in earnest if clocks may be set by now."""
        is_busy = self._policy_task is not None and not self._policy_task.done()
        view = self.job.view()
        if self._is_policy_waited_for and not is_busy and view is not None:
            self._answer(view)

    def _send_plan(self, command: SendPlan) -> None:
        plan, before = command.plan, self.last_epoch
        self.last_epoch = command.plan_epoch
        for pp_rank in self.job.gpus:
            changes = tuple(
                (
                    str(change.instruction.kind),
                    change.instruction.microbatch_index,
                    change.instruction.chunk_index,
                    round(change.offset_s * 1e9),
                    change.sm_clock_mhz,
                )
                for change in plan.changes_of(pp_rank)
            )
            top_mhz = self.job.gpus[pp_rank].supported_sm_clocks_mhz[0] if self.is_part else 0
            plan_slice = PlanSlice(plan.plan_id, command.plan_epoch, command.apply_at_iteration, changes, top_mhz)
            self.slices.setdefault(pp_rank, []).append(plan_slice)
        now = utc_at(time.monotonic_ns())
        self.services.history.write(PlanRecord(self.job_id, command.plan_epoch, plan, now, command.apply_at_iteration))
        self._record(
            "plan",
            f"policy {self.job.description.policy}" if plan.purpose is not PlanPurpose.BASELINE else "core",
            plan.reason,
            before=f"epoch {before}",
            after=f"epoch {command.plan_epoch}: {plan.plan_id}",
        )

    async def _lease(self, gpu_uuids: tuple[str, ...]) -> None:
        try:
            owner = replace(self.owner, pidfds=tuple(self.pidfds.values()))
            await self.services.worker.lease(self.job_id, gpu_uuids, owner)
        except GpuError as error:
            log.warning("job %s: no lease: %s", self.job_id, error)
            self._record("lease", self._owner_text, str(error), after="refused")
            self.take(ControlLost(str(error)))
            return
        self._wants_from_epoch = self.last_epoch + 1 if self._wants_from_epoch is None else self._wants_from_epoch
        for gpu_uuid in gpu_uuids:
            self._record(
                "lease", self._owner_text, "first clock plan", gpu_uuid=gpu_uuid, before="un-tuned", after="leased"
            )

    async def _restore(self, gpu_uuids: tuple[str, ...], reason: str) -> None:
        try:
            outcomes = await self.services.worker.restore(gpu_uuids, reason)
        except GpuError as error:
            # A worker that died cut nothing loose: its successor restores what the journal holds.
            log.warning("job %s: restore left to the next worker: %s", self.job_id, error)
            self._record("restore", "core", reason, after=f"left to the next worker: {error}")
            return
        now_ns = time.monotonic_ns()
        told = {outcome.gpu_uuid: outcome for outcome in outcomes}
        for gpu_uuid in gpu_uuids:
            gpu, outcome = self.services.gpus.known(gpu_uuid), told.get(gpu_uuid)
            before = gpu.requested_sm_clock_mhz if gpu is not None else None
            if gpu is not None and (outcome is None or outcome.result is not RestoreResult.FAILED):
                gpu.note_restored(now_ns)
            self._record(
                "restore",
                "core",
                reason,
                gpu_uuid=gpu_uuid,
                before=f"{before} MHz" if before is not None else "leased",
                # Without an outcome the journal held nothing: somebody else has restored it already.
                after=f"{outcome.result}: {outcome.detail}" if outcome is not None else "nothing left to restore",
            )

    async def _end(self, reason: str) -> None:
        while self._pending:
            self._observe(self._pending.popleft().command)
        for pp_rank in self.job.gpus:
            # A rank that is still there follows nothing any more.
            self.slices[pp_rank] = [PlanSlice("ended", self.last_epoch + 1, 0, ())]
        self.services.history.write(JobEndRecord(self.job_id, utc_at(time.monotonic_ns()), reason))
        if self.services.watcher is not None:
            self.services.watcher.job_ended(self.job_id)
        self.on_end(self)
        await self.services.policy.forget(self.job_id)

    # --- observing ---

    def _is_covered(self, pending: _Pending) -> bool:
        if time.monotonic_ns() >= pending.deadline_mono_ns:
            return True
        end_ns = iteration_window(pending.command.ranks[0]).end_ns
        return all(self.services.gpus[view.gpu_uuid].counter.covers(end_ns) for view in self.job.gpus.values())

    def _observe(self, command: ObserveIteration) -> None:
        gpus = {pp_rank: self.services.gpus[view.gpu_uuid] for pp_rank, view in self.job.gpus.items()}
        if self._graph is None:
            assert self.job.schedule is not None
            self._graph = dependency_graph(self.job.schedule)
        observation, spans = observe_iteration(
            ranks=command.ranks,
            graph=self._graph,
            clocks={pp_rank: gpu.clocks for pp_rank, gpu in gpus.items()},
            counters={pp_rank: gpu.counter for pp_rank, gpu in gpus.items()},
            plan_id=command.plan_id,
            is_regular=command.is_regular,
            has_replicas=self.replicas is not None,
        )
        observation = self.pace.note(
            observation,
            self.job.purpose_of(observation.plan_id),
            self._graph,
            is_imposed=self.job.target.is_forced,
            least_overhead_s=self.replicas.least_overhead_s(self) if self.replicas is not None else None,
        )
        self.take(IterationObserved(observation))
        if self.replicas is not None:
            self.replicas.observed(self)
        self._num_observed += 1
        known = self.job.observations[-1] if self.job.observations else observation
        if known.iteration_index == observation.iteration_index:
            observation = known
        self._note(observation, spans, iteration_window(command.ranks[0]).begin_ns)

    def _note(self, observation: IterationObservation, spans: tuple[ObservedSpan, ...], begin_ns: int) -> None:
        if observation.iteration_index % _IMAGINE_EVERY == 0:
            self._imagine_again()
        purpose = self.job.purpose_of(observation.plan_id)
        if self.services.watcher is not None:
            self.services.watcher.iteration_done(self, observation, purpose, utc_at(begin_ns))
        self.timeline = (observation.iteration_index, spans)
        if observation.is_regular and purpose is not None:
            self.num_iterations_for[purpose] += 1
            if purpose is PlanPurpose.TUNED and not observation.is_imposed:
                self._tuned_figures.append((observation.iteration_time_s, observation.energy_j))
        keeps_timeline = (
            observation.is_regular and self._num_timelines[observation.plan_id] < _TIMELINES_PER_PLAN
        ) or observation.iteration_index % _TIMELINE_EVERY == 0
        self._num_timelines[observation.plan_id] += keeps_timeline
        self.services.history.write(
            IterationRecord(
                job_id=self.job_id,
                iteration_index=observation.iteration_index,
                started_at=utc_at(begin_ns),
                iteration_time_s=observation.iteration_time_s,
                energy_j=observation.energy_j,
                plan_id=observation.plan_id,
                plan_purpose=purpose,
                # What a straggler imposes is neither saved nor lost by the plan.
                is_regular=observation.is_own,
                spans=spans if keeps_timeline else (),
            )
        )

    @property
    def _owner_text(self) -> str:
        return f"uid {self.owner.uid} pid {self.owner.pid}"

    def _gpu_uuids(self) -> tuple[str, ...]:
        return tuple(view.gpu_uuid for _, view in sorted(self.job.gpus.items()))

    def _record(
        self, action: str, actor: str, reason: str, *, gpu_uuid: str | None = None, before: str = "", after: str = ""
    ) -> None:
        self.services.history.write(
            ControlEventRecord(utc_at(time.monotonic_ns()), action, actor, self.job_id, gpu_uuid, reason, before, after)
        )


def _pace_text(straggler_time_s: float | None) -> str:
    return "own pace" if straggler_time_s is None else f"{straggler_time_s:.4g} s per iteration"
