"""Consent of all ranks of a training to run another order of instructions: in an iteration all of them do, or none.

Theory of operation. Ranks get their plans one by one, late, or not at all, and nothing can make all of them certain
that all have got one. So no message says that an order begins. Each rank states for which iterations it has a plan with
an order, and the first rank that begins an iteration decides for it: all ranks run their orders if all have stated so
by then, else none does. The others find the decision when they begin the same iteration. What a rank states later,
because a plan has come or was withdrawn, counts from the first iteration on that is still undecided. Statements and
decisions are kept in a register that one rank at a time reads and writes (`gpuenergyd.client.order_register`), so that
a delay or a loss of messages postpones a change and never divides the ranks. A rank that has left states nothing any
more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

Turn = tuple[int, bool]
"""From this iteration on, a rank has a plan with an order of its own, or it has none."""
MAX_TURNS = 4
"""Turns that a rank states: a plan, a block at full speed during it, the plan again, and one more."""


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """What a rank knows of a plan: its epoch, its first iteration, and whether it has an order of its own."""

    plan_epoch: int
    apply_at_iteration: int
    has_order: bool


def turns_of(plans: Iterable[PlannedOrder], first_iteration: int = 0) -> tuple[Turn, ...]:
    """Return the turns of a rank with these plans, of which the newest one that applies is followed; the last ones.

    It states nothing about iterations before the first one that it has not begun yet.
    """
    known = list(plans)
    turns: list[Turn] = []
    for begin in sorted({max(plan.apply_at_iteration, first_iteration) for plan in known}):
        due = [plan for plan in known if plan.apply_at_iteration <= begin]
        turns.append((begin, max(due, key=lambda plan: plan.plan_epoch).has_order))
    changes = [next(group) for _, group in groupby(turns, key=lambda turn: turn[1])]
    return tuple(changes[-MAX_TURNS:])


def turns_within(windows: Iterable[tuple[int, int]], first_iteration: int = 0) -> tuple[Turn, ...]:
    """Return the turns of a rank that has an order in these windows [begin, end) of iterations alone; the first."""
    at: dict[int, bool] = {}
    for begin, end in sorted(windows):
        if end > first_iteration:
            at[max(begin, first_iteration)] = True
            at.setdefault(end, False)
    turns = sorted(at.items())
    changes = [next(group) for _, group in groupby(turns, key=lambda turn: turn[1])]
    return tuple(changes[:MAX_TURNS])


def has_order(turns: Sequence[Turn], iteration_index: int) -> bool:
    """Return whether a rank with these turns has a plan with an order for an iteration."""
    past = [is_ordered for begin, is_ordered in turns if begin <= iteration_index]
    return bool(past) and past[-1]


def is_agreed(turns_of_all: Iterable[Sequence[Turn]], iteration_index: int) -> bool:
    """Return whether all ranks have a plan with an order for an iteration."""
    return all(has_order(turns, iteration_index) for turns in turns_of_all)
