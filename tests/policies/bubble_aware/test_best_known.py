"""Of plans that ran and a new one, that of least regret; and when a plan is an experiment whatever ran."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_policies.bubble_aware.best_known import (
    NUM_EXPERIMENTS,
    SAME_SHARE,
    BelievedFrontier,
    KnownPlan,
    believed_frontier,
    best_known,
    is_experiment,
    is_kept,
)
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.plan_evaluation import baseline
from tests.policies.learning.test_job_curves import fitted
from tests.policies.learning.test_risk import GRAPH

plans = st.lists(st.builds(KnownPlan, st.floats(1, 1e5), st.floats(-1, 1)), min_size=1, max_size=8)


def straight(price_w: float, *, until_s: float = 2.0) -> BelievedFrontier:
    """Return a frontier that falls by the same energy for each second."""
    return BelievedFrontier((0.0, until_s), (500.0, 500.0 - price_w * until_s), most_s=until_s)


@given(plans=plans, price_w=st.floats(0, 1e5))
def test_no_other_plan_has_less_regret_and_being_early_is_worth_nothing(plans: list[KnownPlan], price_w: float) -> None:
    frontier = straight(price_w)

    chosen = plans[best_known(plans, frontier)]

    assert all(frontier.regret_j(chosen) <= frontier.regret_j(own) for own in plans)
    on_time = [KnownPlan(own.energy_j, min(own.late_s, 0.0)) for own in plans]
    assert on_time[best_known(on_time, frontier)].energy_j == min(own.energy_j for own in plans)


def test_a_new_plan_that_saves_less_than_its_lateness_is_worth_is_not_taken() -> None:
    new, ran = KnownPlan(990.0, 0.01), KnownPlan(1000.0, 0.0)

    assert best_known([new, ran], straight(2000.0)) == 1
    assert best_known([new, ran], straight(500.0)) == 0
    assert best_known([ran, ran], straight(500.0)) == 0


def test_no_energy_pays_for_a_plan_that_is_far_too_late() -> None:
    far_too_late, ran = KnownPlan(1.0, 0.02), KnownPlan(1000.0, 0.0)

    assert best_known([far_too_late, ran], straight(500.0, until_s=0.01)) == 1
    assert best_known([far_too_late], straight(500.0, until_s=0.01)) == 0


def test_the_frontier_is_what_a_later_deadline_saves() -> None:
    believed = fitted(0.8, 1.5, [1185]).profile()
    deadline_s = baseline(GRAPH, believed).iteration_time_s

    frontier = believed_frontier(GRAPH, believed, deadline_s=deadline_s)

    assert frontier.late_s == pytest.approx([0.0, 0.0025 * deadline_s, 0.004 * deadline_s, 0.01 * deadline_s])
    for late_s, bound_j in zip(frontier.late_s, frontier.energies_j, strict=True):
        best = solve(GRAPH, believed, deadline_s=deadline_s + late_s)
        assert bound_j <= best.energy_j * (1 + 1e-9)
        assert bound_j == pytest.approx(best.energy_j, rel=0.01)
        assert frontier.regret_j(KnownPlan(best.energy_j, late_s)) == pytest.approx(best.energy_j - bound_j)
    assert list(frontier.energies_j) == sorted(frontier.energies_j, reverse=True)


def test_first_plans_and_those_after_a_kept_one_are_experiments_but_the_last_is_not() -> None:
    num_plans = NUM_EXPERIMENTS + 4

    always = [n for n in range(1, num_plans + 1) if is_experiment(n, num_plans=num_plans, was_kept=False)]
    after_kept = [n for n in range(1, num_plans + 1) if is_experiment(n, num_plans=num_plans, was_kept=True)]

    assert always == list(range(1, NUM_EXPERIMENTS + 1))
    assert after_kept == list(range(1, num_plans))


def test_a_plan_that_differs_in_few_instructions_counts_as_kept() -> None:
    num = 100
    first = [1410] * num
    other = [1200] * num
    num_changed = round((1 - SAME_SHARE) * num)
    nearly, not_quite = ([1395] * k + first[k:] for k in (num_changed, num_changed + 1))

    assert is_kept([first, other, nearly])
    assert not is_kept([first, other, not_quite])
    assert not is_kept([first])
    assert not is_kept([])
    assert not is_kept([first[1:], first]), "a pipeline of another length"
