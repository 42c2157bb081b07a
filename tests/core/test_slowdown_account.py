"""The slowdown account: what is charged, what may still be spent, and that it can always be balanced."""

import math
import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.slowdown_account import SETTLING_ITERATIONS, Allowance, JobLength, SlowdownAccount


def test_a_pause_is_charged_with_what_was_permitted_at_most() -> None:
    account = SlowdownAccount()

    account.add(1.02, full_speed_time_s=1.0, permitted_time_s=1.05, is_own=True)
    account.add(60.0, full_speed_time_s=1.0, permitted_time_s=1.05, is_own=False)

    assert account.num_iterations == 2
    assert account.slowdown_ratio == pytest.approx((0.02 + 0.05) / 2)


@given(st.lists(st.floats(1.0, 3.0), min_size=24, max_size=24), st.floats(0.0, 0.3))
def test_whatever_a_policy_asks_for_the_account_of_a_window_can_be_balanced(wishes: list[float], budget: float) -> None:
    account, left_s = SlowdownAccount(), 24 * 3600.0
    for wish in wishes:
        time_s = min(wish, account.longest_time_s(1.0, allowance=Allowance(budget, left_s), slot_s=3600.0))
        num = min(3600.0, left_s) / time_s
        account.full_speed_s += num
        account.excess_s += num * (time_s - 1.0)
        left_s -= min(3600.0, left_s)

    assert account.excess_s <= budget * account.full_speed_s * (1 + 1e-9) + 1e-6


@given(st.lists(st.floats(1.0, 3.0), min_size=40, max_size=40), st.floats(0.0, 0.3), st.floats(1.0, 1.5))
def test_a_job_of_known_work_ends_within_its_budget_and_by_its_deadline(
    wishes: list[float], budget: float, deadline_ratio: float
) -> None:
    account, work_s, left_s = SlowdownAccount(), 24 * 3600.0, deadline_ratio * 24 * 3600.0
    for wish in wishes:
        allowance = Allowance(budget, left_s, work_s)
        time_s = min(wish, account.longest_time_s(1.0, allowance=allowance, slot_s=3600.0))
        if work_s <= 0:
            break
        num = min(3600.0 / time_s, work_s)
        account.full_speed_s += num
        account.excess_s += num * (time_s - 1.0)
        work_s, left_s = work_s - num, left_s - num * time_s

    assert work_s == pytest.approx(0.0, abs=1e-6)
    assert left_s >= -1e-6
    assert account.excess_s <= budget * account.full_speed_s + 1e-6


def test_an_untouched_account_permits_much_at_first_and_an_empty_one_nothing() -> None:
    fresh, spent = SlowdownAccount(), SlowdownAccount(100, 100.0, 20.0)

    assert fresh.longest_time_s(2.0, allowance=Allowance(0.05, 36_000.0), slot_s=60.0) > 4.0
    assert spent.longest_time_s(2.0, allowance=Allowance(0.05, 60.0), slot_s=60.0) == 2.0
    assert spent.longest_time_s(2.0, allowance=Allowance(0.05, math.inf, 60.0), slot_s=60.0) == 2.0


def test_a_balanced_account_past_its_window_permits_an_even_slowdown_and_no_more() -> None:
    account = SlowdownAccount(100, 100.0, 5.0)

    longest_s = account.longest_time_s(1.0, allowance=Allowance(0.05, 0.0), slot_s=60.0)

    assert longest_s == pytest.approx(1.05)


def test_full_speed_that_has_become_slower_is_reserved_for_once_it_has_settled() -> None:
    account, draw = SlowdownAccount(), random.Random(3)
    for number in range(200):
        slow = 1.2 if number < SETTLING_ITERATIONS else 1.01 + draw.gauss(0.0, 0.002)  # clocks still rise at first
        account.add(slow, full_speed_time_s=1.0, permitted_time_s=1.0, is_own=True)

    assert account.drift_ratio(1.0) == pytest.approx(0.01, rel=0.15)
    assert account.reserve_s(1.0, 0.01, 1000.0) == pytest.approx(10.0, rel=0.2)
    assert account.reserve_s(1.0, 0.01, math.inf) < 0.1


def test_a_length_is_counted_in_iterations_where_its_owner_gave_hours() -> None:
    assert JobLength(hours=2.0).total_iterations(0.5) == 14_400
    assert JobLength(num_iterations=10, hours=2.0).total_iterations(0.5) == 10
    assert JobLength(deadline_at=datetime(2030, 1, 1, tzinfo=UTC)).total_iterations(0.5) is None


def test_no_time_is_active_before_any_was_charged_and_then_all_that_was() -> None:
    account = SlowdownAccount()
    before_s = account.active_s
    account.add(1.02, full_speed_time_s=1.0, permitted_time_s=1.05, is_own=True)

    assert before_s == 0.0
    assert account.active_s == pytest.approx(1.02)
