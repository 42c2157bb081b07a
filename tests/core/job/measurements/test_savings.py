"""The baseline that drifts along, and the measured saving with its interval."""

import math
from dataclasses import replace
from statistics import NormalDist

import pytest

from gpuenergyd.core.job.measurements.savings import (
    Interval,
    MeasuredSaving,
    baseline_view,
    saved_power_w,
    student_quantile,
    sum_of_significant,
)
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.policy_api.policy import BaselineView


def iteration(index: int, time_s: float, energy_j: float | None) -> IterationObservation:
    return IterationObservation(index, "p", time_s, (), (RankEnergy(0, time_s, energy_j, ()),))


def test_a_full_speed_block_within_the_noise_refines_the_baseline() -> None:
    times_s = [1.0, 1.01, 0.99, 1.0, 1.005, 0.995]
    first = [iteration(k, t, 100.0) for k, t in enumerate(times_s)]
    block = [iteration(50 + k, t, 100.0) for k, t in enumerate([1.004, 0.998, 1.001])]

    assert baseline_view(first + block).iteration_time_s == pytest.approx(1.0, abs=0.002)
    assert baseline_view(first + block).num_iterations == 9


def test_a_full_speed_block_beyond_the_noise_replaces_the_baseline() -> None:
    first = [iteration(k, t, 100.0) for k, t in enumerate([1.0, 1.001, 0.999, 1.0, 1.001, 0.999])]
    block = [iteration(50 + k, t, 100.0) for k, t in enumerate([1.03, 1.031, 1.029])]

    assert baseline_view(first + block).iteration_time_s == pytest.approx(1.03)


def test_a_baseline_of_iterations_without_energy_has_no_energy() -> None:
    assert baseline_view([iteration(0, 1.0, None)]).energy_j is None


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (100, 1.984)]
)
def test_student_quantile_agrees_with_the_tables(degrees: int, expected: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(expected, rel=0.015)


def test_the_baseline_spread_is_a_robust_standard_deviation() -> None:
    times_s = [0.99, 1.0, 1.01, 1.0, 1.5]

    view = baseline_view([iteration(k, t, None) for k, t in enumerate(times_s)])

    assert view.iteration_time_s == pytest.approx(1.0)
    assert view.iteration_sigma_s == pytest.approx(1.4826 * 0.01)


def test_a_gap_of_one_iteration_does_not_split_a_block() -> None:
    slow = [iteration(k, 1.05 + 0.001 * (k % 2), None) for k in range(6)]
    apart = [iteration(k, 1.0 + 0.001 * (k % 2), None) for k in (8, 9, 11, 12)]
    joined = [iteration(k - 1, o.iteration_time_s, None) for k, o in zip((8, 9, 11, 12), apart, strict=True)]

    assert baseline_view(slow + apart).iteration_time_s == pytest.approx(1.0005, abs=6e-4)
    assert baseline_view(slow + joined).iteration_time_s == pytest.approx(1.05, abs=2e-3)


def differing(distance: float) -> float:
    """Return the baseline of six older iterations and a newer block of three, so many of its limits apart.

    Blocks that scatter alike differ where their means lie 2.5 standard errors apart.
    """
    older, newer = [0.99, 1.01] * 3, [0.99, 1.0, 1.01]
    squares = 6 * 0.01**2 + 2 * 0.01**2
    apart = distance * 2.5 * math.sqrt(squares / 7) * math.sqrt(1 / 6 + 1 / 3)
    observed = [iteration(k, t, None) for k, t in enumerate(older)]
    observed += [iteration(50 + k, t + apart, None) for k, t in enumerate(newer)]
    return baseline_view(observed).iteration_time_s - (1.0 + apart)


def test_a_newer_block_replaces_older_ones_beyond_two_and_a_half_standard_errors() -> None:
    assert differing(1.01) == pytest.approx(0.0, abs=1e-12)
    assert differing(-1.01) == pytest.approx(0.0, abs=1e-12)
    assert abs(differing(0.99)) > 0.003
    assert abs(differing(-0.99)) > 0.003


def test_one_iteration_alone_never_differs_from_the_older_ones() -> None:
    older = [iteration(k, 1.0 + 0.001 * (k % 2), None) for k in range(6)]

    assert baseline_view([*older, iteration(50, 3.0, None)]).iteration_time_s < 1.01
    two = [*older, iteration(50, 3.0, None), iteration(51, 3.0, None)]
    assert baseline_view(two).iteration_time_s == 3.0
    assert baseline_view([*older[:2], *two[6:]]).iteration_time_s == 3.0
    apart = [older[0], iteration(50, 3.0, None), iteration(51, 3.2, None)]
    assert baseline_view(apart).iteration_time_s == 3.0


def test_a_gap_of_two_iterations_splits_a_block() -> None:
    slow = [iteration(k, 1.05 + 0.001 * (k % 2), None) for k in range(6)]
    near = [iteration(7 + k, 1.0 + 0.001 * (k % 2), None) for k in range(3)]
    far = [iteration(8 + k, 1.0 + 0.001 * (k % 2), None) for k in range(3)]

    assert baseline_view(slow + near).iteration_time_s == pytest.approx(1.05, abs=2e-3)
    assert baseline_view(slow + far).iteration_time_s == pytest.approx(1.0, abs=2e-3)


def test_energy_at_a_straggler_pace_counts_only_without_other_iterations() -> None:
    own = [iteration(k, 1.0, 100.0) for k in range(3)]
    straggler_pace = [replace(iteration(3 + k, 1.0, 50.0), is_at_straggler_pace=True) for k in range(5)]

    assert baseline_view([*own, *straggler_pace]).energy_j == 100.0
    assert baseline_view(straggler_pace).energy_j == 50.0
    assert baseline_view([*own, iteration(3, 1.0, None)]).energy_j == 100.0


@pytest.mark.parametrize(
    ("z", "terms"),
    [(1.0, (2 / 4, 24 / 96, 24 / 384, -528 / 92160)), (2.0, (10 / 4, 294 / 96, 1098 / 384, 169950 / 92160))],
)
def test_student_quantile_is_the_published_expansion(z: float, terms: tuple[float, ...]) -> None:
    """Abramowitz and Stegun, 26.7.5, worked out by hand: g1 to g4 over the powers of the degrees of freedom."""
    for degrees in (3, 10):
        expected = z + sum(term / degrees ** (k + 1) for k, term in enumerate(terms))

        assert student_quantile(NormalDist().cdf(z), degrees) == pytest.approx(expected, rel=1e-9)


BASELINE = BaselineView(iteration_time_s=0.5, energy_j=100.0, num_iterations=10)


def saving(*, slowdown_ratio: float = 0.0) -> MeasuredSaving:
    slowdown = Interval(slowdown_ratio, slowdown_ratio - 0.001, slowdown_ratio + 0.001)
    return MeasuredSaving(Interval(0.1, 0.08, 0.12), slowdown, num_full_speed=10, num_tuned=10)


def test_at_the_same_speed_the_saved_power_is_baseline_power_minus_tuned_power() -> None:
    saved = saved_power_w(saving(), BASELINE)

    assert saved is not None
    assert saved.estimate == pytest.approx(100.0 / 0.5 - 90.0 / 0.5)
    assert saved.low == pytest.approx(16.0)
    assert saved.high == pytest.approx(24.0)


def test_running_slower_does_not_itself_count_as_saved_power() -> None:
    saved = saved_power_w(saving(slowdown_ratio=0.25), BASELINE)

    assert saved is not None
    assert saved.estimate == pytest.approx(10.0 / 0.625)


def test_without_measured_energy_no_saved_power_is_known() -> None:
    assert saved_power_w(None, BASELINE) is None
    assert saved_power_w(saving(), None) is None
    assert saved_power_w(saving(), replace(BASELINE, energy_j=None)) is None
    assert saved_power_w(replace(saving(), saving_ratio=None), BASELINE) is None


def test_only_significant_savings_are_added_up_also_negative_ones() -> None:
    clear, costly, unclear = Interval(50.0, 47.0, 53.0), Interval(-10.0, -14.0, -6.0), Interval(3.0, -1.0, 7.0)

    total = sum_of_significant([clear, costly, unclear])

    assert total == Interval(40.0, 40.0 - 5.0, 40.0 + 5.0)
    assert sum_of_significant([unclear]) is None
    assert sum_of_significant([]) is None
