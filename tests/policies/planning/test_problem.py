"""Steps of planning on cases solved by hand: deadlines, bounds, rounding and the frontier."""

from dataclasses import replace

import numpy as np
import pytest

from gpuenergyd.core.pipeline.graph import InstructionClass, dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import ScheduleError, TargetError
from gpuenergyd_policies.planning.frontier import frontier
from gpuenergyd_policies.planning.offline_requests import requested_caps
from gpuenergyd_policies.planning.problem import Effort, later_deadlines_s, make_problem, useful_s
from tests.policies.planning.pipelines import B, F, plain_pipeline

OPTIONS = (ClockOption(900, 1.0, 100.0), ClockOption(600, 1.5, 80.0), ClockOption(300, 2.5, 70.0))
"""On one rank that waits with 4 W: 96, 74 and 60 J beyond waiting, so slopes of 44 and 14 W."""
HAND_MADE = (
    dependency_graph(gpipe(1, 1), communication_latency_s=0.0),
    PipelineProfile({InstructionClass(0, kind): InstructionProfile(OPTIONS) for kind in (F, B)}, 4.0),
)


def test_a_deadline_is_limited_to_the_range_from_t_min_to_t_slow() -> None:
    problem = make_problem(*HAND_MADE)

    assert (problem.min_time_s, problem.slowest_time_s) == (2.0, 5.0)
    ends_s = problem.min_time_s, problem.slowest_time_s
    assert useful_s(2.0 * (1 - 1e-13), *ends_s) == 2.0
    assert useful_s(3.0, *ends_s) == 3.0
    assert useful_s(9.0, *ends_s) == pytest.approx(5.0 * (1 + 1e-9), rel=1e-15)
    with pytest.raises(TargetError, match=r"1\.999"):
        useful_s(1.999, *ends_s)


def test_the_bound_is_the_cost_of_the_cheapest_options_at_the_prices_minus_the_deadlines_price() -> None:
    problem = make_problem(*HAND_MADE)
    edges = len(problem.network.arrays.tail)
    prices_w = np.array([[50.0, 50.0], [20.0, 20.0], [10.0, 10.0], [0.0, 0.0], [50.0, 10.0]])

    sweep = replace(
        problem.sweep(np.array([problem.min_time_s]), stop_early=True),
        prices_w=prices_w,
        edge_prices_w=np.zeros((5, edges)),
        snapshot_prices_w=np.array([50.0, 20.0, 10.0, 0.0, 5.0]),
    )

    bounds_j = problem.cost_bounds_j(sweep, np.arange(5), np.array([2.0, 3.0, 5.0, 9.0, 2.0]))

    fast, middle, slow = 96.0, 74.0, 60.0
    expected = [
        2 * (fast + 50.0 * 1.0) - 50.0 * 2.0,
        2 * (middle + 20.0 * 1.5) - 20.0 * 3.0,
        2 * (slow + 10.0 * 2.5) - 10.0 * 5.0,
        2 * slow,
        (fast + 50.0) + (slow + 25.0) - 10.0,
    ]
    assert bounds_j.tolist() == pytest.approx(expected)


def test_flow_over_a_latency_adds_to_the_bound() -> None:
    graph, profile = plain_pipeline(2, 1, latency_s=0.25)
    problem = make_problem(graph, profile)
    n, edges = len(graph.instructions), len(problem.network.arrays.tail)
    swept = problem.sweep(np.array([problem.min_time_s]), stop_early=True)
    sweep = replace(swept, prices_w=np.zeros((1, n)), snapshot_prices_w=np.zeros(1))

    without, with_flow = (
        problem.cost_bounds_j(replace(sweep, edge_prices_w=np.full((1, edges), price_w)), np.array([0]), np.ones(1))[0]
        for price_w in (0.0, 3.0)
    )

    assert with_flow - without == pytest.approx(3.0 * 2 * 0.25)


def test_the_energy_bound_lies_at_the_deadline_or_at_t_min_depending_on_the_price_of_time() -> None:
    problem = make_problem(*HAND_MADE)
    sweep = problem.sweep(np.array([2.5, 4.0]), stop_early=False)
    dear = replace(problem, tables=replace(problem.tables, blocking_power_w=30.0))

    assert sweep.snapshot_prices_w[:2].tolist() == pytest.approx([44.0, 14.0], abs=1e-5)
    assert problem.energy_bound_j(sweep, 0, 2.5) == pytest.approx(2 * 96.0 - 0.5 * 44.0 + 4.0 * 2.5, abs=1e-4)
    assert problem.energy_bound_j(sweep, 1, 4.0) == pytest.approx(2 * 74.0 - 1.0 * 14.0 + 4.0 * 4.0, abs=1e-4)
    at_t_min_j = problem.cost_bounds_j(sweep, np.array([1]), np.array([2.0]))[0]
    assert dear.energy_bound_j(sweep, 1, 4.0) == pytest.approx(at_t_min_j + 30.0 * 2.0)
    assert not problem.is_beyond_least_energy(sweep, 1)
    assert dear.is_beyond_least_energy(sweep, 1)
    assert not dear.is_beyond_least_energy(sweep, 0)
    equal = replace(problem, tables=replace(problem.tables, blocking_power_w=float(sweep.snapshot_prices_w[1]) + 5e-6))
    assert not equal.is_beyond_least_energy(sweep, 1)


def test_the_best_rounding_is_the_cheapest_with_waiting_unless_the_wait_is_forced() -> None:
    problem = make_problem(*HAND_MADE)
    fast_s, slow_s = np.array([1.0, 1.0]), np.array([2.5, 2.5])

    sunk, required = (
        problem.best_rounding([fast_s, slow_s], 5.0 * (1 + 1e-9), forced=forced, effort=Effort.QUICK)
        for forced in (True, False)
    )

    assert sunk.options.tolist() == required.options.tolist() == [2, 5]
    dear = replace(problem, tables=replace(problem.tables, blocking_power_w=100.0))
    tight = dear.best_rounding([fast_s, slow_s], 3.5, forced=False, effort=Effort.FULL)
    assert tight.makespan_s <= 3.5


def test_a_plan_at_its_bound_is_unchanged_and_one_far_above_it_is_refined() -> None:
    graph, profile = plain_pipeline(3, 4, weights=(1.0, 1.2, 0.9))
    problem = make_problem(graph, profile)
    deadline_s = 1.08 * problem.min_time_s
    poor = problem.rounder.round_plan(problem.tables.fastest_s, deadline_s, slack_share=0.0, hull_first=False)

    kept = problem.improved(poor, deadline_s, cost_bound_j=poor.cost_j)
    better = problem.improved(poor, deadline_s, cost_bound_j=0.9 * poor.cost_j)

    assert kept is poor
    assert better.cost_j < poor.cost_j


def test_later_deadlines_begin_with_the_deadline_itself_and_end_two_percent_later() -> None:
    deadlines_s = later_deadlines_s(10.0)

    assert deadlines_s[0] == 10.0
    assert deadlines_s.tolist() == sorted(set(deadlines_s.tolist()))
    assert deadlines_s[-1] == pytest.approx(10.2)


def test_frontier_of_two_instructions_in_a_row() -> None:
    """At most 120 J and 5 s; 14 W down to 3 s, then 44 W down to 2 s; waiting is charged to the end, with 4 W."""
    whole = frontier(*HAND_MADE, num_points=5)
    problem = make_problem(*HAND_MADE)

    sweep = problem.sweep(np.array([problem.min_time_s]), stop_early=False)

    assert sweep.breakpoint_times_s == pytest.approx([5.0, 3.0, 2.0], abs=1e-6)
    assert sweep.breakpoint_prices_w[:-1] == pytest.approx([14.0, 44.0], abs=1e-5)
    assert (whole.min_time_s, whole.slowest_time_s) == (2.0, 5.0)
    assert whole.min_energy_time_s == pytest.approx(5.0, abs=1e-6)
    assert whole.points[0].iteration_time_s == 2.0
    assert whole.points[-1].energy_j == pytest.approx(140.0)


def test_extra_microbatches_are_limited_by_the_requested_number_the_caps_and_memory() -> None:
    schedule = one_forward_one_backward(3, 12)
    request = OfflineRequest(
        "test", HAND_MADE[1], schedule, dependency_graph(schedule), PerformanceTarget(), extra_inflight="auto"
    )

    def caps(extra: int | None = None, **options: str) -> tuple[int, ...] | None:
        asked = replace(request, options=options)
        return requested_caps(asked if extra is None else replace(asked, extra_inflight=extra), 3)

    assert caps() is None
    assert caps(2) == (2, 2, 2)
    assert caps(memory_limit_microbatches="5") == (2, 3, 4)
    assert caps(extra_inflight_caps="3,1,4") == (3, 1, 4)
    assert caps(2, memory_limit_microbatches="4,4,4", extra_inflight_caps="9,1,9") == (1, 1, 2)
    with pytest.raises(ScheduleError, match="rank 0, memory holds 2"):
        caps(memory_limit_microbatches="2")
    with pytest.raises(ScheduleError, match="this one is gpipe"):
        requested_caps(replace(request, schedule=gpipe(3, 12)), 3)
