"""Runs one job: passes events to its state machine one by one, and executes the resulting commands in order."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    AskPolicy,
    Command,
    ControlLost,
    EndJob,
    Event,
    GpuViewChanged,
    JobPhase,
    LeaseGpus,
    ObserveIteration,
    RankChangedMicrobatches,
    RecordIteration,
    RecordNotice,
    RecordPhase,
    RestoreGpus,
    SendPlan,
    StoreCurves,
    StoreOrderRefusal,
    StragglerChanged,
)
from gpuenergyd.core.job.outcome import Outcome, find_outcome, outcome_line
from gpuenergyd.core.job.story import Story
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.daemon.gpus.inventory import Gpu, utc_at
from gpuenergyd.daemon.jobs.audit_log import DAEMON, AuditLog
from gpuenergyd.daemon.jobs.figures import FiguresOfJob, JobTotals
from gpuenergyd.daemon.jobs.iterations import IterationObserver, IterationRecorder
from gpuenergyd.daemon.jobs.leases import JobLeases, LeasesSnapshot
from gpuenergyd.daemon.jobs.past_jobs import JobRuns
from gpuenergyd.daemon.jobs.plan_delivery import DeliverySnapshot, PlanDelivery
from gpuenergyd.daemon.jobs.plan_settings import POWER_LIMITS, POWER_PROFILES, JobSettings, PlanSettingSnapshot
from gpuenergyd.daemon.jobs.plan_source import JobPlans, PermittedPlans, PolicyHostPlans, PostedPlans, PredictionOnly
from gpuenergyd.daemon.ports import JobServices, ReplicasPort
from gpuenergyd.daemon.runtime.actions import Actions, execute
from gpuenergyd.gpu.link.messages import GpuHealth, LeaseOwner
from gpuenergyd.store.records import SLOWDOWN_ADVICE, JobEndRecord

log = logging.getLogger(__name__)

_STORY_LINES_LOGGED = 20
_NOT_CONTROLLED = frozenset({GpuHealth.OBSERVE_ONLY, GpuHealth.RELEASED})


@dataclass(frozen=True, slots=True)
class RunnerSnapshot:
    """The state of a job's runner for the next daemon."""

    owner: LeaseOwner
    created_mono_ns: int
    last_report_mono_ns: int | None
    delivery: DeliverySnapshot
    leases: LeasesSnapshot
    timeline: tuple[int, tuple[ObservedSpan, ...]] | None
    power_limits: PlanSettingSnapshot = field(default_factory=PlanSettingSnapshot)
    power_profiles: PlanSettingSnapshot = field(default_factory=PlanSettingSnapshot)
    totals: JobTotals = field(default_factory=JobTotals)


@dataclass(slots=True)
class JobRunner:
    """Owns one `Job` and the objects that its commands act on; everything here runs on the event loop."""

    job: Job
    services: JobServices
    replicas: ReplicasPort
    owner: LeaseOwner
    on_end: Callable[["JobRunner"], None]
    is_member: bool = False
    """Whether the job is one rank of a pipeline across hosts, whose plans its leader posts."""
    created_mono_ns: int = field(default_factory=time.monotonic_ns)
    last_report_mono_ns: int | None = None
    resumed_mono_ns: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    """The pids of the registered processes, by `JobDescription.rank_index`."""
    audit: AuditLog = field(init=False)
    delivery: PlanDelivery = field(init=False)
    leases: JobLeases = field(init=False)
    power_limits: JobSettings = field(init=False)
    power_profiles: JobSettings = field(init=False)
    observer: IterationObserver = field(init=False)
    recorder: IterationRecorder = field(init=False)
    plans: JobPlans = field(init=False)
    actions: Actions = field(init=False)
    runs: JobRuns = field(init=False)
    _story: Story = field(default_factory=Story)
    _commands: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)
    _has_final_outcome: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        job, services = self.job, self.services
        self.audit = AuditLog(services.history, self.job_id)
        self.delivery = PlanDelivery(job.ranks, services.history, self.audit)
        self.leases = JobLeases(services, self.owner, self.audit, self.delivery, self.handle, self._lease_changed)
        self.power_limits, self.power_profiles = (
            JobSettings(
                kind, services.worker, job.ranks, self.owner, self.audit, lambda: self.leases.are_held, self.handle
            )
            for kind in (POWER_LIMITS, POWER_PROFILES)
        )
        self.plans = self._posted_plans() if self.is_member else self._policy_plans()
        self.observer = IterationObserver(self, services, self.replicas, self.handle)
        self.recorder = IterationRecorder(
            self,
            services.history,
            self.replicas,
            lambda: self.plans.ask_again(job.view()),
            None if self.is_member else services.watcher,
        )
        self.runs = JobRuns(self, services, self.audit, self.owner.uid, is_member=self.is_member)
        self.actions = {
            ObserveIteration: self.observer.observe,
            AskPolicy: lambda command: self.plans.ask(command.view),
            SendPlan: self._send,
            LeaseGpus: self.leases.lease,
            RestoreGpus: self.leases.restore,
            RecordIteration: self.recorder.record,
            RecordPhase: self._phase_entered,
            RecordNotice: self.audit.record_notice,
            StoreOrderRefusal: self.runs.store_refusal,
            StoreCurves: self.runs.store_curves,
            EndJob: self.end,
        }

    @property
    def job_id(self) -> str:
        return self.job.description.job_id

    @property
    def settings(self) -> tuple[JobSettings, ...]:
        """The kinds of GPU settings that the daemon sets for the job's plans."""
        return self.power_limits, self.power_profiles

    @property
    def carbon_zones(self) -> frozenset[str]:
        """Zones reported by other hosts of the job: none, since all its GPUs are on this host."""
        return frozenset()

    @property
    def is_observing(self) -> bool:
        """Whether nothing may be set: the daemon only observes, or one of the job's GPUs cannot be controlled."""
        gpus = (self.services.gpus.get(gpu.gpu_uuid) for gpu in self.job.ranks.own_gpus.values())
        return self.services.is_observing or any(gpu and gpu.health in _NOT_CONTROLLED for gpu in gpus)

    @property
    def prediction(self) -> ClockPlan | None:
        """The predicted savings of a job for which nothing may be set; None for any other job."""
        plans = self.plans
        if not isinstance(plans, PermittedPlans) or plans.prediction.plan is None:
            return None
        return plans.prediction.plan if plans.is_predicting or self.is_observing else None

    @property
    def forbidden_lever(self) -> Lever | None:
        """The kind of setting that the plan in force changes without permission, as after a restart; else None."""
        plan, permitted = self.job.current_plan, frozenset() if self.is_observing else self.services.levers
        if plan.power_limits_w and Lever.POWER_LIMITS not in permitted:
            return Lever.POWER_LIMITS
        if plan.power_profiles and Lever.POWER_PROFILES not in permitted:
            return Lever.POWER_PROFILES
        return Lever.CLOCKS if plan.sets_clocks and Lever.CLOCKS not in permitted else None

    @property
    def _is_predicting(self) -> bool:
        return self.is_observing or self.prediction is not None

    def outcome(self) -> Outcome:
        """Return the outcome of the job, preliminary until its end."""
        waits_for = self.services.policy.activity
        is_predicting = self._is_predicting
        found = find_outcome(self.job, is_member=self.is_member, is_observing=is_predicting, waits_for=waits_for)
        if is_predicting and not self.is_observing:
            levers = " and ".join(sorted(lever.replace("-", " ") for lever in self.services.levers))
            reason = f"policy {self.job.description.policy} cannot plan with {levers} alone: it only predicts"
            return Outcome(found.kind, reason)
        return found

    def outcome_line(self) -> str:
        """Return one line that says what the job has saved, or why it has saved nothing."""
        if self._is_predicting:
            return self.outcome().text
        return outcome_line(self.job, is_member=self.is_member, waits_for=self.services.policy.activity)

    def start(self) -> None:
        """Start executing commands."""
        self._task = asyncio.create_task(self._execute_all(), name=f"job {self.job_id}")

    def handle(self, event: Event) -> None:
        """Pass an event to the state machine and queue its commands.

        Raises:
            JobError: the event contradicts the job; its state is unchanged.
        """
        commands = self.job.handle(event)
        self._story.add(event, commands)
        for command in commands:
            self._commands.put_nowait(command)
            if isinstance(command, SendPlan) and command.num_iterations is not None:
                self.replicas.block_begins(self, command.apply_at_iteration)

    # --- what else changes ---

    def gpu_changed(self, gpu: Gpu) -> None:
        """Pass new measurements of one of the job's GPUs to the state machine."""
        for index, view in self.job.ranks.own_gpus.items():
            if view.gpu_uuid == gpu.identity.gpu_uuid:
                pp_rank, stage_rank = divmod(index, self.job.description.num_stage_ranks)
                self.handle(GpuViewChanged(pp_rank, self.services.gpus.view(gpu), stage_rank))

    def prepare_for_pace(self, suspected_time_s: float | None) -> None:
        """Prepare a plan for the pace of a replica that may be a straggler; None: there is none."""
        if not isinstance(self.plans, PermittedPlans) or self.job.target.is_forced:
            return
        is_tuned = self.job.phase is JobPhase.TUNED and not self.is_observing
        self.plans.prepare(self.job.view, suspected_time_s if is_tuned else None)

    def straggler_changed(self, straggler_time_s: float | None, reason: str) -> None:
        """Follow the pace of the slowest replica of the training; None: the job's own pace."""
        before_s = self.job.target.straggler_time_s
        if isinstance(self.plans, PermittedPlans):
            straggler_time_s = self.plans.tuning.prepared.usable_time_s(straggler_time_s)
        log.info("job %s: %s", self.job_id, reason)
        self.audit.record("straggler", DAEMON, reason, before=_pace_text(before_s), after=_pace_text(straggler_time_s))
        self.handle(StragglerChanged(straggler_time_s, reason))
        if isinstance(self.plans, PermittedPlans):
            self.plans.tuning.release(self.job.current_plan if self.job.phase is JobPhase.TUNED else None)

    def control_lost(self, reason: str) -> None:
        """Fall back to full speed because the job's clocks cannot be set."""
        if self.leases.are_held:
            self.leases.lose()
            self.handle(ControlLost(reason))

    def post_plan(self, plan: ClockPlan) -> None:
        """Follow the leader's plan: at once if this member follows plans now, else when it next requests one."""
        assert isinstance(self.plans, PostedPlans)
        self.plans.post(plan, is_followed=self.job.phase in {JobPhase.TRIAL, JobPhase.TUNED})

    def microbatches_changed(self, event: RankChangedMicrobatches) -> None:
        """Handle a rank's changed number of microbatches; a member's plan was for the previous order and is dropped.

        Raises:
            JobError: the rank does not fit the job.
        """
        self.handle(event)
        if isinstance(self.plans, PostedPlans):
            self.plans.drop()

    async def suspend(self, reason: str) -> None:
        """Restore the GPUs of an idle job."""
        await self.leases.suspend(self.job.ranks.gpu_uuids, reason)

    async def resume(self) -> None:
        """Lease the GPUs of an idle job again."""
        self.resumed_mono_ns = time.monotonic_ns()
        if not self.job.is_ended:
            await self.leases.resume(self.job.ranks.gpu_uuids)

    # --- the end, and the next daemon ---

    async def end(self, command: EndJob) -> None:
        """Record the ended job's last iterations, then release everything that it holds."""
        for event in self.observer.remaining():
            for last in self.job.handle(event):
                await execute(self.actions, last)
        self._has_final_outcome.set()
        self.delivery.end()
        self.recorder.record_estimate()
        outcome = self.outcome()
        log.info("job %s ended: %s", self.job_id, self.outcome_line().removeprefix("ended "))
        if outcome.advice:
            self.audit.record(SLOWDOWN_ADVICE, DAEMON, outcome.advice)
        ended_at = utc_at(time.monotonic_ns())
        self.services.history.write(JobEndRecord(self.job_id, ended_at, command.reason, outcome.kind, outcome.reason))
        if self.services.watcher is not None:
            self.services.watcher.job_ended(self.job_id)
        self.on_end(self)
        await self.services.policy.drop_job(self.job_id)

    async def final_outcome_line(self, limit_s: float) -> str:
        """Return the outcome of an ended job, including its last iterations unless they take longer than the limit."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_final_outcome.wait(), limit_s)
        return self.outcome_line()

    async def finish(self, limit_s: float) -> None:
        """Wait, up to a time limit, until the last commands of an ended job are executed, then stop."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=limit_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.plans.close()
        for setting in self.settings:
            await setting.close()

    async def idle(self, limit_s: float) -> None:
        """Wait, up to a time limit, until all queued commands are executed."""
        joined = asyncio.create_task(self._commands.join())
        running = set() if self._task is None else {self._task}
        await asyncio.wait({joined, *running}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()

    async def pause(self, limit_s: float) -> RunnerSnapshot:
        """Execute the queued commands, then stop without ending the job; return the state for the next daemon."""
        await self.idle(limit_s)
        await self.finish(0.0)
        return RunnerSnapshot(
            owner=self.owner,
            created_mono_ns=self.created_mono_ns,
            last_report_mono_ns=self.last_report_mono_ns,
            delivery=self.delivery.snapshot(),
            leases=self.leases.snapshot(),
            timeline=self.recorder.timeline,
            power_limits=self.power_limits.snapshot(),
            power_profiles=self.power_profiles.snapshot(),
            totals=self.recorder.figures.totals,
        )

    def restore(self, snapshot: RunnerSnapshot) -> None:
        """Continue from the state of an earlier daemon."""
        self.created_mono_ns, self.last_report_mono_ns = snapshot.created_mono_ns, snapshot.last_report_mono_ns
        self.delivery.restore(snapshot.delivery)
        self.leases.take_over(snapshot.leases)
        self.recorder.timeline, self.recorder.figures = snapshot.timeline, FiguresOfJob(self.job, snapshot.totals)
        self.power_limits.restore(snapshot.power_limits)
        self.power_profiles.restore(snapshot.power_profiles)
        self.plans.resume(self.job.current_plan)

    # --- inside ---

    def _send(self, command: SendPlan) -> None:
        self.delivery.send(command)
        if not self.is_member:
            for setting in self.settings:
                setting.send(command)

    async def _phase_entered(self, command: RecordPhase) -> None:
        self.audit.record_phase(command)
        if command.phase is JobPhase.WARMUP:
            # The first iterations are not observed until past jobs are known.
            await self.runs.recall()

    def _lease_changed(self) -> None:
        for setting in self.settings:
            if self.leases.are_held:
                setting.apply()
            else:
                setting.forget()

    async def _execute_all(self) -> None:
        while True:
            command = await self._commands.get()
            try:
                await execute(self.actions, command)
            except Exception:
                story = "\n".join(self._story.lines()[-_STORY_LINES_LOGGED:])
                log.exception("job %s: %s failed; last events:\n%s", self.job_id, type(command).__name__, story)
                self.control_lost(f"{type(command).__name__} failed in the daemon")
            finally:
                self._commands.task_done()
            if isinstance(command, EndJob):
                return

    def _policy_plans(self) -> PermittedPlans:
        host = self.services.policy

        def policy() -> str:
            return self.job.description.policy

        return PermittedPlans(
            PolicyHostPlans(self.job_id, policy, host, self.handle),
            PredictionOnly(self.job_id, policy, host, self.services.history, lambda: self.job.num_iterations),
            lambda: frozenset() if self.is_observing else self.services.levers,
        )

    def _posted_plans(self) -> PostedPlans:
        return PostedPlans(lambda: not self.is_observing and Lever.CLOCKS in self.services.levers, self.handle)


def _pace_text(straggler_time_s: float | None) -> str:
    return "own pace" if straggler_time_s is None else f"{straggler_time_s:.4g} s per iteration"
