"""Schedules in the instruction order of Megatron-core's interleaved pipelines.

R ranks, V chunks per rank, M microbatches, r the current rank. Forwards run in groups of `group_size` microbatches
(Megatron's `microbatch_group_size_per_vp_stage`, at least R), each group through all chunks in order; backwards start
from the last chunk. A rank first runs 2 (R - 1 - r) + (V - 1) `group_size` forwards, then alternates with backwards.
"""

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, combined_chunk_index
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError

INTERLEAVED = "interleaved"
PAIRED = "interleaved-paired"
"""Interleaved; each forward and the backward after it receive their inputs and send their outputs together."""
COMBINED = "combined-1f1b"
"""Interleaved; a forward and a backward are one instruction."""

F, B, FB = InstructionKind.F, InstructionKind.B, InstructionKind.FB


def megatron_interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int | None = None, *, is_paired: bool = False
) -> Schedule:
    """Return Megatron's interleaved 1F1B; by default a group has as many microbatches as there are ranks.

    Args:
        num_ranks: pipeline ranks.
        num_microbatches: microbatches per iteration.
        num_chunks: chunks per rank.
        group_size: microbatches of one chunk that a rank runs before it goes on to the next chunk.
        is_paired: whether communication does not overlap with computation (`overlap_p2p_comm` is off), so that a
            forward and the backward after it wait for each other's data.

    Raises:
        ScheduleError: Megatron does not support these sizes.
    """
    forwards, backwards = _tables(num_ranks, num_microbatches, num_chunks, group_size)
    orders, pairs = [], []
    for r in range(num_ranks):
        warmup = _warmup(r, num_ranks, num_chunks, group_size, len(forwards))
        order = [Instruction(r, F, *at) for at in forwards[:warmup]]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [Instruction(r, F, *forward), Instruction(r, B, *backward)]
            pairs.append((order[-2], order[-1]))
        order += [Instruction(r, B, *at) for at in backwards[len(forwards) - warmup :]]
        orders.append(tuple(order))
    return Schedule(
        PAIRED if is_paired else INTERLEAVED,
        num_microbatches,
        tuple(orders),
        num_chunks,
        sent_after=tuple(pairs) if is_paired else (),
        received_before=tuple((backward, forward) for forward, backward in pairs) if is_paired else (),
    )


def combined_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int | None = None) -> Schedule:
    """Return Megatron's combined 1F1B, which overlaps a forward with the backward of another microbatch.

    A rank runs one more warm-up forward than in `megatron_interleaved`, so that the two do not depend on each other.

    Raises:
        ScheduleError: Megatron does not support these sizes.
    """
    forwards, backwards = _tables(num_ranks, num_microbatches, num_chunks, group_size)
    orders = []
    for r in range(num_ranks):
        warmup = _warmup(r, num_ranks, num_chunks, group_size, len(forwards), num_more=1)
        order = [Instruction(r, F, *at) for at in forwards[:warmup]]
        for (_, forward_chunk), (microbatch, chunk) in zip(forwards[warmup:], backwards, strict=False):
            order.append(Instruction(r, FB, microbatch, combined_chunk_index(forward_chunk, chunk)))
        order += [Instruction(r, B, *at) for at in backwards[len(forwards) - warmup :]]
        orders.append(tuple(order))
    return Schedule(COMBINED, num_microbatches, tuple(orders), num_chunks)


def paired_like(schedule: Schedule) -> Schedule | None:
    """Return the paired schedule of the same sizes, None if Megatron does not support them; orders may differ."""
    is_first = [(i.kind, i.chunk_index) == (F, 0) for i in schedule.orders[0]]
    group_size = [*is_first, False].index(False)
    sizes = schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks, group_size
    try:
        return megatron_interleaved(*sizes, is_paired=True)
    except ScheduleError:
        return None


def _tables(
    num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (microbatch, chunk) pairs of all forwards and of all backwards, in order."""
    group = num_ranks if group_size is None else group_size
    for count, what in ((num_ranks, "pipeline ranks"), (num_microbatches, "microbatches"), (num_chunks, "chunks")):
        if count < 1:
            raise ScheduleError(f"{count} {what}: must be >= 1")
    if num_chunks > 1 and not num_ranks <= group <= num_microbatches:
        raise ScheduleError(
            f"microbatch_group_size_per_vp_stage {group}: must be in [{count_text(num_ranks, 'pipeline rank')},"
            f" {count_text(num_microbatches, 'microbatch')}]"
        )
    rest = num_microbatches % group
    if num_chunks > 1 and 0 < rest < num_ranks:
        raise ScheduleError(
            f"{count_text(num_microbatches, 'microbatch')} in groups of {group}: the last group has {rest}, it must"
            " have at least"
            f" {num_ranks}, one per pipeline rank"
        )
    forwards = [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]
    return forwards, [(microbatch, num_chunks - 1 - chunk) for microbatch, chunk in forwards]


def _warmup(r: int, num_ranks: int, num_chunks: int, group_size: int | None, total: int, *, num_more: int = 0) -> int:
    group = num_ranks if group_size is None else group_size
    return min(2 * (num_ranks - 1 - r) + (num_chunks - 1) * group + num_more, total)
