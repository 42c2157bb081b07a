"""Slowdown account: charges, remaining budget, and balance in all cases."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.carbon.account import charged_time_s
from gpuenergyd.core.job.description import JobLength
from gpuenergyd_carbon.rules.slowdown_account import Allowance, SlowdownAccount
from gpuenergyd_carbon.rules.training_excess import OtherPlansExcess, PlanExcess

FULL_S = 1.0
TIMES = st.floats(0.0, 0.5, allow_nan=False)


def test_a_pause_is_charged_with_the_permitted_time_at_most() -> None:
    account = SlowdownAccount()

    account.add(1.02, full_speed_time_s=1.0, permitted_time_s=1.05, is_own=True)
    account.add(60.0, full_speed_time_s=1.0, permitted_time_s=1.05, is_own=False)

    assert account.num_iterations == 2
    assert account.slowdown_ratio == pytest.approx((0.02 + 0.05) / 2)


@given(st.lists(st.floats(1.0, 3.0), min_size=24, max_size=24), st.floats(0.0, 0.3))
def test_the_account_of_a_window_can_always_be_balanced(requests: list[float], budget: float) -> None:
    account, left_s = SlowdownAccount(), 24 * 3600.0
    for request in requests:
        time_s = min(request, account.longest_time_s(1.0, allowance=Allowance(budget, left_s), slot_s=3600.0))
        num = min(3600.0, left_s) / time_s
        account.full_speed_s += num
        account.excess_s += num * (time_s - 1.0)
        left_s -= min(3600.0, left_s)

    assert account.excess_s <= budget * account.full_speed_s * (1 + 1e-9) + 1e-6


@given(st.lists(st.floats(1.0, 3.0), min_size=40, max_size=40), st.floats(0.0, 0.3), st.floats(1.0, 1.5))
def test_a_job_of_known_work_ends_within_its_budget_and_by_its_deadline(
    requests: list[float], budget: float, deadline_ratio: float
) -> None:
    account, work_s, left_s = SlowdownAccount(), 24 * 3600.0, deadline_ratio * 24 * 3600.0
    for request in requests:
        allowance = Allowance(budget, left_s, work_s)
        time_s = min(request, account.longest_time_s(1.0, allowance=allowance, slot_s=3600.0))
        if work_s <= 0:
            break
        num = min(3600.0 / time_s, work_s)
        account.full_speed_s += num
        account.excess_s += num * (time_s - 1.0)
        work_s, left_s = work_s - num, left_s - num * time_s

    assert work_s == pytest.approx(0.0, abs=1e-6)
    assert left_s >= -1e-6
    assert account.excess_s <= budget * account.full_speed_s + 1e-6


def test_a_full_account_permits_slow_slots_and_an_empty_one_full_speed() -> None:
    fresh, spent = SlowdownAccount(), SlowdownAccount(100, 100.0, 20.0)

    assert fresh.longest_time_s(2.0, allowance=Allowance(0.05, 36_000.0), slot_s=60.0) > 4.0
    assert spent.longest_time_s(2.0, allowance=Allowance(0.05, 60.0), slot_s=60.0) == 2.0
    assert spent.longest_time_s(2.0, allowance=Allowance(0.05, math.inf, 60.0), slot_s=60.0) == 2.0


@pytest.mark.parametrize(
    ("time_s", "permitted_s", "is_own", "charged_s"),
    [
        (1.3, 1.05, True, 1.3),  # its own doing is charged whole, permitted or not
        (0.9, 1.05, True, 0.9),
        (1.3, 1.05, False, 1.05),
        (1.02, 1.05, False, 1.02),  # and never more than it took
        (1.3, 0.9, False, 1.0),  # full speed is always permitted
    ],
)
def test_charged_time_of_own_and_disturbed_iterations(
    time_s: float, permitted_s: float, charged_s: float, *, is_own: bool
) -> None:
    charged = charged_time_s(time_s, full_speed_time_s=1.0, permitted_time_s=permitted_s, is_own=is_own)

    assert charged == charged_s


def test_an_empty_account_has_no_slowdown() -> None:
    fresh = SlowdownAccount()

    assert (fresh.num_iterations, fresh.active_s, fresh.slowdown_ratio) == (0, 0.0, None)
    assert fresh.drift_ratio(1.0) == SlowdownAccount(drift_s=-3.0, drift_full_speed_s=20.0).drift_ratio(1.0) == 0.0
    assert fresh.reserve_s(1.0, 0.0, 100.0) == pytest.approx(0.02)


def test_the_ratio_and_the_active_time_are_of_all_that_was_charged() -> None:
    account = SlowdownAccount()
    for time_s in (2.0, 2.5):
        account.add(time_s, full_speed_time_s=2.0, permitted_time_s=3.0, is_own=True)

    assert account.active_s == pytest.approx(4.5)
    assert account.slowdown_ratio == pytest.approx(0.5 / 4.0)
    assert SlowdownAccount(1, 1.0, -3.0).active_s == 0.0


def test_drift_is_counted_from_the_ninth_iteration_in_a_row_at_full_speed_on() -> None:
    """Sixteen iterations without drift are taken as known before: two of 0.1 s weigh 0.2 / (2 + 16)."""
    account = SlowdownAccount()
    for _ in range(8):
        account.add(1.1, full_speed_time_s=1.0, permitted_time_s=1.0, is_own=True)
    assert (account.drift_s, account.drift_full_speed_s) == (0.0, 0.0)

    for _ in range(2):
        account.add(1.1, full_speed_time_s=1.0, permitted_time_s=1.0, is_own=True)
    assert account.drift_s == pytest.approx(0.2)
    assert account.drift_full_speed_s == pytest.approx(2.0)
    assert account.drift_ratio(1.0) == pytest.approx(0.2 / 18)

    account.add(1.1, full_speed_time_s=1.0, permitted_time_s=1.1, is_own=True)
    account.add(1.1, full_speed_time_s=1.0, permitted_time_s=1.0, is_own=True)
    assert account.num_at_full_speed == 1
    assert account.drift_s == pytest.approx(0.2)


def test_full_speed_targets_are_recognised_up_to_rounding() -> None:
    account = SlowdownAccount()
    account.add(1.0, full_speed_time_s=1.0, permitted_time_s=1.0 + 0.9e-6, is_own=True)
    assert account.num_at_full_speed == 1

    account.add(1.0, full_speed_time_s=1.0, permitted_time_s=1.0 + 1.1e-6, is_own=True)
    assert account.num_at_full_speed == 0


def test_the_reserve_is_drift_three_sigma_and_2_percent_of_an_iteration() -> None:
    drifted = SlowdownAccount(drift_s=1.0, drift_full_speed_s=18.0)

    assert drifted.drift_ratio(2.0) == pytest.approx(0.02)
    assert drifted.reserve_s(2.0, 0.5, 100.0) == pytest.approx(2.0 + 1.5 + 0.04)
    assert drifted.reserve_s(2.0, 0.5, math.inf) == pytest.approx(1.5 + 0.04)


def test_a_slot_may_be_as_slow_as_full_speed_afterwards_balances() -> None:
    """100 s at budget 0.1, of which the next 50 count: their speed x must leave x * 50 + 50 = 100 / 1.1."""
    longest_s = SlowdownAccount().longest_time_s(2.0, allowance=Allowance(0.1, 100.0), slot_s=50.0)

    assert longest_s == pytest.approx(2.0 * 50.0 / (100.0 / 1.1 - 50.0))


def test_overspending_and_reserve_reduce_the_next_slot_equally() -> None:
    overspent = SlowdownAccount(0, 0.0, 4.0).longest_time_s(1.0, allowance=Allowance(0.1, 100.0), slot_s=50.0)
    reserved = SlowdownAccount().longest_time_s(1.0, allowance=Allowance(0.1, 100.0), slot_s=50.0, reserve_s=4.0)

    assert overspent == pytest.approx(1.0 / ((4.0 + 50.0 - 0.1 * 50.0) / (50.0 * 1.1)))
    assert reserved == pytest.approx(overspent)


def test_known_work_is_limited_by_budget_and_deadline() -> None:
    """50 s of work: a budget of 0.1 leaves 5 s, a deadline in 53 s leaves 3, a reserve takes 1 of them."""
    account = SlowdownAccount()

    by_budget = account.longest_time_s(1.0, allowance=Allowance(0.1, 90.0, 50.0), slot_s=10.0)
    by_deadline = account.longest_time_s(1.0, allowance=Allowance(0.1, 53.0, 50.0), slot_s=10.0)
    with_reserve = account.longest_time_s(1.0, allowance=Allowance(0.1, 53.0, 50.0), slot_s=10.0, reserve_s=1.0)

    assert by_budget == pytest.approx(1 / (1 - 5 / 10))
    assert by_deadline == pytest.approx(1 / (1 - 3 / 10))
    assert with_reserve == pytest.approx(1 / (1 - 2 / 10))


def test_the_budget_covers_done_and_remaining_work() -> None:
    account = SlowdownAccount(100, 100.0, 4.0)

    longest_s = account.longest_time_s(1.0, allowance=Allowance(0.1, math.inf, 50.0), slot_s=20.0)

    assert longest_s == pytest.approx(1 / (1 - 11 / 20))


def test_a_slot_longer_than_the_work_balances_over_its_length() -> None:
    """10 s of work at budget 0.1 would allow 1 s of slack; what may come after the work allows 1.1 as well."""
    account = SlowdownAccount()

    longest_s = account.longest_time_s(1.0, allowance=Allowance(0.1, math.inf, 10.0), slot_s=60.0)

    assert longest_s == pytest.approx(1.1)


def test_a_sufficient_budget_permits_any_time() -> None:
    assert SlowdownAccount(1, 1000.0, 0.0).longest_time_s(1.0, allowance=Allowance(0.1, 10.0), slot_s=10.0) == math.inf
    assert SlowdownAccount().longest_time_s(1.0, allowance=Allowance(5.0, math.inf, 10.0), slot_s=10.0) == math.inf


def test_overspending_is_repaid_at_full_speed_within_the_window() -> None:
    """With 20 s left of a slot of 60 a debt has to go in those 20; without debt the slot balances by itself."""
    debt, even = SlowdownAccount(100, 100.0, 11.0), SlowdownAccount(100, 100.0, 9.0)
    allowance = Allowance(0.1, 20.0)

    assert debt.longest_time_s(1.0, allowance=allowance, slot_s=60.0) == pytest.approx(1 / ((11 - 10 + 20) / 22))
    assert even.longest_time_s(1.0, allowance=allowance, slot_s=60.0) == pytest.approx(1 / ((9 - 10 + 60) / 66))
    exactly = SlowdownAccount(100, 100.0, 10.0)
    assert exactly.longest_time_s(1.0, allowance=allowance, slot_s=60.0) == pytest.approx(1.1)
    assert SlowdownAccount(100, 100.0, 90.0).longest_time_s(1.0, allowance=allowance, slot_s=60.0) == 1.0


def test_overspending_at_the_end_of_a_window_leaves_one_iteration() -> None:
    account = SlowdownAccount(100, 100.0, 10.1)

    assert account.longest_time_s(2.0, allowance=Allowance(0.1, 0.0), slot_s=60.0) == pytest.approx(2 / (2.1 / 2.2))


def test_a_slot_of_no_length_is_full_speed() -> None:
    assert SlowdownAccount().longest_time_s(2.0, allowance=Allowance(0.1, 10.0), slot_s=0.0) == 2.0
    assert SlowdownAccount().longest_time_s(2.0, allowance=Allowance(0.1, 10.0, 0.0), slot_s=0.0) == 2.0


def test_a_length_in_hours_is_rounded_up_and_has_one_iteration_at_least() -> None:
    assert JobLength(hours=1.0).total_iterations(7.0) == 515
    assert JobLength(hours=0.0).total_iterations(7.0) == 1
    assert JobLength(num_iterations=10, hours=2.0).total_iterations(0.5) == 10
    assert JobLength().total_iterations(7.0) is None


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
            charged_s, full_speed_time_s=FULL_S, permitted_time_s=permitted_s, is_trial=is_trial, settling_iterations=4
        )
    return excess.total_s


def test_a_tuned_plan_costs_what_its_target_permitted_even_while_the_next_one_is_not_followed_yet() -> None:
    assert cost_of([(1.1, 1.1)] * 5) == pytest.approx(0.5)
    assert cost_of([(1.1, 1.1)] * 5 + [(1.1, 1.0)] * 3) == pytest.approx(0.8)
    assert cost_of([(1.1, 1.1)] * 5 + [(1.1, 1.0)] * 50) == pytest.approx(0.8), "slow hardware"
    assert cost_of([(0.9, 1.0)]) == 0.0


def test_profiling_costs_what_it_took() -> None:
    assert cost_of([(1.3, 1.0)] * 2, is_trial=True) == pytest.approx(0.6)
