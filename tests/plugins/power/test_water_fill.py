"""Water-filling: exact on convex frontiers, with floors, priorities, replicas, and jobs without a frontier."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from gpuenergyd.core.carbon.speed_curve import speed_points
from gpuenergyd.core.policy_api.policy import FrontierPoint
from gpuenergyd.core.policy_api.power import PowerDecision, PowerJobView, PowerView
from gpuenergyd_power.water_fill import WaterFill

HOST_W = 120.0


def job(job_id: str, *points: tuple[float, float], num_gpus: int = 1, **given: object) -> PowerJobView:
    """Return a job that follows targets, with this frontier of times and energies."""
    frontier = tuple(FrontierPoint(t, e, None) for t, e in points)
    view = PowerJobView(
        job_id, num_gpus, can_follow=True, frontier=frontier, full_speed_time_s=min(t for t, _ in points)
    )
    return replace(view, **given)  # type: ignore[arg-type]


def divide(budget_w: float, *jobs: PowerJobView, other_w: float = HOST_W, floor: float = 0.0) -> PowerDecision:
    return WaterFill().divide(PowerView(budget_w, jobs, other_power_w=other_w, floor_speed_ratio=floor))


STEEP = ((1.0, 400.0), (1.1, 330.0), (1.3, 300.0))
FLAT = ((1.0, 300.0), (1.2, 290.0), (1.4, 288.0))

curves = st.lists(
    st.tuples(st.floats(1.0, 1.6), st.floats(100.0, 400.0)), min_size=1, max_size=6, unique_by=lambda point: point[0]
).map(lambda points: tuple(sorted(points)))


@given(st.lists(st.tuples(curves, st.integers(1, 4), st.integers(3, 7)), min_size=1, max_size=5), st.floats(0.3, 1.2))
def test_it_is_the_optimum_of_the_linear_program(
    drawn: list[tuple[tuple[tuple[float, float], ...], int, int]], share: float
) -> None:
    jobs = [job(f"j{k}", *points, num_gpus=gpus, priority=p) for k, (points, gpus, p) in enumerate(drawn)]
    hulls = [speed_points(points) for points, _, _ in drawn]
    full_w = sum(hull[-1][1] for hull in hulls)
    least_w = sum(hull[0][1] for hull in hulls)
    budget_w = HOST_W + share * full_w
    decision = divide(budget_w, *jobs)
    if budget_w - HOST_W < least_w:
        assert decision.predicted_w == pytest.approx(HOST_W + least_w)
        return
    weights = [gpus * 2.0 ** (5 - p) for _, gpus, p in drawn]
    # One variable per hull point, mixed: all shares of a job sum to 1.
    value = [-w * x / hull[-1][0] for w, hull in zip(weights, hulls, strict=True) for x, _ in hull]
    powers = [p for hull in hulls for _, p in hull]
    rows = np.zeros((len(hulls), len(powers)))
    at = 0
    for row, hull in enumerate(hulls):
        rows[row, at : at + len(hull)] = 1.0
        at += len(hull)
    best = linprog(value, A_ub=[powers], b_ub=[budget_w - HOST_W], A_eq=rows, b_eq=np.ones(len(hulls)))
    got = sum(w * s for w, s in zip(weights, _relative(decision, hulls), strict=True))
    assert got == pytest.approx(-best.fun, rel=2e-6)
    assert decision.predicted_w <= budget_w * (1 + 1e-9)
    price, step_w = decision.price_per_w, 0.01
    assert price is not None
    more, less = (
        sum(w * s for w, s in zip(weights, _relative(divide(budget_w + change_w, *jobs), hulls), strict=True))
        for change_w in (step_w, -step_w)
    )
    tolerance = 2e-6 * got
    assert more - got <= price * step_w + tolerance
    assert got - less >= price * step_w - tolerance or budget_w - HOST_W - step_w < least_w


def _relative(decision: PowerDecision, hulls: list[tuple[tuple[float, float], ...]]) -> list[float]:
    times = [share.iteration_time_s for share in decision.shares]
    return [1.0 if t is None else 1 / (t * hull[-1][0]) for t, hull in zip(times, hulls, strict=True)]


def test_watts_go_where_they_add_most_speed() -> None:
    decision = divide(HOST_W + 600, job("steep", *STEEP), job("flat", *FLAT))
    steep, flat = decision.shares
    assert flat.iteration_time_s is None
    assert steep.iteration_time_s == pytest.approx(1.1)
    assert decision.predicted_w == pytest.approx(HOST_W + 600)
    assert decision.price_per_w is not None
    assert steep.speed_per_w == pytest.approx(decision.price_per_w)
    assert decision.reason == "equal speed per watt for all jobs"


def test_idle_gpus_and_the_host_count() -> None:
    with_idle = divide(HOST_W + 600, job("steep", *STEEP), job("flat", *FLAT), other_w=HOST_W + 50)
    assert with_idle.predicted_w == pytest.approx(HOST_W + 600)
    assert sum(share.power_w for share in with_idle.shares) == pytest.approx(550)


def test_the_floor_comes_before_priority() -> None:
    jobs = (
        job("a", (1.0, 400.0), (2.0, 500.0), slows_for_power=True),
        job("b", (1.0, 400.0), (2.0, 500.0), priority=0, slows_for_power=True),
    )
    floored = divide(HOST_W + 670, *jobs, floor=0.6)
    assert floored.speed_ratios["a"] == pytest.approx(0.6)
    without = divide(HOST_W + 670, *jobs)
    assert without.speed_ratios["a"] < 0.6
    short = divide(HOST_W + 520, *jobs, floor=0.6)
    assert "too little for 60 % of full speed" in short.reason


def test_replicas_of_a_training_run_at_one_speed() -> None:
    slow = job("r0", *STEEP, training_id="t")
    fast = job("r1", (0.9, 390.0), (1.05, 320.0), (1.2, 300.0), training_id="t")
    decision = divide(HOST_W + 620, slow, fast, job("other", *FLAT))
    times = {share.job_id: share.iteration_time_s for share in decision.shares}
    assert times["r0"] == times["r1"]
    assert times["r0"] is not None


def test_a_job_without_a_frontier_gets_a_limit_and_the_rest_is_filled() -> None:
    unknown = PowerJobView("new", 2, power_limit_range_w=(100.0, 400.0))
    decision = divide(HOST_W + 900, unknown, job("known", *STEEP))
    new, known = decision.shares
    assert new.limit_w == pytest.approx(300)
    assert new.iteration_time_s is None
    assert new.speed_ratio is None
    assert known.power_w == pytest.approx(300)
    assert decision.predicted_w <= HOST_W + 900
    assert "1 of 2 jobs by power limits" in decision.reason


def test_a_job_that_draws_less_than_its_limit_leaves_the_rest_to_others() -> None:
    small = PowerJobView("small", 1, power_limit_range_w=(100.0, 400.0), full_speed_power_w=150.0)
    decision = divide(HOST_W + 550, small, job("known", *STEEP))
    assert decision.shares[0].power_w == 150.0
    assert decision.shares[1].iteration_time_s is None


def test_limits_hold_what_plans_cannot() -> None:
    limited = job("a", *STEEP, power_limit_range_w=(100.0, 400.0))
    decision = divide(HOST_W + 150, limited)
    (share,) = decision.shares
    assert share.limit_w == pytest.approx(150)
    assert share.iteration_time_s == pytest.approx(1.3 / 0.8)
    assert decision.least_w == pytest.approx(HOST_W + 300 / 1.3)
    assert "81 W short" in decision.reason


def test_beyond_the_least_energy_only_where_plans_go_there() -> None:
    points = (1.0, 300.0), (1.2, 290.0), (1.5, 320.0)
    budget_w = HOST_W + 225.0
    (cut,) = divide(budget_w, job("a", *points)).shares
    assert cut.power_w == pytest.approx(290 / 1.2)
    (slow,) = divide(budget_w, job("a", *points, slows_for_power=True)).shares
    assert slow.power_w == pytest.approx(225)
    assert slow.limit_w is None


def test_a_budget_below_the_lowest_limits_still_gives_the_lowest() -> None:
    unknown = PowerJobView("new", 4, power_limit_range_w=(100.0, 400.0))
    (share,) = divide(50.0, unknown).shares
    assert share.limit_w == 100.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_a_frontier_with_impossible_values_is_unknown(bad: float) -> None:
    broken = PowerJobView(
        "bad",
        1,
        can_follow=True,
        frontier=(FrontierPoint(1.0, 300.0, None), FrontierPoint(1.2, bad, None)),
        power_limit_range_w=(100.0, 400.0),
    )
    decision = divide(HOST_W + 400, broken, job("good", *FLAT))
    assert decision.shares[0].limit_w == pytest.approx(200)
    assert all(math.isfinite(share.power_w) for share in decision.shares)


def test_without_jobs_and_without_limits_nothing_fails() -> None:
    assert divide(100.0).shares == ()
    assert divide(100.0).reason == "no job"
    (share,) = divide(500.0, PowerJobView("new", 2)).shares
    assert share.limit_w is None


@given(st.lists(st.tuples(curves, st.integers(1, 4)), min_size=1, max_size=4), st.floats(0.0, 1.0))
def test_the_curve_of_the_host_is_concave_and_every_point_of_it_can_be_reached(
    drawn: list[tuple[tuple[tuple[float, float], ...], int]], floor: float
) -> None:
    jobs = [job(f"j{k}", *points, num_gpus=gpus) for k, (points, gpus) in enumerate(drawn)]
    curve = divide(1e6, *jobs, floor=floor).curve
    assert curve[-1].speed == pytest.approx(sum(job.num_gpus for job in jobs))
    assert len(curve) <= 20
    slopes = [
        (high.speed - low.speed) / (high.power_w - low.power_w)
        for low, high in pairwise(curve)
        if high.power_w - low.power_w > 1e-3
    ]
    assert all(later <= earlier * (1 + 1e-6) + 1e-9 for earlier, later in pairwise(slopes))
    for point in curve:
        reached = divide(point.power_w + 1e-6, *jobs, floor=floor).speed_ratios
        speed = sum(job.num_gpus * reached[job.job_id] for job in jobs)
        assert speed == pytest.approx(point.speed, rel=1e-3)
