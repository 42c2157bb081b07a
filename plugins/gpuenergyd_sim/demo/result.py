"""Result of the demo: report, timelines, JSON and one sentence, with the same figures as `gpuenergyd status`."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gpuenergyd.cli.commands.report_output import write_text
from gpuenergyd.cli.output import people_console
from gpuenergyd.core.job.result_text import NOT_SIGNIFICANT, saving_span_text, saving_text
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.report.headline import speed_text
from gpuenergyd.report.job import JobReport, before_and_after, job_reports
from gpuenergyd.report.plugin_formats import ReportedJobs, plugin_format
from gpuenergyd.report.terminal.tables import job_table
from gpuenergyd.report.timelines import ObservedIteration
from gpuenergyd.store import JobSummary, open_history
from gpuenergyd_sim.demo.request import DEFAULT_POLICY, DemoRequest
from gpuenergyd_sim.demo.timelines import timelines_text


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The report of the demo's job, and its timelines before and after."""

    report: JobReport
    timelines: tuple[ObservedIteration, ...]
    page: str
    """Where the HTML report is, or why there is none."""


def write_report(database_url: str, out: Path, *, job_name: str) -> DemoResult:
    """Write the HTML report if a plugin has this format, and return the result.

    Raises:
        GpuEnergyError: the history has no job.
    """
    with open_history(database_url) as history:
        reports = job_reports(history, job=job_name)
        if not reports:
            raise GpuEnergyError("the history contains no job: the training never registered")
        note = "Demo: a small GPT on simulated GPUs under a private daemon."
        jobs = ReportedJobs(history=history, reports=reports, made_at=datetime.now().astimezone(), note=note)
        page = str(out)
        try:
            html = plugin_format("html")
        except UsageError as error:
            page = f"none, {error}"
        else:
            write_text(out, html.write(jobs))
        report = reports[-1]
        timelines = before_and_after(history, report) if report.plan_in_force is not None else ()
        return DemoResult(report, timelines, page)


def print_result(result: DemoResult) -> None:
    """Print the table of the job, the timelines before and after, and the path of the HTML report."""
    console = people_console()
    console.print(job_table(result.report))
    is_coloured = console.is_terminal and console.color_system is not None
    for line in timelines_text(result.timelines, width=console.width, is_coloured=is_coloured):
        console.print(line, no_wrap=True, crop=True)
    console.print(f"report with both timelines: {result.page}", soft_wrap=True)


def result_sentence(job: JobSummary, request: DemoRequest, *, reason: str) -> str:
    """Return the saving with its 95 % confidence interval and the speed in one sentence, or why there is none.

    `reason` is why the training ended without enough planned iterations; empty if it had enough.
    """
    trained = f"gpuenergyd trained this pipeline on {request.gpus}"
    if job.saving_ratio is None or job.saving_interval is None or job.slowdown_ratio is None:
        why = reason or "it takes two blocks at full speed between iterations under a plan"
        return f"{trained}, without a measured saving: {why}. {_what_to_do(request)}"
    speed = speed_text(job.slowdown_ratio)
    than = "" if speed.startswith("at ") else " than at full speed"
    interval = f"(95 % confidence interval: {saving_span_text(job.saving_interval)})"
    if job.is_saving_significant:
        return f"{trained} with {saving_text(job.saving_ratio)} per iteration {interval}, {speed}{than}."
    why = f"{reason}. " if reason else "The difference may be chance. "
    return f"{trained} with {NOT_SIGNIFICANT} per iteration {interval}, {speed}{than}. {why}{_what_to_do(request)}"


def _what_to_do(request: DemoRequest) -> str:
    """Return advice that is likely to give a newcomer a result."""
    if not request.is_in_virtual_time and request.driver == "simulated":
        return "On a busy host times are noisy: try again without --real-time."
    if request.policy != DEFAULT_POLICY:
        return f"Try the default policy: leave out --policy {request.policy}."
    return "Try more iterations, e.g. --tuned-iterations 80, or permit a slowdown, e.g. --max-slowdown 0.05."


def json_figures(report: JobReport, out: Path, request: DemoRequest) -> dict[str, Any]:
    job = report.summary
    return {
        "baseline_iteration_time_s": job.baseline_time_s,
        "iteration_time_s": job.iteration_time_s,
        "baseline_energy_j": job.baseline_energy_j,
        "energy_j": job.energy_per_iteration_j,
        **_measured("saving", job.saving_ratio, job.saving_interval),
        **_measured("slowdown", job.slowdown_ratio, job.slowdown_interval),
        "policy": job.policy,
        "gpus": request.num_gpus,
        **(report.carbon.to_dict() if report.carbon is not None else {}),
        "simulated": True,  # the demo rejects real GPUs
        "simulation": request.simulation if request.driver == "simulated" else None,
        "is_virtual_time": request.is_in_virtual_time,
        "report_path": str(out),
    }


def _measured(name: str, estimate: float | None, interval: tuple[float, float] | None) -> dict[str, float | None]:
    """Return an estimate and the ends of its 95 % confidence interval as JSON fields."""
    low, high = interval or (None, None)
    return {f"{name}_ratio": estimate, f"{name}_low_ratio": low, f"{name}_high_ratio": high}
