"""Leader of a pipeline across hosts: runs the job's state machine over all members, without a GPU of its own.

Each member is a job of one rank in its own host's daemon, which measures, leases, guards and restores. The members'
observations arrive here through the rank that leads the pipeline; plans leave as slices in the replies to it.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any

from gpuenergyd.core.distributed.stragglers import Pace, ReplicaGroup, StragglerChange
from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    Event,
    GpuViewChanged,
    MergedIterationObserved,
    RankJoined,
    StragglerChanged,
    TargetChanged,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.merge import MemberKey, busy_s, merge_observations
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.across_hosts.leader_ports import LeaderAudit, LeaderDelivery, LeaderPlans, MembersOwnGpus
from gpuenergyd.daemon.across_hosts.validation import checked_members, common_gpu
from gpuenergyd.daemon.jobs.executor import CommandExecutor
from gpuenergyd.daemon.jobs.plan_delivery import change_row
from gpuenergyd.daemon.jobs.previous_runs import NoPreviousRuns
from gpuenergyd.daemon.jobs.replicas import straggler_saving_fields
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.registration import checked_kind
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd.wire.pipeline_messages import MemberReport, PipelineReply, PipelineReport, PostedPlan

log = logging.getLogger(__name__)
_RELIEF_ITERATIONS = 48
_STRAGGLER_TOLERANCE_RATIO = 1.03
"""A member cannot distinguish its wait for the straggler from its own slowness; the leader can, and guards the pace."""
_MAX_INCOMPLETE = 64
"""Iterations that some member has not reported."""


@dataclass(slots=True)
class PipelineLeader:
    """One pipeline across hosts, led by a rank of this host; owned by the event loop."""

    description: JobDescription
    rules: JobRules
    services: JobServices
    leader_job_id: str
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    job: Job = field(init=False)
    straggler_reason: str | None = None
    """The reason of the straggler's pace; None at the pipeline's own pace."""
    _audit: LeaderAudit = field(init=False)
    _delivery: LeaderDelivery = field(init=False)
    _plans: LeaderPlans = field(init=False)
    _executor: CommandExecutor = field(init=False)
    _members: frozenset[MemberKey] = frozenset()
    _incomplete: dict[int, dict[MemberKey, IterationObservation]] = field(default_factory=lambda: defaultdict(dict))
    _replicas: ReplicaGroup = field(default_factory=ReplicaGroup)

    def __post_init__(self) -> None:
        # No proof blocks: each would need plan windows for a few iterations, which is not worth it across hosts.
        # Long relief limit: a plan takes some iterations to come into force anyway.
        self.job = Job(self.description, replace(self.rules, proof_iterations=0, relief_iterations=_RELIEF_ITERATIONS))
        self._audit = LeaderAudit(self.services.history, self.pipeline_id, self.leader_job_id)
        self._delivery = LeaderDelivery(self.job, self._audit)
        self._plans = LeaderPlans(
            self.job, self.services.policy, self._delivery, self._handle, self.spawn, self.services.is_observing
        )
        members = MembersOwnGpus()
        self._executor = CommandExecutor(
            observations=members,
            plans=self._plans,
            delivery=self._delivery,
            leases=members,
            iterations=members,
            audit=self._audit,
            runs=NoPreviousRuns(),
            end=members,
        )

    @property
    def pipeline_id(self) -> str:
        """The id of the pipeline, which its plans carry."""
        return self.description.job_id

    async def handle_report(self, report: PipelineReport, target: PerformanceTarget) -> PipelineReply:
        """Handle the observations of all members, and return the plan to follow.

        Raises:
            ProtocolError: members are missing or repeated, or their measurements are out of range.
            JobError: the members' orders do not fit together.
        """
        members = checked_members(report, self.description.num_pp_ranks)
        if not self._members:
            await self._join(members)
        elif self._members != members.keys():
            raise ProtocolError(f"{len(members)} members; the pipeline began with {len(self._members)}")
        if replace(target, straggler_time_s=None) != replace(self.job.target, straggler_time_s=None):
            await self._handle(TargetChanged(target))
        for (pp_rank, tp_rank), state in members.items():
            if tp_rank == 0:
                await self._handle(GpuViewChanged(pp_rank, common_gpu(pp_rank, members)))
            for observation in state.observations:
                if observation.iteration_index > self._plans.newest_index:
                    self._incomplete[observation.iteration_index][pp_rank, tp_rank] = observation
        for index in sorted(i for i, known in self._incomplete.items() if known.keys() == self._members):
            await self._merge(index)
        for stale in sorted(self._incomplete)[:-_MAX_INCOMPLETE]:
            del self._incomplete[stale]
        await self._compare_replicas(report)
        return self._reply()

    def status_fields(self) -> dict[str, Any]:
        """Return the fields of the pipeline in the status of the leader's own job."""
        job, knowledge = self.job, self.job.knowledge
        return {
            "pipeline_id": self.pipeline_id,
            "num_pp_ranks": self.description.num_pp_ranks,
            "phase": job.phase,
            "phase_reason": job.phase_reason,
            "plan_id": job.current_plan.plan_id,
            "num_iterations": job.num_iterations,
            "baseline_time_s": job.baseline.iteration_time_s if job.baseline is not None else None,
            "baseline_energy_j": job.baseline.energy_j if job.baseline is not None else None,
            "saving": knowledge.saving(),
            "own_time_s": knowledge.pace.own_time_s,
            "straggler_time_s": job.target.straggler_time_s,
            "straggler_reason": self.straggler_reason,
            **straggler_saving_fields(knowledge.straggler_saving),
        }

    async def _handle(self, event: Event) -> None:
        for command in self.job.handle(event):
            await self._executor.execute(command)

    async def _join(self, members: Mapping[MemberKey, MemberReport]) -> None:
        for (pp_rank, tp_rank), state in sorted(members.items()):
            if state.order != members[pp_rank, 0].order:
                raise JobError(f"tensor-parallel rank {tp_rank} of pipeline rank {pp_rank} runs another order")
            if tp_rank == 0:
                order = tuple(Instruction(pp_rank, checked_kind(k), microbatch, c) for k, microbatch, c in state.order)
                await self._handle(RankJoined(pp_rank, order, common_gpu(pp_rank, members)))
        self._members = frozenset(members)
        self._replicas.join(self.pipeline_id)

    async def _merge(self, index: int) -> None:
        whole = merge_observations(self._incomplete.pop(index))
        for older in [i for i in self._incomplete if i < index]:
            del self._incomplete[older]
        epoch = self._delivery.epoch_of(whole.plan_id)
        whole = replace(whole, busy_s=busy_s(whole, self.job.ranks.graph, self._delivery.planned_mhz(epoch)))
        self._plans.newest_index, self._plans.newest_epoch = index, epoch
        await self._handle(MergedIterationObserved(whole, epoch))
        self._plans.ask_in_time()
        own_time_s = self.job.knowledge.pace.own_time_s
        if own_time_s is not None:
            for change in self._replicas.update_pace(Pace(own_time_s, self.pipeline_id, time.monotonic())):
                await self._follow(change)

    async def _compare_replicas(self, report: PipelineReport) -> None:
        pace, now_s = None, time.monotonic()
        if report.slowest_other_time_s:
            pace = Pace(report.slowest_other_time_s, "a replica elsewhere", now_s - report.age_s)
        for change in self._replicas.update_pace_elsewhere(self.pipeline_id, pace, now_s, is_news=report.is_news):
            await self._follow(change)

    async def _follow(self, change: StragglerChange) -> None:
        """Follow the pace of the slowest replica, or return to the pipeline's own."""
        straggler_time_s = change.pace.own_time_s if change.pace is not None else None
        self.straggler_reason = change.reason if change.pace is not None else None
        log.info("pipeline %s: %s", self.pipeline_id, change.reason)
        after = "own pace" if straggler_time_s is None else f"{straggler_time_s:.4g} s per iteration"
        self._audit.record("straggler", change.reason, after)
        await self._handle(StragglerChanged(straggler_time_s, change.reason))

    def _reply(self) -> PipelineReply:
        sent, pace = self._delivery.sent, self.job.knowledge.pace
        reply = PipelineReply(
            self.pipeline_id, self.job.phase, None, own_time_s=pace.own_time_s, num_readings=pace.num_readings
        )
        if sent is None:
            return reply
        straggler_time_s = self.job.target.straggler_time_s
        clocks = {rank.pp_rank: rank.sm_clocks_mhz for rank in sent.plan.ranks}
        slices = tuple(
            PostedPlan(
                plan_id=self._delivery.plan_id(sent),
                purpose=sent.plan.purpose,
                sm_clocks_mhz=clocks.get(pp_rank, ()),
                changes=tuple(change_row(change) for change in sent.plan.changes_of(pp_rank)),
                reason=shorten(f"{sent.plan.plan_id}: {sent.plan.reason}", 200, placeholder=" ..."),
                straggler_time_s=None if straggler_time_s is None else straggler_time_s * _STRAGGLER_TOLERANCE_RATIO,
            )
            for pp_rank in range(self.description.num_pp_ranks)
        )
        return replace(reply, plan_id=self._delivery.plan_id(sent), slices=slices, straggler_time_s=straggler_time_s)
