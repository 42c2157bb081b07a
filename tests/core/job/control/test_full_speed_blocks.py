"""When proof blocks are due, within which budget, and how a relief block ends."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.control.full_speed_blocks import FullSpeedBlocks
from gpuenergyd.core.job.rules import JobRules

RULES = JobRules(proof_iterations=4, first_proof_after=8, proof_budget_ratio=0.1)


@pytest.mark.parametrize(("num_tuned", "is_due"), [(7, False), (8, True)])
def test_the_first_proof_block_is_due_after_eight_tuned_iterations(num_tuned: int, *, is_due: bool) -> None:
    blocks = FullSpeedBlocks(RULES, num_tuned_iterations=num_tuned)

    assert blocks.is_proof_due(num_iterations=20) is is_due


@pytest.mark.parametrize(("num_iterations", "is_due"), [(79, False), (80, True)])
def test_later_proof_blocks_keep_within_the_budget(num_iterations: int, *, is_due: bool) -> None:
    blocks = FullSpeedBlocks(RULES, num_tuned_iterations=8)
    blocks.begin_proof()

    assert blocks.is_proof_due(num_iterations) is is_due


def test_a_job_without_proof_blocks_has_none_due() -> None:
    assert not FullSpeedBlocks(replace(RULES, proof_iterations=0), num_tuned_iterations=99).is_proof_due(10**6)


def test_profiling_from_the_beginning_keeps_the_budget_charged() -> None:
    blocks = FullSpeedBlocks(RULES, num_tuned_iterations=8)
    blocks.begin_proof()
    blocks.begin_anew()

    assert (blocks.num_tuned_iterations, blocks.num_proof_iterations) == (0, 4)


def test_a_relief_block_ends_once() -> None:
    blocks = FullSpeedBlocks(RULES)

    blocks.begin_relief()
    assert [blocks.end_relief(), blocks.end_relief()] == [True, False]
