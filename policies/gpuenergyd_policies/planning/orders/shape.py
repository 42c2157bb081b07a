"""Orders of instructions by three numbers per rank: forwards in flight, microbatches held, place of weight gradients.

Theory of operation. With F and I in first-in, first-out order, an order is determined by three values per rank: how
many forwards precede the first input gradient, how many microbatches are held from their forward to their weight
gradient, and whether a weight gradient that can run is placed before or after the next input gradient. Full backwards
hold as many microbatches as there are forwards ahead. With S ranks and r the rank, the family contains 1F1B (full,
S - r ahead), 1F1B with extra microbatches in flight, 1F1B with its backward split in place (S - r ahead and held),
ZB-H1 (S - r ahead, S held), and ZB-H2. Deadlocks occur exactly if a rank runs fewer ahead than the next one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule

PROPORTIONS = (1.0, 1.5, 2.0, 0.8, 2.5, 3.0, 3.5)
"""Starting points: forwards ahead of the first backward, relative to 1F1B; fewer suffice for split backwards."""
F, B, I, W = InstructionKind.F, InstructionKind.B, InstructionKind.I, InstructionKind.W  # noqa: E741  torch's own names


@dataclass(frozen=True, slots=True)
class RankShape:
    """Shape of one rank's order."""

    num_ahead: int
    """Number of forwards before the first backward or input gradient; at least 1."""
    num_held: int
    """Microbatches held from forward to weight gradient, at least `num_ahead`; equal to it for full backwards."""
    is_split: bool = True
    """Whether backwards are split into input and weight gradients."""
    runs_weight_first: bool = False
    """Whether a weight gradient that can run is placed before the next input gradient instead of after it."""


OrderShape = tuple[RankShape, ...]
"""Shape of the orders of all ranks."""


def shaped_schedule(shape: OrderShape, num_microbatches: int) -> Schedule:
    """Return the schedule with this shape, named `auto`."""
    return Schedule(
        name="auto",
        num_microbatches=num_microbatches,
        orders=tuple(tuple(rank_order(r, rank_shape, num_microbatches)) for r, rank_shape in enumerate(shape)),
    )


def rank_order(pp_rank: int, shape: RankShape, num_microbatches: int) -> Iterator[Instruction]:
    if not shape.is_split:
        ahead = min(shape.num_ahead, num_microbatches)
        yield from (Instruction(pp_rank, F, m) for m in range(ahead))
        for m in range(num_microbatches):
            yield Instruction(pp_rank, B, m)
            if ahead + m < num_microbatches:
                yield Instruction(pp_rank, F, ahead + m)
        return
    for step in range(num_microbatches + max(shape.num_held, shape.num_ahead)):
        due = [(F, step), (I, step + 1 - shape.num_ahead), (W, step + 1 - shape.num_held)]
        if shape.runs_weight_first and shape.num_held > shape.num_ahead:
            due[1:] = due[:0:-1]
        yield from (Instruction(pp_rank, kind, m) for kind, m in due if 0 <= m < num_microbatches)


def repaired(shape: Sequence[RankShape], limits: Sequence[int]) -> OrderShape:
    """Return the shape limited to memory and without deadlock: no rank runs fewer forwards ahead than the next."""
    result: list[RankShape] = []
    for wanted, limit in zip(shape, limits, strict=True):
        most = min(limit, result[-1].num_ahead) if result else limit
        ahead = max(1, min(wanted.num_ahead, most))
        held = max(ahead, min(wanted.num_held, limit)) if wanted.is_split else ahead
        weight_first = wanted.runs_weight_first and wanted.is_split and held > ahead
        result.append(RankShape(ahead, held, wanted.is_split, weight_first))
    return tuple(result)


def starting_shapes(limits: Sequence[int], num_microbatches: int, *, try_whole: bool) -> list[OrderShape]:
    """Return the shapes from which a search starts: known schedules and shapes between them, within the limits."""
    num_ranks = len(limits)
    limits = [min(limit, num_microbatches) for limit in limits]
    plain = [num_ranks - r for r in range(num_ranks)]
    shapes = []
    for proportion in PROPORTIONS:
        ahead = [max(1, ceil(number + (proportion - 1) * (number - 1))) for number in plain]
        most_held = ([plain[0]] * num_ranks, limits)
        held_options = most_held if proportion < 1 else (ahead, *most_held, [2 * num_ranks] * num_ranks)
        shapes += [[RankShape(a, max(a, h)) for a, h in zip(ahead, held, strict=True)] for held in held_options]
        if try_whole:
            shapes.append([RankShape(a, a, is_split=False) for a in ahead])
    return list(dict.fromkeys(repaired(shape, limits) for shape in shapes))


def neighbours(shape: OrderShape, limits: Sequence[int], *, try_whole: bool) -> Iterator[OrderShape]:
    """Yield shapes one step away: one number changed by one on a rank, or on all ranks up to or from it."""
    steps = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1)]
    changes = [(ahead, held, False, False) for ahead, held in steps] + [(0, 0, True, False)]
    if try_whole:
        changes.append((0, 0, False, True))
    num_ranks = len(shape)
    seen = {shape}
    for r in reversed(range(num_ranks)):
        for ranks in dict.fromkeys((range(r, r + 1), range(r + 1), range(r, num_ranks))):
            for ahead, held, flips_weight, flips_split in changes:
                moved = [
                    RankShape(
                        max(1, present.num_ahead + ahead),
                        present.num_held + held,
                        is_split=present.is_split != flips_split,
                        runs_weight_first=present.runs_weight_first != flips_weight,
                    )
                    if k in ranks
                    else present
                    for k, present in enumerate(shape)
                ]
                if (fitting := repaired(moved, limits)) not in seen:
                    seen.add(fitting)
                    yield fitting
