"""Validation of training processes' messages (registrations, job lengths, tags, reports), and job descriptions."""

import logging
import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from gpuenergyd.core.job.description import JobDescription, JobLength
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.operator_orders import SOURCE_TEXTS, OptionSource
from gpuenergyd.core.job.outcome import expectation
from gpuenergyd.core.measurement.telemetry import MeasuredInstruction, RankIteration
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.core.pipeline.reorder import RankMemory, ReorderOffer
from gpuenergyd.core.pipeline.timetable import CAPTURED
from gpuenergyd.core.policy_api.target import LARGE_SLOWDOWN_RATIO, PerformanceTarget, slowdown_problem
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.printable import printable_line
from gpuenergyd.store.records import JobRecord
from gpuenergyd.wire import PROTOCOL_VERSION
from gpuenergyd.wire.messages import InstructionRow, IterationReport, RankRegistration, TrueClockRow

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
OLDEST_INSTANT_NS = 86_400 * _NS_PER_S
"""Maximum age of an instant."""
CLOCK_SKEW_NS = _NS_PER_S
"""How far in the future an instant may lie."""
_MAX_RANKS = 4096
_MAX_TOGETHER = 64
_MAX_MICROBATCHES = 65_536
_MAX_ITERATIONS = 2**53
_MAX_HOURS = 1e6
MAX_TAGS = 32
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 256
MAX_TAGS_BYTES = 4096
_MAX_TEXT_CHARS = 256
MAX_CLIENT_COST_S = 3600.0
MAX_TRUE_CLOCKS = 256
_MAX_CLOCK_MHZ = 10_000


def checked_order(registration: RankRegistration) -> tuple[Instruction, ...]:
    """Return the instructions that a rank runs in an iteration.

    Raises:
        ProtocolError: the protocol version is unsupported, or a number is out of range.
    """
    if registration.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol version {registration.protocol_version}; this daemon speaks version {PROTOCOL_VERSION}"
        )
    for name, lowest, highest in (
        ("num_pp_ranks", 1, _MAX_RANKS),
        ("pp_rank", 0, registration.num_pp_ranks - 1),
        ("dp_rank", 0, 2**31 - 1),
        ("num_dp_ranks", 1, 2**31 - 1),
        ("num_stage_ranks", 1, _MAX_RANKS),
        ("stage_rank", 0, registration.num_stage_ranks - 1),
        ("num_microbatches", 1, _MAX_MICROBATCHES),
        ("num_chunks", 1, _MAX_RANKS),
    ):
        value = getattr(registration, name)
        if not lowest <= value <= highest:
            raise ProtocolError(f"{name} {value} must be in [{lowest}, {highest}]")
    for name in ("num_pp_ranks", "num_stage_ranks") if registration.is_pipeline_member else ():
        if (value := getattr(registration, name)) != 1:
            raise ProtocolError(f"{name} {value} must be 1 for a member of a pipeline across hosts")
    if not registration.order:
        raise ProtocolError("order: a rank must run at least one instruction")
    return tuple(
        _instruction(registration.pp_rank, kind, microbatch, chunk) for kind, microbatch, chunk in registration.order
    )


def check_texts(registration: RankRegistration) -> None:
    """Check the names in a registration, which are shown to users and stored, or raise ProtocolError."""
    for name in ("job_name", "run_key", "schedule_name", "framework", "policy"):
        text = getattr(registration, name)
        if text is None:
            continue
        if len(text) > _MAX_TEXT_CHARS:
            raise ProtocolError(f"{name} of {len(text)} characters; at most {_MAX_TEXT_CHARS} are accepted")
        if not text.isprintable():
            raise ProtocolError(f"{name} {printable_line(text)!r:.80}: only printable characters are accepted")


def require_agreement(registration: RankRegistration, first: RankRegistration) -> None:
    """Check that a registration agrees with that of its job's first rank, or raise JobError."""
    options = ("policy", "max_slowdown_ratio")
    for name in ("num_pp_ranks", "num_stage_ranks", "schedule_name", "num_microbatches", "num_chunks", *options):
        mine, theirs = getattr(registration, name), getattr(first, name)
        if mine != theirs:
            raise JobError(
                f"{name} {mine!r} of rank {registration.pp_rank} contradicts {theirs!r} of rank {first.pp_rank}"
                f" in job {registration.job_name!r}"
            )


def option_source(registration: RankRegistration, name: str) -> OptionSource:
    """Return where the value of a job option, a field of its registration, comes from."""
    if getattr(registration, name) is None:
        return OptionSource.DAEMON
    return OptionSource.ENVIRONMENT if name in registration.from_environment else OptionSource.ARGUMENT


def joining_message(job: Job, registration: RankRegistration, *, is_observing: bool) -> str:
    """Return one line for the user: policy and permitted slowdown, where each was set, and what to expect."""
    expected = "the daemon only observes (mode observe): it predicts a saving in `gpuenergyd status`, and sets no clock"
    if not is_observing:
        expected = expectation(job, is_member=registration.is_pipeline_member)
    policy, slowdown = (SOURCE_TEXTS[option_source(registration, name)] for name in ("policy", "max_slowdown_ratio"))
    return (
        f"policy {job.description.policy} ({policy}), permitted slowdown"
        f" {100 * job.description.target.max_slowdown_ratio:.3g} % ({slowdown}); {expected}"
    )


def checked_length(registration: RankRegistration) -> JobLength:
    """Return the expected length of a job.

    Raises:
        ProtocolError: a number is out of range, or the deadline is not a timestamp with a UTC offset.
    """
    iterations, hours = registration.job_iterations, registration.job_hours
    if iterations is not None and not 1 <= iterations <= _MAX_ITERATIONS:
        raise ProtocolError(f"job_iterations {iterations} must be in [1, 2**53]")
    if hours is not None and not (math.isfinite(hours) and 0 < hours <= _MAX_HOURS):
        raise ProtocolError(f"job_hours {hours} must be in (0, {_MAX_HOURS:g}]")
    return JobLength(iterations, hours, _instant(registration.job_deadline))


def checked_slowdown(registration: RankRegistration) -> float | None:
    """Return the permitted slowdown that a job asks for, None if it leaves that to the daemon.

    Raises:
        ProtocolError: it is out of range.
    """
    ratio = registration.max_slowdown_ratio
    if ratio is not None and (problem := slowdown_problem(ratio)) is not None:
        raise ProtocolError(f"max_slowdown_ratio {problem}")
    return ratio


def checked_tags(tags: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the tags of a job sorted by name; their size is limited because the database stores them.

    Raises:
        ProtocolError: there are too many or too large tags, or one is unnamed, repeated, too long or not printable.
    """
    if len(tags) > MAX_TAGS:
        raise ProtocolError(f"{len(tags)} tags; at most {MAX_TAGS} are accepted")
    for name, value in tags:
        if not name or len(name) > MAX_NAME_CHARS or len(value) > MAX_VALUE_CHARS:
            raise ProtocolError(
                f"tag {name[:MAX_NAME_CHARS]!r}: a name of 1 to {MAX_NAME_CHARS} and a value of at most"
                f" {MAX_VALUE_CHARS} characters are accepted"
            )
        if not (name.isprintable() and value.isprintable()):
            raise ProtocolError(f"tag {name!r}: only printable characters are accepted")
    sizes_bytes = {name: len(name.encode()) + len(value.encode()) for name, value in tags}
    if (all_bytes := sum(sizes_bytes.values())) > MAX_TAGS_BYTES:
        largest = max(sizes_bytes, key=sizes_bytes.__getitem__)
        raise ProtocolError(
            f"tags of {count_text(all_bytes, 'byte')}, the largest of {sizes_bytes[largest]} is {largest!r}; at most"
            f" {count_text(MAX_TAGS_BYTES, 'byte')} of names and values are accepted"
        )
    if len(dict(tags)) < len(tags):
        raise ProtocolError("two tags have the same name")
    return tuple(sorted(tags))


def checked_iteration(report: IterationReport, pp_rank: int, stage_rank: int = 0) -> RankIteration:
    """Return a rank's measurements of an iteration; raise ProtocolError for instants or instructions out of range."""
    now_ns = time.monotonic_ns()
    oldest_ns, newest_ns = max(1, now_ns - OLDEST_INSTANT_NS), now_ns + CLOCK_SKEW_NS
    next_ns = report.next_begin_mono_ns or report.end_mono_ns
    if not oldest_ns <= report.begin_mono_ns <= report.end_mono_ns <= next_ns <= newest_ns:
        raise ProtocolError(
            f"begin {report.begin_mono_ns}, end {report.end_mono_ns}, next begin {report.next_begin_mono_ns}:"
            " instants must be of this host's monotonic clock, in order"
        )
    if report.captured and report.captured not in CAPTURED:
        raise ProtocolError(f"captured {report.captured!r} must be empty or one of {', '.join(sorted(CAPTURED))}")
    if not 0 <= report.iteration_index < 2**53:
        raise ProtocolError(f"iteration_index {report.iteration_index} must be in [0, 2**53)")
    if report.is_in_order is not None and report.num_together == 1 and (num_timed := len(report.instructions)):
        raise ProtocolError(
            f"is_in_order {str(report.is_in_order).lower()}: only for reports without instructions, got {num_timed}"
        )
    if report.num_together != 1 and not (
        1 < report.num_together <= min(_MAX_TOGETHER, report.iteration_index + 1)
        and report.is_in_order
        and (_has_spans(report) if report.instructions or report.plan_epoch else True)
    ):
        raise ProtocolError(
            f"num_together {report.num_together} must be 1, or up to {_MAX_TOGETHER} for iterations in order whose"
            " instructions were not timed, under a plan with start and end of each, in order"
        )
    cost_s, timed = report.client_cost_s, report.instructions if report.is_in_order is None else ()
    if cost_s is not None and not 0 <= cost_s <= MAX_CLIENT_COST_S:
        raise ProtocolError(f"client_cost_s {cost_s} must be in [0, {MAX_CLIENT_COST_S:g}]")
    if report.num_tokens is not None and not 0 < report.num_tokens < 2**53:
        raise ProtocolError(f"num_tokens {report.num_tokens} must be in [1, 2**53)")
    return RankIteration(
        pp_rank=pp_rank,
        iteration_index=report.iteration_index,
        plan_epoch=report.plan_epoch,
        begin_ns=report.begin_mono_ns,
        end_ns=report.end_mono_ns,
        next_begin_ns=report.next_begin_mono_ns,
        instructions=tuple(_measured(pp_rank, row, oldest_ns, newest_ns) for row in timed),
        launched_iteration_index=report.launched_iteration_index,
        stage_rank=stage_rank,
        memory=_checked_memory(report.memory_bytes),
        reorder_refusal=printable_line(report.reorder_refusal)[:MAX_VALUE_CHARS],
        client_cost_s=cost_s,
        is_in_order=report.is_in_order,
        num_tokens=report.num_tokens,
        arrived_ns=now_ns,
    )


def _has_spans(report: IterationReport) -> bool:
    """Return whether a report on several iterations has start and end of each, in order."""
    bounds_ns = [report.begin_mono_ns, *(each_ns for row in report.instructions for each_ns in row[3:])]
    is_whole = len(bounds_ns) == 1 + 2 * report.num_together and bounds_ns == sorted(bounds_ns)
    return is_whole and bounds_ns[-2] <= (report.next_begin_mono_ns or report.end_mono_ns)


def single_iterations(iteration: RankIteration, report: IterationReport) -> list[RankIteration]:
    """Return the iterations that a rank has reported together, oldest first, each with its span or the mean of all."""
    num_together, begin_ns = report.num_together, iteration.begin_ns
    if num_together == 1:
        return [iteration]
    if report.instructions:
        begins_ns = [begin_ns, *(row[3] for row in report.instructions[1:])]
        ends_ns = [row[4] for row in report.instructions]
    else:
        gap_ns = max(0, iteration.next_begin_ns - iteration.end_ns)
        # A gap after the last that is longer than an iteration is a pause.
        gap_ns = gap_ns if gap_ns * num_together <= iteration.end_ns - begin_ns else 0
        lasted_ns = iteration.end_ns + gap_ns - begin_ns
        begins_ns = [begin_ns + lasted_ns * number // num_together for number in range(num_together)]
        ends_ns = [*(following_ns - gap_ns for following_ns in begins_ns[1:]), iteration.end_ns]
    nexts_ns = [*begins_ns[1:], iteration.next_begin_ns]
    return [
        replace(
            iteration,
            iteration_index=iteration.iteration_index - num_left,
            begin_ns=begins_ns[-1 - num_left],
            end_ns=min(ends_ns[-1 - num_left], nexts_ns[-1 - num_left] or iteration.end_ns),
            next_begin_ns=nexts_ns[-1 - num_left],
            launched_iteration_index=iteration.launched_iteration_index - num_left,
        )
        for num_left in reversed(range(num_together))
    ]


def checked_clocks(report: IterationReport) -> tuple[TrueClockRow, ...]:
    """Return the clocks that a rank's GPU has counted; raise ProtocolError for instants or clocks out of range."""
    if len(report.true_clocks) > MAX_TRUE_CLOCKS:
        raise ProtocolError(f"true_clocks: {count_text(len(report.true_clocks), 'clock')}; at most {MAX_TRUE_CLOCKS}")
    now_ns = time.monotonic_ns()
    oldest_ns, newest_ns = max(1, now_ns - OLDEST_INSTANT_NS), now_ns + CLOCK_SKEW_NS
    for early_ns, late_ns, sm_clock_mhz in report.true_clocks:
        if not (oldest_ns <= early_ns <= late_ns <= newest_ns and 0 < sm_clock_mhz <= _MAX_CLOCK_MHZ):
            raise ProtocolError(f"true_clocks: {sm_clock_mhz} MHz from {early_ns} to {late_ns}: no clock at an instant")
    return report.true_clocks


def reorder_offer(registration: RankRegistration) -> ReorderOffer:
    """Return whether a registration offers to run other orders of instructions."""
    return ReorderOffer(registration.allow_reorder, printable_line(registration.reorder_refusal)[:MAX_VALUE_CHARS])


def _checked_memory(memory_bytes: tuple[int, ...]) -> RankMemory | None:
    """Return the memory of a rank, None if it was not measured.

    Raises:
        ProtocolError: it is not three amounts of memory.
    """
    if not memory_bytes:
        return None
    if len(memory_bytes) != 3 or not all(0 <= amount < 2**60 for amount in memory_bytes):
        raise ProtocolError(
            f"memory_bytes {memory_bytes!r:.80}: expected three amounts from 0 to 2**60: free at the"
            " peak, of a microbatch, of the GPU"
        )
    free, microbatch, capacity = memory_bytes
    return RankMemory(free, microbatch, capacity)


def _measured(pp_rank: int, row: InstructionRow, oldest_ns: int, newest_ns: int) -> MeasuredInstruction:
    kind, microbatch, chunk, begin_ns, end_ns = row
    if not oldest_ns <= begin_ns <= end_ns <= newest_ns:
        raise ProtocolError(
            f"instruction {kind}{microbatch}: begin {begin_ns} and end {end_ns} must be of this host's monotonic"
            " clock, in order"
        )
    return MeasuredInstruction(_instruction(pp_rank, kind, microbatch, chunk), begin_ns, end_ns)


def checked_kind(kind: str) -> InstructionKind:
    """Return an instruction kind, or raise ProtocolError if the kind is unknown."""
    if kind not in InstructionKind.__members__:
        raise ProtocolError(f"instruction kind {kind!r}; known: {', '.join(InstructionKind)}")
    return InstructionKind(kind)


def _instruction(pp_rank: int, kind: str, microbatch_index: int, chunk_index: int) -> Instruction:
    known_kind = checked_kind(kind)
    if not (0 <= microbatch_index < _MAX_MICROBATCHES and 0 <= chunk_index < _MAX_RANKS):
        raise ProtocolError(
            f"instruction {kind}{microbatch_index} of chunk {chunk_index}: the microbatch must be in"
            f" [0, {_MAX_MICROBATCHES}) and the chunk in [0, {_MAX_RANKS})"
        )
    return Instruction(pp_rank, known_kind, microbatch_index, chunk_index)


def _instant(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
        if at.utcoffset() is not None:
            return at.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ProtocolError(f"job_deadline {text!r:.60} must be a timestamp with a UTC offset, e.g. 2027-01-31T08:00+00:00")


def job_description(registration: RankRegistration, policy: str, default_max_slowdown_ratio: float) -> JobDescription:
    """Return the description of a new job, with a new id.

    Raises:
        ProtocolError: the permitted slowdown or the length of the job is out of range.
    """
    ratio = checked_slowdown(registration)
    job_id = _new_job_id(registration.job_name)
    if ratio is not None and ratio > LARGE_SLOWDOWN_RATIO:
        log.warning("job %s permits a slowdown of %g, i.e. %g %%; 0.05 is 5 %%", job_id, ratio, 100 * ratio)
    return JobDescription(
        job_id=job_id,
        job_name=registration.job_name,
        num_pp_ranks=registration.num_pp_ranks,
        schedule_name=registration.schedule_name,
        num_microbatches=registration.num_microbatches,
        num_chunks=registration.num_chunks,
        policy=policy,
        target=PerformanceTarget(default_max_slowdown_ratio if ratio is None else ratio),
        length=checked_length(registration),
        num_dp_ranks=registration.num_dp_ranks,
        dp_rank=registration.dp_rank,
        num_stage_ranks=registration.num_stage_ranks,
    )


def job_record(
    description: JobDescription, registration: RankRegistration, uid: int, started_at: datetime, gpu: GpuIdentity
) -> JobRecord:
    """Return the database record of a new job."""
    return JobRecord(
        job_id=description.job_id,
        job_name=registration.job_name,
        run_key=registration.run_key,
        dp_rank=registration.dp_rank,
        policy=description.policy,
        schedule_name=registration.schedule_name,
        framework=registration.framework,
        is_simulated=gpu.is_simulated,
        num_ranks=description.num_ranks,
        num_microbatches=registration.num_microbatches,
        max_slowdown_ratio=description.target.max_slowdown_ratio,
        uid=uid,
        started_at=started_at,
        tags=checked_tags(registration.tags),
        energy_scope=gpu.energy_scope,
    )


def _new_job_id(job_name: str) -> str:
    readable = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")[:40] or "job"
    return f"{readable}-{secrets.token_hex(3)}"
