"""Estimates of what a job's plans save, as they are recorded in the history database."""

from gpuenergyd.core.job.measurements.savings import SavingEstimate
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.store.records import EstimateRecord

ESTIMATE_EVERY_NS = 2_000_000_000
"""Time between two records of a running job's estimate; the last one is recorded when the job ends."""


def estimate_record(
    job_id: str, estimate: SavingEstimate | None, account: TimeAccount | None = None
) -> EstimateRecord | None:
    """Return the record of an estimate, with what the daemon has cost the job; None without an estimate."""
    if estimate is None:
        return None
    compared, (saving, slowdown) = estimate.saving, estimate.ratios
    return EstimateRecord(
        job_id=job_id,
        since_iteration=estimate.since_iteration,
        baseline_time_s=estimate.baseline_time_s,
        baseline_energy_j=estimate.baseline_energy_j,
        iteration_time_s=estimate.iteration_time_s,
        energy_per_iteration_j=estimate.energy_j,
        num_compared_baseline_iterations=compared.num_full_speed if compared else None,
        num_compared_tuned_iterations=compared.num_tuned if compared else None,
        saving_ratio=saving.estimate if saving else None,
        saving_low_ratio=saving.low if saving else None,
        saving_high_ratio=saving.high if saving else None,
        slowdown_ratio=slowdown.estimate if slowdown else None,
        slowdown_low_ratio=slowdown.low if slowdown else None,
        slowdown_high_ratio=slowdown.high if slowdown else None,
        cost_s=account.cost_s if account else None,
        cost_ratio=account.cost_ratio if account else None,
        num_experiments=account.num_experiments if account else None,
    )
