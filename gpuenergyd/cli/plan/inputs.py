"""Builds a planner's request from a file and the options of `gpuenergyd plan`, and finds the planner."""

import math
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from gpuenergyd.cli.plan.instruction_costs import (
    INPUT_GRADIENT_SHARE,
    CostAssumptions,
    cost_notes,
    instruction_profiles,
)
from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    InstructionClass,
    InstructionKind,
    Schedule,
    dependency_graph,
)
from gpuenergyd.core.pipeline.megatron_orders import COMBINED
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.schedules import ScheduleFamily, make_schedule, schedule_family
from gpuenergyd.core.policy_api.policy import OfflinePlanner, OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import ScheduleError, UnknownPolicyError, UsageError
from gpuenergyd.wire.profile_files import PlannerInstance, ProfileTable, read_pipeline_file

DEFAULT_SCHEDULE = "1f1b"
AUTO_SCHEDULE = "auto"
"""The schedule option with which the planner chooses the order."""
MAX_INSTRUCTIONS = 1_000_000
_PLANNER_GROUP = "gpuenergyd.planners"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `gpuenergyd plan`; None where an option was not given."""

    schedule: str | None = None
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
    communication_latency_s: float | None = None
    input_gradient_share: float | None = None
    split_overhead: float | None = None
    overlap_saving: float | None = None
    want_frontier: bool = False
    policy_options: tuple[str, ...] = ()
    """NAME=VALUE pairs passed to the planner."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A planner's request, its schedule, and notes for the user about assumptions made."""

    request: OfflineRequest
    schedule: Schedule
    notes: tuple[str, ...] = field(default=())
    schedule_name: str = ""
    """Name of the schedule that was asked for, auto where the planner chooses."""
    fixes_order: bool = False
    """Whether the file defines the order of instructions and the edges, so that options cannot change them."""


def load_planner(policy: str) -> OfflinePlanner:
    """Return the offline planner that a policy provides.

    Raises:
        UnknownPolicyError: no such planner is installed, or it cannot be imported.
    """
    points = {point.name: point for point in entry_points(group=_PLANNER_GROUP)}
    if policy not in points:
        names = ", ".join(sorted(points)) or "none installed"
        raise UnknownPolicyError(f"policy {policy!r} has no offline planner; policies with one: {names}")
    try:
        planner: OfflinePlanner = points[policy].load()
    except (ImportError, AttributeError) as error:
        raise UnknownPolicyError(f"policy {policy!r} cannot be loaded: {error}") from None
    return planner


def plan_input(path: Path, options: PlanOptions) -> PlanInput:
    """Return the request described by a file and options.

    Raises:
        UsageError: the file or an option is invalid, or they contradict each other.
    """
    _check_number("--blocking-power-w", options.blocking_power_w, "W")
    _check_number("--communication-latency-s", options.communication_latency_s, "s")
    _check_number("--switch-latency-s", options.switch_latency_s, "s")
    _check_number("--split-overhead", options.split_overhead, "of the backward")
    if options.input_gradient_share is not None and not 0 < options.input_gradient_share < 1:
        raise UsageError(f"--input-gradient-share {options.input_gradient_share}: must be a ratio between 0 and 1")
    if options.overlap_saving is not None and not 0 <= options.overlap_saving < 1:
        raise UsageError(f"--overlap-saving {options.overlap_saving}: must be a ratio of at least 0 and below 1")
    if options.max_switches is not None and options.max_switches < 1:
        raise UsageError(f"--max-switches {options.max_switches}: must be at least 1")
    if options.slowdown is not None and options.target_s is not None:
        raise UsageError("--max-slowdown and --target-s: give only one of them")
    target = PerformanceTarget(
        max_slowdown_ratio=options.slowdown or 0.0,
        straggler_time_s=options.straggler_time_s,
        permitted_time_s=options.target_s,
    )
    extra_inflight = _extra_inflight(options.extra_inflight)
    content = read_pipeline_file(path)
    match content:
        case PlannerInstance():
            _check_agreement(path, content, options)
            schedule, graph, profile = content.schedule, content.graph, content.profile
            notes: tuple[str, ...] = ()
            reference_graph: DependencyGraph | None = None
        case ProfileTable():
            schedule, graph, profile, notes = _from_table(path, content, options)
            reference_graph = _reference_graph(schedule, options)
    if extra_inflight is not None and schedule.name != "1f1b":
        raise UsageError(f"--extra-inflight {extra_inflight}: needs schedule 1f1b, not {schedule.name}")
    order_limits: tuple[int, ...] = ()
    if options.schedule == AUTO_SCHEDULE:
        order_limits, limit_notes = _order_limits(options, schedule)
        notes += limit_notes
    memory_limits = () if order_limits else _memory_limits(options.memory_limit_microbatches, schedule)
    extra_caps = () if order_limits else _extra_caps(options.free_memory_bytes, options.activation_bytes, schedule)
    if isinstance(extra_inflight, int):
        _check_memory(extra_inflight, memory_limits, extra_caps, schedule)
    return PlanInput(
        OfflineRequest(
            name=content.name,
            profile=profile,
            schedule=schedule,
            graph=graph,
            target=target,
            extra_inflight=extra_inflight,
            max_switches=options.max_switches,
            switch_latency_s=options.switch_latency_s,
            want_frontier=options.want_frontier,
            options={
                **_policy_options(options.policy_options),
                "communication_latency_s": repr(options.communication_latency_s or 0.0),
                **({"memory_limit_microbatches": ",".join(map(str, memory_limits))} if memory_limits else {}),
                **({"extra_inflight_caps": ",".join(map(str, extra_caps))} if extra_caps else {}),
            },
            reference_graph=reference_graph,
            order_limits=order_limits,
        ),
        schedule,
        notes,
        schedule_name=options.schedule if order_limits and options.schedule else schedule.name,
        fixes_order=isinstance(content, PlannerInstance),
    )


def _from_table(
    path: Path, table: ProfileTable, options: PlanOptions
) -> tuple[Schedule, DependencyGraph, PipelineProfile, tuple[str, ...]]:
    name = options.schedule or DEFAULT_SCHEDULE
    chooses_order = name == AUTO_SCHEDULE
    if chooses_order:
        _check_auto(options)
        name = DEFAULT_SCHEDULE
    family = _family(name)
    if options.microbatches is None:
        raise UsageError(f"{path}: a profile CSV needs --microbatches M")
    num_chunks = family.default_num_chunks if options.chunks is None else options.chunks
    if num_chunks < 1 or table.num_stages % num_chunks:
        raise ScheduleError(
            f"schedule {name!r} has {num_chunks} stages per GPU, but {path} has {table.num_stages} stages, which"
            f" {num_chunks} does not divide"
        )
    num_instructions = 3 * table.num_stages * max(0, options.microbatches)
    if num_instructions > MAX_INSTRUCTIONS:
        raise ScheduleError(
            f"{options.microbatches} microbatches on {table.num_stages} stages: more than the maximum of"
            f" {MAX_INSTRUCTIONS} instructions"
        )
    schedule = make_schedule(name, table.num_stages // num_chunks, options.microbatches, options.chunks)
    graph = dependency_graph(schedule, communication_latency_s=options.communication_latency_s or 0.0)
    notes = []
    if options.blocking_power_w is None:
        notes.append("waiting GPUs are assumed to draw 0 W: set --blocking-power-w")
    keys = {i.instruction_class for i in graph.instructions}
    if num_chunks == 1:
        keys |= {InstructionClass(r, InstructionKind.B) for r in range(schedule.num_ranks)}
    if chooses_order:
        keys |= {InstructionClass(r, kind) for r in range(schedule.num_ranks) for kind in _SPLIT_KINDS}
    if options.overlap_saving is not None and all(key.kind is not InstructionKind.FB for key in keys):
        raise UsageError(
            f"--overlap-saving {options.overlap_saving}: needs schedule {COMBINED}, not {options.schedule or name}"
        )
    assumed = CostAssumptions(
        input_gradient_share=options.input_gradient_share or INPUT_GRADIENT_SHARE,
        split_overhead=options.split_overhead or 0.0,
        overlap_saving=options.overlap_saving or 0.0,
    )
    notes += cost_notes(keys, table, assumed)
    classes = instruction_profiles(schedule, sorted(keys), table, assumed)
    profile = PipelineProfile(classes, options.blocking_power_w or 0.0)
    return schedule, graph, profile, tuple(notes)


_SPLIT_KINDS = (InstructionKind.I, InstructionKind.W)


def _family(name: str) -> ScheduleFamily:
    try:
        return schedule_family(name)
    except ScheduleError as error:
        raise ScheduleError(f"{error}, {AUTO_SCHEDULE}") from None


def _check_auto(options: PlanOptions) -> None:
    """Raise UsageError for options that fix what the planner chooses."""
    if options.chunks not in {None, 1}:
        raise UsageError(f"--chunks {options.chunks}: --schedule auto plans one stage per GPU")
    if options.extra_inflight is not None:
        raise UsageError(
            f"--extra-inflight {options.extra_inflight}: --schedule auto chooses it; use --memory-limit-microbatches"
        )


def _order_limits(options: PlanOptions, schedule: Schedule) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the microbatches that each rank may hold, and a note if they are assumed."""
    text, num_ranks = options.memory_limit_microbatches, schedule.num_ranks
    plain = tuple(schedule.peak_inflight(rank) for rank in range(num_ranks))
    extra = _extra_caps(options.free_memory_bytes, options.activation_bytes, schedule)
    limits = _per_stage("--memory-limit-microbatches", text, num_ranks, least=1) if text is not None else ()
    if extra:
        roomy = tuple(held + more for held, more in zip(plain, extra, strict=True))
        limits = tuple(map(min, limits, roomy)) if limits else roomy
    if limits:
        return limits, ()
    held = ", ".join(map(str, plain))
    return plain, (f"memory is assumed to hold what 1F1B holds, {held} microbatches: set --memory-limit-microbatches",)


def _reference_graph(schedule: Schedule, options: PlanOptions) -> DependencyGraph | None:
    """Return the graph of plain 1F1B, if the schedule is another one with one stage per GPU."""
    if schedule.name == DEFAULT_SCHEDULE or schedule.num_chunks != 1:
        return None
    plain = make_schedule(DEFAULT_SCHEDULE, schedule.num_ranks, schedule.num_microbatches)
    return dependency_graph(plain, communication_latency_s=options.communication_latency_s or 0.0)


def _check_agreement(path: Path, instance: PlannerInstance, options: PlanOptions) -> None:
    """Raise UsageError for options that contradict the pipeline defined by an instance file."""
    if options.schedule == AUTO_SCHEDULE:
        raise UsageError(f"--schedule auto: only for a profile CSV; {path} defines order and edges itself")
    own = (
        ("--schedule", options.schedule, instance.schedule.name),
        ("--microbatches", options.microbatches, instance.schedule.num_microbatches),
        ("--chunks", options.chunks, instance.schedule.num_chunks),
        ("--blocking-power-w", options.blocking_power_w, instance.profile.blocking_power_w),
    )
    for option, given, stated in own:
        if given is not None and given != stated:
            raise UsageError(f"{option} {given}: {path} has {stated}")
    for option, given in (
        ("--communication-latency-s", options.communication_latency_s),
        ("--extra-inflight", options.extra_inflight),
        ("--input-gradient-share", options.input_gradient_share),
        ("--split-overhead", options.split_overhead),
        ("--overlap-saving", options.overlap_saving),
    ):
        if given is not None:
            raise UsageError(f"{option} {given}: only for a profile CSV; {path} defines order and edges itself")


def _policy_options(texts: tuple[str, ...]) -> dict[str, str]:
    own = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UsageError(f"--set {text}: must be NAME=VALUE, e.g. --set mode=greedy")
        own[name] = value
    return own


def _extra_inflight(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise UsageError(f"--extra-inflight {text}: must be a whole number >= 0, or auto")
    return count


def _memory_limits(text: str | None, schedule: Schedule) -> tuple[int, ...]:
    """Return the number of microbatches that fit in the memory of each rank; empty if unlimited."""
    if text is None:
        return ()
    limits = _per_stage("--memory-limit-microbatches", text, schedule.num_ranks, least=1)
    for pp_rank, limit in enumerate(limits):
        # Each chunk stores its share of a rank's activations.
        needed = schedule.peak_inflight(pp_rank) / schedule.num_chunks
        if needed > limit:
            raise ScheduleError(
                f"schedule {schedule.name!r} needs {needed:g} microbatches in flight on stage {pp_rank},"
                f" but only {limit} fit in memory"
            )
    return limits


def _extra_caps(free: str | None, activations: str | None, schedule: Schedule) -> tuple[int, ...]:
    """Return how many extra microbatches fit on each rank besides those of the plain schedule."""
    if free is None and activations is None:
        return ()
    if free is None or activations is None:
        raise UsageError("--free-memory-bytes and --activation-bytes: give both or neither")
    free_bytes = _per_stage("--free-memory-bytes", free, schedule.num_ranks, least=0)
    activation_bytes = _per_stage("--activation-bytes", activations, schedule.num_ranks, least=1)
    return tuple(room // size for room, size in zip(free_bytes, activation_bytes, strict=True))


def _check_memory(
    extra_inflight: int, memory_limits: tuple[int, ...], extra_caps: tuple[int, ...], schedule: Schedule
) -> None:
    """Raise ScheduleError if the extra microbatches do not fit in memory on a stage that would use them."""
    for pp_rank in range(schedule.num_ranks - 1):  # the last stage never runs ahead
        inflight = schedule.peak_inflight(pp_rank)
        rooms = ([extra_caps[pp_rank]] if extra_caps else []) + (
            [memory_limits[pp_rank] - inflight] if memory_limits else []
        )
        usable = min(extra_inflight, schedule.num_microbatches - inflight)
        if rooms and min(rooms) < usable:
            raise ScheduleError(
                f"--extra-inflight {extra_inflight}: stage {pp_rank} has memory for {min(rooms)} more than the"
                f" {inflight} microbatches of schedule {schedule.name!r}; `--extra-inflight auto` uses what fits"
            )


def _per_stage(option: str, text: str, num_ranks: int, *, least: int) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) == 1:
        values *= num_ranks
    if len(values) != num_ranks or min(values) < least:
        raise UsageError(
            f"{option} {text}: must be one whole number >= {least}, or one for each of the {num_ranks} stages,"
            " separated by commas"
        )
    return values


def _check_number(option: str, value: float | None, unit: str) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{option} {value}: must be a finite number >= 0 {unit}")
