"""When proof blocks are due, how a relief block ends, and which answers of a policy count."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.control.plan_control import FullSpeedBlocks, PolicyQuestion, QuestionState
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.policy_api.target import PerformanceTarget

RULES = JobRules(proof_iterations=4, first_proof_after=8, proof_distance_growth=1.5, proof_budget_ratio=0.1)


def distances(blocks: FullSpeedBlocks, num_blocks: int) -> list[int]:
    """Return the tuned iterations before each of the next proof blocks."""
    found = []
    for _ in range(num_blocks):
        while not blocks.is_proof_due:
            blocks.num_tuned_iterations += 1
        found.append(blocks.num_tuned_iterations)
        blocks.begin_proof()
    return found


def test_later_proof_blocks_are_farther_apart_until_they_are_their_share_of_the_iterations() -> None:
    assert distances(FullSpeedBlocks(RULES), 6) == [8, 12, 18, 27, 40, 40]


def test_a_job_of_a_million_iterations_has_its_share_of_blocks() -> None:
    blocks = FullSpeedBlocks(RULES)
    for _ in range(10_000):
        blocks.begin_proof()
        blocks.num_tuned_iterations = 40
        assert blocks.is_proof_due or blocks.num_proof_iterations < 40


def test_a_job_without_proof_blocks_has_none_due() -> None:
    assert not FullSpeedBlocks(replace(RULES, proof_iterations=0), num_tuned_iterations=99).is_proof_due


def test_profiling_from_the_beginning_brings_short_distances_back() -> None:
    blocks = FullSpeedBlocks(RULES)
    distances(blocks, 4)
    blocks.begin_anew()

    assert distances(blocks, 2) == [8, 12]


def test_a_relief_block_ends_once() -> None:
    blocks = FullSpeedBlocks(RULES)

    blocks.begin_relief()
    assert [blocks.end_relief(), blocks.end_relief()] == [True, False]


TARGET = PerformanceTarget(0.1)


def asked() -> PolicyQuestion:
    question = PolicyQuestion()
    question.ask(TARGET)
    return question


def test_a_question_is_open_until_it_is_answered_and_keeps_its_target() -> None:
    question = asked()

    assert question.is_open
    assert question.accept_answer()
    assert (question.state, question.target) == (QuestionState.IDLE, TARGET)


def test_an_outdated_question_stays_open_and_its_answer_does_not_count() -> None:
    question = asked()
    question.outdate()

    assert question.is_open
    assert not question.accept_answer()
    assert not question.is_open


def test_an_idle_question_cannot_be_outdated() -> None:
    question = PolicyQuestion()
    question.outdate()

    assert question.state is QuestionState.IDLE


def test_a_plan_without_a_question_counts() -> None:
    assert PolicyQuestion().accept_answer()


def test_a_second_question_is_refused_while_one_is_open() -> None:
    with pytest.raises(AssertionError):
        asked().ask(TARGET)
