"""The baseline that drifts along, and the measured saving with its interval."""

import math
import random

import pytest

from gpuenergyd.core.observation import IterationObservation, RankEnergy
from gpuenergyd.core.savings import baseline_view, measured_saving, student_quantile


def iteration(index: int, time_s: float, energy_j: float | None) -> IterationObservation:
    return IterationObservation(index, "p", time_s, (), (RankEnergy(0, time_s, energy_j, ()),))


def test_a_block_within_the_noise_only_sharpens_the_baseline() -> None:
    times_s = [1.0, 1.01, 0.99, 1.0, 1.005, 0.995]
    first = [iteration(k, t, 100.0) for k, t in enumerate(times_s)]
    block = [iteration(50 + k, t, 100.0) for k, t in enumerate([1.004, 0.998, 1.001])]

    assert baseline_view(first + block).iteration_time_s == pytest.approx(1.0, abs=0.002)
    assert baseline_view(first + block).num_iterations == 9


def test_a_block_beyond_the_noise_becomes_the_baseline() -> None:
    first = [iteration(k, t, 100.0) for k, t in enumerate([1.0, 1.001, 0.999, 1.0, 1.001, 0.999])]
    block = [iteration(50 + k, t, 100.0) for k, t in enumerate([1.03, 1.031, 1.029])]

    assert baseline_view(first + block).iteration_time_s == pytest.approx(1.03)


def test_a_baseline_without_energy_has_none() -> None:
    assert baseline_view([iteration(0, 1.0, None)]).energy_j is None


@pytest.mark.parametrize(("degrees", "expected"), [(3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (100, 1.984)])
def test_student_quantile_agrees_with_the_tables(degrees: int, expected: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(expected, rel=0.015)


def test_the_interval_contains_the_true_saving_nineteen_times_in_twenty() -> None:
    covered = 0
    for seed in range(300):
        draw = random.Random(seed)

        def energy(k: int, saving: float, draw: random.Random = draw) -> float:
            return 1000 * (1 - saving) * math.exp(0.0002 * k + draw.gauss(0, 0.01))

        full = [iteration(k, 1.0, energy(k, 0.0)) for k in [*range(10), *range(60, 64)]]
        tuned = [iteration(k, 1.0, energy(k, 0.12)) for k in [*range(30, 60), *range(64, 80)]]
        saving = measured_saving(full, tuned)
        assert saving is not None
        assert saving.saving_ratio is not None
        covered += saving.saving_ratio.low <= 0.12 <= saving.saving_ratio.high

    assert covered >= 0.92 * 300


def test_too_few_iterations_prove_nothing() -> None:
    full = [iteration(k, 1.0, 100.0) for k in range(10)]

    assert measured_saving(full, [iteration(20, 1.0, 90.0), iteration(21, 1.0, 90.0)]) is None


def test_a_saving_without_energy_is_missing_and_not_zero() -> None:
    full = [iteration(k, 1.0 + 0.001 * (k % 3), None) for k in range(10)]
    tuned = [iteration(20 + k, 1.0 + 0.001 * (k % 3), None) for k in range(10)]

    saving = measured_saving(full, tuned)

    assert saving is not None
    assert saving.saving_ratio is None
    assert saving.slowdown_ratio.low <= 0 <= saving.slowdown_ratio.high
