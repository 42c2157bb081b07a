"""Blocks of full-speed iterations: proof blocks between tuned iterations, relief blocks while a target is not met.

A proof block of a few iterations between tuned ones keeps the baseline current, and is the middle of a bracket that
measures the saving (`measurements.brackets`). The first ones follow soon, since nothing is claimed without several;
then each distance is longer than the one before, until they are a small share of all iterations. A relief block
replaces a plan that is slower than a new target, until the policy has answered.
"""

from dataclasses import dataclass, field

from gpuenergyd.core.job.rules import JobRules


@dataclass(slots=True)
class FullSpeedBlocks:
    """Which full-speed blocks a job has run, and whether it is in a relief block."""

    rules: JobRules
    num_tuned_iterations: int = 0
    """Since the last proof block was sent, or since the job was last profiled from the beginning."""
    num_proof_iterations: int = 0
    is_relieved: bool = False
    _distance: float = field(init=False)
    """Tuned iterations before the next proof block."""

    def __post_init__(self) -> None:
        self._distance = self.rules.first_proof_after

    @property
    def is_proof_due(self) -> bool:
        """Whether the next proof block may begin."""
        return self.rules.proof_iterations > 0 and self.num_tuned_iterations >= self._distance

    def begin_proof(self) -> None:
        """Count a proof block; the next one is farther away."""
        rules = self.rules
        self.num_proof_iterations += rules.proof_iterations
        self.num_tuned_iterations = 0
        longest = max(rules.first_proof_after, rules.proof_iterations / rules.proof_budget_ratio)
        self._distance = min(longest, rules.proof_distance_growth * self._distance)

    def begin_relief(self) -> None:
        """Enter a relief block; it lasts until the policy answers or the job falls back."""
        self.is_relieved = True

    def end_relief(self) -> bool:
        """Leave a relief block; return whether there was one."""
        was_relieved, self.is_relieved = self.is_relieved, False
        return was_relieved

    def begin_anew(self) -> None:
        """Begin with short distances between proof blocks again."""
        self.num_tuned_iterations = 0
        self._distance = self.rules.first_proof_after
