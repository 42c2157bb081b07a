"""Carbon account: emissions, frontier saving and timing gain of tuned work."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.carbon.account import JobCarbon, WorkSlot, job_carbon
from gpuenergyd.core.carbon.intensity import HOUR
from gpuenergyd.core.carbon.speed_curve import SpeedPoint, power_at, speed_points
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.policy.budget import speed_hull
from gpuenergyd_carbon.policy.jobs import TraceJob

START_AT = datetime(2024, 3, 1, tzinfo=UTC)
FRONTIER = ((1.0, 1000.0), (1.05, 930.0), (1.1, 890.0), (1.2, 860.0))
POINTS = ((1.0, 400.0), (1.25, 350.0), (2.0, 400.0))
"""400 W at 1 a second, 280 W at 0.8, 200 W at 0.5."""


def worked(speeds_per_s: list[float], intensities: list[float | None]) -> list[WorkSlot]:
    """Return hours of work at given speeds, on the frontier exactly."""
    hull = speed_hull(FRONTIER)
    return [
        WorkSlot(
            START_AT + k * HOUR, round(3600 * x), round(3600 * x) / x, float(hull.power_w(x)) * round(3600 * x) / x, c
        )
        for k, (x, c) in enumerate(zip(speeds_per_s, intensities, strict=True))
    ]


def output(slots: list[WorkSlot], host_power_w: float = 0.0) -> JobCarbon:
    carbon = job_carbon(slots, FRONTIER, host_power_w=host_power_w, baseline=(1.0, 1200.0))
    assert carbon is not None
    return carbon


@given(
    st.lists(st.tuples(st.floats(1 / 1.2, 1.0), st.floats(1.0, 900.0)), min_size=1, max_size=12),
    st.floats(0.3, 3.0),
    st.floats(0.0, 500.0),
)
def test_savings_add_up_and_an_error_of_the_models_level_cancels(
    hours: list[tuple[float, float]], level: float, host_power_w: float
) -> None:
    slots = worked([x for x, _ in hours], [c for _, c in hours])
    wrong = tuple((time_s, level * energy_j) for time_s, energy_j in FRONTIER)

    carbon = output(slots, host_power_w)
    savings = carbon.savings
    other = job_carbon(slots, wrong)
    here = job_carbon(slots, FRONTIER)

    total = savings.saved_by_frontier_g + savings.saved_by_timing_g
    assert savings.full_speed_g - savings.actual_g == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert other is not None
    assert here is not None
    assert other.savings.saved_by_timing_g == pytest.approx(here.savings.saved_by_timing_g, rel=1e-6, abs=1e-6)


def test_the_references_are_those_of_the_replay() -> None:
    truth = np.array([100.0, 300.0, 200.0, 500.0, 50.0, 250.0, 80.0, 90.0])
    speeds = [1 / 1.1, 1 / 1.05, 1.0, 1 / 1.1, 1.0, 1 / 1.05]
    slots = worked(speeds, [float(c) for c in truth[:6]])
    work = sum(slot.num_iterations for slot in slots)
    job = TraceJob(speed_hull(FRONTIER), truth, float(work), 0.1)
    run = job.run(np.array([*speeds, 1.0, 1.0]))

    carbon = output(slots)

    assert carbon.savings.actual_g == pytest.approx(run.carbon_g, rel=1e-3)
    assert carbon.savings.equal_time_constant_g == pytest.approx(run.constant_g, rel=1e-3)
    assert carbon.savings.full_speed_g == pytest.approx(job.constant_g(job.job_s), rel=1e-3)


def test_hours_of_unknown_intensity_are_left_out_and_counted() -> None:
    known = worked([1 / 1.05] * 2, [100.0, 300.0])
    slots = [*known, replace(known[0], begin_at=START_AT + 9 * HOUR, carbon_intensity_g_per_kwh=None)]

    carbon = output(slots)

    assert carbon.unpriced_j == pytest.approx(known[0].energy_j)
    assert carbon.savings.actual_g == pytest.approx(output(known).savings.actual_g)
    assert job_carbon([replace(slot, carbon_intensity_g_per_kwh=None) for slot in slots], FRONTIER) is None


def test_without_a_frontier_there_are_no_savings() -> None:
    assert job_carbon(worked([1.0], [100.0]), ()) is None


def test_with_iterations_adds_time_and_energy_to_a_slot() -> None:
    slot = WorkSlot(START_AT, 2, 3.0, 40.0, 100.0)

    assert slot.with_iterations(1.5, 20.0) == WorkSlot(START_AT, 3, 4.5, 60.0, 100.0)
    assert slot.with_iterations(5.0, 60.0, num_iterations=4).num_iterations == 6


def test_the_plans_saving_is_unknown_without_baseline_energy() -> None:
    carbon = output(worked([1.0] * 2, [100.0, 100.0]))

    assert carbon.baseline_g is not None
    assert carbon.saved_by_plan_g == carbon.baseline_g - carbon.savings.full_speed_g > 0
    assert replace(carbon, baseline_g=None).saved_by_plan_g is None


def hour(number: int, iterations: int, time_s: float, energy_j: float, intensity: float | None) -> WorkSlot:
    return WorkSlot(START_AT + number * HOUR, iterations, time_s, energy_j, intensity)


KWH_J = 3.6e6


def test_emissions_of_two_hours_at_two_speeds_computed_by_hand() -> None:
    """1 kW at one a second, 0.5 kW at half of it; 100 then 300 g/kWh, the first hour slow and the second fast.

    5,400 iterations: at full speed an hour and a half of 1 kW; evenly 0.75 a second, 0.75 kW for two hours.
    """
    slots = [hour(0, 1800, 3600.0, 0.5 * KWH_J, 100.0), hour(1, 3600, 3600.0, KWH_J, 300.0)]

    carbon = job_carbon(slots, [(1.0, 1000.0), (2.0, 1000.0 - 1e-9)], baseline=(1.0, 1200.0))

    assert carbon is not None
    assert carbon.savings.actual_g == pytest.approx(0.5 * 100 + 300)
    assert carbon.savings.full_speed_g == pytest.approx(100 + 0.5 * 300)
    assert carbon.savings.equal_time_constant_g == pytest.approx(0.75 * (100 + 300))
    assert carbon.baseline_g == pytest.approx(1.2 * (100 + 0.5 * 300))
    assert carbon.saved_by_plan_g == pytest.approx(0.2 * 250)
    assert (carbon.num_iterations, carbon.priced_j, carbon.unpriced_j) == (5400, 1.5 * KWH_J, 0.0)


def test_host_power_counts_over_the_whole_time() -> None:
    slots = [hour(0, 3600, 3600.0, KWH_J, 100.0)]

    carbon = job_carbon(slots, [(1.0, 1000.0)], host_power_w=500.0, baseline=(1.0, 1200.0))

    assert carbon is not None
    assert carbon.savings.actual_g == pytest.approx(150.0)
    assert carbon.baseline_g == pytest.approx(170.0)
    assert (carbon.host_power_w, carbon.priced_j) == (500.0, KWH_J)


def test_the_frontier_is_scaled_to_the_measured_energy() -> None:
    carbon = job_carbon([hour(0, 3600, 3600.0, KWH_J, 100.0)], [(1.0, 2000.0)])

    assert carbon is not None
    assert carbon.savings.full_speed_g == pytest.approx(100.0)
    assert carbon.baseline_g is None


def test_outside_of_the_frontier_its_end_is_the_reference() -> None:
    frontier = [(1.0, 1000.0), (2.0, 900.0)]

    slow = job_carbon([hour(0, 900, 3600.0, KWH_J, 100.0)], frontier)
    fast = job_carbon([hour(0, 7200, 3600.0, KWH_J, 100.0)], frontier)

    assert slow is not None
    assert fast is not None
    assert slow.savings.equal_time_constant_g == pytest.approx(50.0)  # 900 iterations at one in 2 s, scaled to 1 kW
    assert fast.savings.equal_time_constant_g == pytest.approx(200.0)  # at one a second they take two hours


def test_work_without_time_or_iterations_is_ignored() -> None:
    frontier = [(1.0, 1000.0)]

    assert job_carbon([hour(0, 0, 3600.0, KWH_J, 100.0)], frontier) is None
    assert job_carbon([hour(0, 10, 0.0, KWH_J, 100.0)], frontier) is None
    mixed = job_carbon([hour(0, 10, 0.0, KWH_J, 100.0), hour(1, 3600, 3600.0, KWH_J, 100.0)], frontier)
    assert mixed is not None
    assert mixed.unpriced_j == pytest.approx(KWH_J)


def flat(curve: Sequence[SpeedPoint]) -> list[float]:
    return [value for point in curve for value in point]


def test_points_are_ordered_by_speed_from_the_point_of_least_energy() -> None:
    assert flat(speed_points(POINTS)) == pytest.approx([0.8, 280.0, 1.0, 400.0])


def test_host_power_makes_slow_points_more_expensive() -> None:
    """With 500 W of host an iteration takes 900 J at 1 a second, 975 J at 0.8: only full speed is left."""
    assert flat(speed_points(POINTS, 500.0)) == pytest.approx([1.0, 900.0])


def test_a_point_above_the_line_between_its_neighbours_is_never_worth_running() -> None:
    curve = speed_points([(1.0, 400.0), (1.25, 320.0), (1.6, 290.0), (2.0, 280.0)])

    assert [x for x, _ in curve] == pytest.approx([0.5, 0.625, 0.8, 1.0])
    above = speed_points([(1.0, 400.0), (1.25, 360.0), (1.6, 290.0), (2.0, 280.0)])
    assert [x for x, _ in above] == pytest.approx([0.5, 0.625, 1.0])


def test_of_two_points_of_one_speed_the_cheaper_counts() -> None:
    for points in ([(1.0, 300.0), (1.0, 400.0)], [(1.0, 400.0), (1.0, 300.0)]):
        assert flat(speed_points([*points, (2.0, 290.0)])) == pytest.approx([0.5, 145.0, 1.0, 300.0])


def test_power_is_interpolated_between_points_and_constant_beyond_the_ends() -> None:
    curve = speed_points(POINTS)

    assert power_at(curve, 0.85) == pytest.approx(310.0)
    assert power_at(curve, 0.8) == pytest.approx(280.0)
    assert power_at(curve, 1.0) == pytest.approx(400.0)
    assert power_at(curve, 0.1) == pytest.approx(280.0)
    assert power_at(curve, 3.0) == pytest.approx(400.0)


@pytest.mark.parametrize("point", [(0.0, 1.0), (-1.0, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan)])
def test_an_invalid_frontier_point_is_rejected(point: tuple[float, float]) -> None:
    with pytest.raises(CarbonDataError, match=r"both must be finite and > 0"):
        speed_points([(1.0, 1.0), point])


def test_an_empty_frontier_and_an_invalid_host_power_are_rejected() -> None:
    with pytest.raises(CarbonDataError, match="no point"):
        speed_points([])
    for host_power_w in (-1.0, math.inf):
        with pytest.raises(CarbonDataError, match="host power"):
            speed_points(POINTS, host_power_w)
