"""Blocks of full-speed iterations: proof blocks between tuned iterations, relief blocks while a target is not met.

A proof block of a few iterations between tuned ones keeps the baseline current and measures the saving. The first one
follows soon after the first tuned iterations, later ones keep within a budget, a share of all iterations. A relief
block replaces a plan that is slower than a new target, until the policy has answered.
"""

from dataclasses import dataclass

from gpuenergyd.core.job.rules import JobRules


@dataclass(slots=True)
class FullSpeedBlocks:
    """Which full-speed blocks a job has run, and whether it is in a relief block."""

    rules: JobRules
    num_tuned_iterations: int = 0
    """Since the job was last profiled from the beginning."""
    num_proof_iterations: int = 0
    is_relieved: bool = False

    def is_proof_due(self, num_iterations: int) -> bool:
        """Return whether the next proof block may begin, given the number of iterations so far."""
        rules = self.rules
        if not rules.proof_iterations:
            return False
        if self.num_proof_iterations == 0:
            return self.num_tuned_iterations >= rules.first_proof_after
        return self.num_proof_iterations + rules.proof_iterations <= rules.proof_budget_ratio * num_iterations

    def begin_proof(self) -> None:
        """Charge a proof block to the budget."""
        self.num_proof_iterations += self.rules.proof_iterations

    def begin_relief(self) -> None:
        """Enter a relief block; it lasts until the policy answers or the job falls back."""
        self.is_relieved = True

    def end_relief(self) -> bool:
        """Leave a relief block; return whether there was one."""
        was_relieved, self.is_relieved = self.is_relieved, False
        return was_relieved

    def begin_anew(self) -> None:
        """Wait for new tuned iterations before the first proof block; the budget stays charged."""
        self.num_tuned_iterations = 0
