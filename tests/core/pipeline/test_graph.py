"""Instructions, GPipe and 1F1B schedules, and the dependency graph."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionClass,
    InstructionKind,
    Schedule,
    dependency_graph,
    gpipe,
    graph_from_edges,
    one_forward_one_backward,
)
from gpuenergyd.errors import ScheduleError

F, B, I, W, *_ = InstructionKind  # noqa: E741  torch's own names


def _words(order: tuple[Instruction, ...]) -> str:
    return " ".join(f"{i.kind}{i.microbatch_index}" for i in order)


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert [_words(order) for order in gpipe(2, 3).orders] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_warms_up_by_its_distance_from_the_last_rank() -> None:
    assert [_words(order) for order in one_forward_one_backward(3, 4).orders] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_extra_microbatches_lengthen_the_warm_up() -> None:
    schedule = one_forward_one_backward(3, 4, [1, 0, 0])

    assert _words(schedule.orders[0]) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert schedule.extra_inflight == (1, 0, 0)
    assert [schedule.peak_inflight(r) for r in range(3)] == [4, 2, 1]


def test_no_extra_microbatches_is_plain_1f1b() -> None:
    assert one_forward_one_backward(3, 4, [0, 0, 0]) == one_forward_one_backward(3, 4)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([0, 2, 0], "deadlock: rank 0 warms up with 2 forwards, rank 1 waits for 3"),
        ([1, 0], "for 2 ranks; the pipeline has 3"),
        ([0, 0, 1], "0 on the last rank"),
        ([-1, 0, 0], "must be >= 0"),
    ],
)
def test_invalid_extra_microbatches_are_rejected(extra: list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        one_forward_one_backward(3, 8, extra)


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_extra_microbatches_are_valid_if_no_rank_runs_further_ahead_than_the_previous_one(
    num_ranks: int, num_microbatches: int, extra: list[int]
) -> None:
    extra = [*extra[: num_ranks - 1], 0]
    plain = [min(num_ranks - 1 - r, num_microbatches) for r in range(num_ranks)]
    ahead = [w if k == 0 else max(w, min(w + k, num_microbatches - 1)) for w, k in zip(plain, extra, strict=True)]
    runs = all(ahead[r] >= ahead[r + 1] for r in range(num_ranks - 1))

    if runs:
        graph = dependency_graph(one_forward_one_backward(num_ranks, num_microbatches, extra))
        assert len(graph.topological_order) == 2 * num_ranks * num_microbatches
    else:
        with pytest.raises(ScheduleError, match="deadlock"):
            one_forward_one_backward(num_ranks, num_microbatches, extra)


def test_activations_flow_forward_and_gradients_back_with_latency_between_ranks_only() -> None:
    graph = dependency_graph(gpipe(2, 1), communication_latency_s=0.5)

    assert [str(i) for i in graph.instructions] == ["F0@0", "B0@0", "F0@1", "B0@1"]
    assert graph.predecessors == (((), ((0, 0.0), (3, 0.5)), ((0, 0.5),), ((2, 0.0),)))
    assert graph.successors == (((1, 0.0), (2, 0.5)), (), ((3, 0.0),), ((1, 0.5),))


def test_epilogues_belong_to_the_last_instruction_of_each_rank() -> None:
    graph = dependency_graph(gpipe(2, 1)).with_epilogues([0.25, 0.0])

    assert dict(zip(map(str, graph.instructions), graph.epilogues_s, strict=True)) == {
        "F0@0": 0.0,
        "B0@0": 0.25,
        "F0@1": 0.0,
        "B0@1": 0.0,
    }


@pytest.mark.parametrize("rank_epilogues_s", [[0.0], [0.0, -0.1], [0.0, float("nan")], [0.0, 0.0, 0.0]])
def test_epilogues_must_be_non_negative_and_one_per_rank(rank_epilogues_s: list[float]) -> None:
    with pytest.raises(ScheduleError, match="expected 2 values >= 0"):
        dependency_graph(gpipe(2, 1)).with_epilogues(rank_epilogues_s)


def test_latency_may_depend_on_the_two_ranks() -> None:
    graph = dependency_graph(gpipe(3, 1), communication_latency_s=lambda sender, receiver: 10.0 * sender + receiver)

    latencies = {latency for before in graph.predecessors for _, latency in before if latency}

    assert latencies == {1.0, 12.0, 10.0, 21.0}


def test_dependencies_of_split_backwards() -> None:
    orders = tuple(tuple(Instruction(r, kind, 0) for kind in (F, I, W)) for r in range(2))
    graph = dependency_graph(Schedule("split", 1, orders))

    assert graph.predecessors[1] == ((0, 0.0), (4, 0.0))
    assert graph.predecessors[2] == ((1, 0.0),)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ((("F0", "F0"),), "duplicate instruction F0@0"),
        ((("B0",),), "B0@0 needs F0 of stage 0, which no rank computes"),
        ((("F0",), ("F0", "F1")), "F1@1 needs F1 of stage 0, which no rank computes"),
        ((("F0", "B0"), ("B0", "F0")), "waits for itself"),
    ],
)
def test_invalid_orders_are_rejected(orders: tuple[tuple[str, ...], ...], message: str) -> None:
    schedule = Schedule(
        "bad",
        2,
        tuple(
            tuple(Instruction(r, InstructionKind(word[0]), int(word[1:])) for word in order)
            for r, order in enumerate(orders)
        ),
    )

    with pytest.raises(ScheduleError, match=message):
        dependency_graph(schedule)


def test_parallel_edges_keep_the_longer_latency() -> None:
    instructions = [Instruction(0, F, 0), Instruction(0, B, 0)]

    graph = graph_from_edges(instructions, [(0, 1, 0.1), (0, 1, 0.4), (0, 1, 0.2)], num_ranks=1)

    assert graph.predecessors[1] == ((0, 0.4),)
    assert sum(map(len, graph.predecessors)) == 1


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        ((0, 2, 0.0), "numbered 0 to 1"),
        ((2, 0, 0.0), "numbered 0 to 1"),
        ((-1, 0, 0.0), "numbered 0 to 1"),
        ((0, -1, 0.0), "numbered 0 to 1"),
        ((0, 1, -1.0), "must be >= 0"),
        ((1, 1, 0.0), "cyclic"),
    ],
)
def test_invalid_edges_are_rejected(edge: tuple[int, int, float], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        graph_from_edges([Instruction(0, F, 0), Instruction(0, B, 0)], [edge], num_ranks=1)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "message"), [(0, 2, "0 pipeline ranks"), (2, 0, "0 microbatches")]
)
def test_an_empty_pipeline_is_rejected(num_ranks: int, num_microbatches: int, message: str) -> None:
    for make in (gpipe, one_forward_one_backward):
        with pytest.raises(ScheduleError, match=f"{message}: must be >= 1"):
            make(num_ranks, num_microbatches)


def test_extra_microbatches_are_limited_to_all_but_one() -> None:
    """On the first rank of two: two forwards by its place, however many more are wanted of three."""
    assert _words(one_forward_one_backward(2, 3, [9, 0]).orders[0]) == "F0 F1 F2 B0 B1 B2"
    assert _words(one_forward_one_backward(2, 4, [1, 0]).orders[0]) == "F0 F1 F2 B0 F3 B1 B2 B3"


def test_with_fewer_microbatches_than_ranks_all_forwards_come_first() -> None:
    assert [_words(order) for order in one_forward_one_backward(4, 2).orders] == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_an_instruction_is_named_by_kind_microbatch_chunk_and_rank() -> None:
    assert str(Instruction(2, F, 3)) == "F3@2"
    assert str(Instruction(2, F, 3, 1)) == "F3.1@2"
    assert Instruction(2, F, 3, 1).instruction_class == InstructionClass(2, F, 1)
    assert (Instruction(2, F, 3).chunk_index, InstructionClass(2, F).chunk_index) == (0, 0)


def test_split_backwards_hold_their_activations_until_the_weight_gradient() -> None:
    order = tuple(Instruction(0, kind, m) for kind, m in ((F, 0), (F, 1), (I, 0), (F, 2), (W, 0), (I, 1), (W, 1)))

    assert Schedule("split", 3, (order,)).peak_inflight(0) == 3
    assert Schedule("split", 3, (order[:5],)).peak_inflight(0) == 3
    assert Schedule("none", 0, ((),)).peak_inflight(0) == 0


def test_the_launch_gap_is_only_on_order_edges() -> None:
    graph = dependency_graph(gpipe(2, 1), communication_latency_s=0.5, launch_gap_s=0.25)

    assert graph.predecessors == ((), ((0, 0.25), (3, 0.5)), ((0, 0.5),), ((2, 0.25),))
    assert graph.num_ranks == 2


def test_the_last_stage_has_no_gradient_input() -> None:
    with pytest.raises(ScheduleError, match=r"B0@0 needs B\|I0 of stage 1, which no rank computes"):
        dependency_graph(Schedule("bad", 1, ((Instruction(0, F, 0), Instruction(0, B, 0)), (Instruction(1, F, 0),))))
