"""Builds a planner's request from a file and the options of `gpuenergyd plan`, and finds the planner."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeAlias

from gpuenergyd.core.pipeline.graph import DependencyGraph, Schedule
from gpuenergyd.core.pipeline.profile import with_waiting_power
from gpuenergyd.core.pipeline.waiting import WaitingPower, waiting_power
from gpuenergyd.core.policy_api.policy import OfflinePlanner, OfflineRequest, PowerCap
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError, UnknownPolicyError, UsageError
from gpuenergyd_plan.profiles.profile_files import (
    PlannerInstance,
    ProfileTable,
    read_pipeline_file,
    read_waiting_power_file,
)
from gpuenergyd_plan.tables import AUTO_SCHEDULE, PlanOptions, reference_graph, table_request

_PLANNER_GROUP = "gpuenergyd.planners"


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A planner's request, its schedule, and notes for the user about assumptions made."""

    request: OfflineRequest
    schedule: Schedule
    notes: tuple[str, ...] = field(default=())
    schedule_name: str = ""
    """Name of the requested schedule; auto if the planner chooses the order."""
    fixes_order: bool = False
    """Whether the file defines the order of instructions and their dependencies, so that options cannot change them."""


def load_planner(policy: str) -> OfflinePlanner:
    """Return the offline planner that a policy provides.

    Raises:
        UnknownPolicyError: no such planner is installed, or it cannot be imported.
    """
    points = {point.name: point for point in entry_points(group=_PLANNER_GROUP)}
    if policy not in points:
        names = ", ".join(sorted(points)) or "none installed"
        raise UnknownPolicyError(f"policy {policy!r} has no offline planner; policies with one: {names}")
    # Planners use small arrays, for which starting OpenBLAS threads on all cores takes longer than they can save.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        planner: OfflinePlanner = points[policy].load()
    except (ImportError, AttributeError) as error:
        raise UnknownPolicyError(f"policy {policy!r} cannot be loaded: {error}") from None
    return planner


def plan_input(path: Path, options: PlanOptions, content: PlannerInstance | None = None) -> PlanInput:
    """Return the request that a file and options describe; if `content` is given, `path` is used in messages only.

    Raises:
        UsageError: the file or an option is invalid, or they contradict each other.
    """
    _check_numbers(options)
    if options.slowdown is not None and options.target_s is not None:
        raise UsageError("--max-slowdown and --target-s: give only one of them")
    target = PerformanceTarget(
        max_slowdown_ratio=options.slowdown or 0.0,
        straggler_time_s=options.straggler_time_s,
        permitted_time_s=options.target_s,
    )
    extra_inflight = _extra_inflight(options.extra_inflight)
    pipeline = content or read_pipeline_file(path)
    match pipeline:
        case PlannerInstance():
            _check_agreement(path, pipeline, options)
            schedule, graph, profile = pipeline.schedule, pipeline.graph, pipeline.profile
            notes: tuple[str, ...] = ()
            baseline_graph: DependencyGraph | None = None
        case ProfileTable():
            schedule, graph, profile, notes = table_request(path, pipeline, options)
            baseline_graph = reference_graph(schedule, options)
    if options.waiting_power is not None:
        _check_waiting_power(path, pipeline, options)
        curve, waiting_notes = given_waiting_power(options.waiting_power)
        profile, notes = with_waiting_power(profile, curve), notes + waiting_notes
    if extra_inflight is not None and schedule.name != "1f1b":
        raise UsageError(f"--extra-inflight {extra_inflight}: needs schedule 1f1b, not {schedule.name}")
    chosen_limits: tuple[int, ...] = ()
    if options.schedule == AUTO_SCHEDULE:
        chosen_limits, limit_notes = order_limits(
            options.memory_limit_microbatches, options.free_memory_bytes, options.activation_bytes, schedule
        )
        notes += limit_notes
    limits = () if chosen_limits else memory_limits(options.memory_limit_microbatches, schedule)
    caps = () if chosen_limits else extra_caps(options.free_memory_bytes, options.activation_bytes, schedule)
    if isinstance(extra_inflight, int):
        check_memory(extra_inflight, limits, caps, schedule)
    return PlanInput(
        OfflineRequest(
            name=pipeline.name,
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
                **({"memory_limit_microbatches": ",".join(map(str, limits))} if limits else {}),
                **({"extra_inflight_caps": ",".join(map(str, caps))} if caps else {}),
            },
            reference_graph=baseline_graph,
            order_limits=chosen_limits,
            power_cap=None if options.power_cap_w is None else PowerCap(options.power_cap_w, options.window_s or 0.0),
            is_flattest=options.is_flattest,
        ),
        schedule,
        notes,
        schedule_name=options.schedule if chosen_limits and options.schedule else schedule.name,
        fixes_order=isinstance(pipeline, PlannerInstance),
    )


def _check_numbers(options: PlanOptions) -> None:
    """Raise UsageError for numbers out of range."""
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
    _check_power_cap(options)
    _check_flattest(options)


def _check_power_cap(options: PlanOptions) -> None:
    """Raise UsageError if the cap is out of range, or given with options that it replaces or does not support."""
    if options.power_cap_w is None:
        if options.window_s is not None:
            raise UsageError(f"--window-s {options.window_s:g}: only together with --power-cap-w")
        return
    for option, number, unit in (("--power-cap-w", options.power_cap_w, "W"), ("--window-s", options.window_s, "s")):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise UsageError(f"{option} {number}: must be a finite number > 0 {unit}")
    for option, given in (
        ("--max-slowdown", options.slowdown),
        ("--target-s", options.target_s),
        ("--straggler-time-s", options.straggler_time_s),
    ):
        if given is not None:
            raise UsageError(f"{option}: not together with --power-cap-w, which asks for the least time under the cap")
    for option, value in (
        ("--schedule auto", options.schedule == AUTO_SCHEDULE),
        ("--extra-inflight", options.extra_inflight is not None),
        ("--max-switches", options.max_switches is not None),
        ("--switch-latency-s", options.switch_latency_s > 0),
        ("--waiting-power", options.waiting_power is not None),
        ("--frontier", options.want_frontier),
    ):
        if value:
            raise UsageError(f"{option}: not planned under a power cap; leave it or --power-cap-w out")


def _check_flattest(options: PlanOptions) -> None:
    """Raise UsageError if --flattest is given with options that it does not support."""
    for option, value in (
        ("--power-cap-w", options.power_cap_w is not None),
        ("--straggler-time-s", options.straggler_time_s is not None),
        ("--max-switches", options.max_switches is not None),
        ("--switch-latency-s", options.switch_latency_s > 0),
        ("--waiting-power", options.waiting_power is not None),
    ):
        if value and options.is_flattest:
            raise UsageError(f"{option}: not together with --flattest; leave one of them out")


def _check_waiting_power(path: Path, content: PlannerInstance | ProfileTable, options: PlanOptions) -> None:
    """Raise UsageError if --waiting-power is given with inputs that assume one power of waiting at all clocks."""
    if isinstance(content, PlannerInstance):
        raise UsageError(f"--waiting-power {options.waiting_power}: {path} has one power for all clocks, p_block_w")
    for option, given in (
        ("--blocking-power-w", options.blocking_power_w),
        ("--straggler-time-s", options.straggler_time_s),
        ("--frontier", options.want_frontier or None),
    ):
        if given is not None:
            raise UsageError(f"{option}: not together with --waiting-power")


def _check_agreement(path: Path, instance: PlannerInstance, options: PlanOptions) -> None:
    """Raise UsageError if an option contradicts the pipeline that an instance file defines."""
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
        ("--order", None if options.order is None else str(options.order)),
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


def _check_number(option: str, value: float | None, unit: str) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{option} {value}: must be a finite number >= 0 {unit}")


def order_limits(
    text: str | None, free: str | None, activations: str | None, schedule: Schedule
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return how many microbatches each rank may hold, and a note if that is assumed."""
    num_ranks = schedule.num_ranks
    plain = tuple(schedule.peak_inflight(rank) // schedule.num_chunks for rank in range(num_ranks))
    extra = extra_caps(free, activations, schedule)
    limits = _per_stage("--memory-limit-microbatches", text, num_ranks, least=1) if text is not None else ()
    if extra:
        roomy = tuple(held + more for held, more in zip(plain, extra, strict=True))
        limits = tuple(map(min, limits, roomy)) if limits else roomy
    if limits:
        return limits, ()
    held = ", ".join(map(str, plain))
    return plain, (f"memory is assumed to hold what 1F1B holds per stage, {held}: set --memory-limit-microbatches",)


def memory_limits(text: str | None, schedule: Schedule) -> tuple[int, ...]:
    """Return the number of microbatches that fit in the memory of each rank; empty if unlimited."""
    if text is None:
        return ()
    limits = _per_stage("--memory-limit-microbatches", text, schedule.num_ranks, least=1)
    for pp_rank, limit in enumerate(limits):
        # Each chunk stores an equal part of the activations of its rank.
        needed = schedule.peak_inflight(pp_rank) / schedule.num_chunks
        if needed > limit:
            raise ScheduleError(
                f"schedule {schedule.name!r} needs {count_text(needed, 'microbatch')} in flight on stage {pp_rank},"
                f" but only {limit} fit in memory"
            )
    return limits


def extra_caps(free: str | None, activations: str | None, schedule: Schedule) -> tuple[int, ...]:
    """Return how many more microbatches fit on each rank than the plain schedule holds there."""
    if free is None and activations is None:
        return ()
    if free is None or activations is None:
        raise UsageError("--free-memory-bytes and --activation-bytes: give both or neither")
    free_bytes = _per_stage("--free-memory-bytes", free, schedule.num_ranks, least=0)
    activation_bytes = _per_stage("--activation-bytes", activations, schedule.num_ranks, least=1)
    return tuple(room // size for room, size in zip(free_bytes, activation_bytes, strict=True))


def check_memory(extra_inflight: int, limits: tuple[int, ...], caps: tuple[int, ...], schedule: Schedule) -> None:
    """Raise ScheduleError if the extra microbatches do not fit in memory on a stage that would use them."""
    for pp_rank in range(schedule.num_ranks - 1):  # the last stage never runs ahead
        inflight = schedule.peak_inflight(pp_rank)
        rooms = ([caps[pp_rank]] if caps else []) + ([limits[pp_rank] - inflight] if limits else [])
        usable = min(extra_inflight, schedule.num_microbatches - inflight)
        if rooms and min(rooms) < usable:
            raise ScheduleError(
                f"--extra-inflight {extra_inflight}: stage {pp_rank} has memory for {min(rooms)} more than the"
                f" {count_text(inflight, 'microbatch')} of schedule {schedule.name!r}; `--extra-inflight auto` uses"
                " what fits"
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
            f"{option} {text}: must be one whole number >= {least}, or one for each of the"
            f" {count_text(num_ranks, 'stage')},"
            " separated by commas"
        )
    return values


AssumedWaitingPowers: TypeAlias = Callable[[], Mapping[str, Sequence[tuple[int, float]]]]


def given_waiting_power(text: str) -> tuple[WaitingPower, tuple[str, ...]]:
    """Return the curve that `--waiting-power` names, and a note if it is assumed.

    Raises:
        UsageError: the text names neither a file nor a GPU model.
        ProfileError: the file is invalid.
    """
    path = Path(text)
    if path.exists():
        return read_waiting_power_file(path), ()
    assumed = _assumed_waiting_powers()
    if text not in assumed:
        models = ", ".join(sorted(assumed)) or "none installed"
        raise UsageError(f"--waiting-power {text}: neither a file nor a GPU model; models: {models}")
    curve = waiting_power(assumed[text], where=text, is_assumed=True)
    note = (
        f"the power of waiting by clock is assumed, as of a simulated {text}: {curve.powers_w[-1]:.1f} W at"
        f" {curve.clocks_mhz[-1]} MHz, {curve.powers_w[0]:.1f} W at {curve.clocks_mhz[0]} MHz"
    )
    return curve, (note,)


def _assumed_waiting_powers() -> Mapping[str, Sequence[tuple[int, float]]]:
    found: dict[str, Sequence[tuple[int, float]]] = {}
    for point in entry_points(group="gpuenergyd.waiting_powers"):
        waiting_powers: AssumedWaitingPowers = point.load()
        found |= waiting_powers()
    return found
