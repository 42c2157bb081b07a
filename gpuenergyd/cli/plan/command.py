"""`gpuenergyd plan FILE`: the offline planner, from tables to a clock for every instruction and a proven bound."""

from collections.abc import Callable
from importlib.metadata import entry_points
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gpuenergyd.cli.output import JsonOption, print_json
from gpuenergyd.cli.plan.inputs import DEFAULT_SCHEDULE, PlanInput, PlanOptions, plan_input
from gpuenergyd.cli.terminal import people_console
from gpuenergyd.core.pipeline.schedules import SCHEDULES
from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflinePlanner, SwitchingFigures
from gpuenergyd.errors import UnknownPolicyError

PLANNER_GROUP = "gpuenergyd.planners"
DEFAULT_POLICY = "bubble-aware"


def plan(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A profile CSV or an instance JSON."),
    ],
    *,
    schedule: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(SCHEDULES)} [default: {DEFAULT_SCHEDULE}]"),
    ] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Microbatches per iteration.")] = None,
    chunks: Annotated[int | None, typer.Option(metavar="V", help="Stages per GPU, where the schedule is free.")] = None,
    extra_inflight: Annotated[
        str | None, typer.Option(metavar="K|auto", help="Let stages run ahead by up to K more microbatches (1f1b).")
    ] = None,
    memory_limit_microbatches: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Microbatches whose activations fit, for all stages or each.")
    ] = None,
    free_memory_bytes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Memory left on each stage beside the schedule's own need.")
    ] = None,
    activation_bytes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="What one more microbatch in flight takes of it.")
    ] = None,
    slowdown: Annotated[float | None, typer.Option(metavar="R", help="Permitted slowdown ratio [default: 0].")] = None,
    target_s: Annotated[float | None, typer.Option(metavar="T", help="Permitted iteration time instead.")] = None,
    straggler_time_s: Annotated[
        float | None, typer.Option(metavar="T", help="The job waits until then anyway: use all of it.")
    ] = None,
    max_switches: Annotated[
        int | None, typer.Option(metavar="K", help="At most K clock segments per stage and iteration.")
    ] = None,
    switch_latency_s: Annotated[float, typer.Option(metavar="L", help="Seconds until a clock is effective.")] = 0.0,
    blocking_power_w: Annotated[float | None, typer.Option(metavar="W", help="Power of a waiting GPU.")] = None,
    communication_latency_s: Annotated[
        float | None, typer.Option(metavar="L", help="Seconds from one stage to the next.")
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Whose planner to use.")] = DEFAULT_POLICY,
    set_option: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the policy's own.")
    ] = None,
    frontier: Annotated[bool, typer.Option("--frontier", help="Add the whole time-energy frontier.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Plan a pipeline's clocks from measured tables: least energy at the owed iteration time."""
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
            want_frontier=frontier,
            own=tuple(set_option or ()),
        ),
    )
    figures = plan_figures(given, planner(given.request))
    if as_json:
        print_json(figures)
    else:
        _print_for_people(given, figures)
    return 0


def load_planner(name: str) -> OfflinePlanner:
    """Return the offline planner that a policy of this name ships.

    Raises:
        UnknownPolicyError: none is installed; the message names those that are.
    """
    points = {point.name: point for point in entry_points(group=PLANNER_GROUP)}
    if name not in points:
        raise UnknownPolicyError(f"no policy {name!r} plans offline; installed: {', '.join(sorted(points)) or 'none'}")
    try:
        planner: OfflinePlanner = points[name].load()
    except (ImportError, AttributeError) as error:
        raise UnknownPolicyError(f"policy {name!r} cannot be loaded: {error}") from None
    return planner


def plan_figures(given: PlanInput, planned: OfflinePlan) -> dict[str, Any]:
    """Return what the command prints as JSON; when the wait is forced, all energies are charged until it ends."""
    num_ranks = len(planned.orders)
    charged_until_s = given.request.target.straggler_time_s

    def charged(energy_j: float, iteration_time_s: float) -> float:
        waited_s = max(0.0, (charged_until_s or 0.0) - iteration_time_s)
        return energy_j + given.request.profile.blocking_power_w * num_ranks * waited_s

    baseline_j = charged(planned.baseline_energy_j, planned.baseline_time_s)
    energy_j = charged(planned.energy_j, planned.iteration_time_s)
    bound_j = planned.lower_bound_j
    figures: dict[str, Any] = {
        "schedule": given.schedule.name,
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
        "solve_cpu_s": planned.solve_cpu_s,
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


def _print_switching(console: Console, switching: dict[str, Any]) -> None:
    from rich import box  # noqa: PLC0415  only a person who reads needs it
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in (f"clocks {1000 * switching['switch_latency_s']:g} ms late", "saving", "slowdown"):
        table.add_column(title, justify="right" if table.columns else "left")
    rows = (
        ("this plan", "planned"),
        ("free clocks, asked ahead", "free_with_lead"),
        ("free clocks, naive", "free_naive"),
    )
    for title, key in rows:
        outcome = switching[key]
        table.add_row(title, f"{100 * outcome['saving_ratio']:.2f} %", f"{100 * outcome['slowdown_ratio']:+.2f} %")
    console.print(table)


def _print_for_people(given: PlanInput, figures: dict[str, Any]) -> None:
    from rich import box  # noqa: PLC0415  only a person who reads needs it
    from rich.table import Table  # noqa: PLC0415

    console = people_console()
    extra = figures["extra_inflight"]
    console.print(
        f"{given.request.name}: {figures['schedule']}, {figures['num_stages']} stages,"
        f" {figures['num_microbatches']} microbatches" + (f", extra in flight {extra}" if any(extra) else "")
    )
    summary = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("", "full speed", "planned", "change"):
        summary.add_column(title, justify="left" if not title else "right")
    summary.add_row(
        "iteration time",
        f"{figures['baseline_time_s']:.4f} s",
        f"{figures['iteration_time_s']:.4f} s",
        f"{100 * figures['slowdown_ratio']:+.2f} %",
    )
    summary.add_row(
        "energy",
        f"{figures['baseline_energy_j']:.1f} J",
        f"{figures['energy_j']:.1f} J",
        f"{-100 * figures['saving_ratio']:+.2f} %",
    )
    if figures["lower_bound_j"] is not None:
        gap = figures["energy_j"] / figures["lower_bound_j"] - 1.0
        summary.add_row("proven least", "", f"{figures['lower_bound_j']:.1f} J", f"plan is {100 * gap:+.2f} %")
    console.print(summary)
    clocks = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("stage", "instruction", "clocks, MHz", "segments"):
        clocks.add_column(title, justify="left" if title == "instruction" else "right")
    by_stage = groupby(figures["clocks"], key=lambda row: row["stage"])
    for stage, rows in ((stage, list(rows)) for stage, rows in by_stage):
        segments = sum(1 for _ in groupby(rows, key=lambda row: row["sm_clock_mhz"]))
        for at, kind in enumerate(sorted({row["instruction"] for row in rows}, key="FBIW".index)):
            used = [row["sm_clock_mhz"] for row in rows if row["instruction"] == kind]
            span = str(used[0]) if min(used) == max(used) else f"{min(used)} to {max(used)}"
            clocks.add_row("" if at else str(stage), str(kind), span, "" if at else str(segments))
    console.print(clocks)
    if figures["frontier"]:
        frontier = Table("iteration time, s", "energy, J", "proven least, J", box=box.SIMPLE, pad_edge=False)
        for point in figures["frontier"]:
            bound = "" if point.lower_bound_j is None else f"{point.lower_bound_j:.1f}"
            frontier.add_row(f"{point.iteration_time_s:.4f}", f"{point.energy_j:.1f}", bound)
        console.print(frontier)
    if "switching" in figures:
        _print_switching(console, figures["switching"])
    console.print(f"planned in {figures['solve_cpu_s']:.2f} CPU s")
    if given.request.target.straggler_time_s is not None:
        console.print(f"energies count waiting until {given.request.target.straggler_time_s:g} s")
    if figures["throttling"]:
        lowest, highest = (f(row["sm_clock_mhz"] for row in figures["throttling"]) for f in (min, max))
        clock = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        console.print(
            f"note: {len(figures['throttling'])} of {len(given.request.profile.classes)} instructions are throttled:"
            f" above {clock} MHz a higher clock buys no time"
        )
    for note in given.notes:
        console.print(f"note: {note}")
