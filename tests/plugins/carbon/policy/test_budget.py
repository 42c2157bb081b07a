"""The budget planner is exact, and its controller never exceeds the budget, whatever the forecast."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from gpuenergyd_carbon.policy.budget import SpeedHull, next_speed, plan_slots, repaired, speed_hull
from tests.support.examples import examples

FRONTIER = [(1.0, 100.0), (1.02, 96.0), (1.05, 92.0), (1.1, 88.0), (1.2, 85.0), (1.4, 90.0)]

times = st.floats(0.5, 2.0)
energies = st.floats(10.0, 1000.0)
frontiers = st.lists(st.tuples(times, energies), min_size=1, max_size=25)
anything = st.floats(allow_nan=True, allow_infinity=True)


def plan_cost(hull: SpeedHull, speeds_per_s: np.ndarray, intensities: np.ndarray, lengths: np.ndarray) -> float:
    """Return the cost of a plan, in the unit of the intensity times joules."""
    return float((intensities * hull.power_w(speeds_per_s) * lengths).sum())


def solved_by_linprog(hull: SpeedHull, intensities: np.ndarray, lengths: np.ndarray, work: float) -> float:
    """Return the least cost over all time mixes of the hull's points in every slot."""
    speeds, powers = hull.speeds_per_s, hull.powers_w
    cost = (intensities[:, None] * powers).ravel()
    done = np.tile(speeds, len(lengths))[None]
    fills_slot = np.kron(np.eye(len(lengths)), np.ones(len(speeds)))
    # Scaled to about 1, where the solver's absolute tolerances are relative ones.
    scale = float(cost.max())
    result = linprog(
        cost / scale,
        A_eq=np.vstack([fills_slot, done / work]),
        b_eq=np.append(lengths, 1.0),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert result.status == 0, result.message
    return float(result.fun) * scale


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_has_the_cost_of_the_linear_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_points, num_slots = int(rng.integers(2, 40)), int(rng.integers(1, 75))
    t = np.sort(rng.uniform(1.0, 1.6, num_points))
    hull = speed_hull(
        [(float(a), float(b)) for a, b in zip(t, 50 + 40 / t**2 + rng.normal(0, 0.5, num_points), strict=True)]
    )
    intensities = rng.uniform(5, 700, num_slots)
    lengths = rng.uniform(0.2, 1.0, num_slots)
    work = rng.uniform(hull.speeds_per_s[0], hull.speeds_per_s[-1]) * lengths.sum()

    speeds = plan_slots(hull, intensities, lengths, work)
    cost = plan_cost(hull, speeds, intensities, lengths)

    assert cost == pytest.approx(solved_by_linprog(hull, intensities, lengths, work), rel=1e-9)
    assert (speeds * lengths).sum() == pytest.approx(work, rel=1e-12)


@given(frontiers, st.floats(0, 1))
def test_a_mixture_of_points_has_the_speed_and_power_of_the_hull(
    points: list[tuple[float, float]], share: float
) -> None:
    hull = speed_hull(points)
    speed = float(hull.speeds_per_s[0] + share * (hull.speeds_per_s[-1] - hull.speeds_per_s[0]))

    mix = hull.mix(speed)

    assert sum(part for _, part in mix) == pytest.approx(1.0)
    assert sum(part / time_s for time_s, part in mix) == pytest.approx(speed, rel=1e-9)
    power_w = sum(part * float(hull.power_w(1.0 / time_s)) for time_s, part in mix)
    assert power_w == pytest.approx(float(hull.power_w(speed)), rel=1e-9)


@example([(1.0, 10.0), (0.5, 10.0), (0.5000000000000001, 11.0)], 0.0)
@example([(0.5, 10.0), (0.5000000000000001, 11.0)], 0.0)
@given(frontiers, st.floats(0, 500))
def test_the_hull_is_convex_and_ends_at_the_fastest_and_the_cheapest_point(
    points: list[tuple[float, float]], host_power_w: float
) -> None:
    hull = speed_hull(points, host_power_w)

    assert (np.diff(hull.slopes_j) >= -1e-6 * np.abs(hull.slopes_j[:-1])).all()
    assert 1.0 / hull.full_speed_per_s == pytest.approx(min(t for t, _ in points))
    cheapest_j = min(e + host_power_w * t for t, e in points)
    assert hull.powers_w[0] / hull.speeds_per_s[0] == pytest.approx(cheapest_j)
    for time_s, energy_j in points:
        if 1 / time_s >= hull.speeds_per_s[0]:
            assert hull.power_w(1 / time_s) <= (energy_j / time_s + host_power_w) * (1 + 1e-9)


def run_job(hull: SpeedHull, forecasts: list[np.ndarray], lengths: np.ndarray, work: float) -> float:
    """Return the work left at the deadline when each slot is decided by its own forecast."""
    left = work
    for k, length in enumerate(lengths):
        fallback = np.full(len(lengths) - k, 200.0)
        speed = next_speed(hull, forecasts[k], fallback, lengths[k:], left)
        assert hull.speeds_per_s[0] <= speed <= hull.full_speed_per_s * (1 + 1e-12)
        left -= speed * length
    return left


@settings(max_examples=examples(300), deadline=None)
@given(
    frontiers,
    st.lists(st.lists(anything, max_size=30), min_size=24, max_size=24),
    st.floats(0, 0.5),
    st.lists(st.floats(60.0, 3600.0), min_size=1, max_size=24),
)
def test_no_forecast_can_exceed_the_budget(
    points: list[tuple[float, float]], forecasts: list[list[float]], budget: float, lengths_s: list[float]
) -> None:
    hull = speed_hull(points)
    lengths = np.array(lengths_s)
    work = float(lengths.sum()) * hull.full_speed_per_s / (1 + budget)

    left = run_job(hull, [np.array(f) for f in forecasts], lengths, work)

    assert left <= work * 1e-9


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_job_that_lost_time_runs_at_full_speed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hull = speed_hull(FRONTIER)
    lengths = np.full(10, 3600.0)
    impossible = float(lengths.sum()) * hull.full_speed_per_s * rng.uniform(1.0, 2.0)

    speed = next_speed(hull, rng.uniform(0, 500, 10), np.full(10, 100.0), lengths, impossible)

    assert speed == hull.full_speed_per_s


def test_the_controller_adapts_to_a_lower_full_speed() -> None:
    hull = speed_hull(FRONTIER).limited_to(1 / 1.05)
    lengths = np.full(4, 3600.0)

    speed = next_speed(hull, np.array([900.0, 1.0, 1.0, 1.0]), np.full(4, 100.0), lengths, 4 * 3600.0 / 1.05)

    assert 1.0 / hull.full_speed_per_s == pytest.approx(1.05)
    assert speed == pytest.approx(1 / 1.05)


def test_only_implausible_forecast_values_are_replaced() -> None:
    fallback = np.array([1.0, 2.0, 3.0, 4.0])

    assert repaired(np.array([math.nan, 50.0, -3.0]), fallback).tolist() == [1.0, 50.0, 3.0, 4.0]
    assert repaired(np.array([]), np.array([math.nan, math.inf])).tolist() == [1.0, 1.0]
    assert repaired(np.array([math.inf, 8.0]), np.array([math.nan, math.nan, math.nan])).tolist() == [8.0, 8.0, 8.0]
