"""Named schedules: complete, executable, and equal to those of torch.distributed.pipelining."""

from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, dependency_graph
from gpuenergyd.core.pipeline.megatron_orders import COMBINED, PAIRED
from gpuenergyd.core.pipeline.schedules import SCHEDULES, make_schedule, with_communication
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.errors import ScheduleError

F, B, I, W, FB, *_ = InstructionKind  # noqa: E741  torch's own names
SIZES = [(r, m) for r in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32)]
CHUNKS = {
    "interleaved": (1, 2, 3),
    "looped-bfs": (1, 2, 3),
    "interleaved-zb": (1, 2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
    PAIRED: (1, 2, 3),
    COMBINED: (1, 2, 3),
}
OF_MEGATRON = {PAIRED, COMBINED}
"""Compared with Megatron-core's own table in tests/trainers/test_megatron_interleaved.py."""


def _made(name: str) -> list[tuple[int, int, int, Schedule]]:
    """Return every schedule of this name that the sizes allow."""
    made = []
    for num_ranks, num_microbatches in SIZES:
        for num_chunks in CHUNKS.get(name, (1,)):
            try:
                schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
            except ScheduleError:
                continue
            made.append((num_ranks, num_microbatches, num_chunks, schedule))
    return made


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_each_forward_and_backward_of_each_stage_once(name: str) -> None:
    made = _made(name)
    assert made
    for num_ranks, num_microbatches, num_chunks, schedule in made:
        graph = dependency_graph(schedule)

        microbatches = [(s, m) for s in range(num_ranks * num_chunks) for m in range(num_microbatches)]
        computed = [part for r in range(num_ranks) for _, parts in schedule.computations(r) for part in parts]
        assert len(graph.topological_order) == len(graph.instructions)
        for kinds in ((F,), (B, I), (B, W)):
            ran = [
                (schedule.stage_index(i.pp_rank, i.chunk_index), i.microbatch_index)
                for i in computed
                if i.kind in kinds
            ]
            assert sorted(ran) == microbatches


def _iteration_time(name: str, num_chunks: int | None = None) -> float:
    """Return T / (3 M) on 8 ranks with 32 microbatches, forward 1, backward 2, each half of it 1 per rank."""
    schedule = make_schedule(name, 8, 32, num_chunks)
    graph = dependency_graph(schedule)
    cost = {F: 1.0, B: 2.0, I: 1.0, W: 1.0}
    durations_s = [cost[i.kind] / schedule.num_chunks for i in graph.instructions]
    return timeline(graph, durations_s).iteration_time_s / (3 * 32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", 1.219),
        ("1f1b", 1.219),
        ("interleaved", 1.109),
        ("zb-h1", 1.073),
        ("interleaved-zb", 1.037),
        ("zbv", 1.037),
        ("dualpipev", 1.073),  # 1.037 if a forward's output did not wait for the backward beside it, as torch has it
    ],
)
def test_iteration_times_match_the_literature(name: str, expected: float) -> None:
    assert _iteration_time(name) == pytest.approx(expected, abs=6e-4)


def test_the_receiver_of_an_overlapped_forward_waits_for_its_backward() -> None:
    schedule = make_schedule("dualpipev", 2, 6)
    graph = dependency_graph(schedule)
    node_of = {instruction: node for node, instruction in enumerate(graph.instructions)}

    forward, backward = next(pair for pair in schedule.sent_after if pair[0].pp_rank == 0 and pair[0].chunk_index == 0)
    next_stage = Instruction(1, F, forward.microbatch_index, 0)

    assert node_of[backward] in {u for u, _ in graph.predecessors[node_of[next_stage]]}
    assert node_of[forward] not in {u for u, _ in graph.predecessors[node_of[next_stage]]}
    turning, beside = next(
        pair for pair in schedule.sent_after if pair[0].pp_rank == 1 and pair[0].chunk_index == 0
    )  # stages 1 and 2 are on one rank: nothing is sent
    same_rank = node_of[Instruction(1, F, turning.microbatch_index, 1)]
    assert node_of[turning] in {u for u, _ in graph.predecessors[same_rank]}
    assert (node_of[beside] in {u for u, _ in graph.predecessors[same_rank]}) == (same_rank == node_of[beside] + 1)


def test_late_sends_are_known_for_the_orders_of_the_named_schedule() -> None:
    schedule = make_schedule("dualpipev", 2, 6)

    bare = replace(schedule, sent_after=())
    assert with_communication(bare) == schedule != bare
    for other in (replace(bare, orders=tuple(reversed(bare.orders))), replace(bare, num_microbatches=3)):
        assert with_communication(other) == other
    assert with_communication(make_schedule("zbv", 2, 6)) == make_schedule("zbv", 2, 6)


def test_zero_bubble_h1_has_no_more_microbatches_in_flight_than_1f1b() -> None:
    assert make_schedule("zb-h1", 8, 32).peak_inflight(0) == make_schedule("1f1b", 8, 32).peak_inflight(0) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 4, 8), "no schedule '2f2b'; known: gpipe, 1f1b"),
        (("1f1b", 0, 8), "0 pipeline ranks"),
        (("interleaved", 4, 0), "0 microbatches"),
        (("interleaved", 4, 8, 0), "0 chunks"),
        (("interleaved", 4, 9), "9 microbatches do not divide into 2 equal rounds"),
        (("zb-h1", 4, 9), "9 microbatches do not divide"),
        (("dualpipev", 4, 7), "7 microbatches; at least 8 are needed for 4 ranks"),
        (("zbv", 4, 8, 3), "schedule 'zbv' has 2 chunks per rank, got 3"),
    ],
)
def test_unsupported_sizes_are_rejected(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_schedule(*arguments)


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in {"gpipe", "1f1b", *OF_MEGATRON}])
def test_orders_are_those_of_torch(name: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    torch_class = {
        "interleaved": "ScheduleInterleaved1F1B",
        "looped-bfs": "ScheduleLoopedBFS",
        "zb-h1": "ScheduleInterleavedZeroBubble",
        "interleaved-zb": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
        "dualpipev": "ScheduleDualPipeV",
    }[name]
    kind_of = {schedules.F: F, schedules.FULL_BACKWARD: B, schedules.BACKWARD_INPUT: I, schedules.BACKWARD_WEIGHT: W}
    made = _made(name)
    assert made
    for num_ranks, num_microbatches, num_chunks, schedule in made:
        # The rule that makes an order needs no process group, only these sizes.
        theirs = object.__new__(getattr(schedules, torch_class))
        theirs.pp_group_size, theirs._n_microbatches = num_ranks, num_microbatches
        theirs.n_local_stages, theirs._stages = num_chunks, [None] * num_chunks
        theirs.num_stages = theirs._num_stages = num_ranks * num_chunks
        theirs.number_of_rounds = max(1, num_microbatches // num_ranks)
        theirs.microbatches_per_round = num_microbatches // theirs.number_of_rounds
        theirs.pipeline_order = {}
        for rank in range(num_ranks):
            actions = [a for a in theirs._calculate_single_rank_operations(rank) if a is not None]
            parts = [part for action in actions for part in (action.sub_actions or (action,))]

            assert [
                (i.kind, schedule.stage_index(rank, i.chunk_index), i.microbatch_index) for i in schedule.orders[rank]
            ] == [(kind_of[p.computation_type], p.stage_index, p.microbatch_index) for p in parts]
            # One action sends when all of it is done.
            position = {id(part): at for at, part in enumerate(parts)}
            late = [[schedule.orders[rank][position[id(p)]] for p in a.sub_actions] for a in actions if a.sub_actions]
            assert [list(pair) for pair in schedule.sent_after if pair[0].pp_rank == rank] == late


@pytest.mark.torch
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_single_stage_orders_are_those_of_torch(name: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    torch_class = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[name]
    for num_ranks, num_microbatches, _, schedule in _made(name):
        if num_microbatches < num_ranks:
            continue  # torch refuses to run these
        theirs = object.__new__(torch_class)
        theirs._num_stages, theirs._n_microbatches = num_ranks, num_microbatches
        listed = theirs._get_pipeline_order()
        for rank in range(num_ranks):
            if name == "1f1b" and rank == num_ranks - 1:
                continue  # torch lists F1..FM there and runs F0..F(M-1)
            assert [(str(i.kind), i.microbatch_index) for i in schedule.orders[rank]] == [
                ("F" if a.computation_type == schedules.F else "B", a.microbatch_index)
                for a in listed[rank]
                if a is not None and a.computation_type in {schedules.F, schedules.FULL_BACKWARD}
            ]
