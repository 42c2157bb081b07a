"""A job has at most one open question to its policy, and discards an outdated answer."""

import pytest

from gpuenergyd.core.job.control.plan_control import PolicyQuestion, QuestionState
from gpuenergyd.core.policy_api.target import PerformanceTarget

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
