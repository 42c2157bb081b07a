"""Faults of a job's plans: how often plans failed, and how long the job waits before it asks the policy again."""

from dataclasses import dataclass

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.count_text import count_text


@dataclass(slots=True)
class Faults:
    """Fault counts of one job: each fault doubles the wait; a plan that lasts long enough clears them."""

    rules: JobRules
    num_faults: int = 0
    num_slow_plans: int = 0
    """Consecutive plans that the guard found too slow."""
    num_fallbacks: int = 0
    """Changes from a plan back to full speed, for any reason."""
    fell_back_at: int = 0
    """First iteration after the last fall-back."""
    retry_at_iteration: int | None = None
    """None if the job has not fallen back, or has failed too often to try again."""
    last_reason: str = ""
    """Reason of the last fall-back; empty if a plan has lasted long enough since."""
    slow_plan_id: str | None = None
    """Plan that the guard found too slow, until full speed is measured after it."""

    def fell_back(
        self, *, at_iteration: int, wait_from: int, is_fault: bool, least_wait: int, reason: str = ""
    ) -> int | None:
        """Record a fall-back to full speed; return the iteration at which the policy is asked again, None for never.

        The wait lasts at least `least_wait` iterations.
        """
        self.fell_back_at, self.last_reason = at_iteration, reason
        self.num_faults += is_fault
        wait = max(self.rules.fallback_iterations, least_wait) * 2 ** max(0, self.num_faults - 1)
        self.retry_at_iteration = wait_from + wait if self.num_faults <= self.rules.max_faults else None
        return self.retry_at_iteration

    def allow_retry(self, at_iteration: int) -> None:
        """Let the policy be asked again from an iteration on, after any number of faults; for operators."""
        self.num_faults, self.retry_at_iteration = 0, at_iteration

    def is_retry_due(self, iteration_index: int) -> bool:
        """Return whether a job that has fallen back has waited long enough."""
        return self.retry_at_iteration is not None and iteration_index >= self.retry_at_iteration

    @property
    def is_profile_in_doubt(self) -> bool:
        """Whether the profile of the job must be dropped and measured again."""
        return self.num_slow_plans >= self.rules.relearn_after_slow_plans

    def relearning_reason(self) -> str:
        """Return the log message for dropping the profile."""
        were = "was" if self.num_slow_plans == 1 else "in a row were"
        return f"{count_text(self.num_slow_plans, 'plan')} {were} slow: beginning again"

    def find_slow(self, plan_id: str) -> None:
        """Count a plan that the guard found too slow."""
        self.num_slow_plans += 1
        self.slow_plan_id = plan_id

    def excuse(self) -> None:
        """Undo the fault of the last plan, because the job was as slow at full speed."""
        self.num_faults, self.num_slow_plans = max(0, self.num_faults - 1), max(0, self.num_slow_plans - 1)

    def redeem(self) -> None:
        """Clear all faults, because a plan has met its target long enough."""
        self.num_faults = self.num_slow_plans = 0
        self.last_reason = ""

    def begin_anew(self) -> None:
        """Reset the count of slow plans, because a new profile is measured."""
        self.num_slow_plans = 0
