"""Single clocks that are off the curve: their neighbours stay where they are, and other stages are warned."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import solve_triangular

from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd_policies.learning.job_curves import FittedCurves, fit_curves
from gpuenergyd_policies.learning.seen import TimeSeen
from gpuenergyd_policies.learning.shape import GENERIC
from gpuenergyd_policies.learning.single_clocks import solved
from gpuenergyd_policies.learning.sizes import Factors
from tests.policies.learning.test_job_curves import CLOCKS, KEYS, WAITING, B, F, classes, energies, time_s
from tests.support.examples import examples

SHARE, OFF_RATIO = 0.6, 0.03
SEEN_MHZ = (1320, 1230, 1140, 1095, 1050, 960)
ODD_MHZ = 1095


def fitted(odd: list[InstructionClass], seen: list[InstructionClass]) -> FittedCurves:
    """Return curves from times of some classes, of which the odd ones are far too fast at one clock."""
    times = []
    for key in seen:
        for clock in SEEN_MHZ:
            ratio = 1 - OFF_RATIO if clock == ODD_MHZ and key in odd else 1.0
            times.append(TimeSeen(key, ((clock, ratio * time_s(key, clock, SHARE)),), 0.002))
    at_full_speed = energies(dict.fromkeys(KEYS, CLOCKS[0]), SHARE, 1.5)
    return fit_curves(classes(), GENERIC, times, at_full_speed, WAITING)


def off_ratio(curves: FittedCurves, key: InstructionClass, clock: int) -> float:
    return curves.profile()[key].at_clock(clock).time_s / time_s(key, clock, SHARE) - 1


def test_a_clock_far_off_the_curve_hardly_bends_its_neighbours() -> None:
    key = InstructionClass(1, B)
    found = fitted([key], KEYS)

    for clock in (1140, 1050):
        assert abs(off_ratio(found, key, clock)) < 0.004
    assert off_ratio(found, key, ODD_MHZ) < -0.8 * OFF_RATIO


def test_a_clock_that_is_off_in_two_stages_is_expected_to_be_off_in_the_third() -> None:
    odd, unseen = [InstructionClass(rank, B) for rank in (0, 1)], InstructionClass(2, B)
    seen = [key for key in KEYS if key != unseen]
    found = fitted(odd, seen)

    assert off_ratio(found, unseen, ODD_MHZ) < -0.5 * OFF_RATIO
    assert abs(off_ratio(found, InstructionClass(2, F), ODD_MHZ)) < 0.3 * OFF_RATIO


@given(odd=st.sets(st.sampled_from(KEYS)), seen=st.sets(st.sampled_from(KEYS), min_size=1))
@settings(max_examples=examples(20), deadline=None)
def test_the_belief_is_sure_of_full_speed_only_and_of_what_was_seen_most(
    odd: set[InstructionClass], seen: set[InstructionClass]
) -> None:
    curves = fitted(sorted(odd), sorted(seen))

    index, sigma = curves.index_of(), curves.time.sigma
    assert np.all(np.isfinite(sigma))
    for key in KEYS:
        assert sigma[index[key, CLOCKS[0]]] < 1e-6
        assert all(sigma[index[key, clock]] > 0 for clock in CLOCKS[1:])
        if key in seen:
            assert all(sigma[index[key, clock]] < 0.003 for clock in SEEN_MHZ)


def test_factors_far_from_one_are_improbable() -> None:
    one = Factors.assumed()

    assert one.log_penalty == 0
    assert math.isclose(replace(one, job=4.0).log_penalty, replace(one, single_class=0.25).log_penalty)
    assert replace(one, stage=8.0).log_penalty > replace(one, stage=4.0).log_penalty > 0


def test_triangular_systems_are_solved_as_scipy_does() -> None:
    draw = np.random.default_rng(0)

    for rows, columns in ((1, ()), (40, ()), (40, (7,)), (9, (0,))):
        covariance = np.cov(draw.standard_normal((rows, 3 * rows))).reshape(rows, rows)
        root = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        values = draw.standard_normal((rows, *columns))
        expected = solve_triangular(root, values, lower=True)
        assert np.array_equal(solved(root, values), expected)
