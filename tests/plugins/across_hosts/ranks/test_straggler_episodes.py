"""Straggler episodes: when the other replica slowed down and what that saved, or that it never did."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.host_trainer import Done
from tests.support.straggling import Episode, counted

USUAL_S, SLOW_RATIO, WORK_S, STRETCHED_S = 1.0, 1.2, 0.5, 0.56
WAITING_J, FOLLOWING_J = 100.0, 90.0
NUM_USUAL, NUM_SLOW, NUM_WAITED, NUM_LATE = 8, 12, 3, 2


def iterations(*, is_followed: bool) -> tuple[list[list[Done]], list[list[Done]]]:
    """Return the iterations of two ranks of each replica around a straggler."""
    others, stragglers = [], []
    for index in range(2 * NUM_USUAL + NUM_SLOW):
        is_slow = NUM_USUAL <= index < NUM_USUAL + NUM_SLOW
        is_stretched = is_followed and NUM_USUAL + NUM_WAITED <= index < NUM_USUAL + NUM_SLOW + NUM_LATE
        time_s = USUAL_S * (SLOW_RATIO if is_slow or is_stretched else 1.0)
        energy_j = FOLLOWING_J if is_stretched else WAITING_J
        others.append(Done(time_s, STRETCHED_S if is_stretched else WORK_S, energy_j, 1.0))
        stragglers.append(Done(time_s, WORK_S, WAITING_J, SLOW_RATIO if is_slow else 1.0))
    return [others, others], [stragglers, stragglers]


def episode(*, is_followed: bool, reported: float = 0.08) -> Episode:
    return counted(*iterations(is_followed=is_followed), reported)


def benchmark() -> ModuleType:
    path = Path(__file__).resolve().parents[4] / "benchmarks" / "runs" / "two_hosts.py"
    spec = importlib.util.spec_from_file_location("two_hosts_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_episode_reports_iterations_and_energy_of_following() -> None:
    seen = episode(is_followed=True)

    assert (seen.iterations_until_followed, seen.iterations_until_recovered) == (NUM_WAITED, NUM_LATE)
    assert seen.straggler_ratio == pytest.approx(SLOW_RATIO)
    assert seen.busy_ratio == pytest.approx(STRETCHED_S / WORK_S)
    assert seen.saving_ratio == pytest.approx(1 - FOLLOWING_J / WAITING_J)


def test_a_straggler_that_was_not_followed_has_no_saving() -> None:
    seen = episode(is_followed=False)

    assert (seen.iterations_until_followed, seen.iterations_until_recovered) == (None, None)
    assert seen.busy_ratio == pytest.approx(1.0)
    assert seen.waiting_energy_j == 2 * WAITING_J
    assert (seen.following_energy_j, seen.saving_ratio) == (None, None)


def test_figures_cover_followed_stragglers_and_count_the_others() -> None:
    figures: Any = benchmark().episode_figures

    found = figures([episode(is_followed=True), episode(is_followed=False, reported=0.5), episode(is_followed=True)])
    none = figures([episode(is_followed=False)])

    assert found["iterations_until_followed"] == [NUM_WAITED, None, NUM_WAITED]
    assert found["num_not_followed"] == 1
    assert found["extrinsic_saving_ratio"] == pytest.approx(1 - FOLLOWING_J / WAITING_J)
    assert found["reported_saving_ratio"] == pytest.approx(0.08)
    assert (none["num_not_followed"], none["extrinsic_saving_ratio"]) == (1, None)
