"""The frontier of a job whose policy knows none: what its plans were measured to take."""

import pytest

from gpuenergyd.core.job.measurements.measured_frontier import measured_frontier
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.policy import BaselineView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget


def iteration(
    plan_id: str | None, time_s: float, energy_j: float | None, *, is_regular: bool = True
) -> IterationObservation:
    return IterationObservation(0, plan_id, time_s, (), (RankEnergy(0, time_s, energy_j, ()),), is_regular)


def points(*observations: IterationObservation, baseline_j: float | None = 100.0) -> list[float]:
    """Return times and energies, one after the other."""
    baseline = BaselineView(1.0, baseline_j, 10)
    schedule = one_forward_one_backward(1, 1)
    view = JobView("j", schedule, (), PerformanceTarget(), baseline, observations, ())
    return [value for point in measured_frontier(view) for value in (point.iteration_time_s, point.energy_j)]


def test_each_plan_without_its_first_iteration_and_full_speed_are_frontier_points() -> None:
    slow = [iteration("slow", time_s, energy_j) for time_s, energy_j in ((9.0, 9.0), (1.2, 80.0), (1.4, 84.0))]
    quick = [iteration("quick", 0.8, 120.0), iteration("quick", 0.9, 130.0)]

    assert points(*slow, *quick) == pytest.approx([0.85, 125.0, 1.0, 100.0, 1.3, 82.0])


def test_one_iteration_makes_no_frontier_point() -> None:
    assert points(iteration("p", 1.2, 80.0)) == [1.0, 100.0]


@pytest.mark.parametrize(
    "left_out",
    [iteration(None, 1.2, 80.0), iteration("p", 1.2, None), iteration("p", 1.2, 80.0, is_regular=False)],
    ids=["no plan", "no energy", "disturbed"],
)
def test_disturbed_or_unmeasured_iterations_make_no_frontier_point(left_out: IterationObservation) -> None:
    assert points(left_out, left_out, left_out) == [1.0, 100.0]


def test_full_speed_without_energy_makes_no_frontier_point() -> None:
    assert points(baseline_j=None) == []
