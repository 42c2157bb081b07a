"""Which iterations of a job stay remembered, and which of those count as what."""

from dataclasses import replace

from gpuenergyd.core.job.measurements.history import KeptIterations
from gpuenergyd.core.job.measurements.knowledge import JobKnowledge, PlanMeasurement
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose

PURPOSES: dict[str | None, PlanPurpose] = {
    BASELINE_PLAN_ID: PlanPurpose.BASELINE,
    "proof": PlanPurpose.BASELINE,
    "probe": PlanPurpose.TRIAL,
    "tuned": PlanPurpose.TUNED,
}


def iteration(
    index: int, plan_id: str | None, *, regular: bool = True, gap_s: float | None = None
) -> IterationObservation:
    return IterationObservation(index, plan_id, 1.0, (), (), is_regular=regular, launch_gap_s=gap_s)


def remembered(*plan_ids: str | None, max_kept: int = 100) -> KeptIterations:
    made = KeptIterations(max_kept)
    for index, plan_id in enumerate(plan_ids):
        made.add(iteration(index, plan_id), PURPOSES)
    return made


def indices(observations: list[IterationObservation]) -> list[int]:
    return [o.iteration_index for o in observations]


def test_the_oldest_tuned_iteration_is_dropped_first() -> None:
    full = remembered("baseline", "tuned", "probe", "tuned", "tuned", "tuned", max_kept=6)
    assert indices(full.kept) == [0, 1, 2, 3, 4, 5]

    for index, gone in ((6, 1), (7, 3)):
        full.add(iteration(index, "tuned"), PURPOSES)
        assert gone not in indices(full.kept)
        assert len(full.kept) == 6


def test_without_tuned_iterations_in_the_older_half_full_speed_is_dropped_then_the_oldest() -> None:
    full = remembered("probe", "baseline", "probe", "tuned", "tuned", "tuned", max_kept=6)
    full.add(iteration(6, "tuned"), PURPOSES)
    assert indices(full.kept) == [0, 2, 3, 4, 5, 6]

    probes = remembered("probe", "probe", "probe", "tuned", max_kept=4)
    probes.add(iteration(4, "tuned"), PURPOSES)
    assert indices(probes.kept) == [1, 2, 3, 4]


def test_iterations_under_unknown_plans_are_dropped_like_tuned_ones() -> None:
    full = remembered("baseline", None, "probe", "probe", max_kept=4)

    full.add(iteration(4, "probe"), PURPOSES)

    assert indices(full.kept) == [0, 2, 3, 4]


def test_with_room_for_one_the_newest_iteration_is_kept() -> None:
    assert indices(remembered("baseline", "tuned", "probe", max_kept=1).kept) == [2]


def test_the_first_iteration_of_a_full_speed_block_is_left_out_and_the_first_of_the_job_is_not() -> None:
    run = remembered("baseline", "baseline", "tuned", "proof", "proof", "proof", "tuned", "proof", "proof")

    assert indices(run.at_full_speed(PURPOSES)) == [0, 1, 4, 5, 8]
    assert indices(run.at_full_speed(PURPOSES, since=4)) == [4, 5, 8]
    assert indices(run.at_full_speed(PURPOSES, since=5)) == [5, 8]


def test_a_disturbed_iteration_is_not_selected() -> None:
    run = remembered("baseline", "baseline")
    run.add(iteration(2, "baseline", regular=False), PURPOSES)
    run.add(iteration(3, "tuned", regular=False, gap_s=9.0), PURPOSES)
    run.add(iteration(4, "tuned", gap_s=1.0), PURPOSES)

    assert indices(run.at_full_speed(PURPOSES)) == [0, 1]
    assert indices(run.regular_under("tuned")) == [4]
    assert run.typical(lambda o: o.launch_gap_s) == 1.0


def test_iterations_of_one_plan_are_selected_since_an_index() -> None:
    run = remembered("tuned", "baseline", "tuned", "tuned", "probe")

    assert indices(run.regular_under("tuned", since=2)) == [2, 3]
    assert indices(run.regular_under("tuned", since=3)) == [3]
    assert indices(run.regular_under("tuned")) == [0, 2, 3]


def test_medians_of_a_plan_are_those_of_its_newest_iterations() -> None:
    job = JobKnowledge("job-1", max_kept=512)
    slow, usual = (replace(iteration(k, "tuned"), iteration_time_s=time_s) for k, time_s in enumerate((2.0, 1.0)))
    job.iterations.kept = [slow] * 200 + [usual] * 128

    assert job.measured_under("tuned") == PlanMeasurement(328, 1.0, None)
    assert job.measured_under("baseline") == PlanMeasurement(0, None, None)
    assert job.measured_under("tuned") == PlanMeasurement(328, 1.0, None)


def test_figures_of_a_plan_count_a_new_iteration() -> None:
    job = JobKnowledge("job-1", max_kept=512)
    observed = replace(iteration(0, BASELINE_PLAN_ID), iteration_time_s=2.0)
    assert job.measured_under(BASELINE_PLAN_ID).num_iterations == 0

    job.add(
        observed,
        dependency_graph(one_forward_one_backward(1, 1)),
        is_forced=False,
        permitted_ratio=0.0,
        least_other_overhead_s=None,
    )

    assert job.measured_under(BASELINE_PLAN_ID) == PlanMeasurement(1, 2.0, None)


def test_a_figure_that_no_iteration_has_is_zero() -> None:
    assert remembered("baseline").typical(lambda o: o.launch_gap_s) == 0.0
