"""The live view in a screen of a given size: all of it where there is room, else in short lines, nothing cut off."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gpuenergyd.report.formatting import (
    MISSING,
    age_text,
    clock_text,
    power_text,
    ratio_text,
    temperature_text,
    time_text,
)
from gpuenergyd.report.terminal.live import Status, health_line, status_view

_LINES_OF_A_JOB = 2


def screen_view(status: Status, console: Console) -> RenderableType:
    """Return what fits the screen of a console; what had to be left out is counted in its place."""
    full = status_view(status)
    if len(console.render_lines(full)) <= console.height:
        return full
    return Group(*short_lines(status, console.width, console.height))


def short_lines(status: Status, width: int, height: int) -> list[Text]:
    """Return health, one line for each GPU and two for each job: at most `height`, none wider than `width`."""
    health = health_line(status).split()
    jobs, gpus = status["jobs"], status["gpus"]
    # Jobs come first: few, and what a person looks for. A GPU in trouble is never among those that are left out.
    room = height - len(health) - 2
    num_jobs = _fitting(len(jobs) * _LINES_OF_A_JOB, max(_LINES_OF_A_JOB, room - min(len(gpus), 4))) // _LINES_OF_A_JOB
    used = num_jobs * _LINES_OF_A_JOB + (num_jobs < len(jobs))
    num_gpus = _fitting(len(gpus), room - used)
    shown = sorted(sorted(gpus, key=lambda gpu: gpu["state"] == "ok")[:num_gpus], key=lambda gpu: int(gpu["index"]))
    lines = [*health, Text("GPU  state          clock      asked    power    temp    age", style="bold")]
    lines += [_gpu_line(gpu) for gpu in shown]
    lines += _left_out(len(gpus) - len(shown), "GPU")
    lines += [Text("no job")] if not jobs else [line for job in jobs[:num_jobs] for line in _job_lines(job)]
    lines += _left_out(len(jobs) - num_jobs, "job")
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _fitting(wanted: int, room: int) -> int:
    """Return how many lines fit; where not all do, one line less, for it says how many are left out."""
    return wanted if wanted <= room else max(0, room - 1)


def _left_out(number: int, what: str) -> list[Text]:
    return [Text(f"and {number} {what}{'s' if number > 1 else ''} more", style="dim")] if number > 0 else []


def _gpu_line(gpu: Status) -> Text:
    asked = gpu["requested_sm_clock_mhz"]
    line = Text(f"{gpu['index']:>3}  ")
    line.append(f"{gpu['state']:<12}", style="" if gpu["state"] == "ok" else "bold red")
    line.append(
        f"{clock_text(gpu['sm_clock_mhz']):>8} {'full' if asked is None else clock_text(asked):>10}"
        f" {power_text(gpu['power_w']):>8} {temperature_text(gpu['temperature_celsius']):>7}"
        f" {age_text(gpu['reading_age_s']):>6}"
    )
    return line


def _job_lines(job: Status) -> Sequence[Text]:
    target = job.get("target")
    owed = f", owes {time_text(target['permitted_time_s'])}" if target and target["permitted_time_s"] else ""
    profiled = f", {job['num_profile_iterations']} profiled" if job["num_profile_iterations"] else ""
    first = Text.assemble(
        (job["job_name"], "bold"),
        f" {job['phase']}: saves {ratio_text(job['saving_ratio'])} at {ratio_text(job['slowdown_ratio'])} time{owed};"
        f" {job['num_iterations']} iterations{profiled}",
    )
    return first, Text(f"  {job['plan_reason'] or job.get('phase_reason') or MISSING}", style="dim")
