"""Energy between two distant updates of a counter follows power where power tells it, and is even elsewhere."""

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.measurement.telemetry import EnergyCounter
from tests.support.costly_counters import CostlyHost, Levels
from tests.support.examples import examples

MS, S = 1_000_000, 1_000_000_000


def counter(powers_w: Sequence[tuple[int, float]], edges: Sequence[tuple[int, float]]) -> EnergyCounter:
    made = EnergyCounter(900.0)
    for at_ns, power_w in powers_w:
        made.record_power(at_ns, power_w)
    for at_ns, energy_j in edges:
        made.record(at_ns, energy_j)
    return made


def square(at_ns: int) -> float:
    """Return 700 W in every other second from 0.33 s on, else 100 W."""
    return 700.0 if (at_ns - 330 * MS) % (2 * S) < S else 100.0


def square_j(until_ns: int) -> float:
    """Return its energy since 0."""
    return sum(square(at_ns) for at_ns in range(0, until_ns, 10 * MS)) / 100


@pytest.mark.parametrize("gap_ms", [900, 200])
def test_energy_of_a_gap_shows_when_power_changed_between_two_readings(gap_ms: int) -> None:
    powers = [(at_ns, square(at_ns)) for at_ns in range(0, 12 * S, 103 * MS)]
    made = counter(powers, [(at_ns, square_j(at_ns)) for at_ns in range(0, 12 * S, gap_ms * MS)])

    for begin_ns, end_ns in [(5 * S, 5330 * MS), (5330 * MS, 6 * S), (5 * S, 6 * S)]:
        assert made.energy_j(begin_ns, end_ns) == pytest.approx(square_j(end_ns) - square_j(begin_ns), abs=3.0)


def test_readings_without_order_leave_energy_even() -> None:
    """A program repeats faster than power is read: readings meet its instructions or its waits by chance."""
    draw = random.Random(3)
    powers = [(at_ns, draw.choice([100.0, 700.0, 700.0])) for at_ns in range(0, 20 * S, 100 * MS)]
    made = counter(powers, [(at_ns, 500.0 * at_ns / S) for at_ns in range(0, 20 * S, S)])

    for begin_ns in range(5 * S, 15 * S, 130 * MS):
        assert made.energy_j(begin_ns, begin_ns + 400 * MS) == pytest.approx(200.0, rel=0.25)


def test_without_readings_of_power_energy_is_even_and_nearly_unknown() -> None:
    made = counter([], [(0, 0.0), (S, 400.0)])

    estimate = made.estimate(200 * MS, 300 * MS)

    assert estimate is not None
    assert estimate.energy_j == pytest.approx(40.0)
    assert estimate.is_estimated
    assert estimate.low_j < 10.0
    assert estimate.high_j > 70.0


def test_energy_between_two_edges_is_as_counted_and_exact() -> None:
    made = counter(
        [(at_ns, square(at_ns)) for at_ns in range(0, 3 * S, 103 * MS)], [(0, 0.0), (S, 300.0), (2 * S, 390.0)]
    )

    estimate = made.estimate(0, 2 * S)

    assert estimate is not None
    assert (estimate.low_j, estimate.energy_j, estimate.high_j) == pytest.approx((390.0, 390.0, 390.0))
    assert not estimate.is_estimated


def test_energy_across_a_counter_that_began_anew_has_no_estimate() -> None:
    made = counter([(at_ns, 100.0) for at_ns in range(0, 3 * S, 100 * MS)], [(0, 500.0), (S, 600.0), (2 * S, 3.0)])

    assert made.estimate(0, 2 * S) is None
    assert made.estimate(500 * MS, 900 * MS) is not None


@settings(max_examples=examples(60), deadline=None)
@given(
    powers_w=st.lists(st.floats(0.0, 800.0), min_size=60, max_size=60),
    rises_j=st.lists(st.floats(0.0, 800.0), min_size=6, max_size=6),
    cuts=st.lists(st.integers(0, 5 * S), min_size=1, max_size=4),
)
def test_parts_of_a_time_add_up_and_none_is_negative(
    powers_w: list[float], rises_j: list[float], cuts: list[int]
) -> None:
    edges = [(k * S, sum(rises_j[:k])) for k in range(6)]
    made = counter([(k * 100 * MS, power_w) for k, power_w in enumerate(powers_w)], edges)

    ends = sorted({0, *cuts, 5 * S})
    parts = [made.energy_j(begin_ns, end_ns) or 0.0 for begin_ns, end_ns in pairwise(ends)]
    assert min(parts) >= -1e-6
    assert sum(parts) == pytest.approx(made.energy_j(0, 5 * S), abs=1e-6)


PROGRAMS = {
    "steps of a training": [(0.065, 690.0)],
    "with waits": [(0.063, 690.0), (0.03, 126.0)],
    "a pipeline": [(0.017, 600.0), (0.008, 126.0)],
    "load of a second": [(1.0, 720.0), (1.0, 127.0)],
    "long pauses": [(0.3, 690.0), (0.2, 126.0)],
    "idle": [(1.0, 126.0)],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_intervals_contain_the_truth(name: str) -> None:
    """Of single short spans in 95 of 100 cases, of all programs together; and the mean of the energies is right."""
    source = Levels(PROGRAMS[name], until_ns=70 * S, seed=5)
    host = CostlyHost([source], 60 * S, seed=5).run()
    made, draw = host.counter(0), random.Random(1)

    held, ratios = [], []
    for _ in range(3000):
        begin_ns = draw.randint(15 * S, 55 * S)
        end_ns = begin_ns + draw.randint(50, 900) * MS
        estimate, true_j = made.estimate(begin_ns, end_ns), source.true_j(end_ns) - source.true_j(begin_ns)
        assert estimate is not None
        held.append(estimate.low_j <= true_j <= estimate.high_j)
        ratios.append((estimate.energy_j - true_j) / (source.true_j(55 * S) - source.true_j(15 * S)) * 40)
    assert fmean(held) >= 0.95
    assert abs(fmean(ratios)) < 0.005
