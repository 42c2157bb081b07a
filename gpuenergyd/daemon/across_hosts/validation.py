"""Validation of messages about pipelines across hosts: reports of all members, and posted plans."""

from collections.abc import Mapping

from gpuenergyd.core.job.stage_gpu import stage_gpu
from gpuenergyd.core.measurement.merge import MemberKey
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, RankClocks
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.daemon.registration import checked_kind
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire import MAX_STRING_CHARS
from gpuenergyd.wire.pipeline_messages import MemberReport, PipelineReport, PostedPlan, ReportedMember

_MAX_RANKS = 4096
MAX_PACE_S = 86_400.0
_MAX_SWITCH_LATENCY_S = 60.0


def checked_size(report: PipelineReport) -> tuple[int, int]:
    """Return the numbers of pipeline and tensor-parallel ranks of a reported pipeline.

    Raises:
        ProtocolError: a number is out of range.
    """
    size = report.num_pp_ranks, report.num_tp_ranks
    if not all(1 <= number <= _MAX_RANKS for number in size):
        raise ProtocolError(f"{size[0]} x {size[1]} ranks: each number must be in [1, {_MAX_RANKS}]")
    return size


def checked_members(report: PipelineReport, num_pp_ranks: int) -> dict[MemberKey, MemberReport]:
    """Return the states of all members of a pipeline.

    Raises:
        ProtocolError: a member is missing or repeated, or its measurements are out of range.
    """
    expected = {(pp, tp) for pp in range(num_pp_ranks) for tp in range(report.num_tp_ranks)}
    members = {(member.pp_rank, member.tp_rank): member.state for member in report.members}
    if len(members) != len(report.members) or members.keys() != expected:
        raise ProtocolError(
            f"{len(report.members)} members: each of {num_pp_ranks} x {report.num_tp_ranks} ranks must be given once"
        )
    for member in report.members:
        _check_member(member)
    return members


def checked_plan(posted: PostedPlan) -> ClockPlan:
    """Return a posted plan as the clock plan of one rank.

    Raises:
        ProtocolError: a name is empty or too long, or an instruction kind is unknown.
    """
    if not 0 < len(posted.plan_id) <= MAX_STRING_CHARS or len(posted.reason) > MAX_STRING_CHARS:
        raise ProtocolError(f"plan_id and reason: at most {MAX_STRING_CHARS} characters, and a plan_id is not empty")
    changes = tuple(
        ClockChange(Instruction(0, checked_kind(kind), microbatch, chunk), delay_ns / 1e9, clock)
        for kind, microbatch, chunk, delay_ns, clock in posted.changes
    )
    ranks = (RankClocks(0, posted.sm_clocks_mhz, changes),) if posted.sm_clocks_mhz else ()
    return ClockPlan(posted.plan_id, posted.purpose, ranks, reason=posted.reason)


def common_gpu(pp_rank: int, members: Mapping[MemberKey, MemberReport]) -> GpuView:
    """Return the GPU that a stage is planned for: all GPUs of the stage as one.

    Raises:
        JobError: the GPUs are on several hosts, or have no clock in common.
    """
    return stage_gpu(pp_rank, [state.gpu for (stage, _), state in sorted(members.items()) if stage == pp_rank])


def _check_member(member: ReportedMember) -> None:
    state, where = member.state, f"member {member.pp_rank}.{member.tp_rank}"
    clocks = state.gpu.supported_sm_clocks_mhz
    if not clocks or list(clocks) != sorted(set(clocks), reverse=True) or clocks[-1] <= 0:
        raise ProtocolError(
            f"{where}: supported_sm_clocks_mhz must be a non-empty, strictly descending list of positive numbers"
        )
    if not 0 <= state.gpu.switch_latency_s < _MAX_SWITCH_LATENCY_S:
        latency_s = state.gpu.switch_latency_s
        raise ProtocolError(f"{where}: switch_latency_s {latency_s} must be in [0, {_MAX_SWITCH_LATENCY_S:g})")
    for row in state.order:
        checked_kind(row[0])
    for o in state.observations:
        times_s = [o.iteration_time_s, *(s.time_s for s in o.instruction_samples)]
        times_s += [share.time_s for s in o.instruction_samples for share in s.shares]
        times_s += [at.time_s for rank in o.ranks for at in rank.time_at]
        times_s += [share.time_s for s in o.call_samples for share in (s.before, s.after)]
        # A sample without any clock was not measured.
        clocks_mhz = [min((share.sm_clock_mhz for share in s.shares), default=0) for s in o.instruction_samples]
        clocks_mhz += [min(s.before.sm_clock_mhz, s.after.sm_clock_mhz) for s in o.call_samples]
        if len(o.ranks) != 1 or min(times_s) < 0 or max(times_s) > MAX_PACE_S or min(clocks_mhz, default=1) <= 0:
            raise ProtocolError(
                f"{where}: iteration {o.iteration_index} must hold one rank, times in [0, {MAX_PACE_S:g}] s"
                " and positive clocks"
            )
