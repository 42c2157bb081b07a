"""Megatron's interleaved orders: complete, executable, with the communication and the costs of combined steps."""

from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionKind,
    Schedule,
    chunk_name,
    combined_chunk_index,
    dependency_graph,
)
from gpuenergyd.core.pipeline.megatron_orders import PAIRED, combined_1f1b, megatron_interleaved
from gpuenergyd.core.pipeline.schedules import make_schedule, with_communication
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.errors import ScheduleError

F, B, FB = InstructionKind.F, InstructionKind.B, InstructionKind.FB
SIZES = [
    (r, m, v, g)
    for r in (1, 2, 3, 4)
    for v in (1, 2, 3)
    for m in (1, 2, 3, 4, 5, 8, 12)
    for g in (r, r + 1, m)
    if v == 1 or (r <= g <= m and (m % g == 0 or m % g >= r))
]


def _all_made() -> list[Schedule]:
    made = [megatron_interleaved(*sizes, is_paired=is_paired) for sizes in SIZES for is_paired in (False, True)]
    return [*made, *(combined_1f1b(*sizes) for sizes in SIZES)]


def test_every_stage_runs_each_forward_and_backward_once_and_no_order_deadlocks() -> None:
    for schedule in _all_made():
        graph = dependency_graph(schedule)

        wanted = [(s, m) for s in range(schedule.num_stages) for m in range(schedule.num_microbatches)]
        computed = [part for r in range(schedule.num_ranks) for _, parts in schedule.computations(r) for part in parts]
        for kind in (F, B):
            ran = [
                (schedule.stage_index(i.pp_rank, i.chunk_index), i.microbatch_index) for i in computed if i.kind is kind
            ]
            assert sorted(ran) == wanted
        assert len(graph.topological_order) == len(graph.instructions)


def test_groups_of_as_many_microbatches_as_ranks_are_torchs_interleaved_order() -> None:
    for num_ranks, num_microbatches, num_chunks in ((2, 4, 2), (3, 6, 3), (4, 16, 2)):
        own = megatron_interleaved(num_ranks, num_microbatches, num_chunks)

        assert own == make_schedule("interleaved", num_ranks, num_microbatches, num_chunks)


def test_data_of_a_pair_moves_before_and_after_both() -> None:
    schedule = megatron_interleaved(2, 4, 2, is_paired=True)
    graph = dependency_graph(schedule)
    node_of = {instruction: node for node, instruction in enumerate(graph.instructions)}
    before = {v: {u for u, _ in graph.predecessors[v]} for v in node_of.values()}
    forward, backward = Instruction(1, F, 0, 1), Instruction(1, B, 0, 1)
    assert (forward, backward) in schedule.sent_after
    assert (backward, forward) in schedule.received_before

    # Rank 0 pairs F2 with the first backward: its input must have arrived before F2 starts, after rank 1's own pair.
    assert (Instruction(0, B, 0, 1), Instruction(0, F, 2)) in schedule.received_before
    assert node_of[backward] in before[node_of[Instruction(0, F, 2)]]
    assert node_of[backward] not in before[node_of[Instruction(0, B, 0, 1)]]


def test_pairs_are_found_again_from_the_registered_orders_and_only_from_these() -> None:
    for sizes in SIZES:
        schedule = megatron_interleaved(*sizes, is_paired=True)
        bare = Schedule(PAIRED, schedule.num_microbatches, schedule.orders, schedule.num_chunks)
        assert with_communication(bare) == schedule

    for other in (
        replace(bare, orders=tuple(reversed(bare.orders))),
        replace(bare, orders=((Instruction(0, B, 0),),)),
        replace(bare, num_microbatches=5),
    ):
        assert with_communication(other) == other


def test_a_combined_instruction_computes_the_next_forward_of_its_chunk_and_a_backward() -> None:
    schedule = combined_1f1b(2, 4, 2)

    computed = dict(schedule.computations(1))
    assert [str(instruction) for instruction in schedule.orders[1]] == [
        *("F0@1", "F1@1", "F0.1@1"),
        *("FB0.1+1@1", "FB1.0+1@1", "FB0.0+0@1", "FB1.1+0@1", "FB2.1+1@1"),
        *("B3.1@1", "B2@1", "B3@1"),
    ]
    first = Instruction(1, FB, 0, combined_chunk_index(1, 1))
    assert computed[first] == (Instruction(1, F, 1, 1), Instruction(1, B, 0, 1))
    assert computed[schedule.orders[1][0]] == (schedule.orders[1][0],)
    assert schedule.peak_inflight(1) == 4
    assert (chunk_name(FB, first.chunk_index), chunk_name(F, 0), chunk_name(F, 1)) == ("1+1", "", "1")


def test_overlap_shortens_the_iteration_by_what_combined_steps_save() -> None:
    """With one rank, three of four forwards overlap: an iteration is F + 3 FB + B."""
    durations_s = {F: 1.0, B: 2.0, FB: 2.5}
    graph = dependency_graph(combined_1f1b(1, 4, 1))

    assert timeline(graph, [durations_s[i.kind] for i in graph.instructions]).iteration_time_s == pytest.approx(10.5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 8, 2, 1), "microbatch_group_size_per_vp_stage 1: must be in [2 pipeline ranks, 8 microbatches]"),
        ((2, 8, 2, 9), "microbatch_group_size_per_vp_stage 9: must be in [2 pipeline ranks, 8 microbatches]"),
        ((3, 8, 2, 7), "8 microbatches in groups of 7: the last group has 1, it must have at least 3"),
        ((2, 0, 1, 2), "0 microbatches: must be >= 1"),
        ((0, 4, 1, 2), "0 pipeline ranks: must be >= 1"),
        ((2, 4, 0, 2), "0 chunks: must be >= 1"),
    ],
)
def test_sizes_that_megatron_does_not_run_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    for make in (megatron_interleaved, combined_1f1b):
        with pytest.raises(ScheduleError) as caught:
            make(*sizes)
        assert message in str(caught.value)


def test_chunks_that_cannot_be_combined_are_refused() -> None:
    with pytest.raises(ScheduleError, match="at most 64 chunks per rank"):
        combined_1f1b(1, 64, 65)
