"""The baseline that drifts along, and the measured saving with its interval."""

import math
import random
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuenergyd.core.job.measurements.savings import (
    Interval,
    MeasuredSaving,
    baseline_view,
    measured_saving,
    saved_power_w,
    saving_between,
    student_quantile,
    sum_of_significant,
)
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.policy_api.policy import BaselineView

FloatArray = NDArray[np.float64]


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


@pytest.mark.parametrize(("degrees", "expected"), [(3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (100, 1.984)])
def test_student_quantile_agrees_with_the_tables(degrees: int, expected: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected", "within"),
    [
        (0.975, 5, 2.5705818366147395, 2e-4),
        (0.975, 10, 2.2281388519649385, 5e-6),
        (0.975, 30, 2.0422724563012373, 3e-8),
        (0.9, 10, 1.3721836411102863, 1e-6),
        (0.025, 30, -2.0422724563012373, 3e-8),
    ],
)
def test_student_quantile_has_the_accuracy_of_its_expansion(
    probability: float, degrees: int, expected: float, within: float
) -> None:
    """Against exact values: each of its four terms counts."""
    assert student_quantile(probability, degrees) == pytest.approx(expected, rel=within)


def test_the_interval_contains_the_true_saving_in_95_percent_of_runs() -> None:
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


def disturbed(num_disturbed: int) -> Interval:
    """Return the slowdown of a job whose plan costs no time, with as many disturbed iterations of 14 at full speed."""
    draw = random.Random(3)
    full = [(k, 1.0 + draw.gauss(0, 0.002), None) for k in [*range(10), *range(60, 64)]]
    full[14 - num_disturbed :] = [(k, 1.2 * time_s, None) for k, time_s, _ in full[14 - num_disturbed :]]
    tuned = [(k, 1.0 + draw.gauss(0, 0.002), None) for k in [*range(30, 60), *range(64, 80)]]
    found = saving_between(full, tuned)
    assert found is not None
    return found.slowdown_ratio


@pytest.mark.parametrize("num_disturbed", [1, 2, 4])
def test_a_disturbed_full_speed_block_does_not_pass_for_a_speed_up(num_disturbed: int) -> None:
    slowdown = disturbed(num_disturbed)

    assert slowdown.estimate == pytest.approx(disturbed(0).estimate, abs=0.002)
    assert slowdown.high - slowdown.low < 0.01


def test_more_than_a_third_of_the_baseline_is_a_change_and_counts() -> None:
    assert disturbed(6).estimate < -0.03


@given(
    logs=st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=20),
    tuned_logs=st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=20),
)
def test_an_estimate_lies_inside_its_own_interval(logs: list[float], tuned_logs: list[float]) -> None:
    full = [(k, math.exp(y), math.exp(-y)) for k, y in enumerate(logs)]
    tuned = [(len(logs) + k, math.exp(y), math.exp(-y)) for k, y in enumerate(tuned_logs)]

    found = saving_between(full, tuned)

    assert found is not None
    for interval in (found.slowdown_ratio, found.saving_ratio):
        assert interval is not None
        assert interval.low <= interval.estimate <= interval.high


def test_too_few_iterations_give_no_measured_saving() -> None:
    full = [iteration(k, 1.0, 100.0) for k in range(10)]

    assert measured_saving(full, [iteration(20, 1.0, 90.0), iteration(21, 1.0, 90.0)]) is None


def test_a_saving_without_energy_is_missing_and_not_zero() -> None:
    full = [iteration(k, 1.0 + 0.001 * (k % 3), None) for k in range(10)]
    tuned = [iteration(20 + k, 1.0 + 0.001 * (k % 3), None) for k in range(10)]

    saving = measured_saving(full, tuned)

    assert saving is not None
    assert saving.saving_ratio is None
    assert saving.slowdown_ratio.low <= 0 <= saving.slowdown_ratio.high


def fitted_effect(logs: FloatArray, is_tuned: FloatArray) -> tuple[float, float]:
    """Return the effect and its standard error; warmth has a prior of 0.5 %, as one more observation of zero."""
    index = np.arange(len(logs))
    linear = np.column_stack([np.ones(len(logs)), is_tuned, index])
    variance = np.linalg.lstsq(linear, logs)[1][0] / (len(logs) - 3)
    columns = np.column_stack([linear, np.exp(-index / 15)])
    both = np.vstack([columns, [0.0, 0.0, 0.0, math.sqrt(variance) / 0.005]])
    solved = np.linalg.lstsq(both, np.append(logs, 0.0))[0]
    squares = float(np.sum((logs - columns @ solved) ** 2))
    covariance = squares / (len(logs) - 4) * np.linalg.inv(both.T @ both)
    return float(solved[1]), math.sqrt(covariance[1, 1])


def test_saving_and_interval_come_from_the_regression() -> None:
    """A job that drifts by 1 % an iteration, tuned in blocks; numpy's least squares gives the same figures."""
    draw = random.Random(5)
    is_tuned = [k % 8 >= 4 for k in range(24)]
    logs = [5.0 - 0.15 * tuned + 0.01 * k + draw.gauss(0, 0.02) for k, tuned in enumerate(is_tuned)]
    full, tuned = (
        [(k, math.exp(y), None) for k, y in enumerate(logs) if is_tuned[k] is side] for side in (False, True)
    )
    effect, error = fitted_effect(np.array(logs), np.array(is_tuned, dtype=float))

    found = saving_between(full, tuned)

    margin = student_quantile(0.975, 20) * error
    expected = [math.expm1(x) for x in (effect, effect - margin, effect + margin)]
    assert found is not None
    slowdown = found.slowdown_ratio
    assert [slowdown.estimate, slowdown.low, slowdown.high] == pytest.approx(expected)
    assert (found.num_full_speed, found.num_tuned) == (12, 12)


def test_drift_collinear_with_the_plan_is_not_corrected() -> None:
    """First all at full speed, then all tuned: the difference of means, with Student's interval of two samples."""
    full, tuned = [100.0, 102.0, 101.0, 99.0], [90.0, 88.0, 91.0, 89.0]
    a, b = ([math.log(value) for value in side] for side in (full, tuned))
    effect = sum(b) / 4 - sum(a) / 4
    squares = sum((x - sum(a) / 4) ** 2 for x in a) + sum((x - sum(b) / 4) ** 2 for x in b)
    margin = student_quantile(0.975, 6) * math.sqrt(squares / 6 * (1 / 4 + 1 / 4))

    found = saving_between([(k, v, None) for k, v in enumerate(full)], [(4 + k, v, None) for k, v in enumerate(tuned)])

    expected = [math.expm1(x) for x in (effect, effect - margin, effect + margin)]
    assert found is not None
    slowdown = found.slowdown_ratio
    assert [slowdown.estimate, slowdown.low, slowdown.high] == pytest.approx(expected)


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


def test_a_plan_that_saves_more_than_the_one_before_does_not_pass_for_drift() -> None:
    draw = random.Random(2)
    full = [(k, 1.0, 100.0 * math.exp(draw.gauss(0, 0.002))) for k in [*range(10), *range(30, 34)]]
    first = [(k, 1.0, 90.0 * math.exp(draw.gauss(0, 0.002))) for k in [*range(20, 30), *range(34, 60)]]
    second = [(k, 1.0, 80.0 * math.exp(draw.gauss(0, 0.002))) for k in range(60, 96)]

    found = saving_between(full, first, second)

    assert found is not None
    assert found.saving_ratio is not None
    assert found.num_tuned == 72
    assert found.saving_ratio.estimate == pytest.approx(0.15, abs=0.003)
    assert found.saving_ratio.low < 0.15 < found.saving_ratio.high


def test_the_interval_contains_what_warming_may_have_changed() -> None:
    """Full speed is mostly measured on cold GPUs, a plan on warm ones."""
    covered = 0
    for seed in range(200):
        draw = random.Random(seed)
        warm_ratio = draw.gauss(0.0, 0.005)

        def energy(k: int, saving: float, draw: random.Random = draw, warm_ratio: float = warm_ratio) -> float:
            return 1000 * (1 - saving) * math.exp(-warm_ratio * math.exp(-k / 12) + draw.gauss(0, 0.002))

        full = [(k, 1.0, energy(k, 0.0)) for k in [*range(10), *range(30, 34)]]
        tuned = [(k, 1.0, energy(k, 0.12)) for k in [*range(22, 30), *range(34, 150)]]
        found = saving_between(full, tuned)
        assert found is not None
        assert found.saving_ratio is not None
        covered += found.saving_ratio.low <= 0.12 <= found.saving_ratio.high

    assert covered >= 0.92 * 200


def test_a_saving_is_the_reduction_of_energy_inside_its_interval() -> None:
    full = [(k, 1.0, 100.0 + k % 3) for k in range(8)]
    tuned = [(8 + k, 1.0, 80.0 + k % 3) for k in range(8)]

    found = saving_between(full, tuned)

    assert found is not None
    assert found.saving_ratio is not None
    saving = found.saving_ratio
    assert 0.15 < saving.low < saving.estimate < saving.high < 0.25


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


def test_a_saving_needs_three_iterations_of_each_kind() -> None:
    three = [(k, 1.0 + 0.01 * (k % 2), None) for k in range(3)]
    later = [(3 + k, 1.1 + 0.01 * (k % 2), None) for k in range(3)]

    assert saving_between(three, later) is not None
    assert saving_between(three[:2], later) is None
    assert saving_between(three, later[:2]) is None


def test_with_too_few_energies_only_the_slowdown_is_measured() -> None:
    full = [(k, 1.0, 100.0 if k < 2 else None) for k in range(6)]
    tuned = [(6 + k, 1.0, 90.0) for k in range(6)]

    found = saving_between(full, tuned)

    assert found is not None
    assert found.saving_ratio is None
    enough = saving_between([(k, 1.0, 100.0 if k < 3 else None) for k in range(6)], tuned)
    assert enough is not None
    assert enough.saving_ratio is not None
    assert enough.saving_ratio.estimate == pytest.approx(0.1)


def test_drift_is_corrected_only_if_it_is_not_collinear_with_the_plan() -> None:
    """A share of 0.3 of the products must remain: four and four in a row leave less, two by two more."""
    rising = [math.exp(0.01 * k) for k in range(12)]
    in_a_row = saving_between([(k, rising[k], None) for k in range(6)], [(k, rising[k], None) for k in range(6, 12)])
    in_turn = saving_between(
        [(k, rising[k], None) for k in range(12) if k // 2 % 2 == 0],
        [(k, rising[k], None) for k in range(12) if k // 2 % 2 == 1],
    )

    assert in_a_row is not None
    assert in_turn is not None
    assert in_a_row.slowdown_ratio.estimate == pytest.approx(math.expm1(0.06))
    assert in_turn.slowdown_ratio.estimate == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("z", "terms"),
    [
        (1.0, (2 / 4, 24 / 96, 24 / 384, -528 / 92160)),
        (2.0, (10 / 4, 294 / 96, 1098 / 384, 169950 / 92160)),
    ],
)
def test_student_quantile_is_the_published_expansion(z: float, terms: tuple[float, ...]) -> None:
    """Abramowitz and Stegun, 26.7.5, worked out by hand: g1 to g4 over the powers of the degrees of freedom."""
    for degrees in (1, 3, 10):
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
