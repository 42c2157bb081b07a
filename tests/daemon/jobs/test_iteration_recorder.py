"""The number of stored timelines is bounded, however long a job runs and however many plans it gets."""

from gpuenergyd.client.thinning import STRIDES
from gpuenergyd.core.job.issued_plans import MAX_PLANS_KEPT
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.daemon.jobs.iterations import TimelineSelection


def iteration(index: int, plan_id: str, *, is_regular: bool = True) -> IterationObservation:
    return IterationObservation(index, plan_id, 1.0, (), (), is_regular=is_regular)


def test_a_dozen_timelines_of_each_plan_are_stored_and_one_in_96_of_all() -> None:
    timelines = TimelineSelection()

    selected = [i for i in range(1, 350) if timelines.select(iteration(i, "tuned-1"))]

    assert selected == [*range(1, 13), 96, 192, 288]
    assert all(index % stride == 0 for index in selected[12:] for stride in STRIDES)  # timed by every rank
    assert not timelines.select(iteration(351, "tuned-2", is_regular=False))
    assert timelines.select(iteration(352, "tuned-2"))


def test_timelines_are_counted_for_the_newest_plans_and_the_one_in_force() -> None:
    timelines = TimelineSelection()

    for number in range(3 * MAX_PLANS_KEPT):
        for index in range(13):
            selected = timelines.select(iteration(1 + 100 * number + index, f"tuned-{number}"))
        timelines.select(iteration(1 + 100 * number + 13, "untuned"))

    assert not selected
    assert not timelines.select(iteration(77, "untuned"))
    assert timelines.select(iteration(77, "tuned-0"))  # a plan that was dropped counts from the start
