"""Which orders of a plan a rank runs: those that can replace its registered one, and none after a refusal."""

import pytest

from gpuenergyd.wire.messages import OrderRow
from gpuenergyd_trainers.joining.ordered_rank import can_replace

PLAIN = (("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0))
SPLIT = (("F", 0, 0), ("F", 1, 0), ("I", 0, 0), ("W", 0, 0), ("B", 1, 0))


@pytest.mark.parametrize(
    ("order", "can_run"),
    [
        (SPLIT, True),
        ((("W", 0, 0), *SPLIT), False),
        ((*SPLIT, ("F", 2, 0)), False),
        ((("X", 0, 0), *SPLIT[1:]), False),
        (SPLIT[:-1], False),
    ],
)
def test_an_order_that_cannot_replace_the_registered_one_is_not_run(
    order: tuple[OrderRow, ...],
    can_run: bool,  # noqa: FBT001
) -> None:
    assert can_replace(order, PLAIN) == can_run
