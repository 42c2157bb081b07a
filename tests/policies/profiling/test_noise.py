"""Fits and draws hold for any noise: equal times, one clock repeated, times off by a factor of two and more."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd_policies.profiling.fit import fit_profile
from gpuenergyd_policies.profiling.times import fit_times
from tests.policies.profiling.test_profiling import CLOCKS, COUNT, GPU, true_energy_j, true_time_s, waiting_power_w
from tests.support.examples import examples

F, B = InstructionKind.F, InstructionKind.B
FACTORS = st.one_of(st.just(1.0), st.floats(0.5, 2.0), st.floats(0.01, 100.0))
POINTS = st.lists(st.tuples(st.sampled_from(CLOCKS[::6]), FACTORS, FACTORS, FACTORS), min_size=2, max_size=12)


def noisy(index: int, clock: int, forward: float, backward: float, energy: float) -> IterationObservation:
    """Return an iteration at one clock whose times and energy are off by these factors."""
    times_s = {F: forward * true_time_s(F, clock), B: backward * true_time_s(B, clock)}
    samples = tuple(
        InstructionSample(0, kind, (ClockShare(clock, time_s),), COUNT[kind]) for kind, time_s in times_s.items()
    )
    energy_j = sum(COUNT[kind] * true_energy_j(kind, clock) for kind in times_s) + 0.4 * waiting_power_w(clock)
    spent = (TimeAtClock(None, clock, 0.4), *(TimeAtClock(k, clock, COUNT[k] * times_s[k]) for k in times_s))
    length_s = sum(part.time_s for part in spent)
    return IterationObservation(index, "p", length_s, samples, (RankEnergy(0, length_s, energy * energy_j, spent),))


@given(points=POINTS)
def test_a_time_curve_is_positive_and_finite_for_any_noise(points: list[tuple[int, float, float, float]]) -> None:
    for curve in fit_times([noisy(k, *point) for k, point in enumerate(points)]).values():
        for shape in (curve, curve.as_capped()):
            times_s = shape.times_s(CLOCKS)
            assert np.isfinite(times_s).all()
            assert (times_s > 0.0).all()
            assert list(shape.knots_mhz) == sorted(set(shape.knots_mhz))


@settings(max_examples=examples(25))
@given(points=POINTS, seed=st.integers(0, 1000))
def test_a_fitted_profile_and_its_draws_are_valid_for_any_noise(
    points: list[tuple[int, float, float, float]], seed: int
) -> None:
    seen = [noisy(0, CLOCKS[0], 1.0, 1.0, 1.0), *(noisy(k + 1, *point) for k, point in enumerate(points))]

    fitted = fit_profile(seen, [GPU])

    random = np.random.default_rng(seed)
    for profile in (fitted.profile, *(fitted.drawn(random) for _ in range(3))):
        for own in profile.classes.values():
            assert all(0.0 < option.time_s < 1e6 for option in own.options)
            assert all(0.0 <= option.energy_j < 1e9 for option in own.options)


@settings(max_examples=examples(25))
@given(
    points=st.lists(
        st.tuples(
            st.sampled_from(CLOCKS[::6]), st.sampled_from(CLOCKS[::6]), st.floats(1e-3, 1.0), st.floats(1e-3, 1.0)
        ),
        min_size=2,
        max_size=12,
    )
)
def test_the_error_of_a_time_is_limited_whatever_instructions_that_changed_clock_say(
    points: list[tuple[int, int, float, float]],
) -> None:
    """Two clocks of which only mixtures were seen left a time so uncertain that draws from it overflowed."""
    seen = []
    for k, (low, high, low_s, high_s) in enumerate(points):
        shares = tuple(ClockShare(clock, time_s) for clock, time_s in {low: low_s, high: high_s}.items())
        seen.append(IterationObservation(k, "p", 1.0, (InstructionSample(0, F, shares, 4),), ()))
    (curve,) = fit_times(seen).values()
    assert ((curve.times_s(CLOCKS) > 1e-6) & (curve.times_s(CLOCKS) < 1e3)).all()
    drawn_s = curve.times_s(CLOCKS) * np.exp(4.0 * curve.sigmas_ratio(CLOCKS))
    assert np.isfinite(drawn_s).all()
    assert (curve.sigmas_ratio(CLOCKS) < 1.5).all()
