"""What a replica reads of its training's budgets: the first replica's target, and what plans of others cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class BudgetReadings:
    """The budget messages of the other replicas, for this one's daemon; see `TrainingBudget` in wire/messages.py."""

    is_first: bool
    """Whether this replica decides for all."""
    _first: tuple[float, bool] | None = None
    """Slowdown that the first replica permits, and whether its host decides targets; None before it was heard."""
    _first_message: Mapping[str, Any] = field(default_factory=dict)
    _heard_at_s: float = 0.0
    _excess_s: dict[int, float] = field(default_factory=dict)
    """By replica, the time that its own plans have cost."""
    _sum_s: float = 0.0
    _spent_s: dict[int, float] = field(default_factory=dict)
    """By replica, what it has spent of the training's time account."""
    _sum_spent_s: float = 0.0
    _changed: dict[int, tuple[Mapping[str, Any], float]] = field(default_factory=dict)
    """By replica, its newest message and when that came."""

    def read(self, messages: Mapping[int, Mapping[str, Any]], now_s: float) -> None:
        """Read the newest messages, by the index of the replica."""
        most_s = most_spent_s = 0.0
        for index, message in messages.items():
            share = message["budget"]
            if self._changed.get(index, (None, 0.0))[0] != message:
                self._changed[index] = message, now_s
            if share is not None:
                # An older daemon does not tell it.
                spent_s = share.get("spent_s", 0.0)
                most_spent_s = max(most_spent_s, spent_s - self._spent_s.get(index, 0.0))
                self._spent_s[index] = spent_s
            if share is not None:
                # A daemon that has been restarted without its account counts from 0 again.
                most_s = max(most_s, share["excess_s"] - self._excess_s.get(index, share["excess_s"]))
                self._excess_s[index] = share["excess_s"]
            if message["is_first"] and message != self._first_message:
                self._first_message, self._heard_at_s = message, now_s
                if share is not None:
                    self._first = share["permitted_slowdown_ratio"], share["is_decided"]
        # Replicas end each iteration together, so that only the slowest plan costs time.
        self._sum_s += most_s
        self._sum_spent_s += most_spent_s

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the fields of `TrainingBudget`."""
        ratio, is_decided = self._first or (None, False)
        return {
            "is_first": self.is_first,
            "permitted_slowdown_ratio": ratio,
            "is_decided": is_decided,
            "age_s": now_s - self._heard_at_s if self._first is not None else 0.0,
            "excess_s": self._sum_s,
            "num_replicas": 1 + len(self._changed),
            "others_spent_s": self._sum_spent_s,
            "others_age_s": max((now_s - at_s for _, at_s in self._changed.values()), default=0.0),
        }
