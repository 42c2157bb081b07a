"""Expected and actual outcome of a job: the saving of its plans, or the one reason why they saved nothing."""

from dataclasses import dataclass, replace
from enum import StrEnum

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.measurements.savings import MeasuredSaving
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.result_text import (
    advice_text,
    cost_text,
    saving_with_interval,
    slowdown_span_text,
    slowdown_text,
)
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.measurement.sustained_clock import sustained_clocks, sustained_text
from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.count_text import count_text


class OutcomeKind(StrEnum):
    """Kinds of outcomes."""

    SAVED = "saved"
    """Significantly less energy per iteration."""
    USED_MORE = "used_more"
    """Significantly more energy per iteration."""
    NOT_SIGNIFICANT = "not_significant"
    """A plan was in force; the change of energy may be due to chance."""
    NOTHING_TO_SAVE = "nothing_to_save"
    """No significant saving: the job has no waiting time to use and may not slow down."""
    NOT_MEASURED = "not_measured"
    """A plan was in force, but too few iterations or no energy were measured."""
    AT_FULL_SPEED = "at_full_speed"
    """No plan was in force: the policy failed or chose full speed, or clocks could not be set."""
    OBSERVED_ONLY = "observed_only"
    """The daemon may not set clocks, or may set only power limits, which the policy cannot plan."""
    TOO_EARLY = "too_early"
    """The job has not reached a plan yet, or ended before it did."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an ended job, or of a running one up to now; `reason` does not contain the savings."""

    kind: OutcomeKind
    reason: str
    advice: str = ""
    """What a larger permitted slowdown would save; empty if unknown."""

    @property
    def text(self) -> str:
        """The reason, with the advice if there is one."""
        return f"{self.reason}; {self.advice}" if self.advice else self.reason


_AT_FULL_SPEED = frozenset({JobPhase.FALLBACK, JobPhase.PAUSED})
_UNDER_WAY = {
    JobPhase.JOINING: "waiting for ranks",
    JobPhase.WARMUP: "warming up",
    JobPhase.BASELINE: "measuring the baseline",
    JobPhase.TRIAL: "trying settings",
}


def expectation(job: Job, *, is_member: bool = False) -> str:
    """Return in one sentence what to expect of this kind of job; a member is one rank of a pipeline across hosts."""
    ratio = job.target.max_slowdown_ratio
    if job.description.num_pp_ranks > 1 or is_member or job.ranks.has_waits:
        who = "it waits for gradients or data" if job.ranks.has_waits else "stages wait for each other"
        text = f"saves energy at the same speed while {who}"
        return f"{text}, and more by running up to {100 * ratio:.3g} % slower" if ratio else text
    is_loop = job.ranks.is_plain_loop
    if ratio and is_loop and job.description.num_dp_ranks > 1:
        return (
            f"stays at full speed: {count_text(job.description.num_dp_ranks, 'data-parallel rank')} are not"
            " planned together yet"
        )
    if ratio:
        return f"saves energy by running up to {100 * ratio:.3g} % slower"
    what = "one instruction per iteration" if is_loop else "a single pipeline stage"
    if job.description.schedule_name == LOOP_SCHEDULE and not is_loop:
        what = "no phase that waits"
    return (
        f"nothing can be saved at the same speed: {what}, so no waiting time to use, and no slowdown permitted;"
        " permit some with --max-slowdown"
    )


def can_save(job: Job, *, is_member: bool = False) -> bool:
    """Return whether the job waits between stages or in phases, or is permitted to slow down."""
    has_waits = job.description.num_pp_ranks > 1 or job.ranks.has_waits
    return is_member or has_waits or job.target.max_slowdown_ratio > 0


def power_limit_text(job: Job) -> str:
    """Return what the job's GPUs sustain at their power limits at full speed; empty if none is at its limit."""
    return sustained_text(sustained_clocks(job.knowledge.full_speed()))


def find_outcome(
    job: Job, *, is_member: bool = False, is_observing: bool = False, waits_for: str | None = None
) -> Outcome:
    """Return the outcome of a job, up to now or at its end; `waits_for` says what delays the policy host."""
    outcome = _find_outcome(job, is_member=is_member, is_observing=is_observing, waits_for=waits_for)
    outcome = replace(outcome, reason="; ".join(filter(None, (outcome.reason, power_limit_text(job)))))
    return outcome if is_observing else replace(outcome, advice=advice_text(job.advice))


def _find_outcome(job: Job, *, is_member: bool, is_observing: bool, waits_for: str | None) -> Outcome:
    if is_observing:
        return Outcome(
            OutcomeKind.OBSERVED_ONLY, "clocks are not set: the daemon, or a GPU of the job, is only observed"
        )
    phase, reason = job.last_activity
    num_tuned = job.knowledge.num_iterations_for[PlanPurpose.TUNED]
    if num_tuned:
        outcome = _under_plans(job, num_tuned, is_member=is_member)
        later = f"; then at full speed: {reason.removeprefix('at full speed ')}" if phase in _AT_FULL_SPEED else ""
        return Outcome(outcome.kind, outcome.reason + later)
    if phase is JobPhase.TUNED and not job.current_plan.ranks and not can_save(job, is_member=is_member):
        return Outcome(OutcomeKind.NOTHING_TO_SAVE, reason)
    if phase in _AT_FULL_SPEED or (phase is JobPhase.TUNED and not job.current_plan.ranks):
        return Outcome(OutcomeKind.AT_FULL_SPEED, reason)
    before = f"; before that: {job.faults.last_reason}" if job.faults.last_reason else ""
    if phase is JobPhase.TUNED:
        return Outcome(OutcomeKind.TOO_EARLY, f"no iteration of the first plan was measured{before}")
    is_asked = phase is JobPhase.BASELINE and job.control.question.is_open
    doing = (waits_for or "waiting for the policy's plan") if is_asked else _UNDER_WAY[phase]
    if phase is JobPhase.TRIAL and (waiting := _waiting_text(job)):
        doing = f"trying settings: {waiting}"
    since = f"{doing}, after {count_text(job.num_iterations, 'iteration')}{before}"
    return Outcome(OutcomeKind.TOO_EARLY, f"ended while {since}" if job.is_ended else since)


def outcome_line(job: Job, *, is_member: bool = False, waits_for: str | None = None) -> str:
    outcome = find_outcome(job, is_member=is_member, waits_for=waits_for)
    saving = _saving(job)
    text = outcome.text if saving is None else f"{_result_text(saving)}; {outcome.text}"
    return f"{text}; cost so far: {_cost_text(job.account)}" if job.account else text


def _under_plans(job: Job, num_tuned: int, *, is_member: bool) -> Outcome:  # noqa: PLR0911  one per outcome
    ran = f"{count_text(num_tuned, 'iteration')} under a plan"
    saving = _saving(job)
    ratio = saving.saving_ratio if saving is not None else None
    if job.knowledge.straggler_saving.saving is not None and (ratio is None or ratio.low <= 0):
        return Outcome(OutcomeKind.SAVED, f"{ran}, part of them at the pace of a slower replica")
    if saving is None:
        return Outcome(OutcomeKind.NOT_MEASURED, f"{ran}: too few comparable blocks at full speed to measure a saving")
    if ratio is None:
        return Outcome(OutcomeKind.NOT_MEASURED, f"{ran}, but their energy is not known")
    if ratio.low > 0:
        return Outcome(OutcomeKind.SAVED, ran)
    if ratio.high < 0:
        return Outcome(OutcomeKind.USED_MORE, f"{ran} used more energy than the baseline")
    if not can_save(job, is_member=is_member):
        return Outcome(OutcomeKind.NOTHING_TO_SAVE, expectation(job))
    return Outcome(OutcomeKind.NOT_SIGNIFICANT, f"{ran}: no significant saving")


def _waiting_text(job: Job) -> str:
    """Return what experiments have cost if the job waits to afford another one; empty if it does not wait."""
    account = job.account
    if account is None or job.control.experiments.awaited_s is None:
        return ""
    on = count_text(account.num_experiments, "experiment")
    return f"spent {account.cost_s:.2g} of {account.income_s:.2g} s on {on}; another one would cost too much"


def _cost_text(account: TimeAccount) -> str:
    client = ", the client's own not measured" if account.client_cost_s is None else ""
    return cost_text(account.cost_s, account.cost_ratio) + client


def _saving(job: Job) -> MeasuredSaving | None:
    estimate = job.estimate()
    return None if estimate is None else estimate.saving


def _result_text(saving: MeasuredSaving) -> str:
    ratio, slowdown = saving.saving_ratio, saving.slowdown_ratio
    speed = slowdown_text(slowdown.estimate)
    if ratio is None:
        return speed
    if not ratio.is_significant and slowdown.low <= 0.0 < slowdown.estimate:
        speed = slowdown_span_text((slowdown.low, slowdown.high))
    energy = saving_with_interval(ratio.estimate, (ratio.low, ratio.high), is_significant=ratio.is_significant)
    return f"{energy}, {speed}"
