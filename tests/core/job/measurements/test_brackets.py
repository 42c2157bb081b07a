"""Savings from brackets: what is compared with what, which brackets are void, and that intervals contain the truth."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.job.measurements.brackets import LogPoint, complete_brackets
from gpuenergyd.core.job.measurements.savings import (
    MeasuredSaving,
    Point,
    measured_saving,
    saving_between,
    student_quantile,
)
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy

RUNS = (10, 8, 4, 12, 4, 16, 4, 20, 4, 20)
"""Lengths of what a job runs by turns: full speed, under a plan, full speed, ..."""
EFFECT = math.log(0.88)


def job(energy: Callable[[int], float], *, runs: Sequence[int] = RUNS) -> tuple[list[Point], list[Point]]:
    """Return the iterations at full speed, without the first of each block, and those under the plan.

    `energy` gives the logarithm of the energy of an iteration at full speed; the plan saves 12 %, at the same speed.
    """
    full: list[Point] = []
    tuned: list[Point] = []
    index = 0
    for number, length in enumerate(runs):
        for k in range(index, index + length):
            if number % 2:
                tuned.append(Point(k, 1.0, math.exp(energy(k) + EFFECT)))
            elif k > index or not number:
                full.append(Point(k, 1.0, math.exp(energy(k))))
        index += length
    return full, tuned


def saving_of(energy: Callable[[int], float], *, runs: Sequence[int] = RUNS) -> tuple[float, float, float]:
    """Return the saving of a job with its interval."""
    found = saving_between(*job(energy, runs=runs))
    assert found is not None
    assert found.saving_ratio is not None
    return found.saving_ratio.low, found.saving_ratio.estimate, found.saving_ratio.high


def test_saving_and_interval_come_from_the_effects_of_brackets() -> None:
    """Three blocks at full speed after the first: effects count as the iterations near their blocks."""
    level = {block: 0.001 * block for block in range(5)}  # by which a block at full speed is off

    def energy(index: int) -> float:
        own = {range(18, 22): level[1], range(34, 38): level[2], range(54, 58): level[4]}
        return 5.0 + next((off for at, off in own.items() if index in at), 0.0)

    effects = [EFFECT - level[k] for k in (1, 2, 4)]
    weights = [near / 61 for near in (9 + 7, 7 + 9, 9 + 20)]
    mean = sum(weight * effect for weight, effect in zip(weights, effects, strict=True))
    spread = sum((weight * (effect - mean)) ** 2 for weight, effect in zip(weights, effects, strict=True))
    margin = student_quantile(0.975, 2) * math.sqrt(spread / (1 - sum(weight**2 for weight in weights)))
    expected = [-math.expm1(x) for x in (mean + margin, mean, mean - margin)]

    assert saving_of(energy, runs=RUNS[:8]) == pytest.approx(expected)


def test_the_first_baseline_is_in_no_bracket() -> None:
    calm = saving_of(lambda _: 5.0)

    assert saving_of(lambda index: 5.0 + (0.7 if index < 10 else 0.0)) == pytest.approx(calm)


def test_a_steady_drift_cancels() -> None:
    _, estimate, _ = saving_of(lambda index: 5.0 + 0.0003 * index, runs=(10, *[20, 5] * 4, 20))

    assert estimate == pytest.approx(0.12, abs=0.0005)


@pytest.mark.parametrize("at", range(20, 60, 5))
def test_a_bracket_in_which_the_job_changed_is_void(at: int) -> None:
    draw = random.Random(at)
    noise = [draw.gauss(0, 0.002) for _ in range(200)]

    low, estimate, high = saving_of(lambda index: 5.0 + noise[index] - (0.3 if index >= at else 0.0))

    assert estimate == pytest.approx(0.12, abs=0.006)
    assert low <= 0.12 <= high


def test_a_change_of_power_that_begins_with_the_plan_is_no_saving() -> None:
    draw = random.Random(1)
    noise = [draw.gauss(0, 0.002) for _ in range(200)]

    _, estimate, _ = saving_of(lambda index: 5.0 + noise[index] - (0.4 if index >= 10 else 0.0))

    assert estimate == pytest.approx(0.12, abs=0.005)


def test_a_single_stall_counts_nothing() -> None:
    calm = saving_of(lambda _: 5.0)

    assert saving_of(lambda index: 5.0 + (1.0 if index in {15, 19, 30} else 0.0)) == pytest.approx(calm)


@pytest.mark.parametrize("num_runs", [2, 3, 4, 5])
def test_nothing_is_claimed_before_two_complete_brackets(num_runs: int) -> None:
    full, tuned = job(lambda _: 5.0, runs=RUNS[:num_runs])
    num_complete = (num_runs - 2) // 2

    assert len(complete_brackets([LogPoint(*p[:2]) for p in full], [LogPoint(*p[:2]) for p in tuned])) == num_complete
    assert (saving_between(full, tuned) is None) is (num_complete < 2)


def test_energies_that_were_not_measured_are_missing_and_not_zero() -> None:
    full, tuned = job(lambda _: 5.0)
    found = saving_between([p._replace(energy_j=None) for p in full], tuned)

    assert found is not None
    assert found.saving_ratio is None
    assert found.slowdown_ratio.estimate == pytest.approx(0.0)


def test_a_change_of_power_alone_makes_the_time_of_its_bracket_void_too() -> None:
    def time_and_energy(points: Sequence[Point]) -> list[Point]:
        return [
            Point(k, 1.2 if 18 <= k < 22 else 1.0, j * (0.5 if k >= 20 else 1.0))
            for k, _, j, _ in points
            if j is not None
        ]

    full, tuned = job(lambda index: 5.0 + 0.001 * (index % 2))
    found = saving_between(time_and_energy(full), time_and_energy(tuned))

    assert found is not None
    assert found.slowdown_ratio.estimate == pytest.approx(0.0)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), gaps=st.lists(st.integers(0, 3), max_size=12))
def test_no_iteration_is_in_two_brackets(lengths: list[int], gaps: list[int]) -> None:
    full: list[LogPoint] = []
    tuned: list[LogPoint] = []
    index = 0
    for number, length in enumerate(lengths):
        index += gaps[number] if number < len(gaps) else 0
        (tuned if number % 2 else full).extend(LogPoint(k, 0.0) for k in range(index, index + length))
        index += length
    found = complete_brackets(full, tuned)
    used = list(chain.from_iterable((*b.before, *b.block, *b.after) for b in found))

    assert len(used) == len(set(used))
    for bracket in found:
        assert set(bracket.block) <= set(full)
        assert {*bracket.before, *bracket.after} <= set(tuned)
        assert bracket.before[-1][0] < bracket.block[0][0] <= bracket.block[-1][0] < bracket.after[0][0]


@pytest.mark.parametrize("seed", range(10))
def test_iterations_that_are_stored_as_one_row_count_as_what_they_are(seed: int) -> None:
    draw = random.Random(seed)
    full, tuned = job(lambda _: 5.0 + draw.gauss(0, 0.002), runs=(10, 30, 4, 30, 4, 30, 4, 30))
    rows: list[list[Point]] = []
    for point in tuned:
        begins = not rows or point.first_index - rows[-1][-1].first_index > 1 or len(rows[-1]) >= draw.randint(1, 8)
        rows = [*rows, [point]] if begins else [*rows[:-1], [*rows[-1], point]]
    merged = [Point(row[0].first_index, 1.0, median(p.energy_j or 0.0 for p in row), len(row)) for row in rows]
    singly, by_row = saving_between(full, tuned), saving_between(full, merged)

    assert singly is not None
    assert by_row is not None
    assert singly.saving_ratio is not None
    assert by_row.saving_ratio is not None
    assert by_row.saving_ratio.estimate == pytest.approx(singly.saving_ratio.estimate, abs=0.003)


def test_a_row_between_two_blocks_is_in_one_bracket() -> None:
    full = [LogPoint(k, 0.0) for k in (10, 11, 12, 33, 34, 35)]
    tuned = (
        [LogPoint(k, -0.1) for k in range(10)] + [LogPoint(13, -0.1, 20)] + [LogPoint(k, -0.1) for k in range(36, 46)]
    )
    (bracket,) = complete_brackets([LogPoint(-1, 0.0), *full], [p for p in tuned if p.first_index >= 0])

    assert bracket.block == tuple(full[3:])
    assert bracket.before == (LogPoint(13, -0.1, 20),)


@pytest.mark.thorough
def test_the_interval_contains_the_true_saving_in_95_percent_of_jobs_that_change() -> None:
    """Loads that come and go, drift and noise: what changes between brackets is in their spread."""
    covered = 0
    for seed in range(300):
        draw = random.Random(seed)
        noise = [draw.gauss(0, 0.01) for _ in range(400)]
        drift = draw.gauss(0, 0.0005)
        levels: list[float] = []
        while len(levels) < 400:
            levels += [draw.choice([0.0, 0.0, draw.uniform(0, 0.1)])] * draw.randint(10, 80)

        def energy(index: int, noise: list[float] = noise, drift: float = drift, own: list[float] = levels) -> float:
            return 5.0 + noise[index] + drift * index + own[index]

        low, _, high = saving_of(energy, runs=(10, 8, 4, 11, 4, 15, 4, 20, 4, 27, 4, 36, 4, 49, 4, 66))
        covered += low <= 0.12 <= high

    assert covered >= 0.92 * 300


def observed(points: Sequence[Point], plan_id: str) -> list[IterationObservation]:
    return [IterationObservation(k, plan_id, t, (), (RankEnergy(0, t, j, ()),)) for k, t, j, _ in points]


def test_observations_of_several_plans_count_together() -> None:
    full, tuned = job(lambda index: 5.0 + 0.001 * (index % 2))
    found = measured_saving(observed(full, "f"), [*observed(tuned[:20], "a"), *observed(tuned[20:], "b")])

    assert found == saving_between(full, tuned)
    assert isinstance(found, MeasuredSaving)
    assert (found.num_full_speed, found.num_tuned) == (len(full), len(tuned))
