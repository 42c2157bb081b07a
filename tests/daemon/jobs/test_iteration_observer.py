"""Of which iterations the history keeps the timelines, however long a job runs and however many plans it gets."""

from typing import cast

from gpuenergyd.core.job.issued_plans import MAX_PLANS_KEPT
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.daemon.jobs.iteration_observer import ObservedIterations
from gpuenergyd.daemon.ports import JobServices


def iteration(index: int, plan_id: str, *, is_regular: bool = True) -> IterationObservation:
    return IterationObservation(index, plan_id, 1.0, (), (), is_regular=is_regular)


def new_observed() -> ObservedIterations:
    return ObservedIterations(cast("JobServices", None))  # which timelines are kept is asked of nobody


def test_a_dozen_timelines_of_each_plan_are_kept_and_one_in_a_hundred_of_all() -> None:
    observed = new_observed()

    kept = [i for i in range(1, 350) if observed._keeps_timeline(iteration(i, "tuned-1"))]

    assert kept == [*range(1, 13), 100, 200, 300]
    assert not observed._keeps_timeline(iteration(351, "tuned-2", is_regular=False))
    assert observed._keeps_timeline(iteration(352, "tuned-2"))


def test_plans_are_counted_in_a_bounded_number_and_the_one_in_force_is_among_them() -> None:
    observed = new_observed()

    for number in range(3 * MAX_PLANS_KEPT):
        for index in range(13):
            kept = observed._keeps_timeline(iteration(1 + 100 * number + index, f"tuned-{number}"))
        observed._keeps_timeline(iteration(1 + 100 * number + 13, "untuned"))

    assert not kept
    assert len(observed._num_timelines) == MAX_PLANS_KEPT
    assert not observed._keeps_timeline(iteration(77, "untuned"))
