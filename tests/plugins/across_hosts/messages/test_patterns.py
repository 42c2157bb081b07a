"""Orders and plans as blocks: few for regular lists, any list can be encoded, and no block can stand for too much."""

import random

import pytest

from gpuenergyd.core.pipeline.graph import Instruction, one_forward_one_backward
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.errors import ProtocolError
from gpuenergyd_across_hosts.messages.patterns import MAX_ROWS, Row, from_blocks, to_blocks


def rows_of(order: tuple[Instruction, ...]) -> list[Row[tuple[str, int]]]:
    return [((str(i.kind), i.chunk_index), i.microbatch_index) for i in order]


def test_the_order_of_1f1b_is_three_blocks_whatever_its_length() -> None:
    blocks = to_blocks(rows_of(one_forward_one_backward(64, 512).orders[0]))

    assert blocks == (
        (64, ((("F", 0), 0, 1),)),
        (448, ((("B", 0), 0, 1), (("F", 0), 64, 1))),
        (64, ((("B", 0), 448, 1),)),
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_every_schedule_is_restored(name: str) -> None:
    for order in make_schedule(name, 4, 16).orders:
        assert list(from_blocks(to_blocks(rows_of(order)))) == rows_of(order)


def test_lists_without_a_pattern_are_restored() -> None:
    draw = random.Random(1)
    for length in (0, 1, 2, 3, 40, 200):
        rows = [(draw.choice("abc"), draw.randrange(3)) for _ in range(length)]
        assert list(from_blocks(to_blocks(rows))) == rows


def test_a_constant_clock_is_one_block() -> None:
    assert to_blocks([(1410, 0)] * 1024) == ((1024, ((1410, 0, 0),)),)


@pytest.mark.parametrize("count", [0, -1, MAX_ROWS + 1])
def test_a_block_stands_for_a_limited_number_of_rows(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"a block repeated {count} times"):
        list(from_blocks([(count, (("F", 0, 1),))]))
