"""Speed curve: hull of a frontier, and power of mixed points."""

import math
from collections.abc import Sequence

import pytest

from gpuenergyd.core.carbon.speed_curve import SpeedPoint, power_at, speed_points
from gpuenergyd.errors import CarbonDataError

POINTS = ((1.0, 400.0), (1.25, 350.0), (2.0, 400.0))
"""400 W at 1 a second, 280 W at 0.8, 200 W at 0.5."""


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
