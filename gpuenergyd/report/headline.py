"""The result of a job in words: the saving with its interval, or why there is none."""

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.core.job.result_text import (
    cost_text,
    predicted_saving_text,
    saving_span_text,
    saving_text,
    slowdown_span_text,
    slowdown_text,
)
from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.count_text import count_text
from gpuenergyd.report.job import JobReport
from gpuenergyd.store import JobSummary


def headline(report: JobReport) -> str:
    """Return the saving and the change of speed in one sentence, or why no saving was measured."""
    job = report.summary
    if not job.num_tuned_iterations:
        return _without_plan(job)
    if job.slowdown_ratio is None:
        tuned = count_text(job.num_tuned_iterations, "tuned iteration")
        return (
            f"No saving is known: {tuned}, {job.num_baseline_iterations} at full speed, but fewer than two blocks at"
            " full speed between tuned iterations at the job's own pace."
        )
    speed = speed_text(job.slowdown_ratio)
    if job.saving_ratio is None:
        return f"Energy was not measured, so no saving is known; iterations ran {speed}."
    if not job.is_saving_significant:
        return f"No significant saving; iterations ran {speed}."
    return f"{saving_text(job.saving_ratio)} per iteration, {speed}."


def evidence(report: JobReport) -> str:
    """Return the confidence intervals and the data behind them, or what a job without a plan needs."""
    job = report.summary
    if not job.num_tuned_iterations and job.predicted_saving_ratio is None and job.num_iterations:
        return _next_step(job)
    if job.slowdown_interval is None or job.num_compared_tuned_iterations is None:
        return ""
    spans = [slowdown_span_text(job.slowdown_interval)]
    if job.saving_interval is not None:
        spans.insert(0, saving_span_text(job.saving_interval))
    percent = 100 * job.max_slowdown_ratio
    permitted = f" A slowdown of up to {percent:.3g} % was permitted." if percent else ""
    return (
        f"95 % confidence: {', '.join(spans)}. {count_text(job.num_compared_tuned_iterations, 'tuned iteration')}"
        f" against {job.num_compared_baseline_iterations} at full speed beside them.{permitted}"
    )


def is_of_modules(job: JobSummary) -> bool:
    """Return whether the energy of a job includes whole superchip modules, so that it is not that of GPUs alone."""
    return job.energy_scope == EnergyScope.MODULE


def time_cost(job: JobSummary) -> str:
    """Return the time that the daemon has cost a job's training, in words; empty if not measured."""
    if job.cost_s is None:
        return ""
    return f"{cost_text(job.cost_s, job.cost_ratio)}, with {count_text(job.num_experiments or 0, 'experiment')}"


def speed_text(slowdown_ratio: float) -> str:
    """Return the change of speed in words, without a number if it rounds to 0.0 %."""
    return "at the same speed" if abs(slowdown_ratio) < 0.0005 else slowdown_text(slowdown_ratio)


def _without_plan(job: JobSummary) -> str:
    """Return which iterations ran instead of tuned ones."""
    if job.predicted_saving_ratio is not None:
        interval = job.predicted_saving_low_ratio, job.predicted_saving_high_ratio
        saving = predicted_saving_text(job.predicted_saving_ratio, interval)
        return f"Clocks were only observed. Predicted if they are set: {saving} ({job.predicted_saving_basis})."
    if not job.num_iterations:
        return "No iteration was measured."
    ran = f"{count_text(job.num_baseline_iterations, 'iteration')} at full speed"
    if job.num_trial_iterations:
        ran += f", {job.num_trial_iterations} in trials"
    if job.num_profile_iterations:
        ran += f", {job.num_profile_iterations} for profiling"
    so_far = " so far" if job.ended_at is None else ""
    return f"No plan was applied, so nothing was saved: {ran}{so_far}."


def _next_step(job: JobSummary) -> str:
    """Return what a job without a plan needs to save energy; empty if the job has ended or its outcome is known."""
    if job.outcome_reason:
        return ""
    if job.schedule_name == LOOP_SCHEDULE and job.max_slowdown_ratio == 0:
        return "A loop without pipeline stages has no waiting time to use; it saves only with a permitted slowdown."
    return "" if job.ended_at is not None else "A plan follows after the baseline."
