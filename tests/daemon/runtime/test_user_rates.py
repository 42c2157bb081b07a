"""Token buckets: so many at once, so many in the long run, for each user."""

import pytest

from gpuenergyd.daemon.runtime.user_rates import UserRates


def test_a_bucket_holds_its_capacity_and_is_per_user() -> None:
    now = [0.0]
    rates = UserRates(10.0, capacity=3.0, monotonic_s=lambda: now[0])

    def taken(uid: int) -> float:
        wait_s = rates.wait_s(uid)
        if wait_s == 0.0:
            rates.count(uid)
        return wait_s

    burst = [taken(1) for _ in range(4)]
    other = taken(2)
    now[0] = 0.1
    later = [taken(1) for _ in range(2)]

    assert burst == [0.0, 0.0, 0.0, pytest.approx(0.1)]
    assert other == 0.0
    assert later == [0.0, pytest.approx(0.1)]


def test_of_many_users_those_with_full_buckets_are_forgotten_and_the_others_stay_limited() -> None:
    now = [0.0]
    rates = UserRates(1 / 3600, capacity=1.0, monotonic_s=lambda: now[0])
    rates.count(0)
    now[0] = 1800.0
    for uid in range(1, 2000):
        rates.count(uid)
    now[0] = 3599.0

    assert rates.wait_s(0) > 0
    now[0] = 3601.0
    assert rates.wait_s(0) == 0.0
    assert rates.wait_s(1999) == pytest.approx(1799.0)
