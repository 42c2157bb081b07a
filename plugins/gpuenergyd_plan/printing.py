"""Output of `gpuenergyd plan` for people: tables of its figures, and notes about assumptions."""

import os
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from gpuenergyd.cli.output import people_console
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.policy_api.policy import FrontierPoint
from gpuenergyd.count_text import count_text
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd_plan.inputs import PlanInput
from gpuenergyd_plan.tables import AUTO_SCHEDULE

_KINDS = tuple(InstructionKind)


def print_plan(given: PlanInput, figures: dict[str, Any]) -> None:
    """Print the figures of the JSON document for people."""
    console = people_console()
    extra = figures["extra_inflight"]
    console.print(
        f"{given.request.name}: {figures['schedule']}, {count_text(figures['num_stages'], 'stage')},"
        f" {count_text(figures['num_microbatches'], 'microbatch')}"
        + (f", extra in flight {extra}" if any(extra) else "")
    )
    console.print(_summary_table(figures))
    power_lines = (*_power_lines(figures), *swing_lines(figures))
    for line in (*_order_lines(figures), *_waiting_lines(figures), *power_lines, *_job_lines(figures)):
        console.print(line)
    console.print(_clocks_table(figures["clocks"]))
    if figures["frontier"]:
        console.print(_frontier_table(figures["frontier"]))
    if "switching" in figures:
        console.print(_switching_table(figures["switching"]))
    console.print(_time_line(figures))
    for note in _notes(given, figures):
        console.print(f"note: {note}")


def _time_line(figures: dict[str, Any]) -> str:
    """Return one line on how long the command took, and how much of that the planner took."""
    solved = f"{figures['solve_cpu_s']:.2f} CPU s to solve"
    if figures["compile_cpu_s"]:
        solved += f" and {figures['compile_cpu_s']:.1f} CPU s to compile the planner (once)"
    return f"took {_own_age_s():.2f} s since the command was started, of which {solved}"


def _own_age_s() -> float:
    """Return the time since this process started, which includes starting Python and importing modules."""
    started_ticks = process_start_ticks(os.getpid())
    assert started_ticks is not None  # it lives
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


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
    """Return lines on what the order itself saves, if it was chosen or is not the order of the baseline."""
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
            "what any other order could save was not computed"
            if bound is None
            else f"no order within this memory saves more than {100 * bound:.2f} %"
        )
    if "stage_of_chunk" in figures:
        lines.append(f"stages of each GPU: {', '.join('+'.join(map(str, gpu)) for gpu in figures['stage_of_chunk'])}")
    lines.append(f"microbatches held per stage: {', '.join(f'{held:g}' for held in figures['held_microbatches'])}")
    split = [stage for stage, order in figures["order"].items() if any(kind == "I" for kind, *_ in order)]
    if len(split) == len(figures["order"]):
        lines.append("backward split on all stages")
    elif split:
        lines.append(f"backward split on stages {', '.join(split)}")
    return lines


def _waiting_lines(figures: dict[str, Any]) -> list[str]:
    """Return a line on what waiting at lower clocks saves."""
    waiting = figures.get("waiting")
    if waiting is None:
        return []
    kept = 100 * waiting["kept_clock_saving_ratio"]
    lowered = waiting["lowered"]
    waited_s = sum(wait["wait_s"] for wait in lowered)
    return [
        (
            f"clocks are lowered in {count_text(len(lowered), 'wait')}, {waited_s:.3f} s in all; without that it would"
            f" save {kept:.2f} %"
        )
    ]


def _power_lines(figures: dict[str, Any]) -> list[str]:
    """Return lines on the power under a cap, the gap to the fastest possible plan, and the cost of simpler methods."""
    if "power_cap_w" not in figures:
        return []
    window_s = figures["window_s"]
    where = f"in any {window_s:g} s" if window_s else "at any instant"
    gap = 100 * (figures["iteration_time_s"] / figures["time_bound_s"] - 1)
    usual = []
    for name, title in (("single_clock", "one locked clock for all GPUs"), ("equal_limits", "equal power limits")):
        slowdown = figures[f"{name}_slowdown_ratio"]
        cost = "cannot stay below it" if slowdown is None else f"would take {100 * slowdown:+.2f} %"
        usual.append(f"{title} {cost}")
    cap = f"a cap of {figures['power_cap_w']:g} W (full speed {figures['full_speed_peak_power_w']:.1f} W)"
    return [
        f"power {where}: at most {figures['peak_power_w']:.1f} W under {cap}; mean {figures['mean_power_w']:.1f} W",
        f"no plan of this order under the cap is faster than {figures['time_bound_s']:.4f} s (this one {gap:+.2f} %)",
        f"under the same cap {', '.join(usual)}",
    ]


def _job_lines(figures: dict[str, Any]) -> list[str]:
    """Return lines that compare the running job's plan in force, and tell how to plan from an exported profile."""
    if "job" not in figures:
        return []
    job, in_force, full_j = figures["job"], figures["job"]["in_force"], figures["baseline_energy_j"]
    lines = [
        f"times are those of the pipeline; an iteration takes {1000 * job['bias_s']:.3g} ms more (optimizer, data)"
    ]
    if in_force is None:
        lines.append(f"the job is in phase {job['phase']}: no plan with clocks is in force")
    else:
        saved = 100 * (1 - in_force["energy_j"] / full_j) if full_j else 0.0
        lines.append(
            f"plan in force {in_force['plan_id']!r}: {in_force['iteration_time_s']:.4f} s, {in_force['energy_j']:.1f} J"
            f" by the same profile ({-saved:+.2f} %)"
        )
    if figures["plan_command"]:
        lines.append(f"to plan from the exported profile: {figures['plan_command']}")
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
            f"{len(figures['throttling'])} of {count_text(len(given.request.profile.classes), 'instruction')} are"
            " throttled:"
            f" clocks above {clock} MHz do not make them faster"
        )
    return [*notes, *given.notes]


def swing_lines(figures: dict[str, Any]) -> list[str]:
    """Return one line on the power swing of the plan; empty if it is unknown."""
    if "swing" not in figures:
        return []
    swing = figures["swing"]
    planned, full_speed = swing["planned"], swing["full_speed"]
    change = swing["band_energy_against_least_energy_ratio"]
    trough, peak = (f"{planned[key]:.1f} W (full speed {full_speed[key]:.1f} W)" for key in ("trough_w", "peak_w"))
    rms = f"{planned['band_rms_w']:.1f} W RMS from 0.1 to 20 Hz (full speed {full_speed['band_rms_w']:.1f} W)"
    flatter = f", its energy {100 * change:+.1f} % against the plan of least energy" if change else ""
    return [f"power of all GPUs is between {trough} and {peak}; it swings by {rms}{flatter}"]
