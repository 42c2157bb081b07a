"""Windows of iterations in which all hosts of a training run their orders: consent across hosts. No I/O, no clock.

Theory of operation. Ranks of one host decide in shared memory (`order_consent`). Hosts have none in common, so that a
host must know before an iteration whether all others run their orders in it. Iterations therefore come in *windows*:

1. each host publishes for which iterations all its ranks have a plan with an order, and the newest one it has begun;
2. the first host proposes a window, some iterations ahead, in which all hosts have orders;
3. each host *promises* it, if it still has orders for all of it and has begun none of its iterations;
4. once all have promised, the window is granted, by a register in the training's store that takes one value only.

A host that has not promised a window runs its iterations in 1F1B, and the window is never granted. A host that has
promised, and begins an iteration of the window before it knows the verdict, is *in doubt*: it has the register refuse
the window unless that is granted already, and waits for the answer, one round trip. Windows are disjoint, so that in
each iteration all hosts run their orders or none does, whatever messages are late or lost, and if ranks leave.

A host whose link is cut while it is in doubt would wait without end, and no protocol can avoid that: with messages that
may be lost, two parties cannot be certain of the last one (Gray 1978). It waits for a limited time, then runs 1F1B and
promises nothing any more. If the others were granted that window, they run their orders until its end, alone: such a
mix is harmless, since only orders with 1F1B's communication and sums of gradients are offered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from gpuenergyd.core.distributed.order_consent import Turn, has_order, is_agreed

_ROUNDS_AHEAD = 6
"""Exchanges through the store between proposing a window and its first iteration; an undisturbed agreement takes 4."""
LEAST_AHEAD = 3


@dataclass(frozen=True, slots=True)
class OrderWindow:
    """The iterations [begin, end) of a window; numbers rise, and no two windows have an iteration in common."""

    number: int
    begin_iteration: int
    end_iteration: int

    def covers(self, iteration_index: int) -> bool:
        """Return whether an iteration is inside the window."""
        return self.begin_iteration <= iteration_index < self.end_iteration


@dataclass(frozen=True, slots=True)
class HostOffer:
    """What a host publishes: the newest iteration begun, when all its ranks have orders, and the newest promise."""

    newest_iteration: int
    turns: tuple[Turn, ...]
    promised: int = -1


def common_turns(turns_of_all: Sequence[Sequence[Turn]]) -> tuple[Turn, ...]:
    """Return the turns of a host whose ranks have these: it has orders where all have."""
    begins = sorted({begin for turns in turns_of_all for begin, _ in turns})
    return tuple((begin, is_agreed(turns_of_all, begin)) for begin in begins)


def has_orders_within(turns: Sequence[Turn], begin: int, end: int) -> bool:
    """Return whether there are orders for all iterations in [begin, end)."""
    return has_order(turns, begin) and all(is_ordered for at, is_ordered in turns if begin < at < end)


def iterations_ahead(period_s: float, iteration_s: float) -> int:
    """Return how many iterations a window is proposed ahead, with this pause between two exchanges."""
    return LEAST_AHEAD if iteration_s <= 0 else max(LEAST_AHEAD, ceil(_ROUNDS_AHEAD * period_s / iteration_s))


@dataclass(slots=True)
class WindowProposer:
    """The first host's side: proposes one window after the other, and says when a proposed one can be decided."""

    proposed: OrderWindow | None = None
    """The newest window; None before the first one."""
    is_decided: bool = True
    """Whether the verdict on the newest window is known."""

    def decision(self, offers: Iterable[HostOffer]) -> bool | None:
        """Return whether the proposed window should be granted; None while that is open, or decided already."""
        window, known = self.proposed, list(offers)
        if window is None or self.is_decided:
            return None
        if known and all(offer.promised >= window.number for offer in known):
            return True
        newest = max((offer.newest_iteration for offer in known), default=-1)
        return False if newest >= window.begin_iteration else None

    def propose(self, offers: Iterable[HostOffer], ahead: int) -> OrderWindow | None:
        """Return the next window if one is due that all hosts have orders for; the newest one must be decided."""
        known, last = list(offers), self.proposed
        if not known or not self.is_decided:
            return None
        newest = max(offer.newest_iteration for offer in known)
        ended = 0 if last is None else last.end_iteration
        if ended > newest + 2 * ahead:
            return None
        turns = common_turns([offer.turns for offer in known])
        begins = [max(newest + ahead, ended), *(at for at, is_ordered in turns if is_ordered)]
        for begin in sorted(begin for begin in begins if begin >= begins[0]):
            end = min([begin + ahead, *(at for at, is_ordered in turns if at > begin and not is_ordered)])
            if has_orders_within(turns, begin, end) and begin <= newest + 2 * ahead:
                self.proposed = OrderWindow(0 if last is None else last.number + 1, begin, end)
                self.is_decided = False
                return self.proposed
        return None
