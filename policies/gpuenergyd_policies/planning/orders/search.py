"""Search over orders: from known schedules by steps of shape, then by swaps of neighbours, both guided by prices.

Theory of operation. The dual of the relaxation gives each pair of neighbours on a rank a price. If every pair with a
price keeps its direction in another order, then the same flow is feasible there and proves at least the same energy; so
only orders that reverse a priced pair are tried, those with the largest price times duration first. The family of
shapes (see `shape`) is searched first, then single swaps of neighbours and the same swap in all microbatches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd_policies.planning.orders.relaxation import OrderTask, RelaxedOrder, relaxed
from gpuenergyd_policies.planning.orders.shape import (
    OrderShape,
    RankShape,
    neighbours,
    rank_order,
    shaped_schedule,
    starting_shapes,
)

MOST_WORK, MOST_LONG_WORK = 50_000, 15_000
"""Instructions of all orders that are compared while shapes are searched, for short and for long pipelines; limits the
time of planning."""
FINALISTS = 3
"""Orders that are then solved with real clocks."""
FEWEST_STARTS = 4
"""Starting points that are compared in any case."""
MOST_SWAP_WORK = 20_000
"""The same for swaps of neighbours."""


def ranked_shapes(task: OrderTask, *, try_whole: bool, most_work: int) -> list[tuple[OrderShape, RelaxedOrder]]:
    """Return shapes that meet the deadline, cheapest first; none if no shape of the family does."""
    known: dict[OrderShape, RelaxedOrder] = {}

    def tried(shape: OrderShape) -> RelaxedOrder:
        if shape not in known:
            known[shape] = relaxed(task, shaped_schedule(shape, task.num_microbatches))
        return known[shape]

    size = 3 * len(task.limits) * task.num_microbatches
    limits = [min(limit, task.num_microbatches) for limit in task.limits]
    starts = [
        shape for shape in starting_shapes(limits, task.num_microbatches, try_whole=try_whole) if _fits(task, shape)
    ]
    for shape in starts:
        if len(known) >= FEWEST_STARTS and len(known) * size >= most_work:
            break
        tried(shape)
    best = min(known, key=lambda shape: (known[shape].energy_j, known[shape].min_time_s))
    orders: dict[tuple[int, RankShape], dict[Instruction, int]] = {}
    improved = True
    while improved and len(known) * size < most_work:
        improved = False
        here = known[best]
        gains = _Gains.of(here, best, task.num_microbatches, orders)
        moves = [
            (gains.of_shape(shape), shape)
            for shape in neighbours(best, limits, try_whole=try_whole)
            if shape not in known and _fits(task, shape)
        ]
        moves.sort(key=lambda move: -move[0])
        for gain_j, shape in moves:
            if gain_j <= 0 or len(known) * size >= most_work:
                break
            if tried(shape).is_better(here):
                best, improved = shape, True
                break
    possible = [shape for shape in known if known[shape].energy_j < float("inf")]
    return [(shape, known[shape]) for shape in sorted(possible, key=lambda shape: known[shape].energy_j)]


def _fits(task: OrderTask, shape: OrderShape) -> bool:
    """Return whether a shape keeps what the task requires of 1F1B."""
    plain = [len(shape) - r for r in range(len(shape))]
    if task.keeps_whole:
        least = (min(own, task.num_microbatches) for own in plain)
        return all(not own.is_split and own.num_ahead >= number for own, number in zip(shape, least, strict=True))
    return not task.keeps_exchange or [own.num_ahead for own in shape] == plain


@dataclass(frozen=True, slots=True)
class _Gains:
    """Estimates of what shapes gain over one whose prices are known."""

    prices: Mapping[int, Sequence[tuple[Instruction, Instruction, float]]]
    """By rank: pairs with a price, and that price times the shorter duration."""
    known: OrderShape
    num_microbatches: int
    places: dict[tuple[int, RankShape], dict[Instruction, int]]
    """The places of instructions in orders of single ranks that were needed so far."""

    @classmethod
    def of(
        cls,
        here: RelaxedOrder,
        known: OrderShape,
        num_microbatches: int,
        places: dict[tuple[int, RankShape], dict[Instruction, int]],
    ) -> "_Gains":
        """Return the estimates from an order with its shape."""
        prices: dict[int, list[tuple[Instruction, Instruction, float]]] = {}
        for (u, v), price_w in here.prices_w.items():
            worth_j = price_w * min(here.durations_s[u], here.durations_s[v])
            prices.setdefault(u.pp_rank, []).append((u, v, worth_j))
        return cls(prices, known, num_microbatches, places)

    def of_shape(self, shape: OrderShape) -> float:
        """Return the price of the pairs that a shape reverses, times the shorter duration; infinite without prices."""
        if not self.prices:
            return float("inf")
        gain_j = 0.0
        for pp_rank, (own, before) in enumerate(zip(shape, self.known, strict=True)):
            if own == before:
                continue
            if (pp_rank, own) not in self.places:
                order = rank_order(pp_rank, own, self.num_microbatches)
                self.places[pp_rank, own] = {i: at for at, i in enumerate(order)}
            place = self.places[pp_rank, own]
            for u, v, worth_j in self.prices.get(pp_rank, ()):
                if u not in place or v not in place:  # split instead of whole, or the reverse
                    return float("inf")
                if place[u] > place[v]:
                    gain_j += worth_j
        return gain_j


def swapped(task: OrderTask, start: RelaxedOrder) -> RelaxedOrder:
    """Return the order improved by swaps of neighbours on one rank, within the memory limits."""
    best, work = start, 0
    tried: set[tuple[tuple[Instruction, ...], ...]] = {start.schedule.orders}
    improved = True
    while improved:
        improved = False
        moves = sorted(_swaps(best), key=lambda move: -move[0])
        for _, pp_rank, pairs in moves:
            schedule = _with_swaps(best.schedule, pp_rank, pairs)
            if schedule.orders in tried or schedule.peak_inflight(pp_rank) > task.limits[pp_rank]:
                continue
            work += sum(map(len, schedule.orders))
            if work > MOST_SWAP_WORK:
                return best
            tried.add(schedule.orders)
            candidate = relaxed(task, schedule)
            if candidate.is_better(best):
                best, improved = candidate, True
                break
    return best


_Pair = tuple[Instruction, Instruction]


def _swaps(here: RelaxedOrder) -> Iterator[tuple[float, int, tuple[_Pair, ...]]]:
    """Yield (estimated gain, rank, pairs to reverse): single priced pairs, and alike pairs of all microbatches."""
    alike: dict[tuple[int, InstructionKind, InstructionKind, int], list[_Pair]] = {}
    for u, v in here.prices_w:
        if u.kind != v.kind and u.microbatch_index != v.microbatch_index:
            key = (u.pp_rank, u.kind, v.kind, u.microbatch_index - v.microbatch_index)
            alike.setdefault(key, []).append((u, v))
    for (pp_rank, first, second, offset), priced in alike.items():
        gains_j = [_swap_gain_j(here, pair) for pair in priced]
        if len(priced) > 1:
            order = here.schedule.orders[pp_rank]
            everywhere = tuple(
                (u, v)
                for u, v in pairwise(order)
                if (u.kind, v.kind, u.microbatch_index - v.microbatch_index) == (first, second, offset)
            )
            yield sum(gains_j), pp_rank, everywhere
        for gain_j, pair in zip(gains_j, priced, strict=True):
            yield gain_j, pp_rank, (pair,)


def _swap_gain_j(here: RelaxedOrder, pair: _Pair) -> float:
    return here.prices_w[pair] * min(here.durations_s[i] for i in pair)


def _with_swaps(schedule: Schedule, pp_rank: int, pairs: Iterable[_Pair]) -> Schedule:
    order = list(schedule.orders[pp_rank])
    place: Mapping[Instruction, int] = {i: at for at, i in enumerate(order)}
    for u, v in pairs:
        order[place[u]], order[place[v]] = v, u
    orders: Sequence[tuple[Instruction, ...]] = [
        tuple(order) if r == pp_rank else own for r, own in enumerate(schedule.orders)
    ]
    return replace(schedule, orders=tuple(orders))
