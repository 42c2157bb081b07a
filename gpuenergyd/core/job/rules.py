"""The rules by which a job is run: how long it warms up, is measured, is trusted and is left alone."""

import sys
from dataclasses import dataclass, field, replace

from gpuenergyd.core.job.guard import GuardRules


@dataclass(frozen=True, slots=True)
class JobRules:
    """How a job is run; the same for all policies."""

    warmup_iterations: int = 2
    baseline_iterations: int = 10
    guard: GuardRules = field(default_factory=GuardRules)
    fallback_iterations: int = 5
    """Iterations at full speed after the first fault, before the policy is asked again; each further one doubles it."""
    relearn_after_slow_plans: int = 2
    """After so many slow plans in a row the profile is not believed any more, and measured again."""
    redeeming_iterations: int = 64
    """Iterations of one tuned plan without a fault that make up for all faults before it."""
    job_changed_ratio: float = 0.02
    """Instructions or iterations at full speed that moved by more than this: not the job that was profiled."""
    settled_ratio: float = 0.01
    """A changed job is planned for once its newest iterations at full speed differ by less than this, ..."""
    settling_iterations: int = 20
    """... or after so many of them."""
    proof_iterations: int = 4
    """Length of a full-speed block between tuned iterations, its first one not counted; 0: no such blocks."""
    first_proof_after: int = 8
    """Tuned iterations before the first block, which tells drift since the baseline from a plan that is too slow."""
    proof_budget_ratio: float = 0.01
    """Share of all iterations that later blocks may take."""
    max_faults: int = 6
    """After more faults (guard trips, policy failures, lost control) the job stays at full speed."""
    max_profile_iterations: int = 120
    """A policy that is still profiling after so many iterations may go on, from the beginning, after as many at full
    speed; each further time that doubles."""
    refused_profiling_iterations: int = 64
    """After so many iterations a job that was refused its profiling asks again."""
    relief_iterations: int = 3
    """Iterations under one profiling plan after which the job runs at full speed until the policy has answered."""
    pause_ratio: float = 0.05
    """A wait between steps that is longer than usual by this share of a step was a pause (evaluation, checkpoint)."""
    foreign_orders: int = 3
    """So many iterations in a row in another order than registered: clocks planned for that one are given back."""
    notice_every: int = 25
    """The same kind of disturbance is recorded once in so many iterations."""
    max_observations: int = 192


def part_rules(rules: JobRules) -> JobRules:
    """Return the rules for a part of a pipeline across hosts: who plans the whole decides how long it profiles."""
    return replace(rules, proof_iterations=0, max_profile_iterations=sys.maxsize)
