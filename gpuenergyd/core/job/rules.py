"""Rules of a job: lengths of warm-up, baseline and waits, income of the time account, and tolerances."""

from dataclasses import dataclass, field, replace

from gpuenergyd.core.job.guard import GuardRules
from gpuenergyd.core.job.time_account import AccountRules


@dataclass(frozen=True, slots=True)
class JobRules:
    """Limits and waiting times of a job; the same for all policies."""

    warmup_iterations: int = 2
    baseline_iterations: int = 10
    guard: GuardRules = field(default_factory=GuardRules)
    is_guarding: bool = True
    """Whether guard and time account judge the job's plans; of a pipeline across hosts only its leader's do."""
    fallback_iterations: int = 5
    """Iterations at full speed after the first fault until the policy is asked again; each further fault doubles it."""
    relearn_after_slow_plans: int = 2
    """Consecutive slow plans after which the profile is in doubt."""
    redeeming_iterations: int = 64
    """Iterations of one tuned plan without a fault that clear all faults before it."""
    job_changed_ratio: float = 0.02
    """Change of an instruction or iteration time at full speed beyond which the job counts as changed."""
    settled_ratio: float = 0.01
    """A changed job has settled once its newest iterations at full speed differ by less than this, ..."""
    settling_iterations: int = 20
    """... or after this number of iterations."""
    proof_iterations: int = 4
    """Length of a proof block between tuned iterations; 0: no proof blocks."""
    first_proof_after: int = 8
    """Tuned iterations before the first proof block."""
    proof_distance_growth: float = 1.35
    """Each distance between two proof blocks is this many times the one before, ..."""
    proof_budget_ratio: float = 0.01
    """... until proof blocks are this share of the iterations."""
    max_faults: int = 6
    """Faults (findings of the guard, policy failures, lost control) beyond which the job stays at full speed."""
    refused_profiling_iterations: int = 64
    """Iterations after which a job whose profiling was refused asks again."""
    account: AccountRules = field(default_factory=AccountRules)
    """Income of the time account that pays for everything that slows the job."""
    experiment_iterations: int = 1
    """Iterations of an experiment, of which the last one runs at its clocks from begin to end."""
    are_plans_queued: bool = True
    """Whether ranks may be sent full speed together with an experiment that it follows."""
    pause_ratio: float = 0.05
    """A gap between iterations longer than usual by this share of an iteration is a pause (evaluation, checkpoint)."""
    foreign_orders: int = 3
    """Consecutive iterations in another order than registered after which a planned job falls back."""
    notice_every: int = 25
    """Minimum distance of two notices about the same kind of disturbance, in iterations."""
    max_observations: int = 192


def member_rules(rules: JobRules) -> JobRules:
    """Return the rules for a member of a pipeline across hosts: its leader guards it, and proves its savings.

    A member cannot tell whether an iteration is long because of its plan or because it waits for a rank elsewhere.
    """
    return replace(rules, proof_iterations=0, is_guarding=False)
