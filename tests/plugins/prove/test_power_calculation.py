"""Power calculation: enough rounds for the wanted saving, and no proof where they may not run."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.proof.power_calculation import design, margin_factor
from gpuenergyd_prove.proof.registration import LEAST_ROUNDS


def pilot(sigma: float, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(-0.1, sigma) for _ in range(6)]


@given(st.floats(0.0005, 0.02), st.integers(0, 50))
def test_interval_of_the_design_is_narrower_than_the_saving_it_must_show(sigma: float, seed: int) -> None:
    planned = design(pilot(sigma, seed), block_iterations=10, smallest_saving_ratio=0.02, max_rounds=10_000)

    assert planned.num_rounds >= LEAST_ROUNDS
    assert margin_factor(planned.num_rounds) * planned.round_sigma_ratio < 0.02


@given(st.integers(0, 50))
def test_noisier_pilots_need_more_rounds(seed: int) -> None:
    rounds = [
        design(pilot(sigma, seed), block_iterations=10, smallest_saving_ratio=0.02, max_rounds=10_000).num_rounds
        for sigma in (0.002, 0.01, 0.05)
    ]

    assert rounds == sorted(rounds)


def test_wilson_and_hilferty_bound_the_spread_as_the_chi_square_does() -> None:
    planned = design([0.0, 0.01, 0.02, 0.03, 0.04, 0.05], block_iterations=1, smallest_saving_ratio=0.5, max_rounds=100)

    own_sigma = math.sqrt(0.00035)
    assert planned.round_sigma_ratio == pytest.approx(own_sigma * math.sqrt(5 / 2.3425), rel=0.01)  # chi-square 0.2, 5


def test_too_few_pilot_rounds_are_refused() -> None:
    with pytest.raises(ProofError, match="3 usable pilot rounds; at least 4"):
        design([0.1, 0.1, 0.1], block_iterations=1, smallest_saving_ratio=0.1, max_rounds=10)


def test_more_rounds_than_may_run_are_refused_with_both_numbers() -> None:
    with pytest.raises(ProofError, match=r"needs \d+ rounds to show a saving of 1\.0%, and 8 may run"):
        design(pilot(0.05), block_iterations=1, smallest_saving_ratio=0.01, max_rounds=8)


def test_pilot_without_spread_still_runs_the_least_rounds() -> None:
    assert design([0.1] * 4, block_iterations=1, smallest_saving_ratio=0.01, max_rounds=8).num_rounds == LEAST_ROUNDS
