"""The power swing of a job's GPUs as a sentence of the report: predicted within an iteration, and measured."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from gpuenergyd.core.pipeline.power_swing import SwingFigure
from gpuenergyd.report.formatting import power_text
from gpuenergyd.store import PlanRecord
from gpuenergyd.store.records import RollupRecord

_SECOND_S = 1.0


def swing_text(plan: PlanRecord | None, rollups: Sequence[RollupRecord], *, num_gpus: int) -> str:
    """Return the power swing under the plan in force; empty if it is neither predicted nor measured.

    Args:
        plan: the plan in force.
        rollups: stored power of each GPU by second; other bucket lengths are ignored.
        num_gpus: number of GPUs of the job; seconds in which one of them was not measured are left out.
    """
    return " ".join(filter(None, (_predicted(plan), _measured(plan, rollups, num_gpus))))


def _predicted(plan: PlanRecord | None) -> str:
    if plan is None:
        return ""
    peak_w, trough_w = plan.plan.figure(SwingFigure.PEAK), plan.plan.figure(SwingFigure.TROUGH)
    rms_w = plan.plan.figure(SwingFigure.BAND_RMS)
    if peak_w is None or trough_w is None or rms_w is None:
        return ""
    return (
        f"Predicted for an iteration of the plan in force: {power_text(trough_w)} to {power_text(peak_w)},"
        f" {power_text(rms_w)} RMS from 0.1 to 20 Hz."
    )


def _measured(plan: PlanRecord | None, rollups: Sequence[RollupRecord], num_gpus: int) -> str:
    by_second: dict[float, list[float]] = defaultdict(list)
    for rollup in rollups:
        is_under_plan = plan is not None and rollup.started_at >= plan.issued_at
        if is_under_plan and rollup.bucket_s == _SECOND_S and rollup.mean_power_w is not None:
            by_second[rollup.started_at.timestamp()].append(rollup.mean_power_w)
    means_w = {at: sum(own) for at, own in sorted(by_second.items()) if len(own) == num_gpus}
    ramps_w = [abs(means_w[b] - means_w[a]) for a, b in pairwise(means_w) if b - a <= 1.5 * _SECOND_S]
    if not ramps_w:
        return ""
    return (
        f"Measured, means of seconds: {power_text(min(means_w.values()))} to {power_text(max(means_w.values()))},"
        f" at most {power_text(max(ramps_w))} from one second to the next."
    )
