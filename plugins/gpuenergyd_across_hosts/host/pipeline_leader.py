"""Leader of a pipeline across hosts: runs the job's state machine over all members, without a GPU of its own.

Each member is a job of one rank in its own host's daemon, which measures, leases, guards and restores. Each host merges
its observations by stage. The leading rank sends them here, and the replies carry plans as one slice per member.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any

from gpuenergyd.core.distributed.stragglers import Pace, ReplicaGroup, StragglerChange
from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    AskPolicy,
    Command,
    EndJob,
    Event,
    GpuViewChanged,
    JobPhase,
    LeaseGpus,
    MergedIterationObserved,
    ObserveIteration,
    OrdersRefused,
    RankChangedMicrobatches,
    RankJoined,
    RecordIteration,
    RecordNotice,
    RecordPhase,
    RestoreGpus,
    SendPlan,
    StageMemoryChanged,
    StoreCurves,
    StoreOrderRefusal,
    StragglerChanged,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.reorder import order_fields
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.jobs.past_jobs import JobRuns
from gpuenergyd.daemon.jobs.plan_delivery import change_row
from gpuenergyd.daemon.jobs.replicas import check_paces, straggler_saving_fields
from gpuenergyd.daemon.jobs.training_budget import TrainingTarget
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.runtime.actions import Actions, execute
from gpuenergyd.errors import ProtocolError
from gpuenergyd_across_hosts.host.leader_ports import LeaderAudit, LeaderDelivery, LeaderPlans
from gpuenergyd_across_hosts.host.leader_records import LeaderIterations
from gpuenergyd_across_hosts.host.stage_parts import StageParts
from gpuenergyd_across_hosts.messages.patterns import to_blocks
from gpuenergyd_across_hosts.messages.pipeline_messages import PipelineReply, PipelineReport, PostedPlan, StageFacts
from gpuenergyd_across_hosts.rules.merge import busy_s

log = logging.getLogger(__name__)
_EXPERIMENT_ITERATIONS = 8
"""Length of an experiment: hosts agree on one plan at a time, so the return to full speed takes effect late."""


@dataclass(slots=True)
class PipelineLeader:
    """One pipeline across hosts, led by a rank of this host; owned by the event loop."""

    description: JobDescription
    rules: JobRules
    services: JobServices
    leader_job_id: str
    uid: int
    pids: Mapping[int, int]
    """Pid of the leading rank, by which the pipeline is recognized after a restart of the daemon."""
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    num_tp_ranks: int = 1
    job: Job = field(init=False)
    straggler_reason: str | None = None
    """Why the pipeline follows a straggler's pace; None at its own pace."""
    _audit: LeaderAudit = field(init=False)
    _delivery: LeaderDelivery = field(init=False)
    _plans: LeaderPlans = field(init=False)
    _iterations: LeaderIterations = field(init=False)
    _runs: JobRuns = field(init=False)
    _is_recalled: bool = False
    """Whether past jobs were looked up; iterations are handled only afterwards."""
    actions: Actions = field(init=False)
    _commands: deque[Command] = field(default_factory=deque)
    _is_executing: bool = False
    _parts: StageParts = field(init=False)
    _has_joined: bool = False
    _replicas: ReplicaGroup = field(default_factory=ReplicaGroup)
    _target: TrainingTarget = field(init=False)

    def __post_init__(self) -> None:
        own = replace(self.rules, experiment_iterations=_EXPERIMENT_ITERATIONS, are_plans_queued=False)
        self.job = Job(self.description, own)
        self._parts = StageParts(self.description.num_pp_ranks, self.num_tp_ranks)
        self._audit = LeaderAudit(self.services.history, self.leader_job_id, f"pipeline {self.job_id}")
        self._delivery = LeaderDelivery(self.job, self._audit)
        may_set_clocks = not self.services.is_observing and Lever.CLOCKS in self.services.levers
        self._plans = LeaderPlans(
            self.job, self.services.policy, self._delivery, self._handle, self.spawn, is_observing=not may_set_clocks
        )
        self._iterations = LeaderIterations(self, self.services)
        facts = "across hosts", self.num_tp_ranks
        self._runs = JobRuns(self, self.services, self._audit, self.uid, facts)
        self._target = TrainingTarget(self, self.services.watcher)
        # Each member's own daemon observes its iterations, leases and restores its GPU, and ends its own job.
        members_own = (ObserveIteration, LeaseGpus, RestoreGpus, EndJob)
        self.actions = {
            **dict.fromkeys(members_own, lambda _: None),
            AskPolicy: lambda command: self._plans.ask(command.view),
            SendPlan: self._delivery.send,
            RecordIteration: self._iterations.record,
            RecordPhase: self._phase_entered,
            RecordNotice: self._audit.record_notice,
            StoreOrderRefusal: self._runs.store_refusal,
            StoreCurves: self._runs.store_curves,
        }

    @property
    def job_id(self) -> str:
        """The id of the pipeline, which its plans carry."""
        return self.description.job_id

    @property
    def carbon_zones(self) -> frozenset[str]:
        """Carbon-intensity zones that the hosts have reported."""
        return self._parts.carbon_zones

    async def handle_report(self, report: PipelineReport) -> PipelineReply:
        """Handle the stages' new facts and observations, and return the plan to follow.

        Raises:
            ProtocolError: measurements are out of range, or the pipeline has another size than before.
            JobError: the stages' orders or GPUs do not fit together.
        """
        check_paces(
            slowest_other_time_s=report.slowest_other_time_s,
            age_s=report.age_s,
            least_other_overhead_s=report.least_other_overhead_s,
        )
        parts = self._parts
        size = report.num_pp_ranks, report.num_tp_ranks
        if size != (parts.num_pp_ranks, parts.num_tp_ranks):
            began = f"{parts.num_pp_ranks} x {parts.num_tp_ranks}"
            raise ProtocolError(f"{size[0]} x {count_text(size[1], 'rank')}; the pipeline began with {began}")
        for facts in report.facts:
            parts.add_facts(facts)
            if self._has_joined and parts.is_complete:
                await self._update_gpu(facts.pp_rank)
                await self._update_order(facts)
                await self._update_reordering(facts.pp_rank)
        missing = [(pp, tp) for pp, tp, part in report.parts if not parts.add(pp, tp, part)]
        if not self._has_joined and parts.is_complete:
            await self._join()
        if self._has_joined and self._is_recalled:
            for whole in parts.complete_iterations():
                await self._merge(whole, report.least_other_overhead_s)
        await self._compare_replicas(report)
        budget = self._target.handle(report.budget)
        return replace(self._reply(report.known_plan_id), missing_facts=tuple(missing), budget=budget)

    def status_fields(self) -> dict[str, Any]:
        """Return the fields of the pipeline in the status of the leader's own job."""
        job, knowledge, estimate = self.job, self.job.knowledge, self.job.estimate()
        return {
            "pipeline_id": self.job_id,
            "num_pp_ranks": self.description.num_pp_ranks,
            "num_tp_ranks": self.num_tp_ranks,
            "phase": job.phase,
            "phase_reason": job.phase_reason,
            "policy": job.description.policy,
            "max_slowdown_ratio": job.target.max_slowdown_ratio,
            "is_paused": job.is_paused,
            "plan_id": job.current_plan.plan_id,
            **order_fields(job.current_plan.orders, job.knowledge.reordering.advice),
            "num_iterations": job.num_iterations,
            "num_proof_iterations": job.control.blocks.num_proof_iterations,
            "baseline_time_s": job.baseline.iteration_time_s if job.baseline is not None else None,
            "baseline_energy_j": job.baseline.energy_j if job.baseline is not None else None,
            "saving": estimate.saving if estimate is not None else None,
            "own_time_s": knowledge.pace.own_time_s,
            "straggler_time_s": job.target.straggler_time_s,
            "straggler_reason": self.straggler_reason,
            **straggler_saving_fields(knowledge.straggler_saving),
        }

    def handle(self, event: Event) -> None:
        """Pass an event to the state machine and queue its commands."""
        self._commands.extend(self.job.handle(event))
        if not self._is_executing:
            self.spawn(self._execute_all())

    def close(self) -> None:
        """Record the last estimate when the leading rank's job has ended."""
        self._iterations.record_estimate()
        if self.services.watcher is not None:
            self.services.watcher.job_ended(self.job_id)

    async def _handle(self, event: Event) -> None:
        self._commands.extend(self.job.handle(event))
        await self._execute_all()

    async def _execute_all(self) -> None:
        """Execute all commands one by one, unless another task does."""
        if self._is_executing:
            return
        self._is_executing = True
        try:
            while self._commands:
                await execute(self.actions, self._commands.popleft())
        finally:
            self._is_executing = False

    def _phase_entered(self, command: RecordPhase) -> None:
        self._audit.record_phase(command)
        if command.phase is JobPhase.WARMUP and self.services.past_jobs is None:
            self._is_recalled = True
        elif command.phase is JobPhase.WARMUP:  # in the background: a training process waits for the reply
            self.spawn(self._recall())

    async def _recall(self) -> None:
        try:
            await self._runs.recall()
        finally:
            self._is_recalled = True

    async def _join(self) -> None:
        ranks = range(self.description.num_pp_ranks)
        found = [(pp_rank, self._parts.order(pp_rank), self._parts.gpu(pp_rank)) for pp_rank in ranks]
        for pp_rank, order, gpu in found:
            if pp_rank not in self.job.ranks.orders:  # incompatible orders leave the last one out
                offer, _, _ = self._parts.reordering(pp_rank)
                await self._handle(RankJoined(pp_rank, order, gpu, reorder=offer))
        self._has_joined = True
        for pp_rank in ranks:
            await self._update_reordering(pp_rank)
        self._replicas.join(self.job_id)

    async def _update_gpu(self, pp_rank: int) -> None:
        known_mhz = self.job.ranks.gpus[pp_rank].supported_sm_clocks_mhz
        gpu = replace(self._parts.gpu(pp_rank), supported_sm_clocks_mhz=known_mhz)
        await self._handle(GpuViewChanged(pp_rank, gpu))

    async def _update_reordering(self, pp_rank: int) -> None:
        """Pass a stage's memory figures to the job, and the reason if the stage no longer accepts other orders."""
        _, refusal, memory = self._parts.reordering(pp_rank)
        await self._handle(StageMemoryChanged(pp_rank, memory))
        if refusal:
            await self._handle(OrdersRefused(refusal))

    async def _update_order(self, facts: StageFacts) -> None:
        """Update the job's schedule for a stage whose number of microbatches has changed."""
        order = self._parts.changed_order(facts.pp_rank, self._newest_order(facts.pp_rank))
        if order is not None:
            self._delivery.schedule_changed()
            self._plans.prepared.drop()
            await self._handle(RankChangedMicrobatches(facts.pp_rank, order, facts.num_microbatches))

    def _newest_order(self, pp_rank: int) -> tuple[Instruction, ...]:
        _, order = self.job.ranks.changed_ranks.get(pp_rank, (0, self.job.ranks.orders[pp_rank]))
        return order

    async def _merge(self, whole: IterationObservation, least_other_overhead_s: float | None) -> None:
        epoch = self._delivery.epoch_of(whole.plan_id)
        graph = self.job.graph_under(self.job.knowledge.plans.id_of(epoch))
        whole = replace(whole, busy_s=busy_s(whole, graph, self._delivery.planned_mhz(epoch)))
        self._plans.newest_index, self._plans.newest_epoch = whole.iteration_index, epoch
        await self._handle(MergedIterationObserved(whole, epoch, least_other_overhead_s))
        self._plans.ask_in_time()
        own_time_s = self.job.knowledge.pace.own_time_s
        if own_time_s is not None:
            for change in self._replicas.update_pace(Pace(own_time_s, self.job_id, time.monotonic())):
                await self._follow(change)

    async def _compare_replicas(self, report: PipelineReport) -> None:
        pace, now_s = None, time.monotonic()
        if report.slowest_other_time_s:
            pace = Pace(report.slowest_other_time_s, "a replica elsewhere", now_s - report.age_s)
        for change in self._replicas.update_pace_elsewhere(self.job_id, pace, now_s, is_news=report.is_news):
            await self._follow(change)
        if not self.job.target.is_forced:
            suspected_s = self._replicas.suspected_time_s(self.job_id, now_s)
            is_tuned = self.job.phase is JobPhase.TUNED
            self._plans.prepared.prepare(self.job.view, suspected_s if is_tuned else None)

    async def _follow(self, change: StragglerChange) -> None:
        """Follow the pace of the slowest replica, or return to the pipeline's own."""
        confirmed_time_s = change.pace.own_time_s if change.pace is not None else None
        straggler_time_s = self._plans.prepared.usable_time_s(confirmed_time_s)
        self.straggler_reason = change.reason if change.pace is not None else None
        log.info("pipeline %s: %s", self.job_id, change.reason)
        after = "own pace" if straggler_time_s is None else f"{straggler_time_s:.4g} s per iteration"
        self._audit.record("straggler", self._audit.actor, change.reason, after=after)
        await self._handle(StragglerChanged(straggler_time_s, change.reason))
        await self._plans.straggler_changed()

    def _reply(self, known_plan_id: str | None) -> PipelineReply:
        delivery, pace = self._delivery, self.job.knowledge.pace
        reply = PipelineReply(
            self.job_id,
            self.job.phase,
            None,
            merged_iteration=self._parts.merged_iteration,
            own_time_s=pace.own_time_s,
            num_readings=pace.num_readings,
            overhead_s=pace.overhead_s,
        )
        if delivery.sent is None or delivery.plan_id is None:
            return reply
        slices = self._slices(delivery.plan_id, delivery.sent) if delivery.plan_id != known_plan_id else ()
        straggler_time_s = self.job.target.straggler_time_s
        return replace(
            reply,
            plan_id=delivery.plan_id,
            slices=slices,
            straggler_time_s=straggler_time_s,
            block=delivery.block,
            replaces=delivery.replaces,
        )

    def _permitted_slowdown_ratio(self) -> float | None:
        """Return the slowdown that the newest plan's target permits; None if that is the registered target."""
        target, baseline = self._delivery.target, self.job.baseline
        if target is None or baseline is None:
            return None
        own = replace(target, straggler_time_s=None)
        if own == self.description.target:
            return None
        return max(0.0, own.iteration_time_s(baseline.iteration_time_s) / baseline.iteration_time_s - 1.0)

    def _slices(self, plan_id: str, sent: SendPlan) -> tuple[PostedPlan, ...]:
        permitted_ratio = self._permitted_slowdown_ratio()
        clocks = {rank.pp_rank: rank.sm_clocks_mhz for rank in sent.plan.ranks}
        return tuple(
            PostedPlan(
                plan_id=plan_id,
                purpose=sent.plan.purpose,
                clocks=to_blocks([(mhz, 0) for mhz in clocks.get(pp_rank, ())]),
                changes=to_blocks([_change_row(change) for change in sent.plan.changes_of(pp_rank)]),
                reason=shorten(f"{sent.plan.plan_id}: {sent.plan.reason}", 200, placeholder=" ..."),
                straggler_time_s=self.job.target.straggler_time_s,
                permitted_slowdown_ratio=permitted_ratio,
                num_microbatches=self.job.description.num_microbatches if clocks else 0,
                order=to_blocks([_order_row(i) for i in sent.plan.orders[pp_rank]]) if sent.plan.orders else (),
            )
            for pp_rank in range(self.description.num_pp_ranks)
        )


def _order_row(instruction: Instruction) -> tuple[tuple[str, int], int]:
    return (str(instruction.kind), instruction.chunk_index), instruction.microbatch_index


def _change_row(change: ClockChange) -> tuple[tuple[str, int, int, int], int]:
    kind, microbatch, chunk, delay_ns, sm_clock_mhz = change_row(change)
    return (kind, chunk, delay_ns, sm_clock_mhz), microbatch
