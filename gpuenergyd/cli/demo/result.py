"""Result of the demo: report, timelines, JSON and one sentence, all with the figures of `gpuenergyd status`."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gpuenergyd.cli.commands.report_output import write_text
from gpuenergyd.cli.demo.request import DemoRequest
from gpuenergyd.cli.output import people_console
from gpuenergyd.core.job.result_text import NOT_SIGNIFICANT, saving_span_text, saving_text
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.report.headline import speed_text
from gpuenergyd.report.job import JobReport, before_and_after, job_reports
from gpuenergyd.report.observed_iteration import ObservedIteration
from gpuenergyd.report.page import report_page
from gpuenergyd.report.terminal.tables import job_table
from gpuenergyd.report.terminal.timelines import timelines_text
from gpuenergyd.store import JobSummary, open_history


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The report of the demo's job, and its timelines before and after."""

    report: JobReport
    timelines: tuple[ObservedIteration, ...]


def write_report(database_url: str, out: Path, *, job_name: str) -> DemoResult:
    """Write the HTML report, and return the result.

    Raises:
        GpuEnergyError: the history has no job, or no tuned iterations.
    """
    with open_history(database_url) as history:
        reports = job_reports(history, job=job_name)
        if not reports:
            raise GpuEnergyError("the history contains no job: the training never registered")
        note = "Demo: a small GPT on simulated GPUs under a private daemon."
        write_text(out, report_page(history, reports, made_at=datetime.now().astimezone(), note=note))
        report = reports[-1]
        if report.plan_in_force is None:
            raise GpuEnergyError("the history contains no planned iterations")
        return DemoResult(report, before_and_after(history, report))


def print_result(result: DemoResult, out: Path) -> None:
    """Print the table of the job, the timelines before and after, and the path of the HTML report."""
    console = people_console()
    console.print(job_table(result.report))
    is_coloured = console.is_terminal and console.color_system is not None
    for line in timelines_text(result.timelines, width=console.width, is_coloured=is_coloured):
        console.print(line, no_wrap=True, crop=True)
    console.print(f"report with both timelines: {out}", soft_wrap=True)


def result_sentence(job: JobSummary, *, gpus: str) -> str:
    """Return the saving with its 95 % confidence interval and the speed in one sentence; `gpus` names the GPUs."""
    if job.saving_ratio is None or job.saving_interval is None or job.slowdown_ratio is None:
        return (
            f"gpuenergyd trained this pipeline on {gpus}, with too few iterations for a measured saving: it takes three"
            " at full speed and three tuned ones."
        )
    saving = saving_text(job.saving_ratio) if job.is_saving_significant else NOT_SIGNIFICANT
    speed = speed_text(job.slowdown_ratio)
    than = "" if speed.startswith("at ") else " than at full speed"
    return (
        f"gpuenergyd trained this pipeline on {gpus} with {saving} per iteration (95 %"
        f" confidence interval: {saving_span_text(job.saving_interval)}), {speed}{than}."
    )


def json_figures(report: JobReport, out: Path, request: DemoRequest) -> dict[str, Any]:
    """Return the fields of the JSON document."""
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
        "report_path": str(out),
    }


def _measured(name: str, estimate: float | None, interval: tuple[float, float] | None) -> dict[str, float | None]:
    """Return an estimate and the ends of its 95 % confidence interval as JSON fields."""
    low, high = interval or (None, None)
    return {f"{name}_ratio": estimate, f"{name}_low_ratio": low, f"{name}_high_ratio": high}
