"""Records of previous runs."""

from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.previous_run import (
    MAX_FULL_SPEED_ITERATIONS,
    MAX_PROFILE_ITERATIONS,
    PREVIOUS_FULL_SPEED,
    PREVIOUS_PROFILE,
    PreviousRun,
    summarize_run,
)

PLAN = ClockPlan("tuned", PlanPurpose.TUNED, figures=(("own", 7.0),))


def iteration(index: int, energy_j: float | None = 5.0, *, regular: bool = True) -> IterationObservation:
    return IterationObservation(index, "p", 1.0, (), (RankEnergy(0, 1.0, energy_j, ()),), is_regular=regular)


def indices(observations: tuple[IterationObservation, ...]) -> list[int]:
    return [o.iteration_index for o in observations]


def test_the_newest_iterations_that_profiled_and_the_first_at_full_speed_are_left() -> None:
    many = [iteration(k) for k in range(100)]

    model = summarize_run("j", many, many, PLAN)

    assert model is not None
    assert indices(model.profile) == list(range(100))[-MAX_PROFILE_ITERATIONS:]
    assert indices(model.full_speed) == list(range(MAX_FULL_SPEED_ITERATIONS))
    assert {o.plan_id for o in model.profile} == {PREVIOUS_PROFILE}
    assert {o.plan_id for o in model.full_speed} == {PREVIOUS_FULL_SPEED}
    assert (model.job_id, model.figures, model.is_of_this_run) == ("j", PLAN.figures, False)


def test_what_was_disturbed_or_not_measured_is_not_left_and_a_run_without_profile_leaves_nothing() -> None:
    profile = [iteration(0, regular=False), iteration(1, None), iteration(2)]

    model = summarize_run("j", [], profile, PLAN)

    assert model is not None
    assert indices(model.profile) == [2]
    assert summarize_run("j", [iteration(0)], profile[:2], PLAN) is None


def test_a_figure_is_found_by_its_name() -> None:
    model = PreviousRun("j", (), (), figures=(("own", 7.0),))

    assert (model.figure("own"), model.figure("other")) == (7.0, None)
