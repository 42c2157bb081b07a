"""Rules of a job: lengths of warm-up, baseline and waits, income of the time account, and tolerances."""

from dataclasses import dataclass, field, replace

from gpuenergyd.core.job.guard import GuardRules
from gpuenergyd.core.job.time_account import AccountRules


@dataclass(frozen=True, slots=True)
class JobRules:
    """Limits and waiting times of a job; they are the same for all policies."""

    warmup_iterations: int = 2
    baseline_iterations: int = 10
    guard: GuardRules = field(default_factory=GuardRules)
    is_guarding: bool = True
    """Whether guard and time account evaluate the job's plans; in a pipeline across hosts only the leader's do."""
    fallback_iterations: int = 5
    """Full-speed iterations after the first fault before the policy is asked again; each further fault doubles them."""
    relearn_after_slow_plans: int = 2
    """Number of consecutive slow plans after which the profile is measured again."""
    redeeming_iterations: int = 64
    """Number of iterations of one tuned plan without a fault that clear all earlier faults."""
    job_changed_ratio: float = 0.02
    """The job has changed if an instruction or iteration time at full speed changes by more than this ratio."""
    settled_ratio: float = 0.01
    """A changed job has settled once its newest full-speed iterations differ by less than this, ..."""
    settling_iterations: int = 20
    """... or after this number of iterations."""
    proof_iterations: int = 4
    """Length of a proof block between tuned iterations; 0 disables proof blocks."""
    first_proof_after: int = 8
    """Number of tuned iterations before the first proof block."""
    proof_distance_growth: float = 1.35
    """Each distance between two proof blocks is this many times the one before, ..."""
    proof_budget_ratio: float = 0.01
    """... until proof blocks are this share of the iterations."""
    max_faults: int = 6
    """After more faults (findings of the guard, policy failures, lost control) the job stays at full speed."""
    refused_trial_iterations: int = 64
    """Iterations after which a job whose trial was refused asks the policy again."""
    account: AccountRules = field(default_factory=AccountRules)
    """Income of the time account that pays for everything that slows the job."""
    experiment_iterations: int = 1
    """Length of an experiment; its last iteration runs entirely at the experiment's clocks."""
    are_plans_queued: bool = True
    """Whether ranks may receive, together with an experiment, the full-speed plan that follows it."""
    pause_ratio: float = 0.05
    """A gap that exceeds the usual one by this share of an iteration is a pause (evaluation, checkpoint)."""
    foreign_orders: int = 3
    """Consecutive iterations in an unexpected order after which a planned job falls back."""
    notice_every: int = 25
    """Minimum distance in iterations of the first two notices about the same kind of disturbance; it doubles later."""
    max_observations: int = 192


def member_rules(rules: JobRules) -> JobRules:
    """Return the rules for a member of a pipeline across hosts, whose leader guards it and proves its savings.

    A member cannot know whether an iteration is long because of its plan or because it waits for a rank elsewhere.
    """
    return replace(rules, proof_iterations=0, is_guarding=False)
