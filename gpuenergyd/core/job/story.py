"""Notices of a job for its user, and its story for debugging: the newest events and commands."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpuenergyd.core.job.messages import Command, Event

MAX_STORY_LINES = 256
_NESTED = ("report", "observation", "plan")
_DETAILS = (
    "pp_rank",
    "iteration_index",
    "plan_id",
    "plan_epoch",
    "apply_at_iteration",
    "straggler_time_s",
    "phase",
    "reason",
    "refusal",
)


@dataclass(slots=True)
class Notices:
    """The last event that changed how a job goes on, and when each kind of disturbance was last recorded."""

    last: str | None = None
    last_at: int | None = None
    """Whole iterations of the job before the last notice."""
    recorded_at: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, num_iterations: int) -> None:
        """Replace the last notice."""
        self.last, self.last_at = reason, num_iterations

    def add_rarely(self, kind: str, reason: str, num_iterations: int, *, every: int) -> bool:
        """Replace the last notice at most once in `every` iterations for one kind; return whether it was replaced."""
        before = self.recorded_at.get(kind)
        if before is not None and num_iterations - before < every:
            return False
        self.recorded_at[kind] = num_iterations
        self.add(reason, num_iterations)
        return True


@dataclass(slots=True)
class Story:
    """The newest events of a job, each followed by the commands that it caused, one line each."""

    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_STORY_LINES))

    def add(self, event: Event, commands: Iterable[Command]) -> None:
        """Append an event and its commands."""
        self._lines.append(_line(event))
        self._lines.extend(f"  -> {_line(command)}" for command in commands)

    def lines(self) -> tuple[str, ...]:
        """Return all lines, oldest first."""
        return tuple(self._lines)


def _line(message: Event | Command) -> str:
    parts = (message, *(getattr(message, name, None) for name in _NESTED))
    values = ((name, getattr(part, name, None)) for part in parts for name in _DETAILS)
    return " ".join([type(message).__name__, *(f"{name}={value}" for name, value in values if value not in {None, ""})])
