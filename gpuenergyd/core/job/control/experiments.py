"""Experiments of a job: what a plan may cost until it can be replaced, and whether the time account can pay for it.

A plan is an experiment until its own iterations have shown that it costs no more time than the account earns in it.
Until then its cost is bounded by the worst case of its clocks (`core/measurement/worst_case.py`) for the iterations
needed to replace it. If the account cannot pay that, the plan runs for just enough iterations to measure its cost,
followed by full speed. Every trial does so too. If even that is too much, the job waits at full speed.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean, median

from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.issued_plans import ITERATIONS_AHEAD, SETTLING_ITERATIONS
from gpuenergyd.core.job.measurements.knowledge import JobKnowledge
from gpuenergyd.core.job.measurements.rank_reports import RankReports
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.worst_case import ClockTimes, RankSpeed, WorstCase
from gpuenergyd.core.pipeline.plan import TRIALS, ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget

_UPPER_SIGMAS = 2.0
"""Number of standard deviations above the mean that gives an upper bound on a sum of iteration times."""
_SHOWN_BY = 2
"""Number of a plan's iterations after which its measured cost is used."""
_NEWEST = 16
_RESUMED_FOR = 16
"""A plan that became unaffordable resumes once the account can pay for this many of its iterations."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Conditions for a plan: how many iterations it may run (None: until replaced), and its maximum cost."""

    num_iterations: int | None
    cost_s: float
    is_affordable: bool


@dataclass(slots=True)
class Experiments:
    """What one job's plans may cost, and what the job waits for until its account can pay for it."""

    rules: JobRules
    ranks: JobRanks
    reports: RankReports
    knowledge: JobKnowledge
    account: TimeAccount = field(init=False)
    """Shared with the other replicas of the training on this host."""
    refusal: str | None = None
    """Why the job may not run trials, whatever its account holds; None if it may."""
    ends_at: int | None = None
    """First full-speed iteration after the newest experiment; None if its plan has no end."""
    is_open: bool = False
    """Whether the return to full speed after the experiment has still to be sent."""
    _awaited: tuple[float, PerformanceTarget] | None = None
    """Balance that the account must reach before the policy is asked again, and the target for which that holds."""
    _times: ClockTimes = field(default_factory=ClockTimes)
    _explained_s: dict[str, float] = field(default_factory=dict)
    """For each plan id, the time of an iteration that the plan can explain."""

    def __post_init__(self) -> None:
        self.account = TimeAccount(self.rules.account)

    @property
    def is_paying(self) -> bool:
        """Whether this job's plans are paid from its account; those of members of a pipeline across hosts are not."""
        return self.rules.is_guarding

    @property
    def is_running(self) -> bool:
        """Whether some iterations of an experiment have not been reported yet."""
        return self.ends_at is not None and self.reports.last_index < self.ends_at - 1

    # --- iterations ---

    def observe(
        self,
        observation: IterationObservation,
        purpose: PlanPurpose | None,
        baseline: BaselineView | None,
        target: PerformanceTarget,
    ) -> None:
        """Charge an iteration to the account, and learn how long instructions take at its clocks."""
        if observation.is_regular and purpose is not None:
            self._times.add(observation, is_full_speed=purpose is PlanPurpose.BASELINE)
        if not self.is_paying:
            return
        plan_id, is_full_speed = observation.plan_id, purpose is PlanPurpose.BASELINE
        explained_s = 0.0 if is_full_speed or plan_id is None else self._explained_s.get(plan_id, 0.0)
        self.account.add(
            observation.iteration_index,
            _time_s(observation),
            is_regular=observation.is_regular,
            explained_s=explained_s,
            permitted_ratio=0.0 if baseline is None else target.own.permitted_ratio(baseline.iteration_time_s),
            given_pace_s=_given_pace_s(target),
            sigma_s=0.0 if baseline is None else baseline.iteration_sigma_s,
        )

    # --- what plans may cost ---

    def terms(self, plan: ClockPlan, baseline: BaselineView, target: PerformanceTarget) -> Terms:
        """Return the terms under which a plan could be sent now."""
        if not self.is_paying or not plan.ranks or (plan.purpose is PlanPurpose.BASELINE and not plan.orders):
            return Terms(None, 0.0, is_affordable=True)
        extra_s = self._extra_s(plan, baseline, target)
        least = self._least_iterations(baseline, plan)
        ahead = max(ITERATIONS_AHEAD + self.reports.run_ahead + 1, least)
        first = self.reports.last_index + ITERATIONS_AHEAD + self.reports.run_ahead
        earned_s = self._earned_s(baseline, target)
        costs_s = {n: _most_s(n, extra_s, earned_s, baseline.iteration_sigma_s) for n in (ahead, least)}
        left_s = {n: self.account.left_beside_s(self.knowledge.job_id, first, first + n - 1) for n in costs_s}
        if plan.purpose not in TRIALS and costs_s[ahead] <= left_s[ahead]:
            return Terms(None, costs_s[ahead], is_affordable=True)
        return Terms(least, costs_s[least], is_affordable=costs_s[least] <= left_s[least])

    def affordable_s(self, baseline: BaselineView, target: PerformanceTarget) -> float | None:
        """Return the maximum cost of an iteration of a trial; None if there is no limit."""
        if self.refusal is not None:
            return 0.0
        if not self.is_paying:
            return None
        n = self._least_iterations(baseline)
        chance_s = _UPPER_SIGMAS * baseline.iteration_sigma_s * math.sqrt(n)
        return max(0.0, (self.account.left_s - chance_s) / n + self._earned_s(baseline, target))

    def unpaid_s(self, plan: ClockPlan, baseline: BaselineView, target: PerformanceTarget, since: int) -> float | None:
        """Return what the current plan may cost until it could be replaced; None if the account can pay that.

        Iterations before `since` ran for another target and are not used.
        """
        if not self.is_paying:
            return None
        net_s = self._extra_s(plan, baseline, target, since=since) - self._earned_s(baseline, target)
        cost_s = max(0.0, net_s) * (ITERATIONS_AHEAD + self.reports.run_ahead)
        return cost_s if self.account.balance_s < cost_s else None

    def _least_iterations(self, baseline: BaselineView, plan: ClockPlan | None = None) -> int:
        """Return the number of iterations that a plan must run to show its cost.

        Clocks take effect late, and energy is only known when the counters have new values.
        """
        latency_s = max(gpu.switch_latency_s for gpu in self.ranks.gpus.values())
        least = self.rules.experiment_iterations + round(latency_s / baseline.iteration_time_s)
        period_s = self.knowledge.iterations.typical(_counter_period_s)
        settling = max(0, round(period_s / baseline.iteration_time_s) - 1)
        if plan is not None and (plan.power_limits_w or plan.power_profiles):
            settling = max(settling, SETTLING_ITERATIONS + _SHOWN_BY - 1)
        if plan is not None and plan.orders:  # another order takes effect late, and is seldom tried
            settling += ITERATIONS_AHEAD + 1
        return least + settling

    # --- waiting ---

    def wait_for(self, cost_s: float, target: PerformanceTarget) -> None:
        """Ask the policy again once the account can pay `cost_s`, or for another target."""
        self._awaited = cost_s, target

    def wait_to_resume(self, plan: ClockPlan, baseline: BaselineView, target: PerformanceTarget) -> None:
        """Ask the policy again once the account can pay for enough iterations of the plan."""
        net_s = self._extra_s(plan, baseline, target) - self._earned_s(baseline, target)
        self.wait_for(max(0.0, net_s) * _RESUMED_FOR, target)

    def is_waiting(self, target: PerformanceTarget) -> bool:
        """Return whether the job waits until its account can pay for the next experiment."""
        if self._awaited is not None and (self._awaited[1] != target or self.account.left_s >= self._awaited[0]):
            self._awaited = None
        return self._awaited is not None

    @property
    def awaited_s(self) -> float | None:
        """Balance that the account must reach before the policy is asked again; None if the job is not waiting."""
        return None if self._awaited is None else self._awaited[0]

    # --- plans that are sent ---

    def sent(self, plan: ClockPlan, from_index: int) -> None:
        """Record the iteration from which a plan is in force."""
        if not self.is_paying:
            return
        explained_s = 0.0
        if plan.ranks and (plan.purpose is not PlanPurpose.BASELINE or plan.orders):
            explained_s = self._explained_s.get(plan.plan_id, math.nan)
            if math.isnan(explained_s):
                graph = self.ranks.graph_in(plan.orders)
                typical_s = self.knowledge.iterations.typical(lambda iteration: iteration.iteration_time_s)
                explained_s = self._worst_case(typical_s).explained_s(plan, graph)
                self._explained_s = dict([*self._explained_s.items(), (plan.plan_id, explained_s)][-64:])
        self.account.plan_sent(self.knowledge.job_id, from_index, explained_s)

    def begun(self, terms: Terms, from_index: int) -> None:
        """Reserve the maximum cost of a plan that was sent."""
        num_iterations = terms.num_iterations or ITERATIONS_AHEAD + self.reports.run_ahead + 1
        self.ends_at = None if terms.num_iterations is None else from_index + num_iterations
        self.is_open = self.ends_at is not None and not self.rules.are_plans_queued
        if terms.cost_s > 0:
            self.account.commit(self.knowledge.job_id, from_index, from_index + num_iterations - 1, terms.cost_s)

    def restore(self, account: TimeAccount | None, ends_at: int | None) -> None:
        """Continue from the state of an earlier daemon; the job asks again for what it was waiting for."""
        if account is not None:
            self.account = account.copy()
        self.ends_at = ends_at
        purposes = self.knowledge.plans.purposes()
        for observation in self.knowledge.iterations.kept:
            if observation.is_regular and (purpose := purposes.get(observation.plan_id)) is not None:
                self._times.add(observation, is_full_speed=purpose is PlanPurpose.BASELINE)

    # --- inside ---

    def _extra_s(self, plan: ClockPlan, baseline: BaselineView, target: PerformanceTarget, *, since: int = 0) -> float:
        """Return the longest time of an iteration under a plan, beyond full speed and the pace that others set."""
        full_s = max(baseline.iteration_time_s, _given_pace_s(target))
        worst_s = self._worst_case(baseline.iteration_time_s).extra_s(plan, self.ranks.graph_in(plan.orders))
        extra_s = max(0.0, baseline.iteration_time_s + worst_s - full_s)
        newest = self.knowledge.iterations.regular_under(plan.plan_id, since=since)[-_NEWEST:]
        if len(newest) < _SHOWN_BY:
            return extra_s
        if self.ranks.has_waits and (at_full_speed := self.knowledge.full_speed()[-_NEWEST:]):
            full_s = max(median(_time_s(iteration) for iteration in at_full_speed), _given_pace_s(target))
        chance_s = _UPPER_SIGMAS * baseline.iteration_sigma_s / math.sqrt(len(newest))
        return max(0.0, fmean(_time_s(iteration) - iteration.waited_s for iteration in newest) + chance_s - full_s)

    def _earned_s(self, baseline: BaselineView, target: PerformanceTarget) -> float:
        """Return the time that the account earns per iteration."""
        full_s = baseline.iteration_time_s
        return full_s * self.account.earned_ratio(target.own.permitted_ratio(full_s))

    def _worst_case(self, iteration_time_s: float) -> WorstCase:
        return WorstCase(self.ranks.graph, self._times, rank_speeds(self.ranks), iteration_time_s)


def rank_speeds(ranks: JobRanks) -> tuple[RankSpeed, ...]:
    """Return the values that bound how slow each rank of a job can become."""
    return tuple(
        RankSpeed(max(gpu.supported_sm_clocks_mhz), gpu.switch_latency_s, (gpu.power_limit_range_w or (0.0, None))[1])
        for gpu in (ranks.gpus[r] for r in sorted(ranks.gpus))
    )


def _time_s(observation: IterationObservation) -> float:
    """Return the time of an iteration without the wait for data, which does not depend on clocks."""
    waits_s: dict[int, float] = defaultdict(float)
    for sample in observation.instruction_samples:
        if sample.kind.is_wait and not sample.kind.waits_for_ranks:
            waits_s[sample.pp_rank] += sample.count * sample.time_s
    is_of_all = bool(waits_s) and len(waits_s) == len(observation.ranks)
    return observation.iteration_time_s - (min(waits_s.values()) if is_of_all else 0.0)


def _counter_period_s(observation: IterationObservation) -> float | None:
    return max((rank.counter_period_s for rank in observation.ranks if rank.counter_period_s is not None), default=None)


def _given_pace_s(target: PerformanceTarget) -> float:
    return max(target.straggler_time_s or 0.0, target.power_time_s or 0.0)


def _most_s(num_iterations: int, extra_s: float, earned_s: float, sigma_s: float) -> float:
    """Return the maximum total cost of iterations that cost `extra_s` each, less what the account earns during them."""
    net_s = num_iterations * (extra_s - earned_s)
    return max(0.0, net_s + _UPPER_SIGMAS * sigma_s * math.sqrt(num_iterations)) if extra_s > earned_s else 0.0
