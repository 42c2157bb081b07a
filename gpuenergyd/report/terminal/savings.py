"""Savings of the running jobs in words: the watts saved now, and each job's result with its interval."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from rich.text import Text

from gpuenergyd.core.job.result_text import saving_with_interval, slowdown_with_interval
from gpuenergyd.count_text import count_text
from gpuenergyd.report.formatting import power_text, replica_name_of


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
