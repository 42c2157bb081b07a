"""Registrations: balanced orders of blocks, and values that survive the file."""

import json
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.proof.power_calculation import design, margin_factor
from gpuenergyd_prove.proof.registration import (
    BASELINE_ARM,
    LEAST_ROUNDS,
    Arm,
    ExclusionRules,
    MeterFacts,
    ProofDesign,
    Registration,
    block_order,
    hypothesis_text,
    registration_of,
)

ARMS = (Arm(BASELINE_ARM, "full-speed"), Arm("tuned", "bubble-aware"))
REGISTRATION = Registration(
    registered_at_s=1e9, public_key="ab", hypothesis=hypothesis_text(ARMS[1], 0.01), command=("train", "--fast"),
    arms=ARMS, design=ProofDesign(8, 20, 0.02, 0.003, 4), rules=ExclusionRules(), order_seed=5,
    max_slowdown_ratio=0.01, meters=(MeterFacts("redfish", "node", 0.02),),
    versions=(("daemon", "1"), ("driver", "nvml")),
)  # fmt: skip


@given(st.integers(2, 5), st.integers(1, 20), st.integers(0, 1000))
def test_every_round_has_every_arm_and_every_second_one_is_reversed(num_arms: int, rounds: int, seed: int) -> None:
    names = [str(k) for k in range(num_arms)]

    order = block_order(names, rounds, seed)

    by_round = [order[k : k + num_arms] for k in range(0, len(order), num_arms)]
    assert all(sorted(own) == names for own in by_round)
    assert all(tuple(reversed(first)) == second for first, second in zip(by_round[::2], by_round[1::2], strict=False))
    if rounds % 2 == 0:
        sums = Counter({name: sum(own.index(name) for own in by_round) for name in names})
        assert len(set(sums.values())) == 1


def test_registration_survives_its_file() -> None:
    assert registration_of(json.loads(json.dumps(REGISTRATION.to_dict()))) == REGISTRATION


def test_void_rounds_of_an_older_registration_are_not_repeated() -> None:
    values = json.loads(json.dumps(REGISTRATION.to_dict()))
    del values["rules"]["repeats_void_rounds"]

    older = registration_of(values)

    assert older.most_rounds == older.design.num_rounds == 8
    assert REGISTRATION.most_rounds == 9
    assert REGISTRATION.order()[: 2 * 8] == older.order()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "format 9; this version reads 1"),
        ({"surprise": 1}, "surprise"),
        ({"arms": []}, "arms none"),
        ({"arms": [{"name": "tuned", "policy": "x"}, {"name": BASELINE_ARM, "policy": "y"}]}, "must be the first"),
        ({"design": {"num_rounds": 2}}, "registration.design has no field 'block_iterations'"),
    ],
)
def test_registration_of_another_form_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProofError, match=message):
        registration_of(REGISTRATION.to_dict() | change)


def test_registration_with_too_few_rounds_is_refused() -> None:
    values = json.loads(json.dumps(REGISTRATION.to_dict()))
    values["design"]["num_rounds"] = 3

    with pytest.raises(ProofError, match="3 rounds; from 8 to 10000"):
        registration_of(values)


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
