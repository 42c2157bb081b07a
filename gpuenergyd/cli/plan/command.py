"""`gpuenergyd plan FILE`: computes a clock for every instruction from measured tables, with a proven lower bound."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from gpuenergyd.cli.option_checks import warn_of_large_slowdown
from gpuenergyd.cli.options import JsonOption
from gpuenergyd.cli.output import people_console, print_json
from gpuenergyd.cli.plan import options
from gpuenergyd.cli.plan.inputs import AUTO_SCHEDULE, PlanInput, PlanOptions, load_planner, plan_input
from gpuenergyd.core.pipeline.graph import InstructionKind, Schedule
from gpuenergyd.core.policy_api.policy import FrontierPoint, OfflinePlan, SwitchingFigures

_KINDS = tuple(InstructionKind)


def plan(  # noqa: PLR0913  each option is a parameter
    file: options.FileArgument,
    *,
    schedule: options.ScheduleOption = None,
    microbatches: options.MicrobatchesOption = None,
    chunks: options.ChunksOption = None,
    extra_inflight: options.ExtraInflightOption = None,
    memory_limit_microbatches: options.MemoryLimitOption = None,
    free_memory_bytes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Memory left on each stage by the plain schedule.")
    ] = None,
    activation_bytes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Memory that one extra microbatch needs.")
    ] = None,
    slowdown: options.SlowdownOption = None,
    target_s: options.TargetOption = None,
    straggler_time_s: Annotated[
        float | None, typer.Option(metavar="S", help="Iteration time of a straggler that the job waits for.")
    ] = None,
    max_switches: Annotated[
        int | None, typer.Option(metavar="K", help="Maximum number of clock segments per stage and iteration.")
    ] = None,
    switch_latency_s: Annotated[
        float, typer.Option(metavar="S", help="Switch latency of clock changes in seconds.")
    ] = 0.0,
    blocking_power_w: options.BlockingPowerOption = None,
    communication_latency_s: options.LatencyOption = None,
    input_gradient_share: options.InputShareOption = None,
    split_overhead: options.SplitOverheadOption = None,
    overlap_saving: options.OverlapSavingOption = None,
    policy: options.PolicyOption = options.DEFAULT_POLICY,
    set_option: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Option of the policy; may be repeated.")
    ] = None,
    frontier: Annotated[bool, typer.Option("--frontier", help="Add the time-energy frontier.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Plan a pipeline's clocks from measured tables.

    Finds the plan with the least energy whose iteration time meets the target, and a proven lower bound on that energy.
    Needs neither a daemon nor a GPU.

    Examples:
        gpuenergyd plan profile.csv --microbatches 8
        gpuenergyd plan profile.csv --microbatches 8 --max-slowdown 0.05 --json
        gpuenergyd plan profile.csv --microbatches 32 --schedule auto --memory-limit-microbatches 8
        gpuenergyd plan instance.json --frontier
    """
    warn_of_large_slowdown(slowdown)
    planner = load_planner(policy)
    given = plan_input(
        file,
        PlanOptions(
            schedule=schedule,
            microbatches=microbatches,
            chunks=chunks,
            extra_inflight=extra_inflight,
            memory_limit_microbatches=memory_limit_microbatches,
            free_memory_bytes=free_memory_bytes,
            activation_bytes=activation_bytes,
            slowdown=slowdown,
            target_s=target_s,
            straggler_time_s=straggler_time_s,
            max_switches=max_switches,
            switch_latency_s=switch_latency_s,
            blocking_power_w=blocking_power_w,
            communication_latency_s=communication_latency_s,
            input_gradient_share=input_gradient_share,
            split_overhead=split_overhead,
            overlap_saving=overlap_saving,
            want_frontier=frontier,
            policy_options=tuple(set_option or ()),
        ),
    )
    figures = plan_figures(given, planner(given.request))
    if as_json:
        print_json(figures)
    else:
        _print_for_people(given, figures)
    return 0


def plan_figures(given: PlanInput, planned: OfflinePlan) -> dict[str, Any]:
    """Return the JSON document of the command; with a straggler, energies include waiting until its time."""
    num_ranks = len(planned.orders)
    charged_until_s = given.request.target.straggler_time_s

    def charged(energy_j: float, iteration_time_s: float) -> float:
        waited_s = max(0.0, (charged_until_s or 0.0) - iteration_time_s)
        return energy_j + given.request.profile.blocking_power_w * num_ranks * waited_s

    baseline_j = charged(planned.baseline_energy_j, planned.baseline_time_s)
    energy_j = charged(planned.energy_j, planned.iteration_time_s)
    bound_j = planned.lower_bound_j
    own_j, any_order_j = planned.own_order_energy_j, planned.any_order_bound_j
    if own_j is not None and planned.own_order_time_s is not None:
        own_j = charged(own_j, planned.own_order_time_s)
    figures: dict[str, Any] = {
        "schedule": given.schedule_name,
        "num_stages": num_ranks,
        "num_microbatches": given.schedule.num_microbatches,
        "extra_inflight": list(planned.extra_inflight),
        "baseline_time_s": planned.baseline_time_s,
        "baseline_energy_j": baseline_j,
        "iteration_time_s": planned.iteration_time_s,
        "energy_j": energy_j,
        "lower_bound_j": None if bound_j is None else charged(bound_j, planned.iteration_time_s),
        "saving_ratio": 1.0 - energy_j / baseline_j if baseline_j else 0.0,
        "slowdown_ratio": planned.iteration_time_s / planned.baseline_time_s - 1.0,
        "own_order_time_s": planned.own_order_time_s,
        "own_order_energy_j": own_j,
        "own_order_saving_ratio": None if own_j is None else 1.0 - energy_j / own_j if own_j else 0.0,
        "any_order_bound_ratio": 1.0 - any_order_j / baseline_j if any_order_j is not None and baseline_j else None,
        "held_microbatches": held_microbatches(planned, given.schedule.num_chunks),
        "solve_cpu_s": planned.solve_cpu_s,
        "compile_cpu_s": planned.compile_cpu_s,
        "order": {
            str(pp_rank): [[i.kind, i.microbatch_index, i.chunk_index] for i in order]
            for pp_rank, order in enumerate(planned.orders)
        },
        "clocks": [
            {
                "stage": i.pp_rank,
                "instruction": i.kind,
                "microbatch": i.microbatch_index,
                "chunk": i.chunk_index,
                "sm_clock_mhz": planned.sm_clocks_mhz[i],
            }
            for order in planned.orders
            for i in order
        ],
        "frontier": list(planned.frontier),
        "throttling": [
            {"stage": key.pp_rank, "instruction": key.kind, "chunk": key.chunk_index, "sm_clock_mhz": clock}
            for key, profile in sorted(given.request.profile.classes.items())
            if (clock := profile.throttling_clock_mhz) is not None
        ],
    }
    if planned.switching is not None:
        figures["switching"] = _switching_figures(planned.switching, charged, baseline_j, planned.baseline_time_s)
    return figures


def held_microbatches(planned: OfflinePlan, num_chunks: int) -> list[float]:
    """Return the largest number of microbatches that each stage holds at once; a chunk counts as its share of one."""
    held = Schedule("planned", 0, planned.orders)
    counts = [held.peak_inflight(rank) for rank in range(held.num_ranks)]
    return [count if num_chunks == 1 else count / num_chunks for count in counts]


def _switching_figures(
    switching: SwitchingFigures, charged: Callable[[float, float], float], baseline_j: float, baseline_time_s: float
) -> dict[str, Any]:
    def outcome(iteration_time_s: float, energy_j: float) -> dict[str, float]:
        energy_j = charged(energy_j, iteration_time_s)
        return {
            "iteration_time_s": iteration_time_s,
            "energy_j": energy_j,
            "saving_ratio": 1.0 - energy_j / baseline_j if baseline_j else 0.0,
            "slowdown_ratio": iteration_time_s / baseline_time_s - 1.0,
        }

    return {
        "switch_latency_s": switching.switch_latency_s,
        "num_segments": list(switching.num_segments),
        "planned": outcome(switching.iteration_time_s, switching.energy_j),
        "free_with_lead": outcome(switching.free_lead_time_s, switching.free_lead_energy_j),
        "free_naive": outcome(switching.free_naive_time_s, switching.free_naive_energy_j),
        "changes": [
            {
                "stage": change.instruction.pp_rank,
                "instruction": change.instruction.kind,
                "microbatch": change.instruction.microbatch_index,
                "chunk": change.instruction.chunk_index,
                "offset_s": change.offset_s,
                "sm_clock_mhz": change.sm_clock_mhz,
            }
            for rank_changes in switching.changes
            for change in rank_changes
        ],
    }


def _print_for_people(given: PlanInput, figures: dict[str, Any]) -> None:
    console = people_console()
    extra = figures["extra_inflight"]
    console.print(
        f"{given.request.name}: {figures['schedule']}, {figures['num_stages']} stages,"
        f" {figures['num_microbatches']} microbatches" + (f", extra in flight {extra}" if any(extra) else "")
    )
    console.print(_summary_table(figures))
    for line in _order_lines(figures):
        console.print(line)
    console.print(_clocks_table(figures["clocks"]))
    if figures["frontier"]:
        console.print(_frontier_table(figures["frontier"]))
    if "switching" in figures:
        console.print(_switching_table(figures["switching"]))
    compiled = f", after {figures['compile_cpu_s']:.1f} CPU s for compiling the planner (once)"
    console.print(f"planning took {figures['solve_cpu_s']:.2f} CPU s{compiled if figures['compile_cpu_s'] else ''}")
    for note in _notes(given, figures):
        console.print(f"note: {note}")


def _new_table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if table.columns else "left")
    return table


def _summary_table(figures: dict[str, Any]) -> Table:
    table = _new_table("", "full speed", "planned", "change")
    table.add_row(
        "iteration time",
        f"{figures['baseline_time_s']:.4f} s",
        f"{figures['iteration_time_s']:.4f} s",
        f"{100 * figures['slowdown_ratio']:+.2f} %",
    )
    table.add_row(
        "energy",
        f"{figures['baseline_energy_j']:.1f} J",
        f"{figures['energy_j']:.1f} J",
        f"{-100 * figures['saving_ratio']:+.2f} %",
    )
    if figures["lower_bound_j"] is not None:
        gap = figures["energy_j"] / figures["lower_bound_j"] - 1.0
        table.add_row("lower bound", "", f"{figures['lower_bound_j']:.1f} J", f"plan is {100 * gap:+.2f} %")
    return table


def _order_lines(figures: dict[str, Any]) -> list[str]:
    """Return what the order itself contributes, for plans whose order was chosen or is not the baseline's."""
    is_chosen = figures["schedule"] == AUTO_SCHEDULE
    is_other = figures["own_order_time_s"] != figures["baseline_time_s"]
    if figures["own_order_saving_ratio"] is None or not (is_chosen or is_other):
        return []
    faster = 100 * (figures["own_order_time_s"] / figures["baseline_time_s"] - 1)
    against = 100 * figures["saving_ratio"]
    against_own = 100 * figures["own_order_saving_ratio"]
    own = f"this order at full speed ({faster:+.2f} % time)"
    lines = [f"saves {against:.2f} % against 1F1B at full speed, and {against_own:.2f} % against {own}"]
    if is_chosen:
        bound = figures["any_order_bound_ratio"]
        lines.append(
            "what any other order could save was not computed: too many stages for the bound"
            if bound is None
            else f"no order within this memory saves more than {100 * bound:.2f} %"
        )
    lines.append(f"microbatches held per stage: {', '.join(f'{held:g}' for held in figures['held_microbatches'])}")
    split = [stage for stage, order in figures["order"].items() if any(kind == "I" for kind, *_ in order)]
    if len(split) == len(figures["order"]):
        lines.append("backward split on all stages")
    elif split:
        lines.append(f"backward split on stages {', '.join(split)}")
    return lines


def _clocks_table(clocks: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("stage", "instruction", "clocks, MHz", "segments"):
        table.add_column(title, justify="left" if title == "instruction" else "right")
    by_stage = groupby(clocks, key=lambda row: row["stage"])
    for stage, rows in ((stage, list(rows)) for stage, rows in by_stage):
        num_segments = sum(1 for _ in groupby(rows, key=lambda row: row["sm_clock_mhz"]))
        for index, kind in enumerate(sorted({row["instruction"] for row in rows}, key=_KINDS.index)):
            used = [row["sm_clock_mhz"] for row in rows if row["instruction"] == kind]
            span = str(used[0]) if min(used) == max(used) else f"{min(used)} to {max(used)}"
            table.add_row("" if index else str(stage), str(kind), span, "" if index else str(num_segments))
    return table


def _frontier_table(points: Sequence[FrontierPoint]) -> Table:
    table = Table("iteration time, s", "energy, J", "lower bound, J", box=box.SIMPLE, pad_edge=False)
    for point in points:
        bound = "" if point.lower_bound_j is None else f"{point.lower_bound_j:.1f}"
        table.add_row(f"{point.iteration_time_s:.4f}", f"{point.energy_j:.1f}", bound)
    return table


def _switching_table(switching: dict[str, Any]) -> Table:
    table = _new_table(f"switch latency {1000 * switching['switch_latency_s']:g} ms", "saving", "slowdown")
    for title, key in (
        ("this plan", "planned"),
        ("unlimited segments, with lead", "free_with_lead"),
        ("unlimited segments, no lead", "free_naive"),
    ):
        outcome = switching[key]
        table.add_row(title, f"{100 * outcome['saving_ratio']:.2f} %", f"{100 * outcome['slowdown_ratio']:+.2f} %")
    return table


def _notes(given: PlanInput, figures: dict[str, Any]) -> list[str]:
    notes = []
    if given.request.target.straggler_time_s is not None:
        notes.append(f"energies include waiting until {given.request.target.straggler_time_s:g} s")
    if figures["throttling"]:
        lowest, highest = (f(row["sm_clock_mhz"] for row in figures["throttling"]) for f in (min, max))
        clock = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        notes.append(
            f"{len(figures['throttling'])} of {len(given.request.profile.classes)} instructions are throttled:"
            f" clocks above {clock} MHz do not make them faster"
        )
    return [*notes, *given.notes]
