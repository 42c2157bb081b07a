"""Plans a pipeline whose ranks sit on several hosts: the job's state machine over all parts, without a GPU of its own.

Each part is a job of one rank in its own host's daemon, which measures, leases, clamps, guards and gives back. What
they observed arrives here through the rank that leads the pipeline; what is decided leaves as slices in its replies.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.core.distributed.pace import PaceEstimator
from gpuenergyd.core.distributed.straggler_savings import StragglerSavingEstimator
from gpuenergyd.core.distributed.stragglers import Pace, ReplicaGroup, StragglerChange
from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    AskPolicy,
    Command,
    Event,
    GpuViewChanged,
    ObservedElsewhere,
    PlanDecided,
    PolicyFailed,
    RankJoined,
    RecordPhase,
    SendPlan,
    StragglerChanged,
    TargetChanged,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.merge import MemberKey, busy_s, merge_observations
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionKind, dependency_graph
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID
from gpuenergyd.core.policy_api.policy import GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.replicas import extrinsic_spoken_of
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd.store.records import ControlEventRecord
from gpuenergyd.wire.messages import ChangeRow
from gpuenergyd.wire.part_messages import PartState, PipelinePart, PipelineReply, PipelineReport, PostedPlan

log = logging.getLogger(__name__)
_RELIEF_ITERATIONS = 48
_HELD_ITERATIONS = 48
_PART_LENIENCE_RATIO = 1.03
"""A part cannot tell what it waits for the straggler from its own slowness; the whole, which can, is judged here."""
_MAX_WAITING = 64
"""Iterations that some part has not reported."""


@dataclass(slots=True)
class WholePipeline:
    """One pipeline across hosts, led by a rank of this host; owned by the event loop."""

    description: JobDescription
    rules: JobRules
    services: JobServices
    leader_job_id: str
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    job: Job = field(init=False)
    _places: frozenset[MemberKey] = frozenset()
    _waiting: dict[int, dict[MemberKey, IterationObservation]] = field(default_factory=lambda: defaultdict(dict))
    _newest_seen: int = -1
    _epoch_of_plan: dict[str, int] = field(default_factory=lambda: {BASELINE_PLAN_ID: 0})
    _sent: SendPlan | None = None
    _target_when_sent: PerformanceTarget | None = None
    _answered_target: PerformanceTarget | None = None
    """What the answer that is being taken was asked for: something else may be owed by now."""
    _newest_epoch: int | None = None
    """What the newest iteration followed."""
    _held: JobView | None = None
    """A question to the policy that waits until the newest plan has been tried, and since which iteration."""
    _held_at: int = -1
    extrinsic: StragglerSavingEstimator = field(default_factory=StragglerSavingEstimator)
    straggler_reason: str | None = None
    """Who is followed; None while nobody is."""
    _pace: PaceEstimator = field(default_factory=PaceEstimator)
    _replicas: ReplicaGroup = field(default_factory=ReplicaGroup)
    _graph: DependencyGraph | None = None

    def __post_init__(self) -> None:
        # A block between two plans would need an agreement for a few iterations: not worth it across hosts.
        # An answer takes some iterations to come into force anyway; a policy is relieved of only if it thinks longer.
        self.job = Job(self.description, replace(self.rules, proof_iterations=0, relief_iterations=_RELIEF_ITERATIONS))

    @property
    def pipeline_id(self) -> str:
        """What the whole is called; plans carry it."""
        return self.description.job_id

    @property
    def own_time_s(self) -> float | None:
        """What an iteration takes at full speed and without waiting for other replicas; None while unknown."""
        return self._pace.own_time_s

    def take(self, report: PipelineReport, target: PerformanceTarget) -> PipelineReply:
        """Take what all parts have observed and return what is decided.

        Raises:
            ProtocolError: parts are missing, given twice, or hold what cannot be.
            JobError: the parts' orders do not fit together.
        """
        parts = _checked_parts(report, self.description.num_pp_ranks)
        if not self._places:
            self._join(parts)
        elif self._places != parts.keys():
            raise ProtocolError(f"{len(parts)} parts, and not the {len(self._places)} that the pipeline began with")
        if replace(target, straggler_time_s=None) != replace(self.job.target, straggler_time_s=None):
            self._tell(TargetChanged(target))
        for (pp_rank, tp_rank), state in parts.items():
            if tp_rank == 0:
                common_mhz = self.job.gpus[pp_rank].supported_sm_clocks_mhz
                self._tell(GpuViewChanged(pp_rank, replace(state.gpu, supported_sm_clocks_mhz=common_mhz)))
            for observation in state.observations:
                if observation.iteration_index > self._newest_seen:
                    self._waiting[observation.iteration_index][pp_rank, tp_rank] = observation
        for index in sorted(i for i, known in self._waiting.items() if known.keys() == self._places):
            self._observe(index)
        for stale in sorted(self._waiting)[:-_MAX_WAITING]:
            del self._waiting[stale]
        self._follow_replicas(report)
        return self._reply()

    def _follow_replicas(self, report: PipelineReport) -> None:
        """Take what replicas elsewhere need: the slowest of them sets the pace of all."""
        pace, now_s = None, time.monotonic()
        if report.slowest_other_time_s:
            pace = Pace(report.slowest_other_time_s, "a replica elsewhere", now_s - report.age_s)
        for change in self._replicas.update_pace_elsewhere(self.pipeline_id, pace, now_s, is_news=report.is_news):
            self._impose(change)

    def _impose(self, change: StragglerChange) -> None:
        straggler_time_s = change.pace.own_time_s if change.pace is not None else None
        self.straggler_reason = change.reason if change.pace is not None else None
        log.info("pipeline %s: %s", self.pipeline_id, change.reason)
        after = "own pace" if straggler_time_s is None else f"{straggler_time_s:.4g} s per iteration"
        self._record("straggler", change.reason, after)
        self._tell(StragglerChanged(straggler_time_s, change.reason))

    def _join(self, parts: Mapping[MemberKey, PartState]) -> None:
        for (pp_rank, tp_rank), state in sorted(parts.items()):
            if state.order != parts[pp_rank, 0].order:
                raise JobError(f"tensor-parallel rank {tp_rank} of pipeline rank {pp_rank} runs another order")
            if tp_rank == 0:
                order = tuple(Instruction(pp_rank, _kind(k), microbatch, c) for k, microbatch, c in state.order)
                self._tell(RankJoined(pp_rank, order, _common_gpu(pp_rank, parts)))
        self._places = frozenset(parts)
        self._replicas.join(self.pipeline_id)
        assert self.job.schedule is not None
        self._graph = dependency_graph(self.job.schedule)

    def _observe(self, index: int) -> None:
        whole = merge_observations(self._waiting.pop(index))
        for older in [i for i in self._waiting if i < index]:
            del self._waiting[older]
        self._newest_seen = index
        epoch = self._epoch_of_plan.get(whole.plan_id) if whole.plan_id is not None else None
        assert self._graph is not None
        purpose = self.job.purpose_of(self.job.plan_id_of(epoch))
        is_forced = self.job.target.is_forced
        whole = replace(whole, busy_s=busy_s(whole, self._graph, self._planned_mhz(epoch)))
        whole = self._pace.observe(whole, purpose, self._graph, is_at_straggler_pace=is_forced)
        self._newest_epoch = epoch
        is_for_straggler = self.job.plans.is_for_straggler(self.job.plan_id_of(epoch))
        self.extrinsic.add(whole, purpose, is_plan_for_straggler=is_for_straggler)
        self._tell(ObservedElsewhere(whole, epoch))
        self._ask_in_time()
        if self._pace.own_time_s is not None:
            own = Pace(self._pace.own_time_s, self.pipeline_id, time.monotonic())
            for change in self._replicas.update_pace(own):
                self._impose(change)

    def _planned_mhz(self, epoch: int | None) -> Mapping[Instruction, int] | None:
        """Return the clocks that the newest plan has for each instruction, if an iteration followed it."""
        sent, schedule = self._sent, self.job.schedule
        if sent is None or schedule is None or epoch != sent.plan_epoch:
            return None
        return {
            instruction: mhz
            for rank in sent.plan.ranks
            for instruction, mhz in zip(schedule.orders[rank.pp_rank], rank.sm_clocks_mhz, strict=False)
            if mhz is not None
        }

    def _tell(self, event: Event) -> None:
        for command in self.job.handle(event):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case AskPolicy() if self.services.is_observing:
                pass  # no plan could be installed here
            case AskPolicy():
                self._held, self._held_at = command.view, self._newest_seen
                self._ask_in_time()
            case SendPlan():
                self._sent = command
                self._target_when_sent = self._answered_target or self.job.target
                self._epoch_of_plan[self._plan_id(command)] = command.plan_epoch
                self._record("plan", command.plan.reason, f"epoch {command.plan_epoch}: {command.plan.plan_id}")
            case RecordPhase():
                log.info("pipeline %s: %s (%s)", self.pipeline_id, command.phase, command.reason)
                self._record("phase", command.reason, f"pipeline {command.phase}")
            case _:
                pass  # each part leases and gives back on its own, and no model of a whole pipeline is kept

    def _ask_in_time(self) -> None:
        """Ask what is to be asked once the newest plan has been tried: policies answer faster than ranks agree."""
        view, latest = self._held, self._sent
        if view is None:
            return
        is_tried = latest is None or latest.plan_epoch == self._newest_epoch
        is_stuck = self._newest_seen - self._held_at >= _HELD_ITERATIONS
        is_urgent = view.target != self._target_when_sent
        if is_tried or is_stuck or is_urgent:
            self._held = None
            fresh = self.job.view() or view
            self.spawn(self._ask(replace(fresh, target=view.target)))

    async def _ask(self, view: JobView) -> None:
        policy = self.description.policy
        answer = await self.services.policy.next_plan(self.pipeline_id, policy, view)
        self._answered_target = view.target
        self._tell(PolicyFailed(answer.reason) if isinstance(answer, PolicyFailure) else PlanDecided(answer))
        self._answered_target = None

    def _plan_id(self, sent: SendPlan) -> str:
        return f"{self.pipeline_id}.{sent.plan_epoch}"

    def _reply(self) -> PipelineReply:
        sent, own_time_s = self._sent, self._pace.own_time_s
        if sent is None:
            return PipelineReply(
                self.pipeline_id, self.job.phase, None, own_time_s=own_time_s, num_readings=self._pace.num_readings
            )
        straggler_time_s = self.job.target.straggler_time_s
        clocks = {rank.pp_rank: rank.sm_clocks_mhz for rank in sent.plan.ranks}
        slices = tuple(
            PostedPlan(
                plan_id=self._plan_id(sent),
                purpose=sent.plan.purpose,
                sm_clocks_mhz=clocks.get(pp_rank, ()),
                changes=tuple(_rows(sent, pp_rank)),
                reason=f"{sent.plan.plan_id}: {sent.plan.reason}"[:200],
                straggler_time_s=None if straggler_time_s is None else straggler_time_s * _PART_LENIENCE_RATIO,
            )
            for pp_rank in range(self.description.num_pp_ranks)
        )
        return PipelineReply(
            self.pipeline_id,
            self.job.phase,
            self._plan_id(sent),
            slices,
            own_time_s=own_time_s,
            num_readings=self._pace.num_readings,
            straggler_time_s=straggler_time_s,
        )

    def _record(self, action: str, reason: str, after: str) -> None:
        now = utc_at(time.monotonic_ns())
        actor = f"pipeline {self.pipeline_id}"
        self.services.history.write(
            ControlEventRecord(now, action, actor, self.leader_job_id, None, reason, before="", after=after)
        )


def spoken_of(whole: WholePipeline) -> dict[str, Any]:
    """Return what the status says of a whole pipeline, beside the part that leads it."""
    job = whole.job
    return {
        "pipeline_id": whole.pipeline_id,
        "num_pp_ranks": whole.description.num_pp_ranks,
        "phase": job.phase,
        "phase_reason": job.phase_reason,
        "plan_id": job.current_plan.plan_id,
        "num_iterations": job.num_iterations,
        "baseline_time_s": job.baseline.iteration_time_s if job.baseline is not None else None,
        "baseline_energy_j": job.baseline.energy_j if job.baseline is not None else None,
        "saving": job.saving(),
        "own_time_s": whole.own_time_s,
        "straggler_time_s": job.target.straggler_time_s,
        "straggler_reason": whole.straggler_reason,
        **extrinsic_spoken_of(whole.extrinsic),
    }


def _rows(sent: SendPlan, pp_rank: int) -> list[ChangeRow]:
    return [
        (
            str(change.instruction.kind),
            change.instruction.microbatch_index,
            change.instruction.chunk_index,
            round(change.offset_s * 1e9),
            change.sm_clock_mhz,
        )
        for change in sent.plan.changes_of(pp_rank)
    ]


def _checked_parts(report: PipelineReport, num_pp_ranks: int) -> dict[MemberKey, PartState]:
    expected = {(pp, tp) for pp in range(num_pp_ranks) for tp in range(report.num_tp_ranks)}
    parts = {(part.pp_rank, part.tp_rank): part.state for part in report.parts}
    if len(parts) != len(report.parts) or parts.keys() != expected:
        raise ProtocolError(
            f"{len(report.parts)} parts: each of {num_pp_ranks} x {report.num_tp_ranks} ranks must be there once"
        )
    for part in report.parts:
        _check(part)
    return parts


def _check(part: PipelinePart) -> None:
    state, where = part.state, f"part {part.pp_rank}.{part.tp_rank}"
    clocks = state.gpu.supported_sm_clocks_mhz
    if not clocks or list(clocks) != sorted(set(clocks), reverse=True) or clocks[-1] <= 0:
        raise ProtocolError(f"{where}: a GPU's clocks are positive, descending and not none")
    if not 0 <= state.gpu.switch_latency_s < 60:
        raise ProtocolError(f"{where}: switch_latency_s {state.gpu.switch_latency_s} must be in [0, 60)")
    for row in state.order:
        _kind(row[0])
    for o in state.observations:
        times_s = [o.iteration_time_s, *(s.time_s for s in o.instruction_samples)]
        times_s += [share.time_s for s in o.instruction_samples for share in s.shares]
        times_s += [at.time_s for rank in o.ranks for at in rank.time_at]
        # What ran at no clock at all was not measured.
        clocks_mhz = [min((share.sm_clock_mhz for share in s.shares), default=0) for s in o.instruction_samples]
        if len(o.ranks) != 1 or min(times_s) < 0 or max(times_s) > 86_400 or min(clocks_mhz, default=1) <= 0:
            raise ProtocolError(f"{where}: iteration {o.iteration_index} cannot be an observation of one rank")


def _kind(kind: str) -> InstructionKind:
    if kind not in InstructionKind.__members__:
        raise ProtocolError(f"instruction kind {kind!r}; known: {', '.join(InstructionKind)}")
    return InstructionKind(kind)


def _common_gpu(pp_rank: int, parts: Mapping[MemberKey, PartState]) -> GpuView:
    """Return the GPU that a stage is planned for: the first one's, with the clocks that all its GPUs can run at."""
    gpus = [state.gpu for (stage, _), state in sorted(parts.items()) if stage == pp_rank]
    common = set(gpus[0].supported_sm_clocks_mhz).intersection(*(gpu.supported_sm_clocks_mhz for gpu in gpus[1:]))
    if not common:
        raise JobError(f"the GPUs of pipeline rank {pp_rank} have no clock in common")
    return replace(gpus[0], supported_sm_clocks_mhz=tuple(sorted(common, reverse=True)))
