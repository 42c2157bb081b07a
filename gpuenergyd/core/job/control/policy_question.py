"""State of a job's request for a plan to its policy: idle, waiting, or waiting for an answer that is outdated."""

from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.core.policy_api.target import PerformanceTarget


class QuestionState(StrEnum):
    """Whether an answer of the policy is awaited, and whether it still counts."""

    IDLE = "idle"
    ASKED = "asked"
    OUTDATED = "outdated"
    """Asked before a fall-back or before the target became faster: the answer will be discarded."""


@dataclass(slots=True)
class PolicyQuestion:
    """At most one open question, and the target that the last one was asked for."""

    state: QuestionState = QuestionState.IDLE
    target: PerformanceTarget | None = None
    """The target of the last question; kept when it is answered."""

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited, outdated or not."""
        return self.state is not QuestionState.IDLE

    def ask(self, target: PerformanceTarget) -> None:
        assert not self.is_open
        self.state, self.target = QuestionState.ASKED, target

    def outdate(self) -> None:
        """Discard the answer to the open question, if there is one, when it arrives."""
        if self.is_open:
            self.state = QuestionState.OUTDATED

    def accept_answer(self) -> bool:
        """Close the question; return whether its answer counts."""
        counts = self.state is not QuestionState.OUTDATED
        self.state = QuestionState.IDLE
        return counts
