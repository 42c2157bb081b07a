"""Notices of a job for its user, and its story for debugging: the newest events and commands."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from operator import attrgetter
from typing import get_type_hints

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
    """The last event that changed the job's course, and when each kind of disturbance was last recorded."""

    last: str | None = None
    last_at: int | None = None
    """Number of complete iterations at the last notice."""
    recorded_at: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, num_iterations: int) -> None:
        """Replace the last notice."""
        self.last, self.last_at = reason, num_iterations

    def add_rarely(self, kind: str, reason: str, num_iterations: int, *, every: int) -> bool:
        """Replace the last notice, per kind after `every` iterations, then ever more rarely; return whether it was."""
        before = self.recorded_at.get(kind)
        if before is not None and num_iterations < max(before + every, 2 * before):
            return False
        self.recorded_at[kind] = num_iterations
        self.add(reason, num_iterations)
        return True


@dataclass(slots=True)
class Story:
    """The newest events of a job, each followed by the commands that it caused, one line each.

    Only the details shown are kept, and text is made on demand, because an event may hold thousands of instructions.
    """

    _entries: deque[tuple[str, type, tuple[object, ...]]] = field(default_factory=lambda: deque(maxlen=MAX_STORY_LINES))

    def add(self, event: Event, commands: Iterable[Command]) -> None:
        self._append("", event)
        for command in commands:
            self._append("  -> ", command)

    def _append(self, prefix: str, message: Event | Command) -> None:
        kind: type = type(message)
        self._entries.append((prefix, kind, _details(kind)(message)))

    def lines(self) -> tuple[str, ...]:
        """Return all lines, oldest first."""
        return tuple(
            prefix + " ".join([kind.__name__, *_texts(_paths(kind), values)]) for prefix, kind, values in self._entries
        )


@cache
def _paths(kind: type) -> tuple[str, ...]:
    """Return the attributes shown in the line of an event or command, e.g. `plan.plan_id`."""
    hints = get_type_hints(kind)
    nested = [(name, hints[name]) for name in _NESTED if is_dataclass(hints.get(name))]
    inner = [f"{name}.{detail}" for name, hint in nested for detail in _DETAILS if detail in get_type_hints(hint)]
    return (*(name for name in _DETAILS if name in hints), *inner)


@cache
def _details(kind: type) -> Callable[[object], tuple[object, ...]]:
    """Return a function that reads the attributes shown."""
    paths = _paths(kind)
    if not paths:
        return lambda _message: ()
    getter = attrgetter(*paths)
    return getter if len(paths) > 1 else lambda message: (getter(message),)


def _texts(paths: Iterable[str], values: Iterable[object]) -> Iterator[str]:
    for path, value in zip(paths, values, strict=True):
        if value is not None and value != "":
            yield f"{path.rsplit('.', 1)[-1]}={value}"
