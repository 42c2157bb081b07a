"""Orders that can replace 1F1B in a running job: the same forwards and backwards, with separate weight gradients.

Theory of operation. A rank's communication follows its forwards and input gradients. An order that keeps their sequence
and only moves weight gradients therefore sends and receives the same data in the same sequence as 1F1B. Ranks that run
different orders in one iteration cannot deadlock or exchange wrong data. Weight gradients are accumulated in the order
of a rank's weight gradients and full backwards. If that is 1F1B's order of backwards, each parameter's gradients are
summed in the same order, and losses are equal bit for bit; other orders are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, one_forward_one_backward
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError

Orders = tuple[tuple[Instruction, ...], ...]
"""The instructions of each rank in program order."""

SPLIT_IN_PLACE, DELAYED_WEIGHTS, PLAIN_ORDER = "split backward in place", "split backward, weights delayed", "1F1B"


@dataclass(frozen=True, slots=True)
class ReorderOffer:
    """What a rank reported about changing its instruction order when it joined."""

    is_allowed: bool = False
    """Whether the user allows other orders."""
    refusal: str = "the order of this schedule cannot be changed from outside"
    """Why the rank accepts no other order even if the user allows it; empty if it does."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank's GPU, measured by its training process."""

    free_bytes: int
    """Memory still free at the peak of 1F1B."""
    microbatch_bytes: int
    """Memory occupied by one microbatch from its forward to the end of its backward."""
    capacity_bytes: int
    free_in_order_bytes: int | None = None
    """Memory still free at the peak of another order; None before another order has run."""


@dataclass(frozen=True, slots=True)
class OrderAdvice:
    """Predicted saving of an order other than 1F1B, and why it is not in use, if so."""

    name: str
    saving_ratio: float
    """Predicted saving against 1F1B at full speed."""
    plain_saving_ratio: float
    """Predicted saving of clocks alone, in 1F1B, against the same baseline."""
    own_order_saving_ratio: float
    """Predicted saving against full speed in the same order, which is faster than 1F1B."""
    held_microbatches: tuple[int, ...]
    """Maximum number of microbatches that each rank holds at once."""
    extra_microbatches: int
    """Microbatches held beyond 1F1B's, on the rank with most of them."""
    is_split_measured: bool
    """Whether the times of input and weight gradients were measured; otherwise each is assumed half of the backward."""
    refusal: str = ""
    """Why the order is not used; empty if it is used or about to be."""

    @property
    def text(self) -> str:
        """One line for the user."""
        most = self.extra_microbatches
        memory = "no more memory" if most == 0 else f"up to {most} microbatch{'es' if most > 1 else ''} more in memory"
        basis = "measured" if self.is_split_measured else "assumed to take half of the backward each"
        line = (
            f"{self.name}: {100 * self.saving_ratio:.0f} % instead of {100 * self.plain_saving_ratio:.0f} %"
            f" ({100 * self.own_order_saving_ratio:.0f} % against its own full speed); {memory};"
            f" predicted, input and weight gradients {basis}"
        )
        return f"{line}; {self.refusal}" if self.refusal else line


def is_plain_1f1b(schedule: Schedule) -> bool:
    """Return whether a schedule is 1F1B with full backwards, the only one whose order can change."""
    if schedule.num_chunks != 1 or schedule.num_ranks < 2 or schedule.num_microbatches < schedule.num_ranks:
        return False
    return schedule.orders == one_forward_one_backward(schedule.num_ranks, schedule.num_microbatches).orders


def is_stage_of_plain_1f1b(order: Sequence[Instruction]) -> bool:
    """Return whether an order of full backwards is that of some stage of a 1F1B pipeline; which stage is left open.

    The members of a pipeline across hosts are jobs of one stage each.
    """
    kinds = InstructionKind
    num_ahead = next((at for at, instruction in enumerate(order) if instruction.kind is not kinds.F), 0)
    num_microbatches = len(order) // 2
    if not 1 <= num_ahead <= num_microbatches:
        return False
    plain = one_forward_one_backward(num_ahead, num_microbatches).orders[0]
    return [(i.kind, i.microbatch_index, i.chunk_index) for i in order] == [
        (i.kind, i.microbatch_index, i.chunk_index) for i in plain
    ]


def split_in_place(schedule: Schedule) -> Schedule:
    """Return 1F1B with each backward replaced by its input gradient and then its weight gradient."""
    orders = []
    for order in schedule.orders:
        split: list[Instruction] = []
        for instruction in order:
            if instruction.kind is InstructionKind.B:
                split += [replace(instruction, kind=InstructionKind.I), replace(instruction, kind=InstructionKind.W)]
            else:
                split.append(instruction)
        orders.append(tuple(split))
    return replace(schedule, orders=tuple(orders))


def order_name(orders: Orders) -> str:
    kinds = {instruction.kind for order in orders for instruction in order}
    if InstructionKind.W not in kinds:
        return PLAIN_ORDER
    for order in orders:
        for instruction, after in pairwise(order):
            if instruction.kind is InstructionKind.I and after != replace(instruction, kind=InstructionKind.W):
                return DELAYED_WEIGHTS
    return SPLIT_IN_PLACE


def check_orders(orders: Orders, plain: Schedule) -> None:
    """Check that 1F1B can change to these orders with equal communication and equal sums of gradients.

    `plain` may also be a single stage of a longer pipeline.

    Raises:
        ScheduleError: the schedule is not 1F1B, or an order is not 1F1B's with separate weight gradients.
    """
    is_stage = plain.num_ranks == 1 and is_stage_of_plain_1f1b(plain.orders[0])
    if not (is_stage or is_plain_1f1b(plain)):
        raise ScheduleError(f"the order of schedule {plain.name!r} cannot change: it is not 1F1B with whole backwards")
    if len(orders) != plain.num_ranks:
        raise ScheduleError(f"orders for {count_text(len(orders), 'rank')}; the pipeline has {plain.num_ranks}")
    for pp_rank, (order, before) in enumerate(zip(orders, plain.orders, strict=True)):
        check_order(order, before, where=f"rank {pp_rank}")


def check_order(order: Sequence[Instruction], before: Sequence[Instruction], *, where: str) -> None:
    """Check that a rank can run `order` instead of its 1F1B order, `before`; `where` begins the error message.

    Raises:
        ScheduleError: exchanged data or sums of gradients would differ.
    """
    kinds = InstructionKind
    exchanged = [replace(i, kind=kinds.B) if i.kind is kinds.I else i for i in order if i.kind != kinds.W]
    if exchanged != list(before):
        raise ScheduleError(f"{where}: forwards and backwards must keep the sequence of 1F1B")
    split: set[Instruction] = set()
    for instruction in order:
        if instruction.kind is kinds.I:
            split.add(replace(instruction, kind=kinds.W))
        elif instruction.kind is kinds.W:
            if instruction not in split:
                raise ScheduleError(f"{where}: {instruction} comes twice, or before its input gradient")
            split.remove(instruction)
    if split:
        raise ScheduleError(f"{where}: no weight gradient of microbatch {min(i.microbatch_index for i in split)}")
    summed = [i.microbatch_index for i in order if i.kind in {kinds.B, kinds.W}]
    if summed != [i.microbatch_index for i in before if i.kind is kinds.B]:
        raise ScheduleError(f"{where}: gradients must be accumulated in the sequence of 1F1B")


def order_fields(orders: Orders, advice: OrderAdvice | None) -> dict[str, Any]:
    """Return the status fields for a job's instruction order: the order that it runs, and the policy's advice."""
    return {
        "order": order_name(orders) if orders else None,
        "order_advice": advice.text if advice else None,
        "order_saving_ratio": advice.saving_ratio if advice else None,
        "plain_order_saving_ratio": advice.plain_saving_ratio if advice else None,
        "own_order_saving_ratio": advice.own_order_saving_ratio if advice else None,
        "order_held_microbatches": advice.held_microbatches if advice else None,
        "order_refusal": advice.refusal if advice else None,
    }
