"""The sweep on its integer network: each snapshot is optimal, and breakpoints sum up to its cost."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd_policies.planning.exact.network import FlowNetwork
from gpuenergyd_policies.planning.exact.sweep import Sweep
from gpuenergyd_policies.planning.exact.tables import FloatArray
from gpuenergyd_policies.planning.problem import PlanningProblem, make_problem
from tests.policies.planning.pipelines import Pipeline, kernel_arrays, plain_pipeline, random_pipelines
from tests.support.examples import examples

UNLIMITED = float("inf")
UNEVEN = plain_pipeline(2, 3, weights=(1.0, 1.2), latency_s=0.002)


def _deadlines_s(problem: PlanningProblem, fractions: list[float]) -> FloatArray:
    """Return times from T_min (0) to T_slow (1), and outside."""
    return problem.min_time_s + np.array(fractions) * (problem.slowest_time_s - problem.min_time_s)


def _edges(network: FlowNetwork) -> list[tuple[int, int, int]]:
    return list(
        zip(
            kernel_arrays(network).tail.tolist(),
            kernel_arrays(network).head.tolist(),
            kernel_arrays(network).latency.tolist(),
            strict=True,
        )
    )


def _makespan_ticks(network: FlowNetwork, ticks: list[int]) -> int:
    n = network.num_operations
    finish = {n: 0}
    for v in [*kernel_arrays(network).order.tolist(), n + 1]:
        begin = max(finish[tail] + latency for tail, head, latency in _edges(network) if head == v)
        finish[v] = begin + (ticks[v] if v < n else 0)
    return finish[n + 1]


def _levels(network: FlowNetwork, v: int) -> tuple[list[int], list[int]]:
    """Return ticks, fastest first, and slopes of an operation's chain."""
    chain = slice(kernel_arrays(network).first[v], kernel_arrays(network).last[v] + 1)
    return kernel_arrays(network).ticks[chain].tolist(), kernel_arrays(network).slope[chain].tolist()


def _fair_prices_uw(network: FlowNetwork, v: int, ticks: int) -> tuple[float, float]:
    """Return the lowest and highest price of time at which this duration is optimal for an operation."""
    chain, slopes = _levels(network, v)
    below = [slope for tick, slope in zip(chain, slopes, strict=True) if tick < ticks]
    upto = [slope for tick, slope in zip(chain, slopes, strict=True) if tick <= ticks]
    return upto[-1], below[-1] if below else UNLIMITED


def _cost_j(network: FlowNetwork, ticks: list[int]) -> float:
    """Return the cost of these durations above that of the slowest."""
    total_uw_ticks = 0
    for v, duration in enumerate(ticks):
        chain, slopes = _levels(network, v)
        for (fast, slow), slope in zip(pairwise(chain), slopes[:-1], strict=True):
            total_uw_ticks += slope * max(0, slow - max(fast, duration))
    return total_uw_ticks * network.tick_s / 1e6


def _check_snapshot(problem: PlanningProblem, sweep: Sweep, row: int) -> int:
    """Check that a snapshot is the cheapest for its makespan, which is returned in ticks."""
    network = problem.network
    n = network.num_operations
    ticks = np.rint(sweep.durations_s[row] / network.tick_s).astype(int).tolist()
    prices = np.rint(sweep.prices_w[row] * 1e6).astype(int).tolist()
    flows = np.rint(sweep.edge_prices_w[row] * 1e6).astype(int).tolist()
    value = round(sweep.snapshot_prices_w[row] * 1e6)
    inflow, outflow = [0] * (n + 2), [0] * (n + 2)
    for (tail, head, _), flow in zip(_edges(network), flows, strict=True):
        assert flow >= 0
        outflow[tail] += flow
        inflow[head] += flow
    assert inflow[:n] == outflow[:n] == prices
    assert outflow[n] == inflow[n + 1] == value
    for v in range(n):
        chain, _ = _levels(network, v)
        least_uw, most_uw = _fair_prices_uw(network, v, ticks[v])
        assert chain[0] <= ticks[v] <= chain[-1]
        assert least_uw <= prices[v] <= most_uw
    makespan = _makespan_ticks(network, ticks)
    latencies = sum(flow * ticks for (_, _, ticks), flow in zip(_edges(network), flows, strict=True))
    along = latencies + sum(price * duration for price, duration in zip(prices, ticks, strict=True))
    assert along == value * makespan  # all flow runs along paths that are as long as the iteration
    return makespan


def _shift_ticks(problem: PlanningProblem) -> int:
    """Return how much longer T_min is in the network than in the tables."""
    network = problem.network
    fastest = kernel_arrays(network).ticks[kernel_arrays(network).first].tolist()
    return _makespan_ticks(network, fastest) - round(problem.min_time_s / network.tick_s)


@settings(max_examples=examples(25), deadline=None)
@given(
    pipeline=random_pipelines(),
    fractions=st.lists(st.floats(-0.2, 1.2), min_size=1, max_size=4),
    stop_early=st.booleans(),
)
def test_every_snapshot_is_optimal_and_at_its_deadline(
    pipeline: Pipeline, fractions: list[float], *, stop_early: bool
) -> None:
    problem = make_problem(*pipeline)
    network, shift = problem.network, _shift_ticks(problem)
    deadlines_s = _deadlines_s(problem, fractions)

    sweep = problem.sweep(deadlines_s, stop_early=stop_early)

    assert len(sweep.durations_s) == len(deadlines_s) + 1
    slow = _makespan_ticks(network, kernel_arrays(network).ticks[kernel_arrays(network).last].tolist())
    fast = _makespan_ticks(network, kernel_arrays(network).ticks[kernel_arrays(network).first].tolist())
    for row, deadline_s in enumerate(deadlines_s):
        wanted = min(max(round(deadline_s / network.tick_s) + shift, fast), slow)
        assert _check_snapshot(problem, sweep, row) == wanted
    least = _check_snapshot(problem, sweep, len(deadlines_s))
    assert sweep.min_energy_time_s == pytest.approx((least - shift) * network.tick_s, abs=2e-12)


@settings(max_examples=examples(25), deadline=None)
@given(pipeline=random_pipelines(), fraction=st.floats(0.0, 1.0))
def test_breakpoints_sum_up_to_the_cost_of_every_snapshot(pipeline: Pipeline, fraction: float) -> None:
    problem = make_problem(*pipeline)
    network, shift = problem.network, _shift_ticks(problem)
    sweep = problem.sweep(_deadlines_s(problem, [fraction]), stop_early=False)
    times = np.rint(sweep.breakpoint_times_s / network.tick_s).astype(int) + shift
    prices_w = sweep.breakpoint_prices_w

    ticks = np.rint(sweep.durations_s[0] / network.tick_s).astype(int).tolist()
    makespan = _makespan_ticks(network, ticks)

    slowest, fastest = (
        kernel_arrays(network).ticks[level].tolist()
        for level in (kernel_arrays(network).last, kernel_arrays(network).first)
    )
    assert times[0] == _makespan_ticks(network, slowest)
    assert times[-1] == _makespan_ticks(network, fastest)
    assert times.tolist() == sorted(set(times.tolist()), reverse=True)
    assert prices_w[:-1].tolist() == sorted(set(prices_w[:-1].tolist()))
    spans = [max(0, upper - max(lower, makespan)) for upper, lower in pairwise(times.tolist())]
    added_j = sum(price * span for price, span in zip(prices_w[:-1].tolist(), spans, strict=True)) * network.tick_s
    assert added_j == pytest.approx(_cost_j(network, ticks), rel=1e-9, abs=1e-9)


@settings(max_examples=examples(20), deadline=None)
@given(pipeline=random_pipelines())
def test_t_star_is_where_the_price_of_time_passes_idle_power(pipeline: Pipeline) -> None:
    problem = make_problem(*pipeline)
    idle_w = problem.tables.idle_power_w

    sweep = problem.sweep(np.array([problem.slowest_time_s]), stop_early=False)

    dear_s = [
        time_s
        for time_s, price_w in zip(sweep.breakpoint_times_s, sweep.breakpoint_prices_w, strict=True)
        if price_w >= idle_w
    ]
    assert sweep.min_energy_time_s == pytest.approx(dear_s[0] if dear_s else sweep.breakpoint_times_s[-1], abs=1e-12)
    if dear_s:
        assert sweep.snapshot_prices_w[-1] == pytest.approx(idle_w, abs=1e-6)
    else:
        assert sweep.snapshot_prices_w[-1] == sweep.breakpoint_prices_w[-1] < idle_w


def test_rows_follow_the_order_of_the_requested_deadlines() -> None:
    problem = make_problem(*UNEVEN)
    rising = _deadlines_s(problem, [0.0, 0.3, 0.8, 1.0])
    turned = [2, 0, 3, 1]

    straight, mixed = (problem.sweep(deadlines, stop_early=False) for deadlines in (rising, rising[turned]))

    assert straight.snapshot_prices_w[:-1].tolist() == sorted(straight.snapshot_prices_w[:-1].tolist(), reverse=True)
    for ours, theirs in ((mixed.durations_s, straight.durations_s), (mixed.edge_prices_w, straight.edge_prices_w)):
        assert ours.tolist() == theirs[[*turned, 4]].tolist()


def test_stopping_early_gives_the_same_result_down_to_the_last_deadline() -> None:
    problem = make_problem(*UNEVEN)
    deadlines_s = _deadlines_s(problem, [0.6, 0.4])

    early, whole = (problem.sweep(deadlines_s, stop_early=early) for early in (True, False))

    assert early.durations_s.tolist() == whole.durations_s.tolist()
    assert early.prices_w.tolist() == whole.prices_w.tolist()
    assert early.min_energy_time_s == whole.min_energy_time_s
    seen = len(early.breakpoint_times_s)
    assert early.breakpoint_times_s.tolist() == whole.breakpoint_times_s[:seen].tolist()
    assert early.num_augmentations < whole.num_augmentations
    assert early.breakpoint_times_s[-1] > deadlines_s[-1] - 0.1 * (problem.slowest_time_s - problem.min_time_s)


def test_every_augmentation_raises_the_price_and_is_counted() -> None:
    """Two operations in a row: each slope of their hulls is a breakpoint, the price of waiting one more path."""
    graph, profile = plain_pipeline(1, 1)
    problem = make_problem(graph, profile)

    sweep = problem.sweep(np.array([problem.min_time_s]), stop_early=False)

    slopes = {slope for v in range(2) for slope in _levels(problem.network, v)[1]} - {0}
    idle_uw = round(problem.tables.idle_power_w * 1e6)
    assert sweep.num_augmentations == len(slopes | {idle_uw})
    assert {round(price * 1e6) for price in sweep.breakpoint_prices_w} == slopes
    assert min(slopes) > idle_uw
