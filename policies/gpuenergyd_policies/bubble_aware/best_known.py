"""Decides whether a job runs the best of its plans so far again, or tries a new one.

Near full speed the frontier is steep: where a power cap makes a clock almost free, 0.3 % of time is worth 2 % of
energy. A new plan that is believed to be a little better may be late by more than it saves, so it is compared with the
plans that ran: their energies by the present belief, their times as measured, each against the frontier at its time.

A plan that is kept teaches nothing, and a belief that kept it may be wrong for good. So the first plans are applied
whatever ran before them, and so is each one after a plan that was kept, but the last: their lateness is limited. With
the same belief, the plan after a kept one would be the same again: where a clock may be almost free or 1 % late, it is
used for all microbatches or for none. So that plan has a little more time than the target, which pays for some
microbatches at such a clock even if it is as slow as feared, and these show how slow it is. A plan that differs from
an earlier one in a few instructions only teaches as little as the same one, and counts as kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.model import PipelineModel
from gpuenergyd_policies.bubble_aware.outcome import PlanOutcome
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.risk import MAX_LATE_RATIO, THIN_TOLERANCE
from gpuenergyd_policies.planning.frontier import least_energies_j
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.switching.simulation import SimulatedIteration, simulate_switching

NUM_EXPERIMENTS = 3
"""First plans that are applied in any case: until then the belief changes more than plans differ."""
EXPERIMENT_LATE_RATIO = 0.0025
"""Time beyond the target for an experiment after a kept plan, of the lateness that is permitted to any plan."""
SAME_SHARE = 0.95
"""Of the instructions, so many have the same clocks in plans that count as the same one."""


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """Energy of a plan by the present belief, and how late it is: measured if it ran, expected if it did not."""

    energy_j: float
    late_s: float
    """Behind the deadline; negative if early, which is worth nothing."""


@dataclass(frozen=True, slots=True)
class BelievedFrontier:
    """Least energy of any plan by the time that it is late, by the present belief."""

    late_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    most_s: float
    """By how much more than the least late plan another one may be late: as much as is permitted to a new plan."""

    def regret_j(self, plan: KnownPlan) -> float:
        """Return the energy of a plan above that of the best one of equal time."""
        return plan.energy_j - float(np.interp(plan.late_s, self.late_s, self.energies_j))


def believed_frontier(graph: DependencyGraph, believed: PipelineProfile, *, deadline_s: float) -> BelievedFrontier:
    """Return the frontier a little beyond a deadline: lower bounds, which unlike rough plans are smooth."""
    late_ratios = (0.0, EXPERIMENT_LATE_RATIO, MAX_LATE_RATIO, TUNING.far_late_ratio)
    deadlines_s = [(1 + ratio) * deadline_s for ratio in late_ratios]
    bounds_j = least_energies_j(graph, believed, deadlines_s, THIN_TOLERANCE)
    falling = np.minimum.accumulate(np.array(bounds_j))
    late_s = tuple(ratio * deadline_s for ratio in late_ratios)
    return BelievedFrontier(late_s, tuple(falling.tolist()), MAX_LATE_RATIO * deadline_s)


def best_known(plans: Sequence[KnownPlan], frontier: BelievedFrontier) -> int:
    """Return the index of the plan of least regret, of equal ones the first; none far later than the least late."""
    most_s = frontier.most_s + max(0.0, min(own.late_s for own in plans))
    costs = [(max(0.0, own.late_s - most_s), frontier.regret_j(own)) for own in plans]
    return costs.index(min(costs))


def is_experiment(number: int, *, num_plans: int, was_kept: bool) -> bool:
    """Return whether plan `number` of `num_plans`, from 1, is applied whatever ran before it.

    `was_kept` says whether the plan before it was the same as an earlier one.
    """
    return number <= NUM_EXPERIMENTS or (was_kept and number < num_plans)


def is_kept(plans: Sequence[Sequence[int | None]]) -> bool:
    """Return whether the latest plan is nearly the same as an earlier one; each one is the clocks of instructions."""
    if not plans:
        return False
    *earlier, latest = plans
    comparable = [own for own in earlier if len(own) == len(latest)]
    least = SAME_SHARE * len(latest)
    return any(sum(a == b for a, b in zip(latest, own, strict=True)) >= least for own in comparable)


class TriedPlans:
    """The plans of a job for its present target that ran, oldest first, before plan `number` is made by a model."""

    def __init__(self, view: JobView, model: PipelineModel, number: int) -> None:
        self._model = model
        plans = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED and not plan.orders]
        outcomes = [PlanOutcome.of(view, plan) for plan in plans]
        self._ran = [
            own for own in outcomes if len(own.measured_s) >= TUNING.min_iterations_to_learn and not own.has_new_target
        ]
        clocks = [[mhz for rank in own.plan.ranks for mhz in rank.sm_clocks_mhz] for own in self._ran]
        self._was_kept = is_kept(clocks)
        self._is_experiment = is_experiment(number, num_plans=TUNING.num_learning_plans, was_kept=self._was_kept)

    @cached_property
    def _simulated(self) -> list[SimulatedIteration]:
        """The iteration of each plan by the model; none in large pipelines, where that takes too long."""
        model = self._model
        if len(model.graph.instructions) > TOO_LARGE:
            return []
        changes = [tuple(own.plan.changes_of(r) for r in range(model.graph.num_ranks)) for own in self._ran]
        return [simulate_switching(model.graph, model.profile, own, latency=model.latencies) for own in changes]

    @property
    def more_time_ratio(self) -> float:
        """By how much the plan may exceed the target: as an experiment after a plan that was kept."""
        is_longer = self._simulated and self._was_kept and self._is_experiment
        return EXPERIMENT_LATE_RATIO if is_longer else 0.0

    def best(self, new: ClockPlan) -> ClockPlan:
        """Return the new plan, or one of those that ran if it is better, under the new plan's name.

        Lateness that the model misses (clocks that take effect late, other couplings of the ranks) is that of the plans
        that ran: the new one is expected to have the median of it.
        """
        if self._is_experiment or not self._simulated or new.predicted is None:
            return new
        model, ran = self._model, list(zip(self._ran, self._simulated, strict=True))
        known = [KnownPlan(simulated.energy_j + model.bias_energy_j, own.late_s) for own, simulated in ran]
        target_s = self._ran[0].target_s
        missed_s = median(target_s + own.late_s - simulated.iteration_time_s - model.bias_s for own, simulated in ran)
        late_s = new.predicted.iteration_time_s + max(0.0, missed_s) - target_s
        frontier = believed_frontier(model.graph, model.profile, deadline_s=target_s - model.bias_s)
        chosen = best_known([KnownPlan(new.predicted.energy_j, late_s), *known], frontier)
        if chosen == 0:
            return new
        kept = self._ran[chosen - 1].plan
        why = f"{new.reason}; {kept.plan_id} is still the best plan known"
        return replace(kept, plan_id=new.plan_id, reason=why, learned=new.learned)
