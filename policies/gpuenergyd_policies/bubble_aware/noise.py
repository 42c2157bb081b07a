"""Detects jobs that are too noisy to plan for: their measurements leave open whether a plan saves energy at all.

The fit of a profile has a posterior distribution. On draws from it a plan has a range of savings and slowdowns, and the
noise of the baseline adds to the slowdown. If the range of the saving is wide and contains zero, or if that of the
slowdown ends far above what is permitted, the job stays at full speed with that reason. Once its iterations at full
speed scatter much less, or after a long time, it is profiled again, from the beginning.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np

from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.model import FittedJob
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.plan_evaluation import FixedClocks
from gpuenergyd_policies.planning.switching.simulation import simulate_switching
from gpuenergyd_policies.profiling.fit import FittedProfile

_NUM_DRAWS, _NUM_DRAWS_OF_LARGE = 41, 11
"""Draws of a range; evaluating one takes a tenth of a second and more in a large pipeline."""
_RANGE = (10.0, 90.0)
"""Percentiles of a range: 8 of 10 draws are in it."""
_SEED = 7
_NORMAL_PER_MEDIAN = 1.4826 / math.sqrt(2)
"""Standard deviation over the median absolute difference of two values, for a normal distribution."""
_MEDIAN_PER_MEAN_ERROR = 1.2533


class NoiseFigure(StrEnum):
    """Figures of a plan that keeps a noisy job at full speed."""

    SCATTER = "scatter_ratio"
    """Scatter of time and energy of the iterations at full speed."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Ranges (low, high) of a plan's saving and slowdown, as ratios to full speed."""

    saving_ratio: tuple[float, float]
    slowdown_ratio: tuple[float, float]

    def problem(self, permitted_ratio: float, *, is_experiment: bool = False) -> str | None:
        """Return why the plan cannot be trusted; None if it can. What an experiment saves is for it to show."""
        low, high = self.saving_ratio
        if not is_experiment and low <= 0.0 and (high - low) / 2 > TUNING.doubtful_saving_ratio:
            return f"the saving is between {100 * low:.0f} and {100 * high:.0f} %"
        low, high = self.slowdown_ratio
        if high > permitted_ratio + TUNING.doubtful_slowdown_ratio:
            fastest = f"{100 * abs(low):.0f} % {'slower' if low > 0 else 'faster'}"
            return f"iterations are between {fastest} and {100 * high:.0f} % slower"
        return None


def outlook(job: FittedJob, plan: ClockPlan) -> Outlook:
    """Return the ranges of a plan's saving and slowdown, by the iterations that it was made from."""
    view, fitted, model = job.view, job.fitted, job.model_as_fitted
    usual_s, scatter_s = view.baseline.iteration_time_s, view.baseline.iteration_sigma_s
    baseline_error = _MEDIAN_PER_MEAN_ERROR * scatter_s / usual_s / math.sqrt(max(1, view.baseline.num_iterations))
    random = np.random.default_rng(_SEED)
    at_full_speed, under_plan = FixedClocks(model.graph, None), _evaluation(job, plan)
    late_s, late_j = model.bias_s, model.bias_energy_j
    if plan.predicted is not None:  # what an evaluation leaves out, as rare long latencies, is the same for all draws
        fitted_s, fitted_j = under_plan(fitted.profile)
        late_s = plan.predicted.iteration_time_s - fitted_s
        late_j = plan.predicted.energy_j - fitted_j
    draw = partial(fitted.drawn, is_shape_known=True) if isinstance(fitted, FittedProfile) else fitted.drawn
    savings, slowdowns = [], []
    is_large = len(model.graph.instructions) > TOO_LARGE
    for _ in range(_NUM_DRAWS_OF_LARGE if is_large else _NUM_DRAWS):
        truth = draw(random)
        full_speed_s, full_speed_j = at_full_speed.time_and_energy(truth)
        planned_s, planned_j = under_plan(truth)
        savings.append(1 - (planned_j + late_j) / (full_speed_j + model.bias_energy_j))
        ratio = (planned_s + late_s) / (full_speed_s + model.bias_s)
        slowdowns.append(ratio - 1 + baseline_error * random.standard_normal())
    return Outlook(_range(savings), _range(slowdowns))


def _evaluation(job: FittedJob, plan: ClockPlan) -> Callable[[PipelineProfile], tuple[float, float]]:
    """Return the function from a profile to the time and energy of the plan, without what is outside of the graph.

    A plan counts on clocks that fall late: were they to fall at once, it would have no slack for any error. In a large
    pipeline, where a simulation takes long, they do fall at once.
    """
    model = job.model_as_fitted
    if len(model.graph.instructions) > TOO_LARGE:
        clock_of = _clock_of(job.view, plan)
        at_once = FixedClocks(model.graph, [clock_of[instruction] for instruction in model.graph.instructions])
        return at_once.time_and_energy
    changes = tuple(plan.changes_of(r) for r in range(model.graph.num_ranks))

    def as_it_runs(profile: PipelineProfile) -> tuple[float, float]:
        simulated = simulate_switching(model.graph, profile, changes, latency=model.latencies)
        return simulated.iteration_time_s, simulated.energy_j

    return as_it_runs


def trusted_plan(job: FittedJob, plan: ClockPlan, *, is_experiment: bool = False) -> ClockPlan:
    """Return a first tuned plan, or full speed with the reason if the job is too noisy for it.

    An experiment comes from a prior instead of profiling: that its saving is uncertain is no noise of the job.
    """
    if plan.predicted is None:
        return plan
    view = job.view
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    permitted_ratio = target_s / view.baseline.iteration_time_s - 1
    problem = outlook(job, plan).problem(permitted_ratio, is_experiment=is_experiment)
    if problem is None:
        return plan
    full_speed = baseline_plan(
        view.plan_id(f"too-noisy-{view.num_issued()}"), reason=f"too noisy to plan for: under the best plan, {problem}"
    )
    return replace(full_speed, figures=((NoiseFigure.SCATTER, scatter_ratio(view)),))


def plan_while_noisy(view: JobView) -> ClockPlan | None:
    """Return full speed while a job stays as noisy as it was; None for a job that may be profiled."""
    noisy = last_noisy_plan(view)
    if noisy is None or any(plan.ranks for plan in view.issued_plans[_index(view, noisy) + 1 :]):
        return None
    since = [o for o in view.observations if o.plan_id == noisy.plan_id]
    if len(since) < TUNING.min_noisy_iterations:
        return noisy
    num_rounds = len({plan.plan_id for plan in _noisy_plans(view)})
    is_long_ago = since[-1].iteration_index - since[0].iteration_index >= TUNING.noisy_iterations * 2**num_rounds
    now = scatter_ratio(replace(view, observations=tuple(since[-TUNING.min_noisy_iterations :])))
    has_fallen = now <= TUNING.fallen_noise_ratio * (noisy.figure(NoiseFigure.SCATTER) or 0.0)
    return None if has_fallen or is_long_ago else noisy


def since_noise(view: JobView) -> JobView:
    """Return the view without what was measured before the job was last found too noisy."""
    noisy = last_noisy_plan(view)
    if noisy is None:
        return view
    before, after = view.issued_plans[: _index(view, noisy)], view.issued_plans[_index(view, noisy) :]
    first = min((o.iteration_index for o in view.observations if o.plan_id == noisy.plan_id), default=0)
    dropped = Counter(plan.purpose for plan in before)
    return replace(
        view,
        issued_plans=after,
        observations=tuple(o for o in view.observations if o.iteration_index >= first),
        num_dropped_plans=Counter(view.num_dropped_plans) + dropped,
    )


def last_noisy_plan(view: JobView) -> ClockPlan | None:
    """Return the last plan that kept the job, since it changed, at full speed because of its noise."""
    return next(reversed(_noisy_plans(view)), None)


def scatter_ratio(view: JobView) -> float:
    """Return the scatter of time and energy of the iterations at full speed, from successive ones."""
    at_full_speed = {plan.plan_id for plan in view.issued_plans if not plan.ranks} | {baseline_plan().plan_id}
    seen = [o for o in view.observations if o.is_regular and o.plan_id in at_full_speed]
    energies_j = [o.energy_j for o in seen if o.energy_j is not None]
    return math.hypot(_scatter([o.own_time_s for o in seen]), _scatter(energies_j))


def _noisy_plans(view: JobView) -> list[ClockPlan]:
    noisy = (plan for plan in view.issued_plans if plan.figure(NoiseFigure.SCATTER) is not None)
    return [plan for plan in noisy if plan.plan_id == view.plan_id(plan.plan_id.partition("@")[0])]


def _scatter(values: Sequence[float]) -> float:
    differences = [abs(b / a - 1) for a, b in pairwise(values) if a > 0]
    return _NORMAL_PER_MEDIAN * median(differences) if differences else 0.0


def _index(view: JobView, plan: ClockPlan) -> int:
    return next(i for i, own in enumerate(view.issued_plans) if own.plan_id == plan.plan_id)


def _clock_of(view: JobView, plan: ClockPlan) -> Mapping[Instruction, int]:
    return {
        instruction: clock
        for rank in plan.ranks
        for instruction, clock in zip(view.schedule.orders[rank.pp_rank], rank.sm_clocks_mhz, strict=True)
        if clock is not None
    }


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, _RANGE)
    return float(low), float(high)
