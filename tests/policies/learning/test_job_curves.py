"""The belief about curves: positive and monotone where physics says so, honest, and better with evidence."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.measurement.sustained_clock import SustainedClock
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd_policies.learning.curves import CurveModel
from gpuenergyd_policies.learning.deviations import TIME
from gpuenergyd_policies.learning.job_curves import FittedCurves, fit_curves
from gpuenergyd_policies.learning.job_profile import _with_bends
from gpuenergyd_policies.learning.published import PUBLISHED, prior_for
from gpuenergyd_policies.learning.seen import (
    ClassAtFullSpeed,
    EnergySeen,
    NotEnoughDataError,
    TimeSeen,
    TimeSpent,
    Waiting,
)
from gpuenergyd_policies.learning.shape import GENERIC, CurvePrior
from tests.support.examples import examples

F, B = InstructionKind.F, InstructionKind.B
CLOCKS = tuple(range(1410, 780, -45))
KEYS = [InstructionClass(rank, kind) for rank in range(3) for kind in (F, B)]
WAITING = Waiting(80.0, 0.05, 0.0, 0.0)
FULL_SPEED_S = {F: 0.05, B: 0.1}
POWER_W = 300.0


def classes(full_speed_mhz: float = 1410.0) -> list[ClassAtFullSpeed]:
    return [ClassAtFullSpeed(key, CLOCKS, FULL_SPEED_S[key.kind], full_speed_mhz) for key in KEYS]


def time_s(key: InstructionClass, clock: int, share: float, full_speed_mhz: float = 1410.0) -> float:
    """Time of work of which a share scales with the clock, under a power cap below `full_speed_mhz`."""
    actual = min(clock, full_speed_mhz)
    return FULL_SPEED_S[key.kind] * (1 - share + share * full_speed_mhz / actual)


def power_w(clock: int, exponent: float) -> float:
    return float(POWER_W * (clock / 1410) ** exponent)


def energies(clock_of: dict[InstructionClass, int], share: float, exponent: float) -> list[EnergySeen]:
    found = []
    for rank in {key.pp_rank for key in clock_of}:
        spent = [TimeSpent(k, c, 8 * time_s(k, c, share)) for k, c in clock_of.items() if k.pp_rank == rank]
        energy_j = 80.0 * 0.3 + sum(s.time_s * power_w(s.sm_clock_mhz, exponent) for s in spent)
        found.append(EnergySeen(rank, energy_j, 0.01, (*spent, TimeSpent(None, 1410, 0.3))))
    return found


def fitted(share: float, exponent: float, clocks: list[int], *, prior: CurvePrior = GENERIC) -> FittedCurves:
    times = [TimeSeen(key, ((clock, time_s(key, clock, share)),), 0.004) for key in KEYS for clock in clocks]
    seen = energies(dict.fromkeys(KEYS, 1410), share, exponent)
    for clock in clocks:
        seen += energies(dict.fromkeys(KEYS, clock), share, exponent)
    return fit_curves(classes(), prior, times, seen, WAITING)


shares = st.floats(0.3, 1.0)
exponents = st.floats(0.3, 2.5)
some_clocks = st.lists(st.sampled_from(CLOCKS[1:]), min_size=0, max_size=4, unique=True)


@given(share=shares, exponent=exponents, clocks=some_clocks, seed=st.integers(0, 10))
@settings(max_examples=examples(25), deadline=None)
def test_draws_are_positive_and_monotone(share: float, exponent: float, clocks: list[int], seed: int) -> None:
    (drawn,) = fitted(share, exponent, clocks).drawn(1, np.random.default_rng(seed))

    for own in drawn.classes.values():
        for faster, slower in zip(own.options, own.options[1:], strict=False):
            assert faster.energy_j > 0
            assert slower.time_s >= faster.time_s * (1 - 1e-12)
            assert slower.time_s * slower.sm_clock_mhz <= faster.time_s * faster.sm_clock_mhz * (1 + 1e-12)
            assert slower.energy_j / slower.time_s <= faster.energy_j / faster.time_s * (1 + 1e-12)


@given(share=shares, exponent=exponents, clocks=some_clocks)
@settings(max_examples=examples(25), deadline=None)
def test_full_speed_is_as_measured_and_evidence_never_widens_the_belief_it_has_no_surprise_in(
    share: float, exponent: float, clocks: list[int]
) -> None:
    before, after = fitted(share, exponent, []), fitted(share, exponent, clocks)

    index = after.index_of()
    for key in KEYS:
        assert after.profile()[key].at_max_clock.time_s == pytest.approx(FULL_SPEED_S[key.kind])
        assert after.time.sigma[index[key, CLOCKS[0]]] == pytest.approx(0.0, abs=1e-9)
    if after.time.factors == before.time.factors:
        assert np.all(after.time.sigma <= before.time.sigma + 1e-9)


@given(share=shares, exponent=exponents)
@settings(max_examples=examples(25), deadline=None)
def test_three_clocks_determine_the_times_between_them_within_one_percent(share: float, exponent: float) -> None:
    profile = fitted(share, exponent, [1275, 1095, 915]).profile()

    for key in KEYS:
        for option in profile[key].options:
            if option.sm_clock_mhz >= 915:
                assert option.time_s == pytest.approx(time_s(key, option.sm_clock_mhz, share), rel=0.01)


def test_one_stage_informs_the_others() -> None:
    share = 0.4
    times = [TimeSeen(KEYS[0], ((clock, time_s(KEYS[0], clock, share)),), 0.004) for clock in (1185, 1005)]
    seen = energies(dict.fromkeys(KEYS, 1410), share, 1.5)

    known, before = (fit_curves(classes(), GENERIC, own, seen, WAITING).profile() for own in (times, []))

    other = InstructionClass(2, F)
    true_s = time_s(other, 1005, share)
    assert known[other].at_clock(1005).time_s == pytest.approx(true_s, rel=0.02)
    assert before[other].at_clock(1005).time_s > 1.1 * true_s


def test_a_sure_but_wrong_prior_is_widened_by_surprise() -> None:
    sure = CurvePrior(
        GENERIC.time.__class__((0.95, 0.02, 0.0), (0.01, 0.01, 0.01)), GENERIC.power, "sure of itself, and wrong"
    )

    found = fitted(0.35, 1.5, [1185, 1005], prior=sure)

    assert found.time.factors.job > 1.0 or found.time.factors.stage > 1.0
    true_s = time_s(KEYS[0], 1095, 0.35)
    assert found.profile()[KEYS[0]].at_clock(1095).time_s == pytest.approx(true_s, rel=0.03)


def test_times_with_a_change_of_clock_count_as_evidence() -> None:
    share, seen = 0.5, energies(dict.fromkeys(KEYS, 1410), 0.5, 1.5)
    times = []
    for key in KEYS:
        parts = ((1095, 0.6 * time_s(key, 1095, share)), (1410, 0.4 * FULL_SPEED_S[key.kind]))
        times.append(TimeSeen(key, parts, 0.002))

    found = fit_curves(classes(), GENERIC, times, seen, WAITING).profile()

    for key in KEYS:
        assert found[key].at_clock(1095).time_s == pytest.approx(time_s(key, 1095, share), rel=0.015)


def test_under_a_power_cap_times_stay_the_same_down_to_the_bend() -> None:
    prior = prior_for("NVIDIA A100-SXM4-80GB")
    seen = energies(dict.fromkeys(KEYS, 1410), 0.8, 0.0)

    capped = fit_curves(classes(1230.0), prior, [], seen, WAITING).profile()
    free = fit_curves(classes(), prior, [], seen, WAITING).profile()

    assert capped[KEYS[0]].at_clock(1275).time_s < 1.015 * FULL_SPEED_S[F]
    assert free[KEYS[0]].at_clock(1275).time_s > 1.06 * FULL_SPEED_S[F]


def test_a_stage_that_its_power_limit_holds_bends_no_other_stage_of_its_kind() -> None:
    limited = SustainedClock(1170.0, capped_ratio=1.0, busy_ratio=1.0, num_kinds=2, num_capped=100)
    own = [replace(known, sustained=limited) if known.key.pp_rank == 0 else known for known in classes()]
    times = [
        TimeSeen(key, ((clock, time_s(key, clock, 0.9, 1170.0 if key.pp_rank == 0 else 1410.0)),), 0.004)
        for key in KEYS
        for clock in (1320, 1230, 1050, 960)
    ]

    bent = _with_bends(own, times, CurveModel(prior_for("").time, TIME, are_sizes_estimated=False))

    clocks_mhz = {known.key.pp_rank: known.full_speed_mhz for known in bent}
    assert clocks_mhz[0] == pytest.approx(1170.0, rel=0.07)
    assert clocks_mhz[1] == clocks_mhz[2] == 1410.0


def test_a_rank_without_energy_at_full_speed_is_named() -> None:
    seen = [own for own in energies(dict.fromkeys(KEYS, 1410), 0.8, 1.0) if own.pp_rank != 1]

    with pytest.raises(NotEnoughDataError, match=r"ranks \[1\] have no measured energy at full speed"):
        fit_curves(classes(), GENERIC, [], seen, WAITING)


def test_the_prior_of_a_gpu_model_leaves_families_out_and_is_generic_for_unknown_models() -> None:
    assert prior_for("NVIDIA H100 80GB HBM3") is GENERIC
    assert prior_for("NVIDIA A40", without_families=["gpt3", "bert", "t5"]) is GENERIC
    whole, without = prior_for("NVIDIA A40"), prior_for("NVIDIA A40", without_families=["gpt3"])
    assert whole.time.mean != without.time.mean
    assert "A40" in without.basis
    assert "gpt3" not in without.basis
    # Another board of the chip tells less.
    pcie, sxm = prior_for("NVIDIA A100-PCIE-40GB"), prior_for("NVIDIA A100-SXM4-40GB", without_families=["gpt3"])
    assert sxm.power.sigma[0] > pcie.power.sigma[0]


def test_nothing_is_learned_from_models_kept_aside_for_evaluation() -> None:
    assert not {own.family for own in PUBLISHED} & {"bloom", "wide-resnet"}
    assert all(math.isfinite(value) for own in PUBLISHED for value in (*own.time, *own.power))
