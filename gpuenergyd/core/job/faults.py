"""What went wrong with a job's plans, and when its policy gets another chance."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.core.job.guard import what_changed
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.observation import IterationObservation


@dataclass(slots=True)
class Faults:
    """The record of one job: each fault doubles the wait, and a plan that holds for long makes up for them all."""

    rules: JobRules
    num_faults: int = 0
    num_slow_plans: int = 0
    """In a row."""
    num_fallbacks: int = 0
    """Times that the job went from a plan back to full speed, whatever the reason."""
    is_profile_endless: bool = False
    fell_back_at: int = 0
    """The first iteration after the last fall-back."""
    retry_at_iteration: int | None = None
    """None: the job has not fallen back, or too often."""

    def fell_back(self, *, at_iteration: int, wait_from: int, is_fault: bool, least_wait: int) -> int | None:
        """Note that the job goes to full speed; return the iteration at which the policy is asked again, None: never.

        `least_wait` iterations are waited for after a first fault, if that is more than usual.
        """
        self.fell_back_at = at_iteration
        self.num_faults += is_fault
        wait = max(self.rules.fallback_iterations, least_wait) * 2 ** max(0, self.num_faults - 1)
        self.retry_at_iteration = wait_from + wait if self.num_faults <= self.rules.max_faults else None
        return self.retry_at_iteration

    def is_retry_due(self, iteration_index: int) -> bool:
        """Return whether a job that has fallen back has waited long enough."""
        return self.retry_at_iteration is not None and iteration_index >= self.retry_at_iteration

    @property
    def is_model_in_doubt(self) -> bool:
        """Whether what was learned of the job is not believed any more."""
        return self.is_profile_endless or self.num_slow_plans >= self.rules.relearn_after_slow_plans

    def why_learn_anew(self, *, is_profiling_again: bool) -> str:
        """Return the line that says what follows from that doubt."""
        if self.is_profile_endless:
            return "profiling did not end: profiling again, from the beginning"
        then = "profiling again" if is_profiling_again else "what was learned is held against full speed again"
        return f"{self.num_slow_plans} plans in a row were slow: {then}"

    def redeem(self) -> None:
        """Forget all faults: a plan has held for long."""
        self.num_faults = self.num_slow_plans = 0

    def begin_anew(self) -> None:
        """Blame what was learned before for nothing that comes."""
        self.is_profile_endless = False
        self.num_slow_plans = 0


def is_settled(full_speed: Sequence[IterationObservation], rules: JobRules) -> bool:
    """Return whether a changed job's newest iterations at full speed are like those before; in the end it is.

    What is planned while a GPU still grows hotter is too slow a moment later.
    """
    recent = full_speed[-rules.fallback_iterations :]
    if len(full_speed) > rules.settling_iterations or len(recent) < rules.fallback_iterations:
        return len(recent) >= rules.fallback_iterations
    half = len(recent) // 2
    return what_changed(recent[:half], recent[-half:], at_least_ratio=rules.settled_ratio) is None
