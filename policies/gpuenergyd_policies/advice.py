"""Advice on the permitted slowdown: what a plain training loop would save if it were permitted more.

Of each possible curve (`setting_curves`) it is the saving of the setting that the policy would choose. At full speed
that is a wide range; once the job has measured other clocks or power limits, it is what the curves that are left agree
on. Policies measure some for a few iterations, also for a loop that permits no slowdown (`setting_plans`).
"""

from dataclasses import replace

import numpy as np

from gpuenergyd.core.pipeline.plan import ClockPlan, SavingAdvice
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.setting_curves import Cost
from gpuenergyd_policies.setting_measurements import curves_of, measured_points, standard_errors
from gpuenergyd_policies.setting_search import ADVISED_SLOWDOWNS, can_be_advised
from gpuenergyd_policies.uniform_settings import settings_of

ADVISED_EVERY_AT_FIRST, ADVISED_EVERY = 4, 64
"""Iterations between two pieces of advice, since each takes milliseconds; the daemon keeps the last one."""
MEASURED_UP_TO = 0.9
"""Advice is measured up to a slowdown of which a slower setting, or one nearly as slow, was measured."""
SAVING_QUANTILES = (0.05, 0.5, 0.95)
"""Quantiles of the saving that advice gives: its 90 % interval, with the median between."""


def is_time_to_review(view: JobView) -> bool:
    """Return whether advice, and a setting that was chosen, are reviewed after this iteration."""
    last_index = view.observations[-1].iteration_index if view.observations else 0
    return last_index % (ADVISED_EVERY if last_index > ADVISED_EVERY else ADVISED_EVERY_AT_FIRST) == 0


def advised_slowdowns(view: JobView) -> list[float]:
    """Return the slowdowns that are more than permitted."""
    return [ratio for ratio in ADVISED_SLOWDOWNS if ratio > view.target.max_slowdown_ratio]


def with_advice(view: JobView, plan: ClockPlan, *, cost: Cost | None = None) -> ClockPlan:
    """Return a plan with advice for a loop that permits less slowdown than `ADVISED_SLOWDOWNS`.

    `cost` is what the policy minimizes instead of energy.
    """
    settings = settings_of(view, with_limits=cost is not None)
    if not settings or not can_be_advised(view) or not is_time_to_review(view):
        return plan
    points = measured_points(view, settings)
    slowest_ratio = max((point.time_ratio - 1 for point in points.values()), default=0.0)
    curves = curves_of(view, settings, points)
    random, num_curves = np.random.default_rng(len(points)), len(curves.logs)
    later = standard_errors(view, view.baseline.num_iterations)  # a job keeps to its permitted time within one of them
    found = []
    for ratio in advised_slowdowns(view):
        used = ratio + later.time * random.uniform(-1, 1, num_curves)
        saved = curves.savings(used, cost) + later.energy * random.standard_normal(num_curves)
        low, middle, high = map(float, np.quantile(saved, SAVING_QUANTILES))
        found.append(SavingAdvice(ratio, middle, low, high, is_measured=slowest_ratio >= MEASURED_UP_TO * ratio))
    return replace(plan, advice=tuple(found))
