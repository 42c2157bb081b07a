"""Errors of energies that repetition does not show: power sensors that sample the same parts of each iteration."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.job.measurements.savings import measured_saving
from gpuenergyd.core.job.measurements.sensor_error import concentration, hidden_energy_error_ratio
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.measurement.telemetry import EnergyCounter


def iterations(
    length_s: float, *, num_ranks: int = 1, period_s: float | None = 0.1, count: int = 40, energy_j: float = 100.0
) -> list[IterationObservation]:
    """Return iterations in a row whose energies scatter by 0.1 %, with the phases that their length leads to."""
    draw = random.Random(7)
    return [
        IterationObservation(
            k,
            "p",
            length_s,
            (),
            tuple(
                RankEnergy(
                    rank,
                    length_s,
                    energy_j * draw.gauss(1.0, 0.001),
                    (),
                    period_s,
                    None if period_s is None else (0.3 * rank + k * length_s / period_s) % 1.0,
                )
                for rank in range(num_ranks)
            ),
        )
        for k in range(count)
    ]


def test_iterations_of_a_multiple_of_the_period_have_an_error_in_common() -> None:
    assert hidden_energy_error_ratio(iterations(2.0)) == pytest.approx(0.1 / 2.0)
    assert hidden_energy_error_ratio(iterations(2.037)) == 0.0


def test_errors_of_several_gpus_are_independent() -> None:
    assert hidden_energy_error_ratio(iterations(2.0, num_ranks=4)) == pytest.approx(0.1 / 2.0 / 2)


def test_an_unknown_period_or_too_few_iterations_have_no_known_error() -> None:
    assert hidden_energy_error_ratio(iterations(2.0, period_s=None)) == 0.0
    assert hidden_energy_error_ratio(iterations(2.0, count=2)) == 0.0
    assert hidden_energy_error_ratio(iterations(2.0, period_s=2.0)) == 0.0
    assert hidden_energy_error_ratio([]) == 0.0


def test_the_interval_of_a_saving_contains_that_error() -> None:
    def width(length_s: float) -> float:
        by_turns = list(zip(iterations(length_s), iterations(length_s, energy_j=90.0), strict=True))
        full_speed = [full for full, _ in by_turns if full.iteration_index // 4 % 2]
        saving = measured_saving(full_speed, [own for _, own in by_turns if not own.iteration_index // 4 % 2])
        assert saving is not None
        assert saving.saving_ratio is not None
        return saving.saving_ratio.high - saving.saving_ratio.low

    assert width(2.037) < 0.005
    assert width(2.0) > 2 * 1.96 * math.sqrt(2) * 0.1 / 2.0 * 0.85


@given(st.lists(st.floats(0, 1), min_size=3, max_size=50), st.floats(0, 1))
def test_concentration_is_a_share_that_does_not_depend_on_the_origin(phases: list[float], shift: float) -> None:
    found = concentration(phases)

    assert 0.0 <= found <= 1.0 + 1e-9
    assert concentration([(phase + shift) % 1.0 for phase in phases]) == pytest.approx(found, abs=1e-6)
    assert concentration([shift] * len(phases)) == pytest.approx(1.0)


def test_the_phase_of_an_instant_comes_from_the_edges_around_it_even_if_some_are_missing() -> None:
    counter = EnergyCounter()
    for k in range(40):
        if k % 7:
            counter.record(k * 100_000_000 + 5_000_000, float(k))

    found = counter.phase(2_030_000_000)
    assert found is not None
    assert found == pytest.approx((0.1, 0.25))
    assert counter.phase(0) is None
    assert EnergyCounter().phase(5) is None


def test_a_counter_that_is_read_once_a_second_shows_no_phase() -> None:
    counter = EnergyCounter()
    for k in range(40):
        counter.record(k * 1_000_000_000, float(k))

    assert counter.phase(20_500_000_000) is None
