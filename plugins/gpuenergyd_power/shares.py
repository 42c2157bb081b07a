"""The shares of the jobs of this host: targets and power limits in force, and whether they are followed."""

from dataclasses import dataclass, field

from gpuenergyd.core.job.messages import PowerTargetChanged
from gpuenergyd.core.policy_api.power import PowerDecision, PowerShare
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd_power.messages import PowerShareState

_SAME_RATIO = 2e-3
"""A smaller change of a target causes no new plan."""


@dataclass(slots=True)
class JobShares:
    """The last decision, and what of it was applied to the jobs."""

    jobs: Jobs
    decision: PowerDecision | None = None
    limits_w: dict[str, float] = field(default_factory=dict)
    """Power limits of the GPUs of jobs whose power is not limited by a plan."""

    @property
    def are_followed(self) -> bool:
        """Whether every job with a target runs a plan for it."""
        known = {share.job_id for share in self.decision.shares} if self.decision is not None else set()
        for runner in self.jobs:
            if runner.job_id in known and runner.job_id not in self._limited and not runner.job.follows_power_target:
                return False
        return True

    def apply(self, decision: PowerDecision, budget_text: str) -> bool:
        """Send each job its target; return whether a target or a limit changed."""
        limits_before, self.limits_w, self.decision = self.limits_w, {}, decision
        has_changed = False
        for share in decision.shares:
            runner = self.jobs.runner(share.job_id)
            if runner is None or runner.job.is_ended:
                continue
            if share.limit_w is not None:
                self.limits_w.update(dict.fromkeys(runner.job.ranks.gpu_uuids, share.limit_w))
            has_changed |= self._send(runner, share.iteration_time_s, f"power budget of {budget_text}")
        return has_changed or self.limits_w != limits_before

    def clear(self, reason: str) -> None:
        """Withdraw all targets and limits."""
        self.decision, self.limits_w = None, {}
        for runner in self.jobs:
            self._send(runner, None, reason)

    def states(self) -> tuple[PowerShareState, ...]:
        shares = self.decision.shares if self.decision is not None else ()
        return tuple(_state(share, runner) for share in shares if (runner := self.jobs.runner(share.job_id)))

    def measured_speed(self) -> float | None:
        """Return the total speed of all jobs in their last iterations, in GPUs at full speed; None if unknown."""
        speeds = []
        for runner in self.jobs:
            baseline, observations = runner.job.baseline, runner.job.observations
            if baseline is not None and observations and not runner.job.is_ended:
                ratio = baseline.iteration_time_s / observations[-1].iteration_time_s
                speeds.append(len(runner.job.ranks.gpu_uuids) * min(1.0, ratio))
        return sum(speeds) if speeds or not list(self.jobs) else None

    @property
    def _limited(self) -> set[str]:
        shares = self.decision.shares if self.decision is not None else ()
        return {share.job_id for share in shares if share.speed_ratio is None}

    def _send(self, runner: JobRunner, time_s: float | None, reason: str) -> bool:
        before_s = runner.job.target.power_time_s
        is_same = time_s == before_s
        if time_s is not None and before_s is not None:
            is_same = abs(time_s / before_s - 1) < _SAME_RATIO
        if is_same or runner.job.is_ended or runner.is_member:
            return False
        runner.handle(PowerTargetChanged(time_s, reason))
        return True


def _state(share: PowerShare, runner: JobRunner) -> PowerShareState:
    return PowerShareState(
        job_id=share.job_id,
        job_name=runner.job.description.job_name,
        predicted_w=share.power_w,
        iteration_time_s=share.iteration_time_s,
        limit_w=share.limit_w,
        speed_ratio=share.speed_ratio,
        speed_per_w=share.speed_per_w,
    )
