"""Whether what was learned earlier still holds, and a view in which it stands beside what is seen now.

An earlier run's iterations are believed when every class of instruction takes the same time at full speed as it did
then, and every GPU draws the same power, within a few percent. What is left of the difference in time is taken out: an
iteration that came out one percent longer everywhere says nothing else about clocks. Of a job that has changed while it
ran, what it showed before is believed whatever the difference (`rescaling`).
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
"""Times of a class at full speed that differ by more belong to different jobs, or to a GPU that is not the same."""
SAME_POWER_RATIO = 0.06
"""The same for a GPU's mean power: ten windows of a coarse counter show it within about two percent."""


def with_memory(view: JobView) -> JobView:
    """Return the view with what was learned earlier beside its own observations; itself where that does not hold.

    Once a plan has been made from it, later iterations at full speed do not take it away again: when the job changes,
    the core says so.
    """
    model = view.previous_run
    purposes = {plan.purpose for plan in view.issued_plans}
    if model is None or PlanPurpose.PROFILE in purposes:
        return view
    change = change_of(view)
    if change is None:
        now = [o for o in view.observations if o.is_regular and o.plan_id == BASELINE_PLAN_ID]
        then_s, now_s = times_by_class_s(model.full_speed), times_by_class_s(now)
        change = Change({key: now_s[key] / then_s[key] for key in then_s.keys() & now_s.keys()})
        if PlanPurpose.TUNED not in purposes and not _holds(model, now, change.ratios):
            return view
    recalled = tuple(change.applied_to(o) for o in (*model.full_speed, *model.profile))
    return replace(view, observations=(*recalled, *view.observations))


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
