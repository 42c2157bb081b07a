"""What the daemon is doing now, drawn for a terminal: health, GPUs, jobs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuenergyd.report.formatting import (
    MISSING,
    age_text,
    clock_text,
    energy_text,
    grams_text,
    interval_text,
    power_text,
    ratio_text,
    temperature_text,
    time_text,
)

Status = Mapping[str, Any]
"""The body of the daemon's GET /v1/status."""


def status_view(status: Status) -> RenderableType:
    """Return the whole view: one line of health, then GPUs, then jobs."""
    grid = grid_lines(status.get("carbon"))
    return Group(health_line(status), *grid, _gpus(status), *_switching(status), *_jobs(status))


def health_line(status: Status) -> Text:
    """Return what is wrong, if anything, and what runs, each in a line."""
    line = Text()
    if status["is_degraded"]:
        reasons = "; ".join(status["degraded_reasons"]) or "no reason given"
        line.append(f"degraded: {reasons}\n", style="bold red")
    driver = "simulated GPUs" if status["driver"] == "simulated" else "NVML"
    does = "controls clocks" if status["mode"] == "control" else "observes only, changes no clock"
    line.append(
        f"gpuenergyd {status['version']}, pid {status['pid']}, up {age_text(status['uptime_s'])}: {driver}, {does}"
    )
    return line


def grid_lines(grid: Mapping[str, Any] | None) -> list[Text]:
    """Return what is known of the grid, what it rests on, and what following it can be worth."""
    if grid is None:
        return []
    value = "unknown" if grid["value"] is None else f"{grid['value']:.4g} {grid['unit']}"
    line = f"zone {grid['zone']}: {value} ({grid['basis']}, {age_text(grid['age_s'])} old)"
    if grid["replayed_hour_s"] is not None:
        line += f"; a trace lived again, an hour in {grid['replayed_hour_s']:g} s"
    lines = [Text(line)]
    if grid["forecast_model"] is not None:
        skill = grid["live_skill"]
        said = "too few have come due to judge them"
        if skill is not None:
            said = (
                f"error against the best naive one: 1 h {ratio_text(-skill['skill_1h_ratio'])},"
                f" 6 h {ratio_text(-skill['skill_6h_ratio'])}, day {ratio_text(-skill['skill_24h_mean_ratio'])}"
                f" ({skill['num_origins']} forecasts)"
            )
        lines.append(Text(f"forecast: {grid['forecast_model']}; {said}"))
    if grid["timing_value"] is not None:
        lines.append(Text(timing_value_text(grid["timing_value"])))
    return lines


def timing_value_text(value: Mapping[str, Any]) -> str:
    """Return the recent upper bound of the gain from choosing the hours, in one sentence."""
    curve = "an assumed frontier" if value["is_frontier_assumed"] else "the job's frontier"
    return (
        f"choosing the hours could have added {100 * value['timing_gain_ratio']:.2f} points to the"
        f" {100 * value['constant_saving_ratio']:.2f} % that {ratio_text(value['max_slowdown_ratio'])} time saves"
        f" at any hour (perfect knowledge, last {value['num_days']} days, {value['job_hours']:.0f} h jobs, {curve})"
    )


def _gpus(status: Status) -> RenderableType:
    if not status["gpus"]:
        return Text("no GPU found")
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("GPU", no_wrap=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=24)
    table.add_column("state", no_wrap=True)
    for name in ("clock", "asked", "power", "temp", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for gpu in status["gpus"]:
        asked = gpu["requested_sm_clock_mhz"]
        table.add_row(
            str(gpu["index"]),
            gpu["model_name"].removeprefix("NVIDIA ").removesuffix(" (simulated)"),
            Text(gpu["state"], style="" if gpu["state"] == "ok" else "bold red"),
            clock_text(gpu["sm_clock_mhz"]),
            "full" if asked is None else clock_text(asked),
            power_text(gpu["power_w"]),
            temperature_text(gpu["temperature_celsius"]),
            age_text(gpu["reading_age_s"]),
        )
    return table


def _switching(status: Status) -> list[RenderableType]:
    """One line for all GPUs: how long clock changes take, and how many GPUs have shown that themselves."""
    known = [gpu["switching"] for gpu in status["gpus"]]
    if not known:
        return []
    raises, lowers = (_span_text([own[key] for own in known]) for key in ("raise_s", "lower_s"))
    bases = Counter(own["basis"] for own in known)
    basis = ", ".join(f"{basis} on {count} of {len(known)} GPUs" for basis, count in sorted(bases.items()))
    return [Text(f"clock changes: raise {raises}, lower {lowers} ({basis})")]


def _span_text(times_s: Sequence[float]) -> str:
    low, high = time_text(min(times_s)), time_text(max(times_s))
    return low if low == high else f"{low} to {high}"


def _jobs(status: Status) -> list[RenderableType]:
    if not status["jobs"]:
        return [Text("no job")]
    views: list[RenderableType] = []
    for job in status["jobs"]:
        title = Text.assemble(
            (job["job_name"], "bold"),
            f" ({job['job_id']}): {job['phase']}, policy {job['policy']}, {job['schedule'] or 'schedule unknown'},"
            f" {job['num_ranks']} ranks x {job['num_microbatches']} microbatches, {job['num_iterations']} iterations",
        )
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column("")
        for name in ("time", "energy", "slower by", "saves", "iterations"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row(
            "baseline",
            time_text(job["baseline_time_s"]),
            energy_text(job["baseline_energy_j"]),
            "",
            "",
            _count(job["num_baseline_iterations"]),
        )
        if job["num_profile_iterations"]:
            table.add_row("profiling", "", "", "", "", _count(job["num_profile_iterations"]))
        table.add_row(
            "tuned",
            time_text(job["iteration_time_s"]),
            energy_text(job["energy_j"]),
            ratio_text(job["slowdown_ratio"]),
            ratio_text(job["saving_ratio"]),
            _count(job["num_tuned_iterations"]),
        )
        if job["predicted_energy_j"] is not None:
            table.add_row(
                "predicted", time_text(job["predicted_iteration_time_s"]), energy_text(job["predicted_energy_j"])
            )
        if job["lower_bound_j"] is not None:
            table.add_row("lower bound", "", energy_text(job["lower_bound_j"]))
        plan = Text(f"plan {job['plan_id'] or MISSING}: {job['plan_reason'] or MISSING}")
        retry = job.get("retry_in_iterations")
        again = "" if retry is None else f"; again in {retry} iterations"
        again = "; for good" if job.get("is_given_up") else again
        why = Text(f"{job['phase']}: {job.get('phase_reason') or MISSING}{again}")
        views.extend((title, table, why, *_notice(job), plan, *_replicas(job), *_following(job), *_would_be(job)))
    return views


def _would_be(job: Mapping[str, Any]) -> list[RenderableType]:
    """What a job would save whose GPUs are only observed: a prediction, never among what was measured."""
    if not job.get("is_observing") or job["predicted_saving_basis"] is None:
        return []
    if job["predicted_saving_ratio"] is None:
        return [Text(f"would save: not known; {job['predicted_saving_basis']}")]
    low, high = job["predicted_saving_low_ratio"], job["predicted_saving_high_ratio"]
    span = f" ({interval_text((low, high))})" if low is not None and high is not None else ""
    return [
        Text(
            f"would save {ratio_text(job['predicted_saving_ratio'])}{span}, predicted: {job['predicted_saving_basis']}"
        )
    ]


def _notice(job: Mapping[str, Any]) -> list[RenderableType]:
    """What last made a job go on differently."""
    if not job.get("last_notice"):
        return []
    return [Text(f"noticed {job['last_notice_iterations_ago']} iterations ago: {job['last_notice']}")]


def _replicas(job: Mapping[str, Any]) -> list[RenderableType]:
    """What the slowest replica of the training imposes on a job, where one does."""
    if job.get("straggler_time_s") is None:
        return []
    since = age_text(job["straggler_since_s"])
    saved = job.get("extrinsic_saving_ratio")
    saves = f", which saves {100 * saved:.1f} % against waiting" if saved is not None else ""
    why = job["straggler_reason"] or MISSING
    return [Text(f"slowed to {time_text(job['straggler_time_s'])} for {since}{saves}: {why}")]


def _following(job: Status) -> list[Text]:
    """Return what a job owes and what that saved, where a signal is followed or grams are counted."""
    target, carbon = job.get("target"), job.get("carbon")
    if target is None:
        return []
    owed = "full speed" if target["permitted_time_s"] is None else time_text(target["permitted_time_s"])
    so_far = f"{ratio_text(target['slowdown_so_far_ratio'])} of {ratio_text(target['budget_ratio'])} used"
    lines = [Text(f"target {target['policy']}: {owed}, {so_far} ({target['reason']})")]
    if target["length_basis"] is not None:
        lines.append(Text(f"length of the job: {target['length_basis']}"))
    if carbon is not None and carbon["carbon_g"] is not None:
        by_plan, by_frontier, by_timing = (
            grams_text(carbon[f"saved_by_{what}_g"]) for what in ("plan", "frontier", "timing")
        )
        lines.append(
            Text(
                f"tuned iterations emitted {grams_text(carbon['carbon_g'])}; saved {by_plan} at no slowdown,"
                f" {by_frontier} by running slower, {by_timing} by choosing the hours"
            )
        )
    return lines


def _count(number: int | None) -> str:
    return MISSING if number is None else str(number)
