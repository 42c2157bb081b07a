"""Whether what was learned earlier still holds, and a view in which it stands beside what is seen now.

An earlier run's iterations are believed when every class of instruction takes the same time at full speed as it did
then, and every GPU draws the same power, within a few percent. What is left of the difference in time is taken out: an
iteration that came out one percent longer everywhere says nothing else about clocks.

Of a job that has changed while it ran, what it showed before is believed whatever the difference: a batch that has
grown, a stage that is in somebody's way take longer at every clock alike, and profiling again would make the job slow
to learn as much. Where a GPU does not reach its maximum clock any more, what its instructions took at the clock that it
does reach is what they are held against.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median, median_low

from gpuenergyd.core.model_memory import RememberedModel
from gpuenergyd.core.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline import InstructionClass
from gpuenergyd.core.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.core.policy import JobView
from gpuenergyd_policies.profiling.times import fit_times

SAME_TIME_RATIO = 0.04
"""Times of a class at full speed that differ by more belong to different jobs, or to a GPU that is not the same."""
SAME_POWER_RATIO = 0.06
"""The same for a GPU's mean power: ten windows of a coarse counter show it within about two percent."""


def with_memory(view: JobView) -> JobView:
    """Return the view with what an earlier run showed beside its own observations; itself where that does not hold.

    Once a plan has been made from it, later iterations at full speed do not take it away again: when the job changes,
    the core forgets both.
    """
    model = view.remembered
    purposes = {plan.purpose for plan in view.issued_plans}
    if model is None or PlanPurpose.PROFILE in purposes:
        return view
    is_of_this_run = model.job_id == view.job_id
    if is_of_this_run:
        now = full_speed_now(view)
        ratios = _ratios_at_reached_clocks(model, now)
    else:
        now = [o for o in view.observations if o.is_regular and o.plan_id == BASELINE_PLAN_ID]
        ratios = _ratios(_times_s(model.full_speed), _times_s(now))
        if PlanPurpose.TUNED not in purposes and not _holds(model, now, ratios):
            return view
    recalled = tuple(_scaled(o, ratios) for o in (*model.full_speed, *model.profile))
    return replace(view, observations=(*recalled, *view.observations))


def full_speed_now(view: JobView) -> list[IterationObservation]:
    """Return this run's regular iterations at full speed, the first of each block (clocks still rising) left out."""
    slower = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    found, plan_id_before = [], None
    for observation in view.observations:
        is_first_of_block = observation.plan_id not in {BASELINE_PLAN_ID, plan_id_before}
        plan_id_before = observation.plan_id
        if observation.is_regular and not is_first_of_block and observation.plan_id not in slower:
            found.append(observation)
    return found


def reached_clocks_mhz(observations: Iterable[IterationObservation]) -> dict[InstructionClass, int]:
    """Return the clock at which each class of instruction mostly ran."""
    clocks_mhz: dict[InstructionClass, list[int]] = defaultdict(list)
    for observation in observations:
        for sample in observation.instruction_samples:
            clocks_mhz[_class_of(sample)].append(_main(sample).sm_clock_mhz)
    return {key: median_low(clocks) for key, clocks in clocks_mhz.items()}


def _ratios_at_reached_clocks(
    model: RememberedModel, now: list[IterationObservation]
) -> dict[InstructionClass, float]:
    then_s, now_s = _times_s(model.full_speed), _times_s(now)
    then_mhz, now_mhz = reached_clocks_mhz(model.full_speed), reached_clocks_mhz(now)
    moved = {key for key in now_mhz.keys() & then_mhz.keys() if now_mhz[key] != then_mhz[key]}
    if moved:
        curves = fit_times([*model.full_speed, *model.profile])
        then_s |= {key: float(curves[key].times_s([now_mhz[key]])[0]) for key in moved}
    return _ratios(then_s, now_s)


def _holds(model: RememberedModel, now: list[IterationObservation], ratios: Mapping[InstructionClass, float]) -> bool:
    classes = set(_times_s(model.full_speed)) | set(_times_s(now))
    powers_w, powers_now_w = _powers_w(model.full_speed), _powers_w(now)
    return (
        bool(classes)
        and classes == set(ratios)
        and all(abs(ratio - 1) <= SAME_TIME_RATIO for ratio in ratios.values())
        and bool(powers_w)
        and set(powers_w) == set(powers_now_w)
        and all(abs(powers_now_w[rank] / power_w - 1) <= SAME_POWER_RATIO for rank, power_w in powers_w.items())
    )


def _ratios(
    then_s: Mapping[InstructionClass, float], now_s: Mapping[InstructionClass, float]
) -> dict[InstructionClass, float]:
    return {key: now_s[key] / time_s for key, time_s in then_s.items() if key in now_s and time_s > 0}


def _times_s(observations: Iterable[IterationObservation]) -> dict[InstructionClass, float]:
    times_s: dict[InstructionClass, list[float]] = defaultdict(list)
    for observation in observations:
        for sample in observation.instruction_samples:
            times_s[_class_of(sample)].append(sample.time_s)
    return {key: median(values) for key, values in times_s.items()}


def _powers_w(observations: Iterable[IterationObservation]) -> dict[int, float]:
    powers_w: dict[int, list[float]] = defaultdict(list)
    for observation in observations:
        for rank in observation.ranks:
            if rank.energy_j is not None and rank.energy_j > 0 and rank.window_s > 0:
                powers_w[rank.pp_rank].append(rank.energy_j / rank.window_s)
    return {rank: median(values) for rank, values in powers_w.items()}


def _scaled(observation: IterationObservation, ratios: Mapping[InstructionClass, float]) -> IterationObservation:
    samples = []
    for sample in observation.instruction_samples:
        ratio = ratios.get(_class_of(sample), 1.0)
        shares = tuple(replace(share, time_s=share.time_s * ratio) for share in sample.shares)
        samples.append(replace(sample, shares=shares))
    return replace(observation, instruction_samples=tuple(samples))


def _class_of(sample: InstructionSample) -> InstructionClass:
    return InstructionClass(sample.pp_rank, sample.kind, sample.chunk_index)


def _main(sample: InstructionSample) -> ClockShare:
    return max(sample.shares, key=lambda share: share.time_s)
