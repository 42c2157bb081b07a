"""Registrations: balanced orders of blocks, and values that survive the file."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.proof.registration import (
    BASELINE_ARM,
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
    registered_at_s=1e9,
    public_key="ab",
    hypothesis=hypothesis_text(ARMS[1], 0.01),
    command=("train", "--fast"),
    arms=ARMS,
    design=ProofDesign(8, 20, 0.02, 0.003, 4),
    rules=ExclusionRules(),
    order_seed=5,
    max_slowdown_ratio=0.01,
    meters=(MeterFacts("redfish", "node", 0.02),),
    versions=(("daemon", "1"), ("driver", "nvml")),
)


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
