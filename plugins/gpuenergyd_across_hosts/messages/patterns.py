"""Compression of regular lists: the order of a schedule, or the clocks and clock changes of a plan, as few blocks.

A list consists of rows (key, number). A block is a row or a group of rows that repeats `count` times. At each
repetition a row keeps its key, and its number grows by a constant step. A stage of 1F1B is three blocks at any length:

    [[63, [["F", 0, 1]]], [449, [["F", 63, 1], ["B", 0, 1]]], [63, [["B", 449, 1]]]]

A list without a pattern becomes blocks of one row each, so every list can be encoded.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from gpuenergyd.errors import ProtocolError

K = TypeVar("K", bound=Hashable)

Row = tuple[K, int]
"""A key, and a number that may grow regularly."""
Block = tuple[int, tuple[tuple[K, int, int], ...]]
"""Count, and a group of rows: key, first number, step of the number from one repetition to the next."""

_LONGEST_GROUP = 64
"""Most rows of a group; interleaved schedules repeat after a few microbatches of each chunk."""
MAX_ROWS = 1_048_576
"""Most rows that a list of blocks may represent."""


def to_blocks(rows: Sequence[Row[K]]) -> tuple[Block[K], ...]:
    """Return the rows as blocks, choosing at each position the group that covers most rows."""
    blocks: list[Block[K]] = []
    at = 0
    while at < len(rows):
        length, count = _best_group(rows, at)
        group = tuple(
            (key, number, rows[at + length + k][1] - number if count > 1 else 0)
            for k, (key, number) in enumerate(rows[at : at + length])
        )
        blocks.append((count, group))
        at += length * count
    return tuple(blocks)


def from_blocks(blocks: Iterable[Block[K]]) -> Iterator[Row[K]]:
    """Yield the rows of blocks.

    Raises:
        ProtocolError: a count is not positive, or the blocks represent too many rows.
    """
    num_rows = 0
    for count, group in blocks:
        num_rows += count * len(group)
        if count < 1 or num_rows > MAX_ROWS:
            raise ProtocolError(f"a block repeated {count} times: counts are positive, all rows at most {MAX_ROWS}")
        for k in range(count):
            for key, first, step in group:
                yield key, first + k * step


def _best_group(rows: Sequence[Row[K]], at: int) -> tuple[int, int]:
    """Return length and count of the group at this position that covers most rows; if several do, the shortest."""
    best_length = best_count = 1
    for length in range(1, min(_LONGEST_GROUP, (len(rows) - at) // 2) + 1):
        count = _repetitions(rows, at, length)
        if count > 1 and count * length > best_length * best_count:
            best_length, best_count = length, count
            if at + count * length == len(rows):
                break
    return best_length, best_count


def _repetitions(rows: Sequence[Row[K]], at: int, length: int) -> int:
    """Return how often the group of this length repeats, each row with the step of its first repetition."""
    steps = []
    for k in range(at, at + length):
        if rows[k][0] != rows[k + length][0]:
            return 1
        steps.append(rows[k + length][1] - rows[k][1])
    count, following = 2, at + 2 * length
    while following + length <= len(rows):
        for k, step in enumerate(steps):
            key, number = rows[following + k]
            before_key, before = rows[following + k - length]
            if key != before_key or number - before != step:
                return count
        count, following = count + 1, following + length
    return count
