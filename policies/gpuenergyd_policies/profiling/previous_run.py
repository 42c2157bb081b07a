"""Use of a previous run's profile, as long as it still holds.

A previous run's iterations are used if, at full speed, every class of instruction takes the same time as then and every
GPU draws the same power, within a few percent. The remaining difference in time is corrected by rescaling: it is a
uniform factor that does not depend on clocks. For a job that has changed during its run, the iterations before the
change are used whatever the difference (see `rescaling`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd_policies.profiling.rescaling import Change, change_of, times_by_class_s

SAME_TIME_RATIO = 0.04
"""Largest difference of a class's time at full speed; beyond it, the job or the GPU is a different one."""
SAME_POWER_RATIO = 0.06
"""Largest difference of a GPU's mean power; ten windows of a coarse counter measure it to about two percent."""


def with_previous_run(view: JobView) -> JobView:
    """Return the view with the previous run's iterations added; the view itself if they do not hold or exist.

    Once a plan has been made from them, later iterations at full speed do not revoke them: the daemon detects changes
    of the job and then drops the previous run.
    """
    model = view.previous_run
    purposes = {plan.purpose for plan in view.issued_plans if not plan.orders}  # the trial of an order tries no clock
    if model is None or PlanPurpose.PROFILE in purposes:
        return view
    change = change_of(view)
    if change is None:
        now = [o for o in view.observations if o.is_regular and o.plan_id == BASELINE_PLAN_ID]
        then_s, now_s = times_by_class_s(model.full_speed), times_by_class_s(now)
        change = Change({key: now_s[key] / then_s[key] for key in then_s.keys() & now_s.keys()})
        if PlanPurpose.TUNED not in purposes and not _holds(model, now, change.ratios):
            return view
    previous = tuple(change.applied_to(o) for o in (*model.full_speed, *model.profile))
    return replace(view, observations=(*previous, *view.observations))


def _holds(model: PreviousRun, now: list[IterationObservation], ratios: Mapping[InstructionClass, float]) -> bool:
    classes = set(times_by_class_s(model.full_speed)) | set(times_by_class_s(now))
    powers_w, powers_now_w = _powers_w(model.full_speed), _powers_w(now)
    return (
        bool(classes)
        and classes == set(ratios)
        and all(abs(ratio - 1) <= SAME_TIME_RATIO for ratio in ratios.values())
        and bool(powers_w)
        and set(powers_w) == set(powers_now_w)
        and all(abs(powers_now_w[rank] / power_w - 1) <= SAME_POWER_RATIO for rank, power_w in powers_w.items())
    )


def _powers_w(observations: Iterable[IterationObservation]) -> dict[int, float]:
    powers_w: dict[int, list[float]] = defaultdict(list)
    for observation in observations:
        for rank in observation.ranks:
            if rank.energy_j is not None and rank.energy_j > 0 and rank.window_s > 0:
                powers_w[rank.pp_rank].append(rank.energy_j / rank.window_s)
    return {rank: median(values) for rank, values in powers_w.items()}
