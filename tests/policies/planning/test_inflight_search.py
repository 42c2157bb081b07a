"""The search for extra in-flight microbatches, on known cost functions."""

import math

import pytest

from gpuenergyd.core.pipeline.graph import dependency_graph, one_forward_one_backward
from gpuenergyd_policies.planning.inflight import MAX_SOLVES, _neighbours, _repaired, _search


class Cost:
    """Cost function: distance to one vector, infinity below a minimum; records the vectors it was called with."""

    def __init__(self, target: tuple[int, ...], least: int = 0) -> None:
        self._target, self._least = target, least
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, extra: tuple[int, ...]) -> float:
        """Return the cost of these extra microbatches."""
        self.asked.append(extra)
        if min(extra[:-1]) < self._least:
            return math.inf
        return float(sum(abs(a - b) for a, b in zip(extra, self._target, strict=True)))


@pytest.mark.parametrize("target", [(0, 0, 0, 0), (3, 2, 1, 0), (1, 2, 1, 0), (6, 5, 4, 0), (2, 0, 0, 0)])
def test_the_search_returns_the_cheapest_vector_first(target: tuple[int, ...]) -> None:
    cost = Cost(target)

    ranked = _search([9, 9, 9, 0], cost)

    assert ranked[0] == target
    assert [cost(extra) for extra in ranked] == sorted(cost(extra) for extra in ranked)


def test_the_search_solves_no_vector_twice_and_stops_at_its_limit() -> None:
    cost = Cost((60, 60, 60, 60, 60, 0))

    ranked = _search([99] * 5 + [0], cost)

    assert len(cost.asked) == len(set(cost.asked)) == MAX_SOLVES
    assert sorted(ranked) == sorted(cost.asked)


def test_the_search_drops_infeasible_vectors_and_respects_limits() -> None:
    cost = Cost((4, 4, 4, 0), least=1)

    ranked = _search([2, 3, 9, 0], cost)

    assert ranked[0] == (2, 3, 4, 0)
    assert all(min(extra[:-1]) >= 1 for extra in ranked)
    assert all(extra[0] <= 2 and extra[1] <= 3 for extra in cost.asked)
    assert _search([0, 0], Cost((0, 0), least=1)) == []


@pytest.mark.parametrize(
    ("extra", "repaired"),
    [
        ([5, 0, 0, 4], (3, 0, 0, 0)),
        ([-1, 0, 0, 4], (0, 0, 0, 0)),
        ([0, 3, 3, 4], (0, 1, 2, 0)),
        ([1, 2, 3, 4], (1, 2, 3, 0)),
        ([1, 3, 9, 4], (1, 2, 3, 0)),
    ],
)
def test_a_rank_has_at_most_one_extra_microbatch_more_than_the_rank_before_it(
    extra: list[int], repaired: tuple[int, ...]
) -> None:
    assert _repaired(extra, [3, 9, 9, 0]) == repaired
    dependency_graph(one_forward_one_backward(4, 12, repaired))  # and what it gives does not deadlock


def test_neighbours_are_one_step_away_on_one_rank_or_on_all_up_to_it() -> None:
    assert list(_neighbours((2, 2, 0), [9, 9, 0])) == [(2, 3, 0), (3, 3, 0), (2, 1, 0), (1, 1, 0), (3, 2, 0), (1, 2, 0)]
