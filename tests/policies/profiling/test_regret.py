"""The decision whether a plan from the present fit is expected to lose little."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_policies.profiling.regret import is_median_at_most


@given(st.integers(0, 6).flatmap(lambda k: st.lists(st.integers(-3, 3), min_size=2 * k + 1, max_size=2 * k + 1)))
def test_the_decision_is_that_of_the_median_of_all_draws(losses: list[int]) -> None:
    for limit in range(-3, 4):
        assert is_median_at_most(limit, iter(map(float, losses)), num_values=len(losses)) is (median(losses) <= limit)


def test_no_draw_is_made_that_cannot_change_the_decision() -> None:
    for losses in ([1.0] * 6, [0.0] * 6, [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]):
        left = iter(losses)
        is_median_at_most(0.5, left, num_values=11)
        assert next(left, None) is None
