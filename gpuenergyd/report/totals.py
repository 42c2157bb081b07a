"""Totals over several jobs, which include only significant savings and count the jobs left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd.quantities.energy_use import add_known, sum_of
from gpuenergyd.report.formatting import energy_text
from gpuenergyd.report.job import JobReport


@dataclass(frozen=True, slots=True)
class SavedTotal:
    """Energy saved by several jobs together; None if no job has a significant saving."""

    saved_energy_j: float | None
    interval_j: tuple[float, float] | None
    """The 95 % confidence interval, assuming independent errors; None if that of a job is unknown."""
    num_counted: int
    num_not_significant: int

    def text(self) -> str:
        """Return the total in one sentence, with the number of jobs left out; empty without savings."""
        left_out = not_counted_text(self.num_not_significant)
        if self.saved_energy_j is None:
            return f"No significant saving. {left_out}" if left_out else ""
        span = ""
        if self.interval_j is not None:
            low_j, high_j = self.interval_j
            span = f" (95 %: {energy_text(low_j)} to {energy_text(high_j)})"
        jobs = f"{count_text(self.num_counted, 'job')}"
        total = f"{energy_text(abs(self.saved_energy_j))} {'saved' if self.saved_energy_j >= 0 else 'more used'}"
        return f"{total} by {jobs} together{span}.{f' {left_out}' if left_out else ''}"


def saved_total(reports: Iterable[JobReport]) -> SavedTotal:
    """Return the sum of the significant savings."""
    total_j: float | None = None
    below: list[float] = []
    above: list[float] = []
    num_counted = num_not_significant = 0
    has_intervals = True
    for report in reports:
        num_not_significant += report.is_saving_left_out
        saved_j, ratio, interval = report.saved_energy_j, report.summary.saving_ratio, report.summary.saving_interval
        if saved_j is None or ratio is None:
            continue
        num_counted += 1
        total_j = add_known(total_j, saved_j)
        if interval is None or ratio == 0.0:
            has_intervals = False
            continue
        per_ratio_j = saved_j / ratio
        below.append((ratio - interval[0]) * per_ratio_j)
        above.append((interval[1] - ratio) * per_ratio_j)
    ends = None
    if total_j is not None and has_intervals:
        ends = (total_j - hypot(*below), total_j + hypot(*above))
    return SavedTotal(total_j, ends, num_counted, num_not_significant)


def not_counted_text(num_not_significant: int) -> str:
    """Return how many jobs a sum of savings leaves out, and why; empty for none."""
    if not num_not_significant:
        return ""
    verb, their = ("is", "its saving is") if num_not_significant == 1 else ("are", "their savings are")
    return f"{count_text(num_not_significant, 'job')} {verb} not counted: {their} not significant."


def totals_dict(reports: Sequence[JobReport]) -> dict[str, Any]:
    """Return the totals of a report by job, under their JSON names; missing values are None."""
    total = saved_total(reports)
    low_j, high_j = total.interval_j or (None, None)
    use = sum_of(report.energy_use for report in reports)
    saved_g = None
    for report in reports:
        if report.carbon is not None and report.summary.is_saving_significant:
            saved_g = add_known(saved_g, report.carbon.saved_g)
    return {
        "num_jobs": len(reports),
        "gpu_energy_j": use.energy_j,
        "gpu_estimated_j": use.estimated_j,
        "saved_energy_j": total.saved_energy_j,
        "saved_energy_low_j": low_j,
        "saved_energy_high_j": high_j,
        "num_jobs_counted": total.num_counted,
        "num_not_significant": total.num_not_significant,
        **use.carbon_to_dict(),
        "pue": reports[0].rates.pue if reports else 1.0,
        "saved_carbon_g": saved_g,
    }
