"""Which orders of a plan a rank runs: those that can replace its registered one, and none after a refusal."""

import pytest

from gpuenergyd.client.plans import PreparedPlan
from gpuenergyd.client.rank import RankClient, RankDescription
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


def test_a_rank_that_refuses_orders_follows_its_plans_in_1f1b() -> None:
    description = RankDescription(
        job_name="refusing",
        run_key="r",
        gpu_uuid="GPU-1",
        schedule_name="1f1b",
        num_microbatches=2,
        allow_reorder=True,
        reorder_refusal="",
    )
    client = RankClient(description, socket_path="/nowhere")
    client._plans.add([PreparedPlan(3, 0, {}, bytes(16), order=SPLIT)])
    client.begin_iteration()
    assert list(client.planned_order) == list(SPLIT)
    client.end_iteration()

    client.refuse_orders("a GPU ran out of memory in another order than 1F1B")
    client.begin_iteration()
    assert not client.planned_order
    client.release()
