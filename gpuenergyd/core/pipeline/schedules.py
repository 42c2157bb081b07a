"""Schedules by name, in the instruction order of torch.distributed.pipelining, or of Megatron-core (`megatron_orders`).

Notation: R ranks, V chunks per rank, M microbatches, r the current rank. Chunks are counted from 0; each repetition of
an operation uses the next microbatch of its kind and chunk.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.megatron_orders import COMBINED, PAIRED, combined_1f1b, megatron_interleaved, paired_like
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError

F, B, I, W = InstructionKind.F, InstructionKind.B, InstructionKind.I, InstructionKind.W  # noqa: E741  torch's own names


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return the looped breadth-first schedule (Lamy-Poirier, 2023): chunk by chunk, backwards in reverse."""
    _require_sizes(num_ranks, num_microbatches, num_chunks)
    orders = []
    for r in range(num_ranks):
        forwards = [Instruction(r, F, m, v) for v in range(num_chunks) for m in range(num_microbatches)]
        backwards = [
            Instruction(r, B, m, v) for v in reversed(range(num_chunks)) for m in reversed(range(num_microbatches))
        ]
        orders.append(tuple(forwards + backwards))
    return Schedule("looped-bfs", num_microbatches, tuple(orders), num_chunks)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return interleaved 1F1B (Narayanan et al., 2021)."""
    return _interleaved("interleaved", num_ranks, num_microbatches, num_chunks, splits_backward=False)


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1 (Qi et al., 2023): 1F1B with weight gradients deferred into the bubbles, using as much memory."""
    return _interleaved("zb-h1", num_ranks, num_microbatches, 1, splits_backward=True)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return the interleaved form of ZB-H1, torch's ScheduleInterleavedZeroBubble."""
    return _interleaved("interleaved-zb", num_ranks, num_microbatches, num_chunks, splits_backward=True)


def _interleaved(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, *, splits_backward: bool
) -> Schedule:
    """Return warm-up, alternation and drain; the chunk changes every `per_round` microbatches."""
    _require_sizes(num_ranks, num_microbatches, num_chunks)
    num_rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_rounds:
        raise ScheduleError(
            f"schedule {name!r}: {count_text(num_microbatches, 'microbatch')} do not divide into"
            f" {count_text(num_rounds, 'equal round')};"
            f" use a multiple of the {count_text(num_ranks, 'rank')}"
        )
    per_round = num_microbatches // num_rounds
    total = num_microbatches * num_chunks

    def chunk_and_microbatch(number: int) -> tuple[int, int]:
        """Return the chunk and the microbatch of the n-th forward."""
        return (number // per_round) % num_chunks, number // (per_round * num_chunks) * per_round + number % per_round

    orders = []
    for r in range(num_ranks):
        factor = 1 if splits_backward else 2
        warmup = min((num_chunks - 1) * per_round + factor * (num_ranks - 1 - r), total)
        order: list[Instruction] = []
        pending: deque[Instruction] = deque()
        for number in range(total + warmup):
            if number < total:
                chunk, microbatch = chunk_and_microbatch(number)
                order.append(Instruction(r, F, microbatch, chunk))
            if number < warmup:
                continue
            chunk, microbatch = chunk_and_microbatch(number - warmup)
            chunk = num_chunks - 1 - chunk
            if not splits_backward:
                order.append(Instruction(r, B, microbatch, chunk))
                continue
            order.append(Instruction(r, I, microbatch, chunk))
            pending.append(Instruction(r, W, microbatch, chunk))
            if number - warmup >= r:
                order.append(pending.popleft())
        orders.append((*order, *pending))
    return Schedule(name, num_microbatches, tuple(orders), num_chunks)


class _OrderBuilder:
    """Builder of one rank's order; counts the microbatches of each chunk and kind."""

    def __init__(self, pp_rank: int) -> None:
        self.order: list[Instruction] = []
        self.sent_after: list[tuple[Instruction, Instruction]] = []
        self._pp_rank = pp_rank
        self._next: dict[tuple[InstructionKind, int], int] = {}
        self._pending: deque[Instruction] = deque()

    def count(self, kind: InstructionKind, chunk: int) -> int:
        """Return the number of instructions of this kind and chunk added until now."""
        return self._next.get((kind, chunk), 0)

    def add(self, kind: InstructionKind, chunk: int) -> None:
        """Append the next instruction of this kind; input gradients and full backwards share one count."""
        counted = I if kind is B else kind
        microbatch = self._next.get((counted, chunk), 0)
        self._next[counted, chunk] = microbatch + 1
        self.order.append(Instruction(self._pp_rank, kind, microbatch, chunk))
        if kind is I:
            self._pending.append(Instruction(self._pp_rank, W, microbatch, chunk))

    def add_pair(self, forward_chunk: int, backward_chunk: int, *, is_one_action: bool = True) -> None:
        """Append a forward and a full backward; if one action, both send their outputs when both are done."""
        self.add(F, forward_chunk)
        self.add(B, backward_chunk)
        if is_one_action:
            self.sent_after.append((self.order[-2], self.order[-1]))

    def add_oldest_weight_gradient(self) -> None:
        """Append the oldest pending weight gradient, if any."""
        if self._pending:
            self.order.append(self._pending.popleft())


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZBV (Qi et al., 2024): two chunks per rank, placed like a V, with split backwards."""
    _require_sizes(num_ranks, num_microbatches, 2)
    orders = []
    for r in range(num_ranks):
        builder = _OrderBuilder(r)
        for kind, chunk in _zbv_steps(builder, num_ranks, r, max(2 * num_ranks - 1, num_microbatches)):
            builder.add(kind, chunk)
        orders.append(tuple(i for i in builder.order if i.microbatch_index < num_microbatches))
    return Schedule("zbv", num_microbatches, tuple(orders), 2, stage_of_chunk=_v_placement(num_ranks))


def _zbv_steps(builder: _OrderBuilder, num_ranks: int, r: int, total: int) -> Iterator[tuple[InstructionKind, int]]:
    """Yield (kind, chunk) for `total` microbatches; the caller drops instructions of microbatches that do not exist."""
    yield from [(F, 0)] * (2 * (num_ranks - r) - 1)
    yield from [(F, 1), (F, 0)] * r
    yield from [(F, 1), (I, 1), (W, 1)] * (num_ranks - r)
    while builder.count(F, 1) < builder.count(F, 0) or builder.count(F, 0) < total:
        if builder.count(F, 0) < total:
            yield F, 0
        yield from [(I, 0), (W, 0), (F, 1), (I, 1), (W, 1)]
    yield from [(I, 0), (I, 1)] * r
    yield from [(I, 0), (W, 0)] * (num_ranks - r)
    for chunk in (1, 0):
        while builder.count(W, chunk) < builder.count(I, chunk):
            yield W, chunk


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return DualPipeV (DeepSeek, 2025), placed as ZBV; an overlapped forward and backward become two instructions.

    torch's runtime executes the two as one action and sends both outputs when both are done, so a consumer of the
    forward's output also waits for the backward.

    Raises:
        ScheduleError: fewer than 2 R microbatches.
    """
    _require_sizes(num_ranks, num_microbatches, 2)
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"schedule 'dualpipev': {count_text(num_microbatches, 'microbatch')}; at least {2 * num_ranks} are"
            f" needed for {count_text(num_ranks, 'rank')}"
        )
    builders = [_dualpipe_v_order(num_ranks, num_microbatches, r) for r in range(num_ranks)]
    return Schedule(
        "dualpipev",
        num_microbatches,
        tuple(tuple(builder.order) for builder in builders),
        2,
        stage_of_chunk=_v_placement(num_ranks),
        sent_after=tuple(pair for builder in builders for pair in builder.sent_after),
    )


def _dualpipe_v_order(num_ranks: int, num_microbatches: int, r: int) -> _OrderBuilder:
    builder = _OrderBuilder(r)
    add = builder.add
    behind = num_ranks - r - 1
    for _ in range(2 * behind):
        add(F, 0)
    for _ in range(r + 1):
        add(F, 0)
        add(F, 1)
    for _ in range(behind):
        add(I, 1)
        builder.add_oldest_weight_gradient()
        add(F, 1)
    for repeat in range(num_microbatches - 2 * num_ranks + r + 1):
        builder.add_pair(0, 1, is_one_action=repeat > 0 or behind > 0)
        builder.add_pair(1, 0)
    for _ in range(behind):
        add(B, 1)
        builder.add_pair(1, 0)
    # The second half of the drain splits its backwards, to keep weight gradients for the end.
    half, is_odd = (r + 1) // 2, r % 2 == 1
    for repeat in range(r + 1):
        add(I if repeat > half or (repeat == half and is_odd) else B, 1)
        add(I if repeat >= half else B, 0)
    for _ in range(behind):
        builder.add_oldest_weight_gradient()
        add(I, 0)
    for _ in range(r + 1):
        builder.add_oldest_weight_gradient()
    return builder


def _v_placement(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple((r, 2 * num_ranks - 1 - r) for r in range(num_ranks))


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """Constructor of the schedules with one name, and their number of chunks per rank."""

    make: Callable[[int, int, int], Schedule]
    default_num_chunks: int = 1
    takes_any_num_chunks: bool = False


SCHEDULES: Mapping[str, ScheduleFamily] = {
    "gpipe": ScheduleFamily(lambda r, m, _: gpipe(r, m)),
    "1f1b": ScheduleFamily(lambda r, m, _: one_forward_one_backward(r, m)),
    "interleaved": ScheduleFamily(interleaved, 2, takes_any_num_chunks=True),
    "looped-bfs": ScheduleFamily(looped_bfs, 2, takes_any_num_chunks=True),
    "zb-h1": ScheduleFamily(lambda r, m, _: zero_bubble_h1(r, m)),
    "interleaved-zb": ScheduleFamily(interleaved_zero_bubble, 2, takes_any_num_chunks=True),
    "zbv": ScheduleFamily(lambda r, m, _: zbv(r, m), 2),
    "dualpipev": ScheduleFamily(lambda r, m, _: dualpipe_v(r, m), 2),
    PAIRED: ScheduleFamily(partial(megatron_interleaved, is_paired=True), 2, takes_any_num_chunks=True),
    COMBINED: ScheduleFamily(combined_1f1b, 2, takes_any_num_chunks=True),
}
"""Schedule families by the name used on the command line."""


def in_a_row(schedule: Schedule, num_chunks: int) -> Schedule:
    """Return a schedule of one stage per GPU with each stage split into chunks, which run one after the other."""

    def parts(instruction: Instruction) -> Iterator[Instruction]:
        chunks = range(num_chunks)
        for chunk in chunks if instruction.kind is F else reversed(chunks):
            yield replace(instruction, chunk_index=chunk)

    return replace(
        schedule,
        orders=tuple(tuple(part for i in order for part in parts(i)) for order in schedule.orders),
        num_chunks=num_chunks,
        stage_of_chunk=tuple(tuple(range(r * num_chunks, (r + 1) * num_chunks)) for r in range(schedule.num_ranks)),
    )


def stage_of_chunk(name: str, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the model stage of each chunk of each rank; if empty, chunk v of rank r is stage v * num_ranks + r."""
    return _v_placement(num_ranks) if name in {"zbv", "dualpipev"} else ()


def with_communication(schedule: Schedule) -> Schedule:
    """Return a schedule with `sent_after` and `received_before` filled in, if its orders match its name."""
    own: Schedule | None = None
    if schedule.name == "dualpipev" and schedule.num_microbatches >= 2 * schedule.num_ranks:
        own = dualpipe_v(schedule.num_ranks, schedule.num_microbatches)
    elif schedule.name == PAIRED:
        own = paired_like(schedule)
    if own is None or own.orders != schedule.orders:
        return schedule
    return replace(schedule, sent_after=own.sent_after, received_before=own.received_before)


def schedule_family(name: str) -> ScheduleFamily:
    """Return the family with this name; raise ScheduleError if it is unknown."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise ScheduleError(f"no schedule {name!r}; known: {', '.join(SCHEDULES)}") from None


def make_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """Return the schedule with this name; `num_chunks` None means the family's default number of chunks per rank.

    Raises:
        ScheduleError: the name is unknown, or the schedule does not support these sizes.
    """
    family = schedule_family(name)
    if num_chunks is None:
        num_chunks = family.default_num_chunks
    elif not family.takes_any_num_chunks and num_chunks != family.default_num_chunks:
        raise ScheduleError(
            f"schedule {name!r} has {count_text(family.default_num_chunks, 'chunk')} per rank, got {num_chunks}"
        )
    return family.make(num_ranks, num_microbatches, num_chunks)


def _require_sizes(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    for count, what in ((num_ranks, "pipeline ranks"), (num_microbatches, "microbatches"), (num_chunks, "chunks")):
        if count < 1:
            raise ScheduleError(f"{count} {what}: must be >= 1")
