"""Faults of a job's plans: how often they failed, and how long the job waits before the policy is asked again."""

from dataclasses import dataclass

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.count_text import count_text


@dataclass(slots=True)
class Faults:
    """The fault counts of one job: each fault doubles the wait, and a plan that holds for long clears them."""

    rules: JobRules
    num_faults: int = 0
    num_slow_plans: int = 0
    """Consecutive plans that the guard found too slow."""
    num_fallbacks: int = 0
    """Changes from a plan back to full speed, for any reason."""
    fell_back_at: int = 0
    """The first iteration after the last fall-back."""
    retry_at_iteration: int | None = None
    """None: the job has not fallen back, or too often for another attempt."""
    last_reason: str = ""
    """The reason of the last fall-back; empty if no plan has failed since a plan held for long."""
    slow_plan_id: str | None = None
    """The plan that the guard found too slow, until full speed is measured after it."""

    def fell_back(
        self, *, at_iteration: int, wait_from: int, is_fault: bool, least_wait: int, reason: str = ""
    ) -> int | None:
        """Record a fall-back to full speed; return the iteration at which the policy is asked again, None for never.

        After a first fault the wait is at least `least_wait` iterations.
        """
        self.fell_back_at, self.last_reason = at_iteration, reason
        self.num_faults += is_fault
        wait = max(self.rules.fallback_iterations, least_wait) * 2 ** max(0, self.num_faults - 1)
        self.retry_at_iteration = wait_from + wait if self.num_faults <= self.rules.max_faults else None
        return self.retry_at_iteration

    def allow_retry(self, at_iteration: int) -> None:
        """Let the policy be asked again from an iteration on, however often plans have failed: an operator wants it."""
        self.num_faults, self.retry_at_iteration = 0, at_iteration

    def is_retry_due(self, iteration_index: int) -> bool:
        """Return whether a job that has fallen back has waited long enough."""
        return self.retry_at_iteration is not None and iteration_index >= self.retry_at_iteration

    @property
    def is_profile_in_doubt(self) -> bool:
        """Whether what was learned of the job must be dropped and measured again."""
        return self.num_slow_plans >= self.rules.relearn_after_slow_plans

    def relearning_reason(self) -> str:
        """Return the log line for a profile in doubt."""
        were = "was" if self.num_slow_plans == 1 else "in a row were"
        return f"{count_text(self.num_slow_plans, 'plan')} {were} slow: beginning again"

    def find_slow(self, plan_id: str) -> None:
        """Count a plan that the guard found too slow."""
        self.num_slow_plans += 1
        self.slow_plan_id = plan_id

    def excuse(self) -> None:
        """Take back the fault of the last plan: the job was as slow at full speed."""
        self.num_faults, self.num_slow_plans = max(0, self.num_faults - 1), max(0, self.num_slow_plans - 1)

    def redeem(self) -> None:
        """Clear all faults, since a plan has met its target for long."""
        self.num_faults = self.num_slow_plans = 0
        self.last_reason = ""

    def begin_anew(self) -> None:
        """Clear the doubts about the profile: a new one is measured."""
        self.num_slow_plans = 0
