"""Disturbed profiling: other programs, odd counters and missing samples must not affect a plan."""

import numpy as np
import pytest

from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd_policies.profiling.design import clock_levels, design_points
from gpuenergyd_policies.profiling.fit import fit_profile
from gpuenergyd_policies.profiling.times import TimeCurve, fit_times
from tests.policies.profiling.test_profiling import CLOCKS, COUNT, GPU, observation, true_energy_j, true_time_s

F, B = InstructionKind.F, InstructionKind.B
LEVELS = clock_levels(CLOCKS)


def curve_of(times_s: dict[int, list[float]]) -> TimeCurve:
    samples = [
        InstructionSample(0, F, (ClockShare(clock, time_s),), count=8)
        for clock, measured in times_s.items()
        for time_s in measured
    ]
    seen = [IterationObservation(k, "p", 1.0, (sample,), ()) for k, sample in enumerate(samples)]
    return fit_times(seen)[InstructionClass(0, F)]


def design_observations() -> list[IterationObservation]:
    levels = [observation({F: LEVELS[0], B: LEVELS[0]}, waiting_s=0.2 + 0.1 * k) for k in range(3)]
    for number, point in enumerate(design_points([(F, B)], len(LEVELS))[: 2 * len(LEVELS)]):
        clocks = {kind: LEVELS[level] for kind, level in point.levels[0].items()}
        levels.append(observation(clocks, waiting_s=0.3 + 0.05 * (number % 4), index=number + 1))
    return levels


@pytest.mark.parametrize("level", range(1, len(LEVELS)))
def test_a_slow_sample_beside_a_good_one_is_ignored(level: int) -> None:
    times_s = {clock: [true_time_s(F, clock)] for clock in LEVELS}
    times_s[LEVELS[level]] = [1.3 * true_time_s(F, LEVELS[level]), true_time_s(F, LEVELS[level])]

    curve = curve_of(times_s)

    assert float(curve.times_s([LEVELS[level]])[0]) == pytest.approx(true_time_s(F, LEVELS[level]), rel=0.005)
    assert not curve.doubtful_mhz


@pytest.mark.parametrize("level", range(1, len(LEVELS)))
def test_a_single_slow_sample_is_doubtful_and_does_not_distort_the_curve(level: int) -> None:
    times_s = {clock: [true_time_s(F, clock)] for clock in LEVELS}
    times_s[LEVELS[level]] = [1.6 * true_time_s(F, LEVELS[level])]

    curve = curve_of(times_s)

    assert curve.doubtful_mhz == (float(LEVELS[level]),)
    for clock in LEVELS:
        if clock != LEVELS[level]:
            assert float(curve.times_s([clock])[0]) == pytest.approx(true_time_s(F, clock), rel=1e-6)
    inner = 0.02 if level < len(LEVELS) - 1 else 0.25
    assert float(curve.times_s([LEVELS[level]])[0]) == pytest.approx(true_time_s(F, LEVELS[level]), rel=inner)


def test_good_samples_are_never_doubtful() -> None:
    assert not curve_of({clock: [true_time_s(F, clock)] for clock in LEVELS}).doubtful_mhz


@pytest.mark.parametrize("cap", [1350, 1260, 1150, 1050, 900])
def test_a_power_cap_makes_no_sample_doubtful(cap: int) -> None:
    curve = curve_of({clock: [true_time_s(F, min(clock, cap))] for clock in LEVELS})

    assert not curve.doubtful_mhz
    for clock in LEVELS:
        assert float(curve.times_s([clock])[0]) == pytest.approx(true_time_s(F, min(clock, cap)), rel=0.01)


@pytest.mark.parametrize("cap", [1270, 1150, 1050, 950])
def test_a_power_cap_below_two_or_more_clocks_is_detected(cap: int) -> None:
    curve = curve_of({clock: [true_time_s(F, min(clock, cap))] for clock in LEVELS})

    assert curve.cap_mhz == pytest.approx(cap, rel=0.02)


@pytest.mark.parametrize("slow", [(0,), (1,), (2,), (1, 2), (2, 3)])
def test_slow_samples_are_not_mistaken_for_a_power_cap(slow: tuple[int, ...]) -> None:
    times_s = {clock: [true_time_s(F, clock)] for clock in LEVELS}
    for level in slow:
        times_s[LEVELS[level]] = [1.05 * true_time_s(F, LEVELS[level])]

    assert curve_of(times_s).cap_mhz is None


def test_an_iteration_with_outlying_energy_is_excluded() -> None:
    seen = design_observations()
    odd = seen[7]
    (rank,) = odd.ranks
    assert rank.energy_j is not None
    seen[7] = IterationObservation(
        odd.iteration_index,
        odd.plan_id,
        odd.iteration_time_s,
        odd.instruction_samples,
        (RankEnergy(0, rank.window_s, 1.5 * rank.energy_j, rank.time_at),),
    )

    fitted, clean = fit_profile(seen, [GPU]), fit_profile(design_observations(), [GPU])

    assert fitted.num_disturbed == 1
    assert clean.num_disturbed == 0
    for key, own in clean.profile.classes.items():
        for option in own.options:
            assert fitted.profile[key].at_clock(option.sm_clock_mhz).energy_j == pytest.approx(
                option.energy_j, rel=0.01
            )


def test_a_gpu_that_the_power_model_does_not_fit_is_planned_from_measured_clocks_only() -> None:
    strange = {clock: 1.0 + 0.6 * (k % 2) for k, clock in enumerate(LEVELS)}
    seen = []
    for number, point in enumerate(design_points([(F, B)], len(LEVELS))[: 3 * len(LEVELS)]):
        clocks = {kind: LEVELS[level] for kind, level in point.levels[0].items()}
        usual = observation(clocks, index=number)
        energy_j = sum(COUNT[k] * strange[c] * true_energy_j(k, c) for k, c in clocks.items())
        time_at = tuple(t for t in usual.ranks[0].time_at if t.kind is not None)
        window_s = sum(t.time_s for t in time_at)
        ranks = (RankEnergy(0, window_s, energy_j, time_at),)
        seen.append(IterationObservation(number, "p", window_s, usual.instruction_samples, ranks))

    fitted = fit_profile(seen, [GPU])

    assert not fitted.is_power_model_valid
    for key, own in fitted.profile.classes.items():
        assert {option.sm_clock_mhz for option in own.options} <= set(LEVELS), key


def test_draws_from_a_profile_vary_at_every_point_and_most_between_measured_clocks() -> None:
    fitted = fit_profile(design_observations(), [GPU])
    random = np.random.default_rng(1)
    draws = [fitted.drawn(random) for _ in range(60)]

    for key, own in fitted.profile.classes.items():
        clocks = [option.sm_clock_mhz for option in own.options]
        times_s = np.array([[draw[key].interpolated(clock).time_s for clock in clocks] for draw in draws])
        energies_j = np.array([[draw[key].interpolated(clock).energy_j for clock in clocks] for draw in draws])
        spreads = times_s.std(axis=0) / times_s.mean(axis=0)
        between = [spread for spread, clock in zip(spreads, clocks, strict=True) if clock not in LEVELS]
        at_levels = [spread for spread, clock in zip(spreads, clocks, strict=True) if clock in LEVELS]
        assert min(between) > min(at_levels)
        assert energies_j.std(axis=0).min() > 0


def test_iterations_of_waiting_only_need_no_instruction_class() -> None:
    usual = observation({F: LEVELS[0], B: LEVELS[0]})
    (rank,) = usual.ranks
    idle = RankEnergy(0, 1.0, 80.0, (TimeAtClock(None, LEVELS[0], 1.0),))
    seen = [*design_observations(), IterationObservation(99, "idle", 1.0, (), (idle,))]

    assert fit_profile(seen, [GPU]).profile.blocking_power_w > 0
    assert rank.energy_j is not None
