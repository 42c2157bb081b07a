"""The cycle in which a loop steps its optimizers."""

import gc
import random
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuenergyd.client.phases.step_cycle import LONGEST_CYCLE, STEPS_WITHOUT_CYCLE, StepCycle, StepTurn


class Optimizer:
    """What steps; only its identity counts."""


class Loop:
    """A loop whose optimizers are letters."""

    def __init__(self) -> None:
        self.cycle = StepCycle()
        self.optimizers: dict[str, Optimizer] = {}

    def run(self, steps: Iterable[str]) -> str:
        """Return what the steps are: | ends an iteration, . is within one, x missed, ? unknown."""
        names = {StepTurn.LAST: "|", StepTurn.WITHIN: ".", StepTurn.MISSED: "x", StepTurn.UNKNOWN: "?"}
        return "".join(names[self.cycle.step(self.optimizers.setdefault(own, Optimizer()))] for own in steps)


@pytest.mark.parametrize(
    ("steps", "turns"),
    [
        ("AAAA", "||||"),
        ("DGDGDGDG", "|??|.|.|"),  # GAN
        (3 * "DDDDDG", "|||||??????|.....|"),  # WGAN
        ("GDDGDDGDD", "|????|..|"),
        (4 * "ABC", "|????|..|..|"),  # optimizers of one model
        ("DDDDGDGDG", "||||??|.|"),  # one warms up alone
        (3 * (4 * "D" + 4 * "G"), "||||???????????|.......|"),  # in turn, several steps each
    ],
)
def test_an_iteration_is_the_shortest_sequence_of_all_optimizers_that_repeats(steps: str, turns: str) -> None:
    assert Loop().run(steps) == turns


@example(list("AABABABAB"))  # a shorter cycle of which one step falls out, rarely enough
@example(list("A" + 12 * "AB"))
@given(st.lists(st.sampled_from("ABC"), min_size=1, max_size=10))
def test_each_cycle_is_found_and_then_ends_once_per_repetition(cycle: list[str]) -> None:
    loop = Loop()
    shortest = next(k for k in range(1, len(cycle) + 1) if (cycle * 2)[k : k + len(cycle)] == cycle)
    for _ in range(20):  # a cycle may contain a shorter one that repeats for a while
        loop.run(cycle)

    turns = loop.run(cycle * 4)
    assert turns.count("|") == 4 * len(cycle) // shortest
    assert set(turns) <= {"|", "."}


def test_a_skipped_step_costs_one_iteration() -> None:
    loop = Loop()
    loop.run("DG" * 4)

    assert loop.run("DG" + "D" + "DGDGDG") == ".|" + "." + "x|.|.|"


def test_rarely_skipped_steps_keep_the_cycle() -> None:
    loop, rng = Loop(), random.Random(1)
    loop.run("DG" * 4)
    turns = "".join(loop.run("DG" if rng.random() > 0.03 else rng.choice("DG")) for _ in range(500))

    assert "?" not in turns
    assert turns.count("|") > 460


def test_a_cycle_that_was_none_is_given_up_and_the_right_one_found() -> None:
    loop = Loop()
    turns = loop.run(40 * "DGDGD")

    assert turns.startswith("|??|")
    assert turns.endswith(4 * "....|")


def test_an_optimizer_that_comes_late_makes_another_cycle() -> None:
    loop = Loop()

    assert loop.run(10 * "A" + 4 * "AB") == 10 * "|" + "|??|.|.|"


def test_a_new_optimizer_takes_the_turn_of_one_that_is_gone() -> None:
    loop = Loop()
    loop.run(4 * "DG")
    del loop.optimizers["G"]
    gc.collect()

    assert loop.run(2 * "DH") == ".|.|"


def test_an_optimizer_that_steps_no_more_takes_no_part() -> None:
    loop = Loop()
    loop.run(10 * "A")
    turns = loop.run(4 * LONGEST_CYCLE * "B" + "BB")

    assert turns.startswith("?" * LONGEST_CYCLE)
    assert turns.endswith("|||")
    assert loop.cycle.num_optimizers == 1


def test_steps_in_no_regular_turn_stay_unknown() -> None:
    loop, rng = Loop(), random.Random(2)
    loop.run("DG")
    turns = loop.run(rng.choice("DG") for _ in range(3 * STEPS_WITHOUT_CYCLE))

    assert turns.count("|") < 3 * STEPS_WITHOUT_CYCLE / 20
    assert loop.cycle.num_without > STEPS_WITHOUT_CYCLE
