"""The live view in a screen of limited size: in full if it fits, else one or two lines per GPU and job."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gpuenergyd.report.formatting import (
    MISSING,
    age_text,
    clock_text,
    power_text,
    saving_text,
    slowdown_text,
    temperature_text,
    time_text,
)
from gpuenergyd.report.terminal.live import Status, health_line, status_view

_LINES_OF_A_JOB = 2


def screen_view(status: Status, console: Console) -> RenderableType:
    """Return a view that fits the screen of a console; it states how many GPUs and jobs are not shown."""
    full = status_view(status)
    if len(console.render_lines(full)) <= console.height:
        return full
    return Group(*short_lines(status, console.width, console.height))


def short_lines(status: Status, width: int, height: int) -> list[Text]:
    """Return the health, one line per GPU and two per job: at most `height` lines of at most `width` characters."""
    health = health_line(status).split()
    jobs, gpus = status["jobs"], status["gpus"]
    # Jobs have priority: they are few and most relevant. GPUs with problems are always shown.
    room = height - len(health) - 2
    num_jobs = _fitting(len(jobs) * _LINES_OF_A_JOB, max(_LINES_OF_A_JOB, room - min(len(gpus), 4))) // _LINES_OF_A_JOB
    used = num_jobs * _LINES_OF_A_JOB + (num_jobs < len(jobs))
    num_gpus = _fitting(len(gpus), room - used)
    shown = sorted(sorted(gpus, key=lambda gpu: gpu["state"] == "ok")[:num_gpus], key=lambda gpu: int(gpu["index"]))
    lines = [*health, Text("GPU  state          clock  requested    power    temp    age", style="bold")]
    lines += [_gpu_line(gpu) for gpu in shown]
    lines += _left_out(len(gpus) - len(shown), "GPU")
    lines += [Text("no jobs")] if not jobs else [line for job in jobs[:num_jobs] for line in _job_lines(job)]
    lines += _left_out(len(jobs) - num_jobs, "job")
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _fitting(wanted: int, room: int) -> int:
    """Return how many lines fit; if not all do, one less, to leave room for the number of those not shown."""
    return wanted if wanted <= room else max(0, room - 1)


def _left_out(number: int, what: str) -> list[Text]:
    return [Text(f"{number} more {what}{'s' if number > 1 else ''}", style="dim")] if number > 0 else []


def _gpu_line(gpu: Status) -> Text:
    requested = gpu["requested_sm_clock_mhz"]
    line = Text(f"{gpu['index']:>3}  ")
    line.append(f"{gpu['state']:<12}", style="" if gpu["state"] == "ok" else "bold red")
    line.append(
        f"{clock_text(gpu['sm_clock_mhz']):>8} {'full' if requested is None else clock_text(requested):>10}"
        f" {power_text(gpu['power_w']):>8} {temperature_text(gpu['temperature_celsius']):>7}"
        f" {age_text(gpu['reading_age_s']):>6}"
    )
    return line


def _job_lines(job: Status) -> Sequence[Text]:
    target = job.get("target")
    target_time = f", target {time_text(target['permitted_time_s'])}" if target and target["permitted_time_s"] else ""
    profiled = f", {job['num_profile_iterations']} profiled" if job["num_profile_iterations"] else ""
    first = Text.assemble(
        (job["job_name"], "bold"),
        f" {job['phase']}: {saving_text(job['saving_ratio'])}, {slowdown_text(job['slowdown_ratio'])}{target_time};"
        f" {job['num_iterations']} iterations{profiled}",
    )
    return first, Text(f"  {job['plan_reason'] or job.get('phase_reason') or MISSING}", style="dim")
