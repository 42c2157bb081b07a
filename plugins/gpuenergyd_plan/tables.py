"""The part of a planner's request that a profile table determines: its order of instructions, graph and profile."""

from dataclasses import dataclass, replace
from pathlib import Path

from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    Instruction,
    InstructionClass,
    InstructionKind,
    Schedule,
    dependency_graph,
)
from gpuenergyd.core.pipeline.megatron_orders import COMBINED
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.schedules import ScheduleFamily, in_a_row, make_schedule, schedule_family
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError, UsageError
from gpuenergyd_plan.instruction_costs import INPUT_GRADIENT_SHARE, CostAssumptions, cost_notes, instruction_profiles
from gpuenergyd_plan.profiles.profile_files import ProfileTable, read_order_file

DEFAULT_SCHEDULE = "1f1b"
AUTO_SCHEDULE = "auto"
"""The value of --schedule with which the planner chooses the order."""
MAX_INSTRUCTIONS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `gpuenergyd plan`; None for options that were not given."""

    schedule: str | None = None
    order: Path | None = None
    microbatches: int | None = None
    chunks: int | None = None
    extra_inflight: str | None = None
    memory_limit_microbatches: str | None = None
    free_memory_bytes: str | None = None
    activation_bytes: str | None = None
    slowdown: float | None = None
    target_s: float | None = None
    straggler_time_s: float | None = None
    max_switches: int | None = None
    switch_latency_s: float = 0.0
    blocking_power_w: float | None = None
    waiting_power: str | None = None
    power_cap_w: float | None = None
    window_s: float | None = None
    is_flattest: bool = False
    communication_latency_s: float | None = None
    input_gradient_share: float | None = None
    split_overhead: float | None = None
    overlap_saving: float | None = None
    want_frontier: bool = False
    policy_options: tuple[str, ...] = ()
    """NAME=VALUE pairs passed to the planner."""


def table_request(
    path: Path, table: ProfileTable, options: PlanOptions
) -> tuple[Schedule, DependencyGraph, PipelineProfile, tuple[str, ...]]:
    """Return schedule, graph, profile and notes about assumptions for a table read from `path`.

    Raises:
        UsageError: an option is missing or contradicts the table or the given order.
        ProfileError: the given order is invalid.
    """
    name = options.schedule or DEFAULT_SCHEDULE
    chooses_order = name == AUTO_SCHEDULE
    if chooses_order:
        _check_auto(options)
        name = DEFAULT_SCHEDULE
    if chooses_order and (options.chunks or 1) > 1 and options.order is None:
        schedule = _plain_in_chunks(path, table, options)
    elif options.order is not None:
        schedule = _given_order(options.order, table, options)
    else:
        schedule = _named_schedule(path, name, table, options)
    graph = dependency_graph(schedule, communication_latency_s=options.communication_latency_s or 0.0)
    notes = []
    if options.blocking_power_w is None and options.waiting_power is None:
        notes.append("waiting GPUs are assumed to draw 0 W: set --blocking-power-w")
    keys = {i.instruction_class for i in graph.instructions}
    if schedule.num_chunks == 1:
        keys |= {InstructionClass(r, InstructionKind.B) for r in range(schedule.num_ranks)}
    if chooses_order:
        keys |= {replace(key, kind=kind) for key in keys for kind in _SPLIT_KINDS}
    if options.overlap_saving is not None and all(key.kind is not InstructionKind.FB for key in keys):
        given = options.schedule or schedule.name
        raise UsageError(f"--overlap-saving {options.overlap_saving}: needs schedule {COMBINED}, not {given}")
    assumed = CostAssumptions(
        input_gradient_share=options.input_gradient_share or INPUT_GRADIENT_SHARE,
        split_overhead=options.split_overhead or 0.0,
        overlap_saving=options.overlap_saving or 0.0,
    )
    notes += cost_notes(keys, table, assumed)
    profile = PipelineProfile(
        instruction_profiles(schedule, sorted(keys), table, assumed), options.blocking_power_w or 0.0
    )
    return schedule, graph, profile, tuple(notes)


def _named_schedule(path: Path, name: str, table: ProfileTable, options: PlanOptions) -> Schedule:
    family = _family(name)
    if options.microbatches is None:
        raise UsageError(f"{path}: a profile CSV needs --microbatches M")
    num_chunks = family.default_num_chunks if options.chunks is None else options.chunks
    if num_chunks < 1 or table.num_stages % num_chunks:
        raise ScheduleError(
            f"schedule {name!r} has {count_text(num_chunks, 'stage')} per GPU, but {path} has"
            f" {count_text(table.num_stages, 'stage')}, which"
            f" {num_chunks} does not divide"
        )
    num_instructions = 3 * table.num_stages * max(0, options.microbatches)
    if num_instructions > MAX_INSTRUCTIONS:
        raise ScheduleError(
            f"{count_text(options.microbatches, 'microbatch')} on {count_text(table.num_stages, 'stage')}: more than"
            f" the maximum of {MAX_INSTRUCTIONS} instructions"
        )
    return make_schedule(name, table.num_stages // num_chunks, options.microbatches, options.chunks)


def _plain_in_chunks(path: Path, table: ProfileTable, options: PlanOptions) -> Schedule:
    """Return 1F1B with neighbouring stages on each GPU, run one after the other as if they were a single stage."""
    num_chunks = options.chunks or 1
    if num_chunks < 1 or table.num_stages % num_chunks:
        raise ScheduleError(
            f"--chunks {num_chunks}: does not divide the {count_text(table.num_stages, 'stage')} of {path}"
        )
    merged = ProfileTable(table.name, table.num_stages // num_chunks, table.classes)
    plain = _named_schedule(path, DEFAULT_SCHEDULE, merged, replace(options, chunks=None))
    return in_a_row(plain, num_chunks)


def _given_order(path: Path, table: ProfileTable, options: PlanOptions) -> Schedule:
    """Return the order of a file, after checking that no option contradicts it."""
    if options.schedule is not None:
        raise UsageError(f"--schedule {options.schedule}: {path} gives the order; omit one of them")
    if options.extra_inflight is not None:
        raise UsageError(f"--extra-inflight {options.extra_inflight}: {path} gives the order; omit one of them")
    schedule = read_order_file(path, table.num_stages)
    for option, given, stated in (
        ("--microbatches", options.microbatches, schedule.num_microbatches),
        ("--chunks", options.chunks, schedule.num_chunks),
    ):
        if given is not None and given != stated:
            raise UsageError(f"{option} {given}: {path} has {stated}")
    return schedule


_SPLIT_KINDS = (InstructionKind.I, InstructionKind.W)


def _family(name: str) -> ScheduleFamily:
    try:
        return schedule_family(name)
    except ScheduleError as error:
        raise ScheduleError(f"{error}, {AUTO_SCHEDULE}") from None


def _check_auto(options: PlanOptions) -> None:
    """Raise UsageError if an option sets what the planner has to choose."""
    if options.extra_inflight is not None:
        raise UsageError(
            f"--extra-inflight {options.extra_inflight}: --schedule auto chooses it; use --memory-limit-microbatches"
        )


def reference_graph(schedule: Schedule, options: PlanOptions) -> DependencyGraph | None:
    """Return the graph of plain 1F1B to compare with; None if the schedule is 1F1B, or has several stages per GPU."""
    if schedule.name == DEFAULT_SCHEDULE or schedule.num_chunks != 1:
        return None
    plain = make_schedule(DEFAULT_SCHEDULE, schedule.num_ranks, schedule.num_microbatches)
    return dependency_graph(plain, communication_latency_s=options.communication_latency_s or 0.0)


def named(instruction: Instruction) -> dict[str, int | str]:
    """Return which instruction a row of a JSON document is about."""
    return {
        "stage": instruction.pp_rank,
        "instruction": instruction.kind,
        "microbatch": instruction.microbatch_index,
        "chunk": instruction.chunk_index,
    }
