"""Of plans that ran and a new one, the cheapest with lateness at its price."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_policies.profiling.prior.best_known import KnownPlan, best_known, price_of_lateness_w
from tests.policies.profiling.prior.test_job_curves import fitted
from tests.policies.profiling.prior.test_risk import GRAPH

plans = st.lists(st.builds(KnownPlan, st.floats(1, 1e5), st.floats(-1, 1)), min_size=1, max_size=8)


@given(plans=plans, price_w=st.floats(0, 1e5))
def test_no_other_plan_costs_less_and_being_early_is_worth_nothing(plans: list[KnownPlan], price_w: float) -> None:
    chosen = plans[best_known(plans, price_w=price_w)]

    cost_j = chosen.energy_j + price_w * max(0.0, chosen.late_s)
    assert all(cost_j <= own.energy_j + price_w * max(0.0, own.late_s) for own in plans)
    on_time = [KnownPlan(own.energy_j, min(own.late_s, 0.0)) for own in plans]
    assert on_time[best_known(on_time, price_w=price_w)].energy_j == min(own.energy_j for own in plans)


def test_a_new_plan_that_saves_less_than_its_lateness_costs_is_not_taken() -> None:
    new, ran = KnownPlan(990.0, 0.01), KnownPlan(1000.0, 0.0)

    assert best_known([new, ran], price_w=2000.0) == 1
    assert best_known([new, ran], price_w=500.0) == 0
    assert best_known([ran, ran], price_w=500.0) == 0


def test_the_price_is_what_a_later_deadline_saves() -> None:
    believed = fitted(0.8, 1.5, [1185]).profile()
    deadline_s = baseline(GRAPH, believed).iteration_time_s

    price_w = price_of_lateness_w(GRAPH, believed, deadline_s=deadline_s)

    energies_j = [solve(GRAPH, believed, deadline_s=ratio * deadline_s).energy_j for ratio in (1.0, 1.003)]
    assert price_w == pytest.approx((energies_j[0] - energies_j[1]) / (0.003 * deadline_s), rel=0.3)
    assert price_w > 0
