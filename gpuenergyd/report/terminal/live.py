"""The daemon's status in a terminal: watts saved now, one line per GPU, two or more per job.

`status` prints everything; `status --watch` prints what fits on the screen, jobs and GPUs with problems first.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from gpuenergyd.core.job.result_text import saving_span_text, saving_with_interval, slowdown_with_interval
from gpuenergyd.count_text import count_text
from gpuenergyd.report.formatting import MISSING, age_text, clock_text, power_text, replica_name_of, temperature_text
from gpuenergyd.report.terminal.status_lines import (
    Status,
    detail_lines,
    ended_job_lines,
    figure_lines,
    grid_lines,
    health_line,
    job_names,
    lease_lines,
    model_lines,
    option_lines,
    owner_text,
    refused_lines,
    service_lines,
    switching_lines,
    usual_states,
)

_LINES_OF_A_JOB = 2
_UNLIMITED = 1_000_000
_LOW_SCREEN = 8
"""Below this height the saved watts are not shown."""
_WIDE_SCREEN = 110
_BAR_WIDTH = 24
_OWNER_WIDTH = 19
_SPARKS = "▁▂▃▄▅▆▇█"
_GPU_HEADER = "GPU  state          clock  requested    power    temp    age  job"


def status_view(status: Status, width: int = 80) -> RenderableType:
    """Return the whole status; lines wider than the console are wrapped with their own indentation."""
    return Group(*(_wrapped(line) for line in view_lines(status, width)))


def screen_view(status: Status, console: Console, powers_w: Sequence[float | None] = ()) -> RenderableType:
    """Return a view that fits the screen of a console, with the number of GPUs and jobs that are not shown.

    `powers_w` are the latest readings of the total power, oldest first.
    """
    return Group(*view_lines(status, console.width, console.height, powers_w))


def total_power_w(status: Status) -> float | None:
    """Return the power of all GPUs; None while one of them is unknown."""
    powers_w = [gpu["power_w"] for gpu in status["gpus"]]
    return sum(powers_w) if powers_w and None not in powers_w else None


def view_lines(
    status: Status, width: int, height: int | None = None, powers_w: Sequence[float | None] = ()
) -> list[Text]:
    """Return the lines of the status: all, or at most `height` lines of at most `width` characters."""
    num_lines = _UNLIMITED if height is None else height
    head = [*health_line(status).split(), *_summary(status, width, powers_w)]
    head = head if num_lines >= _LOW_SCREEN else head[: len(health_line(status).split())]
    jobs, gpus = status["jobs"], status["gpus"]
    # Jobs have priority, because they are few and most relevant. GPUs with problems are always shown.
    room = num_lines - len(head) - 2
    num_jobs = _fitting(len(jobs) * _LINES_OF_A_JOB, max(_LINES_OF_A_JOB, room - min(len(gpus), 4))) // _LINES_OF_A_JOB
    used = num_jobs * _LINES_OF_A_JOB + (num_jobs < len(jobs))
    num_gpus = _fitting(len(gpus), room - used)
    usual = usual_states(status)
    shown = sorted(sorted(gpus, key=lambda gpu: gpu["state"] in usual)[:num_gpus], key=lambda gpu: int(gpu["index"]))
    table = _gpu_lines(shown, job_names(status), usual, width, is_cut=height is not None)
    gpu_lines = [_gpu_header(shown, width), *table] if gpus else [Text("no GPU found")]
    gpu_lines += _left_out(len(gpus) - len(shown), "GPU")
    job_width = None if height is None else width
    job_groups = [_job_lines(job, job_width) for job in jobs[:num_jobs]] or ([] if jobs else [[Text("no jobs")]])
    after = _left_out(len(jobs) - num_jobs, "job")
    spare = num_lines - len(head) - len(gpu_lines) - sum(map(len, job_groups)) - len(after) - 2
    gap = [Text()] if spare >= 0 else []
    notes = [Text(style="dim").append_text(line) for line in _notes(status)[: max(0, spare)]]
    spare -= len(notes)
    details = [_details(job) for job in jobs[:num_jobs]]
    if details and sum(map(len, details)) <= spare:
        job_groups = [[*lines, *more] for lines, more in zip(job_groups, details, strict=True)]
    lines = [*head, *gap, *gpu_lines, *gap, *(line for group in job_groups for line in group), *after, *notes]
    for line in lines if height is not None else ():
        line.truncate(width, overflow="ellipsis")
    return lines[:num_lines]


def _notes(status: Status) -> list[Text]:
    """Return the notes at the end, most important first; those that do not fit are left out."""
    of_gpus = [*refused_lines(status), *lease_lines(status), *service_lines(status)]
    of_host = [*swing_lines(status.get("swing")), *grid_lines(status.get("carbon"))[1:]]
    return [*of_gpus, *ended_job_lines(status), *of_host, *switching_lines(status), *model_lines(status)]


def _summary(status: Status, width: int, powers_w: Sequence[float | None]) -> list[Text]:
    """Return the watts saved now, the total power with recent history, the power budget and the carbon intensity."""
    lines = saved_power_lines(status)
    power_w = total_power_w(status)
    if power_w is not None:
        lines.append(_power_line(power_w, powers_w, width))
    return [*lines, *power_lines(status.get("power")), *grid_lines(status.get("carbon"))[:1]]


def _power_line(power_w: float, powers_w: Sequence[float | None], width: int) -> Text:
    """Return the power of all GPUs, and its recent history as one block character per second."""
    shown = powers_w[-max(0, width - 54) :]
    course = _sparkline(shown)
    highest_w = max((reading for reading in shown if reading is not None), default=0.0)
    scale = f", last {len(shown)} s, 0 to {power_text(highest_w)} " if course else ""
    return Text.assemble(f"{power_text(power_w)} drawn by all GPUs{scale}", (course, "cyan"))


def _sparkline(values: Sequence[float | None]) -> str:
    """Return one block character per value, from 0 to the highest; a space if unknown."""
    highest = max((value for value in values if value is not None), default=0.0)
    if highest <= 0 or len(values) < 2:
        return ""
    last = len(_SPARKS) - 1
    return "".join(" " if value is None else _SPARKS[round(last * max(0.0, value) / highest)] for value in values)


def _fitting(wanted: int, room: int) -> int:
    """Return how many lines fit; if not all do, one less, to leave a line for the number of those not shown."""
    return wanted if wanted <= room else max(0, room - 1)


def _left_out(number: int, what: str) -> list[Text]:
    return [Text(count_text(number, f"more {what}"), style="dim")] if number > 0 else []


def _gpu_header(gpus: Sequence[Status], width: int) -> Text:
    header = Text(_GPU_HEADER, style="bold")
    if width >= _WIDE_SCREEN:
        header.append(f"{'':17}power, bar to {power_text(_highest_w(gpus))}" if _highest_w(gpus) else "")
    return header


def _highest_w(gpus: Sequence[Status]) -> float:
    """Return the maximum of the power bars: the highest power, rounded up to hundreds of watts."""
    return 100.0 * -(-max((gpu["power_w"] or 0.0 for gpu in gpus), default=0.0) // 100.0)


def _gpu_lines(
    gpus: Sequence[Status], names: Mapping[str, str], usual: Collection[str], width: int, *, is_cut: bool
) -> list[Text]:
    """Return one line per GPU, with a power bar on a wide screen; long names are shortened or put on a second line."""
    highest_w = _highest_w(gpus)
    lines = []
    for gpu in gpus:
        requested = gpu["requested_sm_clock_mhz"]
        line = Text(f"{gpu['index']:>3}  ")
        line.append(f"{gpu['state']:<12}", style="green" if gpu["state"] in usual else "bold red")
        line.append(
            f"{clock_text(gpu['sm_clock_mhz']):>8} {'full' if requested is None else clock_text(requested):>10}"
            f" {power_text(gpu['power_w']):>8} {temperature_text(gpu['temperature_celsius']):>7}"
            f" {age_text(gpu['reading_age_s']):>6}  "
        )
        owner = owner_text(gpu, names)
        if not is_cut and len(line) + len(owner) > width:
            lines += [line, Text(f"     {owner}")]
            continue
        if width >= _WIDE_SCREEN and highest_w > 0:
            filled = round(_BAR_WIDTH * (gpu["power_w"] or 0.0) / highest_w)
            line.append(f"{_shortened(owner, _OWNER_WIDTH):<{_OWNER_WIDTH + 1}}")
            line.append("━" * filled, style="cyan")
            line.append("─" * (_BAR_WIDTH - filled), style="dim")
        else:
            line.append(_shortened(owner, width - len(line)))
        lines.append(line)
    return lines


def _shortened(name: str, width: int) -> str:
    """Return a name without its middle if it is too long, because names of jobs often differ only at their ends."""
    if len(name) <= width:
        return name
    num_last = max(0, width - 1) // 2
    return f"{name[: max(0, width - 1 - num_last)]}…{name[len(name) - num_last :]}"


def _job_lines(job: Status, width: int | None) -> list[Text]:
    """Return the result of a job, and its iterations with the reason of its plan.

    With unlimited width both intervals are in the result. Otherwise only that of the saving is shown, which on a narrow
    screen is in the second line.
    """
    phase_style = "green" if job["phase"] == "tuned" else "yellow"
    name = Text.assemble((replica_name_of(job), "bold"), " ", (job["phase"], phase_style), ": ")
    detail = ResultDetail.BOTH_INTERVALS if width is None else ResultDetail.SAVING_INTERVAL
    first = Text.assemble(name, result_text(job, detail=detail))
    iterations = count_text(job["num_iterations"], "iteration")
    is_too_narrow = width is not None and len(first) > width
    if is_too_narrow:
        first = Text.assemble(name, result_text(job, detail=ResultDetail.NO_INTERVAL))
    if is_too_narrow and (interval := job.get("saving_interval")):
        iterations = f"95 %: {saving_span_text(interval).removesuffix(' energy')}; {iterations}"
    elif job.get("num_trial_iterations"):
        iterations += f", {job['num_trial_iterations']} in trials"
    why = job["plan_reason"] or job.get("phase_reason") or MISSING
    return [first, Text(f"  {iterations}; {why}", style="dim")]


def _details(job: Status) -> list[Text]:
    """Return options and figures of a job, and the details that apply to it."""
    return [Text.assemble("  ", line) for line in (*option_lines(job), *figure_lines(job), *detail_lines(job))]


def _wrapped(line: Text) -> RenderableType:
    """Return a line whose continuation lines are indented like the first one."""
    indent = len(line.plain) - len(line.plain.lstrip())
    return Padding.indent(line[indent:], indent) if indent else line


def power_lines(power: Mapping[str, Any] | None) -> list[Text]:
    """Return the power budget and the host's present power; empty without a budget."""
    if power is None or power["power_budget_w"] is None:
        return []
    reason = f" ({power['reason']})" if power["reason"] else ""
    text = f"power: {power_text(power['measured_w'])} of a budget of {power_text(power['power_budget_w'])}{reason}"
    if power["is_cutting"]:
        text += "; clocks are lowered beyond plans"
    elif power["division"]:
        text += f"; {power['division']}"
    return [Text(text)]


def swing_lines(swing: Mapping[str, Any] | None) -> list[Text]:
    """Return the power swing of all GPUs in the last minute; empty while unknown."""
    if swing is None:
        return []
    return [
        Text(
            f"last minute: {power_text(swing['trough_w'])} to {power_text(swing['peak_w'])}, ramps of up to"
            f" {power_text(swing['ramp_w_per_s'])}/s, swings by {power_text(swing['swing_rms_w'])} RMS (0.1 to"
            f" {swing['highest_hz']:g} Hz)"
        )
    ]


def saved_power_lines(status: Mapping[str, Any]) -> list[Text]:
    """Return the watts saved now with their interval, and the jobs whose saving is not significant."""
    jobs, saved_w = status["jobs"], status.get("watts_saved_w")
    if not jobs:
        return []
    counted, uncounted = ([job for job in jobs if _is_counted(job) is wanted] for wanted in (True, False))
    if saved_w is None:
        lines = [Text("no significant saving now")]
    else:
        low, high = status["watts_saved_interval"]
        what = "saved now" if saved_w >= 0 else "more than at full speed now"
        of_jobs = f"{len(counted)} of {count_text(len(jobs), 'job')}"
        lines = [
            Text.assemble(
                (f"{power_text(abs(saved_w))} {what}", "bold green" if saved_w >= 0 else "bold"),
                f" (95 %: {power_text(low)} to {power_text(high)}; {of_jobs})",
            )
        ]
    if uncounted:
        named = ", ".join(f"{replica_name_of(job)} ({power_text(job['watts_saved'])})" for job in uncounted)
        lines.append(Text(f"not counted, because not significant: {named}", style="dim"))
    return lines


class ResultDetail(Enum):
    """The 95 % intervals that the result of a job contains."""

    NO_INTERVAL = auto()
    SAVING_INTERVAL = auto()
    BOTH_INTERVALS = auto()


def result_text(job: Mapping[str, Any], *, detail: ResultDetail = ResultDetail.BOTH_INTERVALS) -> str:
    """Return the saving of a job and its change of speed with their intervals, and the watts saved."""
    saving = job.get("saving_interval") if detail is not ResultDetail.NO_INTERVAL else None
    slowdown = job.get("slowdown_interval") if detail is ResultDetail.BOTH_INTERVALS else None
    parts = []
    if job["saving_ratio"] is not None:
        is_significant = job["is_saving_significant"]
        parts.append(saving_with_interval(job["saving_ratio"], saving, is_significant=is_significant))
    if job["slowdown_ratio"] is not None:
        parts.append(slowdown_with_interval(job["slowdown_ratio"], slowdown))
    if job.get("watts_saved") is not None and job["is_saving_significant"]:
        saved_w = job["watts_saved"]
        parts.append(f"{power_text(abs(saved_w))} {'saved' if saved_w >= 0 else 'more'}")
    return ", ".join(parts) or "no saving measured yet"


def _is_counted(job: Mapping[str, Any]) -> bool | None:
    """Return whether the watts of a job are included in the sum; None if it saves none at present."""
    return None if job.get("watts_saved") is None else bool(job["is_saving_significant"])
