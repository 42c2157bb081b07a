"""How early waits of a plain loop end follows from the clocks of the work after them, not from the iteration's time."""

from dataclasses import replace

import pytest

from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.correction import PlanOutcome, corrected_plan
from gpuenergyd_policies.bubble_aware.planning import Figure
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.bubble_aware.waits import late_after_waits_s, lowers_waits_alone
from tests.support.virtual_loop import F, VirtualLoop

MARGIN_RATIO = 0.02
LONG = 1 + TUNING.min_iterations_to_keep_budget
"""Iterations of a plan, the first of which does not count."""
TOP_MHZ, WAIT_MHZ = 1410, 420
Job = tuple[JobView, ClockPlan]


@pytest.fixture(scope="module")
def job() -> Job:
    """A loop whose plan lowers its waits alone, at the target."""
    run = VirtualLoop(policy=BubbleAware(), noise_ratio=0.003, seed=2)
    run.run(45)
    view, plan = run.job.view(), run.job.current_plan
    assert view is not None
    assert lowers_waits_alone(plan, view.schedule)
    return view, _with_margin(plan, MARGIN_RATIO)


def _with_margin(plan: ClockPlan, ratio: float, plan_id: str = "") -> ClockPlan:
    figures = dict(plan.figures) | {Figure.MARGIN_OF_WAITS: ratio}
    return replace(plan, plan_id=plan_id or plan.plan_id, figures=tuple(figures.items()))


def _observed(view: JobView, plan: ClockPlan, *, raised_late_s: float, late_ratio: float) -> IterationObservation:
    """Return an iteration in which the clock was back so late after the wait for data."""
    usual = next(o for o in reversed(view.observations) if o.plan_id == plan.plan_id and o.is_regular)

    def of(sample: InstructionSample) -> InstructionSample:
        if sample.kind is not F:
            return replace(sample, shares=(ClockShare(sample.main_share.sm_clock_mhz, sample.time_s),))
        late = (ClockShare(WAIT_MHZ, raised_late_s),) if raised_late_s else ()
        return replace(sample, shares=(ClockShare(TOP_MHZ, sample.time_s), *late))

    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    samples = tuple(of(sample) for sample in usual.instruction_samples)
    return replace(usual, instruction_samples=samples, iteration_time_s=(1 + late_ratio) * target_s, waited_s=0.0)


def seen(
    job: Job,
    *,
    raised_late_s: float = 0.0,
    late_ratio: float = 0.0,
    num_iterations: int = LONG,
    num_raised_late: int | None = None,
    before: tuple[float, ...] = (),
) -> JobView:
    """Return the view after so many iterations of the plan; `before` are margins of plans that ran for the target."""
    view, plan = job
    num_late = num_iterations if num_raised_late is None else num_raised_late
    observations = tuple(
        _observed(view, plan, raised_late_s=raised_late_s if k < num_late else 0.0, late_ratio=late_ratio)
        for k in range(num_iterations)
    )
    others = tuple(_with_margin(plan, ratio, f"{plan.plan_id}-{k}") for k, ratio in enumerate(before))
    kept = tuple(own for own in view.issued_plans if own.plan_id != plan.plan_id)
    kept_seen = tuple(o for o in view.observations if o.plan_id != plan.plan_id)
    return replace(view, issued_plans=(*kept, *others, plan), observations=(*kept_seen, *observations))


def next_margin(job: Job, view: JobView) -> float | None:
    return corrected_plan(view, job[1]).figure(Figure.MARGIN_OF_WAITS)


def test_clocks_that_are_back_in_time_are_requested_later(job: Job) -> None:
    assert next_margin(job, seen(job)) == MARGIN_RATIO / 2
    assert next_margin(job, seen(job, num_iterations=LONG - 1)) == MARGIN_RATIO


def test_clocks_that_are_late_are_requested_earlier(job: Job) -> None:
    assert next_margin(job, seen(job, raised_late_s=0.004)) == 2 * MARGIN_RATIO


@pytest.mark.parametrize(("before_s", "factor"), [(0.0045, 1), (0.012, 2)])
def test_clocks_are_requested_earlier_only_for_as_long_as_it_helps(job: Job, before_s: float, factor: int) -> None:
    view, plan = job
    view = seen(job, raised_late_s=0.004)
    smaller = _with_margin(plan, MARGIN_RATIO / 2, "smaller")
    ran = tuple(
        replace(_observed(job[0], plan, raised_late_s=before_s, late_ratio=0.0), plan_id="smaller") for _ in range(LONG)
    )
    *earlier, own = view.issued_plans
    view = replace(view, issued_plans=(*earlier, smaller, own), observations=(*ran, *view.observations))

    assert next_margin(job, view) == factor * MARGIN_RATIO


def test_a_few_late_clocks_are_expected(job: Job) -> None:
    assert next_margin(job, seen(job, raised_late_s=0.02, num_raised_late=4)) == MARGIN_RATIO / 2


def test_a_margin_that_was_too_small_is_not_tried_again(job: Job) -> None:
    assert next_margin(job, seen(job, before=(MARGIN_RATIO / 2,))) == MARGIN_RATIO


def test_a_margin_stays_where_a_smaller_one_hardly_saves(job: Job) -> None:
    small_ratio = TUNING.least_margin_of_waits_ratio
    small = (job[0], _with_margin(job[1], small_ratio))
    assert next_margin(small, seen(small)) == small_ratio


@pytest.mark.parametrize("late_ratio", [0.002, 0.008])
def test_lateness_that_no_clock_explains_changes_nothing(job: Job, late_ratio: float) -> None:
    view = seen(job, late_ratio=late_ratio, before=(MARGIN_RATIO / 2,))

    assert PlanOutcome.of(view, job[1]).late_s > 0
    assert corrected_plan(view, job[1]) is job[1]


def test_lost_time_is_that_of_work_at_the_clocks_of_waits(job: Job) -> None:
    view, plan = job
    late = _observed(view, plan, raised_late_s=0.006, late_ratio=0.0)
    in_time = _observed(view, plan, raised_late_s=0.0, late_ratio=0.05)

    lost_s = late_after_waits_s(plan, view.schedule, [late, in_time])

    assert lost_s == pytest.approx((0.006 * (1 - WAIT_MHZ / TOP_MHZ), 0.0))


def test_a_capped_gpu_is_not_late(job: Job) -> None:
    """Work that runs below its clock all the time does so after no wait in particular."""
    view, plan = job
    usual = _observed(view, plan, raised_late_s=0.0, late_ratio=0.0)
    capped = tuple(
        replace(sample, shares=tuple(replace(share, sm_clock_mhz=1200) for share in sample.shares))
        for sample in usual.instruction_samples
    )

    assert late_after_waits_s(plan, view.schedule, [replace(usual, instruction_samples=capped)]) == (0.0,)
