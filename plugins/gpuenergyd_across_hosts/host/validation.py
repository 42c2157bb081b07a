"""Validation of messages about pipelines across hosts: places, GPUs, observations, and posted plans."""

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, RankClocks
from gpuenergyd.core.pipeline.reorder import RankMemory
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.jobs.replicas import MAX_PACE_S
from gpuenergyd.daemon.registration import checked_kind
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire import MAX_STRING_CHARS
from gpuenergyd_across_hosts.messages.patterns import from_blocks
from gpuenergyd_across_hosts.messages.pipeline_messages import MemberPlace, PipelineReport, PostedPlan

_MAX_RANKS = 4096
MAX_PIPELINE_RANKS = 16_384
"""Most ranks of one replica that one leader plans for."""
MAX_PERMITTED_RATIO = 100.0
"""Largest slowdown that an hourly target may permit."""
_MAX_SWITCH_LATENCY_S = 60.0
_MAX_POWER_W = 1e6
_MAX_MEMORY_BYTES = 2**60


def checked_size(report: PipelineReport | MemberPlace) -> tuple[int, int]:
    """Return the numbers of pipeline and tensor-parallel ranks of a reported pipeline.

    Raises:
        ProtocolError: a number is out of range.
    """
    size = report.num_pp_ranks, report.num_tp_ranks
    if not all(1 <= number <= _MAX_RANKS for number in size) or size[0] * size[1] > MAX_PIPELINE_RANKS:
        raise ProtocolError(
            f"{size[0]} x {count_text(size[1], 'rank')}: each number must be in [1, {_MAX_RANKS}], their product"
            f" at most {MAX_PIPELINE_RANKS}"
        )
    return size


def checked_plan(posted: PostedPlan) -> ClockPlan:
    """Return a posted plan as the clock plan of one rank.

    Raises:
        ProtocolError: a name is empty or too long, or an instruction kind is unknown.
    """
    if not 0 < len(posted.plan_id) <= MAX_STRING_CHARS or len(posted.reason) > MAX_STRING_CHARS:
        raise ProtocolError(f"plan_id and reason: at most {MAX_STRING_CHARS} characters, and a plan_id is not empty")
    changes = tuple(
        ClockChange(Instruction(0, checked_kind(kind), microbatch, chunk), delay_ns / 1e9, clock)
        for (kind, chunk, delay_ns, clock), microbatch in from_blocks(posted.changes)
    )
    order = tuple(
        Instruction(0, checked_kind(kind), microbatch, chunk) for (kind, chunk), microbatch in from_blocks(posted.order)
    )
    clocks_mhz = tuple(clock for clock, _ in from_blocks(posted.clocks))
    ranks = (RankClocks(0, clocks_mhz, changes),) if clocks_mhz else ()
    return ClockPlan(posted.plan_id, posted.purpose, ranks, reason=posted.reason, orders=(order,) if order else ())


def check_gpu(where: str, gpu: GpuView) -> None:
    """Check the GPU of a stage, or raise ProtocolError; `where` names it."""
    clocks = gpu.supported_sm_clocks_mhz
    if not clocks or list(clocks) != sorted(set(clocks), reverse=True) or clocks[-1] <= 0:
        raise ProtocolError(
            f"{where}: supported_sm_clocks_mhz must be a non-empty, strictly descending list of positive numbers"
        )
    if not 0 <= gpu.switch_latency_s < _MAX_SWITCH_LATENCY_S:
        raise ProtocolError(
            f"{where}: switch_latency_s {gpu.switch_latency_s} must be in [0, {_MAX_SWITCH_LATENCY_S:g})"
        )
    low_w, high_w = gpu.power_limit_range_w or (1.0, 2.0)
    if not 0 < low_w < high_w < _MAX_POWER_W:
        raise ProtocolError(f"{where}: power_limit_range_w ({low_w}, {high_w}) must be two ascending powers")
    if not (1 <= gpu.num_gpus <= _MAX_RANKS and 0 <= gpu.num_host_gpus <= _MAX_RANKS):
        raise ProtocolError(
            f"{where}: num_gpus {gpu.num_gpus} must be in [1, {_MAX_RANKS}],"
            f" num_host_gpus {gpu.num_host_gpus} in [0, {_MAX_RANKS}]"
        )


def check_memory(where: str, memory: RankMemory) -> None:
    """Check the memory of a stage, or raise ProtocolError; `where` names the stage."""
    amounts = (memory.free_bytes, memory.microbatch_bytes, memory.capacity_bytes, memory.free_in_order_bytes or 0)
    if not all(0 <= amount < _MAX_MEMORY_BYTES for amount in amounts):
        raise ProtocolError(f"{where}: amounts of memory {amounts} must be in [0, 2**60) bytes")


def check_observation(where: str, o: IterationObservation) -> None:
    """Check the observation of a stage, or raise ProtocolError; `where` names the stage."""
    times_s = [o.iteration_time_s, *(share.time_s for s in o.instruction_samples for share in s.shares)]
    times_s += [at.time_s for rank in o.ranks for at in rank.time_at]
    times_s += [share.time_s for s in o.call_samples for share in (s.before, s.after)]
    # A sample without any clock was not measured.
    clocks_mhz = [min((share.sm_clock_mhz for share in s.shares), default=0) for s in o.instruction_samples]
    clocks_mhz += [min(s.before.sm_clock_mhz, s.after.sm_clock_mhz) for s in o.call_samples]
    is_in_range = all(0 <= time_s <= MAX_PACE_S for time_s in times_s)  # false for NaN
    if not is_in_range or min(clocks_mhz, default=1) <= 0:
        raise ProtocolError(
            f"{where}: iteration {o.iteration_index} must hold times in [0, {MAX_PACE_S:g}] s and positive clocks"
        )
