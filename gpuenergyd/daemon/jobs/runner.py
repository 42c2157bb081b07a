"""One job in motion: its events go to the state machine one by one, and its commands are carried out in order."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import assert_never

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    AskPolicy,
    Command,
    ControlLost,
    EndJob,
    Event,
    GpuViewChanged,
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
from gpuenergyd.core.job.savings import MeasuredSaving
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.gpus.inventory import Gpu, utc_at
from gpuenergyd.daemon.jobs.audit_log import ControlTrail
from gpuenergyd.daemon.jobs.handover_file import HandedRunner
from gpuenergyd.daemon.jobs.iteration_observer import ObservedIterations
from gpuenergyd.daemon.jobs.leases import JobClocks
from gpuenergyd.daemon.jobs.plan_delivery import PlanSlices
from gpuenergyd.daemon.jobs.previous_runs import packed, signature_of
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.gpu.link.messages import GpuHealth, LeaseOwner
from gpuenergyd.store.records import JobEndRecord, PlanRecord, PreviousRunRecord
from gpuenergyd.wire.messages import PlanSlice

log = logging.getLogger(__name__)

_IMAGINE_EVERY = 50
"""Iterations between two looks at what would be saved, and at whether clocks may be set by now."""
_RECALL_LIMIT_S = 5.0
_WAITING = "waiting for the plan of the whole pipeline"
_WOULD_BE_EPOCH = -1
"""No rank ever follows it; each would-be plan of a job takes the place of the one before."""


@dataclass(slots=True)
class JobRunner:
    """Owns one `Job`; everything here runs on the event loop."""

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
    pids: dict[int, int] = field(default_factory=dict)
    """Of the processes that are in the job now, by rank."""
    slices: PlanSlices = field(default_factory=PlanSlices)
    trail: ControlTrail = field(init=False)
    clocks: JobClocks = field(init=False)
    observed: ObservedIterations = field(init=False)
    would_be: ClockPlan | None = None
    """What the policy would aim for where no clock may be set; without a prediction it says why there is none."""
    _is_policy_waited_for: bool = False
    _commands: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)
    _task: asyncio.Task[None] | None = None
    _policy_task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.trail = ControlTrail(self.services.history, self.job_id)
        self.clocks = JobClocks(self.services, self.owner, self.trail)
        self.observed = ObservedIterations(self.services)

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

    @property
    def is_observing(self) -> bool:
        """Whether clocks of this job's GPUs may not be set, by order or because one of them cannot be controlled."""
        known = [self.services.gpus.get(view.gpu_uuid) for view in self.job.gpus.values()]
        return self.services.is_observing or any(gpu and gpu.health is GpuHealth.OBSERVE_ONLY for gpu in known)

    def observe_one_if_covered(self) -> bool:
        """Observe the oldest pending iteration if its energy is known by now, or waited for long enough."""
        observation = self.observed.observe_one_if_covered(self)
        if observation is not None and observation.iteration_index % _IMAGINE_EVERY == 0:
            self._imagine_again()
        return observation is not None

    def saving(self) -> MeasuredSaving | None:
        """Return what the plans in force are measured to save; computed once per observed iteration."""
        return self.observed.saving(self)

    def gpu_changed(self, gpu: Gpu) -> None:
        """Tell the job what was learned about one of its GPUs."""
        for pp_rank, view in self.job.gpus.items():
            if view.gpu_uuid == gpu.identity.gpu_uuid:
                self.take(GpuViewChanged(pp_rank, gpu.view()))

    def straggler_changed(self, straggler_time_s: float | None, reason: str) -> None:
        """Tell the job what the slowest replica of its training imposes on it, None when nothing any more."""
        before_s = self.job.target.straggler_time_s
        log.info("job %s: %s", self.job_id, reason)
        self.trail.record("straggler", "core", reason, before=_pace_text(before_s), after=_pace_text(straggler_time_s))
        self.take(StragglerChanged(straggler_time_s, reason))

    def control_lost(self, reason: str) -> None:
        """Take the job to full speed because its clocks cannot be set."""
        if self.clocks.are_held:
            self.clocks.lose()
            self.take(ControlLost(reason))

    async def suspend(self, reason: str) -> None:
        """Give the GPUs of a job that has fallen silent their full speed; the job itself stays as it is."""
        await self.clocks.suspend(self._gpu_uuids(), reason)

    async def resume(self) -> None:
        """Lease the GPUs again: the job speaks."""
        if self.clocks.is_suspended and not self.job.is_ended:
            self.clocks.is_suspended = False
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
            last_epoch=self.slices.last_epoch,
            slices=self.slices.waiting,
            given=self.slices.given,
            num_iterations_for=dict(self.observed.num_iterations_for),
            timeline=self.observed.timeline,
            tuned_figures=tuple(self.observed.tuned_figures),
            wants_from_epoch=self.clocks.wants_from_epoch,
            is_suspended=self.clocks.is_suspended,
        )

    def recall(self, handed: HandedRunner) -> None:
        """Know what the runner of this job knew in an earlier daemon."""
        self.created_mono_ns = handed.created_mono_ns
        self.last_report_mono_ns = handed.last_report_mono_ns
        self.slices = PlanSlices(handed.last_epoch, handed.slices, handed.given)
        self.observed.num_iterations_for.update(handed.num_iterations_for)
        self.observed.timeline = handed.timeline
        self.observed.tuned_figures.extend(handed.tuned_figures)
        self.clocks.wants_from_epoch = handed.wants_from_epoch
        self.clocks.is_suspended = handed.is_suspended

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
                self.observed.add(command)
                self.observe_one_if_covered()
            case AskPolicy():
                self._is_policy_waited_for = True
                self._answer(command.view)
            case SendPlan():
                self._send_plan(command)
            case LeaseGpus():
                await self._lease(command.gpu_uuids)
            case RestoreGpus():
                await self.clocks.restore(command.gpu_uuids, command.reason)
            case RecordPhase():
                log.info("job %s: %s (%s)", self.job_id, command.phase, command.reason)
                self.trail.record("phase", "core", command.reason, after=command.phase)
                if command.phase is JobPhase.WARMUP and not self.is_part:
                    await self._recall()
            case RecordNotice():
                log.info("job %s: %s", self.job_id, command.reason)
                self.trail.record("notice", "core", command.reason)
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
        return self.slices.take(0)

    def _answer_with_posted(self) -> None:
        untuned = baseline_plan("waiting", reason=_WAITING)
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
            self.would_be = baseline_plan("would-be", reason=f"policy {policy} failed: {answer.reason}")
        elif answer.purpose is PlanPurpose.PROFILE:
            self.would_be = baseline_plan("would-be", reason=f"policy {policy} cannot say without trying clocks")
        else:
            self.would_be = answer if answer.predicted is None else replace(answer, purpose=PlanPurpose.PREDICTED)
        if self.would_be.purpose is PlanPurpose.PREDICTED:
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
            self.trail.record(
                "recall", "core", f"what job {model.job_id} showed", after=f"{len(model.profile)} iterations"
            )
            self.observed.pace.learn_from(model)
            self.take(ModelRecalled(model))

    async def _keep_model(self, command: KeepModel) -> None:
        blob = await asyncio.to_thread(packed, command.model)
        now = utc_at(time.monotonic_ns())
        self.services.history.write(PreviousRunRecord(signature_of(self.job, self.owner.uid), self.job_id, now, blob))

    def _imagine_again(self) -> None:
        """Ask again for what the policy would aim for, or in earnest if clocks may be set by now."""
        is_busy = self._policy_task is not None and not self._policy_task.done()
        view = self.job.view()
        if self._is_policy_waited_for and not is_busy and view is not None:
            self._answer(view)

    def _send_plan(self, command: SendPlan) -> None:
        plan, before = command.plan, self.slices.last_epoch
        self.slices.add(command, self.job.gpus, is_part=self.is_part)
        now = utc_at(time.monotonic_ns())
        self.services.history.write(PlanRecord(self.job_id, command.plan_epoch, plan, now, command.apply_at_iteration))
        self.trail.record(
            "plan",
            f"policy {self.job.description.policy}" if plan.purpose is not PlanPurpose.BASELINE else "core",
            plan.reason,
            before=f"epoch {before}",
            after=f"epoch {command.plan_epoch}: {plan.plan_id}",
        )

    async def _lease(self, gpu_uuids: tuple[str, ...]) -> None:
        await self.clocks.lease(
            gpu_uuids, last_epoch=self.slices.last_epoch, on_refusal=lambda reason: self.take(ControlLost(reason))
        )

    async def _end(self, reason: str) -> None:
        self.observed.observe_all(self)
        self.slices.end(self.job.gpus)
        self.services.history.write(JobEndRecord(self.job_id, utc_at(time.monotonic_ns()), reason))
        if self.services.watcher is not None:
            self.services.watcher.job_ended(self.job_id)
        self.on_end(self)
        await self.services.policy.drop_job(self.job_id)

    def _gpu_uuids(self) -> tuple[str, ...]:
        return tuple(view.gpu_uuid for _, view in sorted(self.job.gpus.items()))


def _pace_text(straggler_time_s: float | None) -> str:
    return "own pace" if straggler_time_s is None else f"{straggler_time_s:.4g} s per iteration"
