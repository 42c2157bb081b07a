"""Orders of the named schedules, word by word for small pipelines; a chunk other than the first follows a dot.

That they are those of torch for every size is shown beside torch itself.
"""

import pytest

from gpuenergyd.core.pipeline.schedules import SCHEDULES, make_schedule, stage_of_chunk
from gpuenergyd.errors import ScheduleError

ORDERS = {
    ("interleaved", 2, 4, 2): (
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ),
    ("looped-bfs", 2, 2, 2): ("F0 F1 F0.1 F1.1 B1.1 B0.1 B1 B0",) * 2,
    ("zb-h1", 3, 6, 1): (
        "F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5",
    ),
    ("interleaved-zb", 2, 4, 2): (
        "F0 F1 F0.1 F1.1 I0.1 W0.1 F2 I1.1 W1.1 F3 I0 W0 F2.1 I1 W1 F3.1 I2.1 W2.1 I3.1 W3.1 I2 W2 I3 W3",
        "F0 F1 F0.1 I0.1 F1.1 I1.1 W0.1 F2 I0 W1.1 F3 I1 W0 F2.1 I2.1 W1 F3.1 I3.1 W2.1 I2 W3.1 I3 W2 W3",
    ),
    ("zbv", 3, 6, 2): (
        (
            "F0 F1 F2 F3 F4 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F2.1 I2.1 W2.1 F5 I0 W0 F3.1 I3.1 W3.1 I1 W1 F4.1 I4.1 W4.1"
            " I2 W2 F5.1 I5.1 W5.1 I3 W3 I4 W4 I5 W5"
        ),
        (
            "F0 F1 F2 F0.1 F3 F1.1 I0.1 W0.1 F2.1 I1.1 W1.1 F4 I0 W0 F3.1 I2.1 W2.1 F5 I1 W1 F4.1 I3.1 W3.1 I2 W2 F5.1"
            " I4.1 W4.1 I3 I5.1 I4 W3 I5 W4 W5.1 W5"
        ),
        (
            "F0 F0.1 F1 F1.1 F2 F2.1 I0.1 W0.1 F3 I0 W0 F3.1 I1.1 W1.1 F4 I1 W1 F4.1 I2.1 W2.1 F5 I2 W2 F5.1 I3.1 W3.1"
            " I3 I4.1 I4 I5.1 I5 W3 W4.1 W5.1 W4 W5"
        ),
    ),
    ("dualpipev", 2, 4, 2): (
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 F3 B1.1 F2.1 B0 B2.1 F3.1 B1 B3.1 I2 W2 I3 W3",
        "F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 B2.1 B2 I3.1 I3 W3.1 W3",
    ),
}


@pytest.mark.parametrize(("sizes", "orders"), ORDERS.items(), ids=str)
def test_orders_of_named_schedules(sizes: tuple[str, int, int, int], orders: tuple[str, ...]) -> None:
    schedule = make_schedule(*sizes)

    assert tuple(" ".join(str(i).partition("@")[0] for i in order) for order in schedule.orders) == orders
    assert [i.pp_rank for order in schedule.orders for i in order] == [
        rank for rank, order in enumerate(schedule.orders) for _ in order
    ]
    assert (schedule.name, schedule.num_microbatches, schedule.num_chunks) == (sizes[0], sizes[2], sizes[3])


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_v_schedules_place_stages_down_the_ranks_and_up_again(name: str) -> None:
    assert stage_of_chunk(name, 3) == ((0, 5), (1, 4), (2, 3)) == make_schedule(name, 3, 6).stage_of_chunk
    assert [make_schedule(name, 3, 6).stage_index(r, v) for v in range(2) for r in range(3)] == [0, 1, 2, 5, 4, 3]


def test_other_schedules_place_stages_round_robin() -> None:
    assert stage_of_chunk("interleaved", 3) == ()
    schedule = make_schedule("interleaved", 3, 6)
    assert [schedule.stage_index(r, v) for v in range(2) for r in range(3)] == [0, 1, 2, 3, 4, 5]
    assert (schedule.num_ranks, schedule.num_stages) == (3, 6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_minimum_sizes_of_each_schedule(name: str) -> None:
    if name != "dualpipev":
        assert make_schedule(name, 1, 1).num_ranks == 1
    for sizes in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ScheduleError, match="must be >= 1"):
            make_schedule(name, *sizes)


def test_fewer_microbatches_than_ranks_are_one_round() -> None:
    assert [len(order) for order in make_schedule("interleaved", 4, 3).orders] == [12] * 4
    with pytest.raises(ScheduleError, match="7 microbatches do not divide into 3 equal rounds"):
        make_schedule("interleaved", 2, 7)
