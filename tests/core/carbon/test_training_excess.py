"""What other replicas' plans cost is charged to a training's account once, and never more than iterations took."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.carbon.training_excess import OtherPlansExcess, PlanExcess

FULL_S = 1.0
TIMES = st.floats(0.0, 0.5, allow_nan=False)


def charged(excess: OtherPlansExcess, iterations: list[tuple[float, float, float]]) -> float:
    """Return what is charged in iterations of own charge, rest, and growth of the other replica's cost."""
    total_s = reported_s = 0.0
    total_s += excess.report(0.0)
    for own_s, rest_s, growth_s in iterations:
        total_s += excess.iteration(charged_excess_s=own_s, uncharged_s=rest_s)
        reported_s += growth_s
        total_s += excess.report(reported_s)
    return total_s


def test_an_iteration_that_another_plan_prolonged_is_charged() -> None:
    assert charged(OtherPlansExcess(), [(0.0, 0.1, 0.1)] * 8) == pytest.approx(0.8)


def test_a_late_report_counts() -> None:
    late = [(0.0, 0.1, 0.0)] * 8 + [(0.0, 0.0, 0.8)]
    assert charged(OtherPlansExcess(), late) == pytest.approx(0.8)


def test_what_both_plans_cost_in_the_same_iterations_is_charged_once() -> None:
    assert charged(OtherPlansExcess(), [(0.1, 0.0, 0.1)] * 50) == pytest.approx(0.0)


def test_a_stall_costs_no_budget_beyond_one_iteration_of_the_others() -> None:
    iterations = [(0.05, 0.0, 0.05)] * 20 + [(0.05, 60.0, 0.05)] + [(0.05, 0.0, 0.05)] * 20
    assert charged(OtherPlansExcess(), iterations) <= 0.05 + 1e-9


def test_a_counter_that_begins_anew_charges_nothing() -> None:
    excess = OtherPlansExcess()
    assert excess.report(5.0) == 0.0
    excess.iteration(charged_excess_s=0.0, uncharged_s=1.0)
    assert excess.report(0.0) == 0.0
    assert excess.report(0.25) == pytest.approx(0.25)


def test_without_reports_nothing_is_charged() -> None:
    assert OtherPlansExcess().iteration(charged_excess_s=0.0, uncharged_s=9.0) == 0.0


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), max_size=60))
def test_never_more_than_iterations_took_nor_than_was_reported(iterations: list[tuple[float, float, float]]) -> None:
    total_s = charged(OtherPlansExcess(), iterations)

    assert total_s <= sum(rest_s for _, rest_s, _ in iterations) + 1e-9
    assert total_s <= sum(growth_s for _, _, growth_s in iterations) + 1e-9


def cost_of(iterations: Sequence[tuple[float, float]], *, is_trial: bool = False) -> float:
    """Return what plans cost in iterations of charged and permitted time."""
    excess = PlanExcess()
    for charged_s, permitted_s in iterations:
        excess.add(
            charged_s,
            full_speed_time_s=FULL_S,
            permitted_time_s=permitted_s,
            is_trial=is_trial,
            settling_iterations=4,
        )
    return excess.total_s


def test_a_tuned_plan_costs_what_its_target_permitted_even_while_the_next_one_is_not_followed_yet() -> None:
    assert cost_of([(1.1, 1.1)] * 5) == pytest.approx(0.5)
    assert cost_of([(1.1, 1.1)] * 5 + [(1.1, 1.0)] * 3) == pytest.approx(0.8)
    assert cost_of([(1.1, 1.1)] * 5 + [(1.1, 1.0)] * 50) == pytest.approx(0.8), "slow hardware"
    assert cost_of([(0.9, 1.0)]) == 0.0


def test_profiling_costs_what_it_took() -> None:
    assert cost_of([(1.3, 1.0)] * 2, is_trial=True) == pytest.approx(0.6)
