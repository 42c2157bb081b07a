"""`gpuenergyd explain FILE`: explains why each instruction of an offline plan runs at its clock."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from gpuenergyd.cli.option_checks import warn_of_large_slowdown
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import people_console, print_json
from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph
from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflinePlanner
from gpuenergyd.errors import UsageError
from gpuenergyd_plan import options
from gpuenergyd_plan.explanation import ClockExplanation, ClockReason, explain_clocks
from gpuenergyd_plan.inputs import PlanInput, load_planner, plan_input
from gpuenergyd_plan.running_job import RunningJobInput, running_job_input
from gpuenergyd_plan.tables import PlanOptions, named

_MAX_ROWS = 12
"""Rows of the table printed when no instruction is named."""


def explain(  # noqa: PLR0913  each option is a parameter
    file: options.FileArgument = None,
    instructions: Annotated[
        list[str] | None, typer.Argument(metavar="INSTRUCTION", help="E.g. F3@2: forward of microbatch 3 on stage 2.")
    ] = None,
    *,
    job: options.JobOption = None,
    socket: SocketOption = None,
    schedule: options.ScheduleOption = None,
    order: options.OrderOption = None,
    microbatches: options.MicrobatchesOption = None,
    chunks: options.ChunksOption = None,
    extra_inflight: options.ExtraInflightOption = None,
    slowdown: options.SlowdownOption = None,
    target_s: options.TargetOption = None,
    blocking_power_w: options.BlockingPowerOption = None,
    communication_latency_s: options.LatencyOption = None,
    policy: options.PolicyOption = options.DEFAULT_POLICY,
    as_json: JsonOption = False,
) -> int:
    """Explain each clock of a plan.

    Prints slack, critical path and marginal value of time; with INSTRUCTION arguments, the reason for each clock. With
    --job the plan is the one in force in a running job.

    Examples:
        gpuenergyd explain profile.csv --microbatches 8
        gpuenergyd explain profile.csv F3@2 B0@1 --microbatches 8
        gpuenergyd explain --job gpt F3@2
    """
    warn_of_large_slowdown(slowdown)
    planner = load_planner(policy)
    own = PlanOptions(
        schedule=schedule, order=order, microbatches=microbatches, chunks=chunks, extra_inflight=extra_inflight,
        slowdown=slowdown, target_s=target_s, blocking_power_w=blocking_power_w,
        communication_latency_s=communication_latency_s,
    )  # fmt: skip
    if job is not None:
        names = [*([str(file)] if file is not None else []), *(instructions or [])]
        return _explain_job(running_job_input(job, socket, own), planner, names, as_json=as_json)
    path = options.file_or_job(file, job)
    assert path is not None
    given = plan_input(path, own)
    planned = planner(given.request)
    explained = explain_clocks(
        _planned_graph(given, planned), given.request.profile, planned.sm_clocks_mhz, planned.prices_w
    )
    shown = _selected(explained, instructions) if instructions else explained
    with_extra = None
    if not instructions and given.schedule.name == "1f1b" and extra_inflight is None and not given.fixes_order:
        with_extra = planner(replace(given.request, extra_inflight="auto"))
    if as_json:
        print_json(_figures(given, planned, shown, with_extra))
    else:
        _print_for_people(given, planned, shown, with_extra, is_summary=not instructions)
    return 0


def _explain_job(job: RunningJobInput, planner: OfflinePlanner, names: Sequence[str], *, as_json: bool) -> int:
    """Explain the plan in force in a running job; marginal values of time come from the best plan for its target."""
    in_force = job.in_force
    if in_force is None:
        raise UsageError(
            f"job {job.fit.job_id} follows no plan with clocks now: {job.fit.phase}, {job.fit.phase_reason}"
        )
    best = planner(job.given.request)
    planned = replace(
        best,
        orders=in_force.schedule.orders,
        sm_clocks_mhz=in_force.sm_clocks_mhz,
        iteration_time_s=in_force.iteration_time_s,
        energy_j=in_force.energy_j,
    )
    prices = best.prices_w if in_force.schedule.orders == best.orders else {}
    explained = explain_clocks(in_force.graph, in_force.profile, in_force.sm_clocks_mhz, prices)
    shown = _selected(explained, names) if names else explained
    if as_json:
        print_json({**_figures(job.given, planned, shown, None), "job": job.figures()})
    else:
        _print_for_people(job.given, planned, shown, None, is_summary=not names)
    return 0


def _planned_graph(given: PlanInput, planned: OfflinePlan) -> DependencyGraph:
    if planned.orders == given.schedule.orders:
        return given.request.graph
    return dependency_graph(
        replace(given.schedule, orders=planned.orders),
        communication_latency_s=float(given.request.options["communication_latency_s"]),
    )


def _selected(explained: Sequence[ClockExplanation], names: Sequence[str]) -> list[ClockExplanation]:
    known = {str(e.instruction): e for e in explained}
    missing = [name for name in names if name not in known]
    if missing:
        first, last = next(iter(known)), list(known)[-1]
        raise UsageError(f"no instruction {missing[0]!r} in this plan; instructions are {first} to {last}")
    return [known[name] for name in names]


def _figures(
    given: PlanInput, planned: OfflinePlan, shown: Sequence[ClockExplanation], with_extra: OfflinePlan | None
) -> dict[str, Any]:
    return {
        "iteration_time_s": planned.iteration_time_s,
        "energy_j": planned.energy_j,
        "saving_ratio": 1.0 - planned.energy_j / planned.baseline_energy_j,
        "with_extra_inflight": None
        if with_extra is None
        else {
            "extra_inflight": list(with_extra.extra_inflight),
            "saving_ratio": 1.0 - with_extra.energy_j / with_extra.baseline_energy_j,
        },
        "instructions": [
            {
                **named(e.instruction),
                "sm_clock_mhz": e.option.sm_clock_mhz,
                "start_s": e.span.start_s,
                "duration_s": e.span.duration_s,
                "slack_s": e.span.slack_s,
                "is_critical": e.span.is_critical,
                "price_w": e.price_w,
                "reason": e.reason,
                "explanation": e.sentence(given.request.profile.blocking_power_w),
            }
            for e in shown
        ],
    }


def _print_for_people(
    given: PlanInput,
    planned: OfflinePlan,
    shown: Sequence[ClockExplanation],
    with_extra: OfflinePlan | None,
    *,
    is_summary: bool,
) -> None:
    console = people_console()
    saving = 100 * (1 - planned.energy_j / planned.baseline_energy_j)
    console.print(
        f"{given.request.name}: {planned.iteration_time_s:.4f} s, {planned.energy_j:.1f} J,"
        f" {saving:.2f} % less energy than at full speed"
    )
    if is_summary:
        counts = Counter(e.reason for e in shown)
        labels = {
            ClockReason.CRITICAL: "critical",
            ClockReason.NO_ROOM: "with too little slack for a lower clock",
            ClockReason.CHEAPEST: "at their most efficient clock",
            ClockReason.ROOM_LEFT: "with unused slack",
        }
        console.print(", ".join(f"{counts[reason]} {label}" for reason, label in labels.items() if counts[reason]))
        if with_extra is not None and any(with_extra.extra_inflight):
            more = 100 * (1 - with_extra.energy_j / with_extra.baseline_energy_j)
            console.print(
                f"--extra-inflight auto would save {more:.2f} %,"
                f" with {list(with_extra.extra_inflight)} extra microbatches in flight"
            )
        _print_most_valuable(console, shown)
        return
    for e in shown:
        state = "critical" if e.span.is_critical else f"slack {1e3 * e.span.slack_s:.3g} ms"
        price = "" if e.price_w is None else f"; 1 ms more time would save {1e-3 * e.price_w:.3g} J"
        console.print(
            f"{e.instruction}: {e.option.sm_clock_mhz} MHz from {e.span.start_s:.4f} s for"
            f" {1e3 * e.span.duration_s:.3g} ms, {state}{price}"
        )
        console.print(f"  {e.sentence(given.request.profile.blocking_power_w)}")


def _print_most_valuable(console: Console, explained: Sequence[ClockExplanation]) -> None:
    from rich import box  # noqa: PLC0415  only tables need it
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("instruction", "clock, MHz", "time, ms", "slack, ms", "value of 1 ms, J"):
        table.add_column(title, justify="right" if table.columns else "left")
    for e in sorted(explained, key=lambda e: -(e.price_w or 0.0))[:_MAX_ROWS]:
        table.add_row(
            str(e.instruction),
            str(e.option.sm_clock_mhz),
            f"{1e3 * e.span.duration_s:.1f}",
            "critical" if e.span.is_critical else f"{1e3 * e.span.slack_s:.1f}",
            "" if e.price_w is None else f"{1e-3 * e.price_w:.3g}",
        )
    console.print(table)
    console.print("for the reason of a clock, name its instruction, e.g. F0@1")
