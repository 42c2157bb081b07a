"""What training processes say, checked once: from registrations and reports as they came to values of the domain."""

import time

from gpuenergyd.core.measurement.telemetry import MeasuredInstruction, RankIteration
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd.wire import PROTOCOL_VERSION
from gpuenergyd.wire.messages import InstructionRow, IterationReport, RankRegistration

_NS_PER_S = 1_000_000_000
OLDEST_INSTANT_NS = 86_400 * _NS_PER_S
"""What is older than this is no instant of a running job."""
CLOCK_SKEW_NS = _NS_PER_S
"""How far in the future an instant may lie."""
_MAX_RANKS = 4096
_MAX_MICROBATCHES = 65_536


def checked_order(registration: RankRegistration) -> tuple[Instruction, ...]:
    """Return the instructions that a rank runs in an iteration.

    Raises:
        ProtocolError: another protocol version, or numbers that cannot be.
    """
    if registration.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol version {registration.protocol_version}; this daemon speaks version {PROTOCOL_VERSION}"
        )
    for name, lowest, highest in (
        ("num_pp_ranks", 1, _MAX_RANKS),
        ("pp_rank", 0, registration.num_pp_ranks - 1),
        ("dp_rank", 0, 2**31 - 1),
        ("num_microbatches", 1, _MAX_MICROBATCHES),
        ("num_chunks", 1, _MAX_RANKS),
    ):
        value = getattr(registration, name)
        if not lowest <= value <= highest:
            raise ProtocolError(f"{name} {value} must be in [{lowest}, {highest}]")
    if registration.is_part and registration.num_pp_ranks != 1:
        raise ProtocolError(f"num_pp_ranks {registration.num_pp_ranks}: a part of a pipeline is one rank")
    if not registration.order:
        raise ProtocolError("order: a rank runs one instruction at least")
    return tuple(
        _instruction(registration.pp_rank, kind, microbatch, chunk) for kind, microbatch, chunk in registration.order
    )


def checked_iteration(report: IterationReport, pp_rank: int) -> RankIteration:
    """Return what a rank measured of an iteration.

    Raises:
        ProtocolError: instants or instructions that cannot be.
    """
    now_ns = time.monotonic_ns()
    oldest_ns, newest_ns = max(1, now_ns - OLDEST_INSTANT_NS), now_ns + CLOCK_SKEW_NS
    next_ns = report.next_begin_mono_ns or report.end_mono_ns
    if not oldest_ns <= report.begin_mono_ns <= report.end_mono_ns <= next_ns <= newest_ns:
        raise ProtocolError(
            f"begin {report.begin_mono_ns}, end {report.end_mono_ns}, next begin {report.next_begin_mono_ns}:"
            " instants must be of this host's monotonic clock, in order"
        )
    if not 0 <= report.iteration_index < 2**53:
        raise ProtocolError(f"iteration_index {report.iteration_index} must be in [0, 2**53)")
    return RankIteration(
        pp_rank=pp_rank,
        iteration_index=report.iteration_index,
        plan_epoch=report.plan_epoch,
        begin_ns=report.begin_mono_ns,
        end_ns=report.end_mono_ns,
        next_begin_ns=report.next_begin_mono_ns,
        instructions=tuple(_measured(pp_rank, row, oldest_ns, newest_ns) for row in report.instructions),
    )


def _measured(pp_rank: int, row: InstructionRow, oldest_ns: int, newest_ns: int) -> MeasuredInstruction:
    kind, microbatch, chunk, begin_ns, end_ns = row
    if not oldest_ns <= begin_ns <= end_ns <= newest_ns:
        raise ProtocolError(f"instruction {kind}{microbatch}: begin {begin_ns} and end {end_ns} cannot be")
    return MeasuredInstruction(_instruction(pp_rank, kind, microbatch, chunk), begin_ns, end_ns)


def _instruction(pp_rank: int, kind: str, microbatch_index: int, chunk_index: int) -> Instruction:
    if kind not in InstructionKind.__members__:
        raise ProtocolError(f"instruction kind {kind!r}; known: {', '.join(InstructionKind)}")
    if not (0 <= microbatch_index < _MAX_MICROBATCHES and 0 <= chunk_index < _MAX_RANKS):
        raise ProtocolError(f"instruction {kind}{microbatch_index} of chunk {chunk_index}: no such index")
    return Instruction(pp_rank, InstructionKind(kind), microbatch_index, chunk_index)


def require_agreement(registration: RankRegistration, first: RankRegistration) -> None:
    """Refuse a rank that says otherwise than the first rank of its job.

    Raises:
        JobError: it does.
    """
    for name in ("num_pp_ranks", "schedule_name", "num_microbatches", "num_chunks", "policy", "max_slowdown_ratio"):
        mine, theirs = getattr(registration, name), getattr(first, name)
        if mine != theirs:
            raise JobError(
                f"{name} {mine!r} of rank {registration.pp_rank} contradicts {theirs!r} of rank {first.pp_rank}"
                f" in job {registration.job_name!r}"
            )
