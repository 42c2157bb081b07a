"""The known values of a job, each with its name and a note, as the page shows them."""

from dataclasses import dataclass

from gpuenergyd.core.job.result_text import NOT_SIGNIFICANT, saving_span_text, saving_text, slowdown_span_text
from gpuenergyd.count_text import count_text
from gpuenergyd.report.formatting import energy_text, time_text
from gpuenergyd.report.headline import is_of_modules, speed_text
from gpuenergyd.report.job import JobReport


@dataclass(frozen=True, slots=True)
class Tile:
    """One value of a job with its name and a note below it."""

    name: str
    value: str
    note: str = ""
    is_good: bool = False


def tiles(report: JobReport) -> list[Tile]:
    """Return the known values of a job; for a job without a plan, only those at full speed."""
    job = report.summary
    found: list[Tile] = []
    if job.saving_ratio is not None:
        note = "95 %: " + saving_span_text(job.saving_interval) if job.saving_interval else ""
        is_known = bool(job.is_saving_significant)
        value = saving_text(job.saving_ratio).removesuffix(" energy") if is_known else NOT_SIGNIFICANT
        is_good = is_known and job.saving_ratio > 0
        found.append(Tile("energy per iteration", value, note.removesuffix(" energy"), is_good))
    if job.slowdown_ratio is not None:
        note = "95 %: " + slowdown_span_text(job.slowdown_interval) if job.slowdown_interval else ""
        found.append(Tile("speed", speed_text(job.slowdown_ratio).removeprefix("at the "), note))
    if report.saved_energy_j is not None:
        name = "energy saved" if report.saved_energy_j >= 0 else "additional energy"
        note = f"by {count_text(job.num_tuned_iterations, 'tuned iteration')}"
        found.append(Tile(name, energy_text(abs(report.saved_energy_j)), note, report.saved_energy_j > 0))
    if not job.num_tuned_iterations:
        if job.baseline_energy_j is not None:
            found.append(Tile("energy per iteration", energy_text(job.baseline_energy_j), "at full speed"))
        if job.baseline_time_s is not None:
            found.append(Tile("iteration time", time_text(job.baseline_time_s), "at full speed"))
    used = report.energy_use
    if used.used_j is not None:
        estimated = f", {energy_text(used.estimated_j)} of it estimated" if used.estimated_j else ""
        whose = "modules (GPU, processor, memory)" if is_of_modules(job) else "GPUs"
        note = f"by its {whose} in {time_text(job.duration_s)}{estimated}"
        found.append(Tile("energy used", energy_text(used.used_j), note))
    return found
