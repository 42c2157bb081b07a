"""Chosen orders with several stages per GPU: on time, within memory, complete, and with the energy that is promised."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.schedules import in_a_row
from gpuenergyd.errors import TargetError
from gpuenergyd_plan.offline.chunks import plan_chunk_order
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan, OrderTask
from gpuenergyd_policies.planning.plan_evaluation import baseline
from tests.policies.planning.orders.cases import POWER_W, full_speed_time_s, split_profile
from tests.support.examples import examples


def _chunk_profile(weights: list[float], num_chunks: int, overhead: float = 0.0) -> PipelineProfile:
    """Return the profile of stages of these weights, `num_chunks` in a row on each GPU."""
    by_stage = split_profile(weights, overhead=overhead).classes
    return PipelineProfile(
        {
            InstructionClass(stage // num_chunks, kind, stage % num_chunks): by_stage[InstructionClass(stage, kind)]
            for stage in range(len(weights))
            for kind in (InstructionKind.F, InstructionKind.B, InstructionKind.I, InstructionKind.W)
        },
        POWER_W,
    )


def _replayed(plan: OrderPlan, weights: list[float], overhead: float, latency_s: float) -> tuple[float, float]:
    """Return time and energy of a plan, computed stage by stage from its orders, clocks and placement alone."""
    by_stage = split_profile(weights, overhead=overhead).classes
    clocks = dict(zip(plan.graph.instructions, plan.solved.sm_clocks_mhz, strict=True))
    placement = plan.schedule.stage_of_chunk
    num_ranks, last = plan.schedule.num_ranks, len(weights) - 1

    def stage_of(i: Instruction) -> int:
        return placement[i.pp_rank][i.chunk_index] if placement else i.chunk_index * num_ranks + i.pp_rank

    done_s: dict[tuple[str, int, int], tuple[float, int]] = {}
    at, free_s, busy_s, energy_j = [0] * num_ranks, [0.0] * num_ranks, 0.0, 0.0
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(plan.schedule.orders):
            while at[rank] < len(order):
                i = order[at[rank]]
                stage, m = stage_of(i), i.microbatch_index
                needed = {
                    "F": [("F", stage - 1, m)] if stage else [],
                    "B": [("F", stage, m)] + ([("G", stage + 1, m)] if stage < last else []),
                    "W": [("G", stage, m)],
                }
                needed["I"] = needed["B"]
                inputs = [done_s.get(key) for key in needed[str(i.kind)]]
                if None in inputs:
                    break
                ready_s = max(
                    (end_s + (latency_s if other != rank else 0.0) for end_s, other in filter(None, inputs)),
                    default=0.0,
                )
                option = by_stage[InstructionClass(stage, i.kind)].at_clock(clocks[i])
                free_s[rank] = max(free_s[rank], ready_s) + option.time_s
                done_s["G" if i.kind in {"B", "I"} else str(i.kind), stage, m] = (free_s[rank], rank)
                busy_s, energy_j = busy_s + option.time_s, energy_j + option.energy_j
                at[rank] += 1
                progress = True
    assert at == [len(order) for order in plan.schedule.orders], "the order deadlocks"
    return max(free_s), energy_j + POWER_W * (num_ranks * max(free_s) - busy_s)


@settings(max_examples=examples(6), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.9, 1.0, 1.0, 1.1]), min_size=6, max_size=6),
    num_chunks=st.sampled_from([2, 3]),
    rounds=st.just(1),
    room=st.integers(0, 3),
    overhead=st.sampled_from([0.0, 0.05]),
    latency_s=st.sampled_from([0.0, 0.05]),
)
def test_plans_with_chunks_keep_time_and_memory_and_cost_what_they_promise(
    weights: list[float], num_chunks: int, rounds: int, room: int, overhead: float, latency_s: float
) -> None:
    num_ranks = len(weights) // num_chunks
    num_microbatches = 2 * rounds * num_ranks
    plain = in_a_row(one_forward_one_backward(num_ranks, num_microbatches), num_chunks)
    profile = _chunk_profile(weights, num_chunks, overhead)
    graph = dependency_graph(plain, communication_latency_s=latency_s)
    deadline_s = baseline(graph, profile).iteration_time_s
    limits = [num_ranks - r + room for r in range(num_ranks)]

    task = OrderTask(num_microbatches, profile, deadline_s, limits, communication_latency_s=latency_s)
    plan = plan_chunk_order(plain, task)

    time_s, energy_j = _replayed(plan, weights, overhead, latency_s)
    assert time_s <= deadline_s * (1 + 1e-9)
    assert time_s == pytest.approx(plan.solved.iteration_time_s, rel=1e-9)
    assert energy_j == pytest.approx(plan.solved.energy_j, rel=1e-9)
    assert plan.solved.lower_bound_j <= energy_j * (1 + 1e-9)
    for rank, order in enumerate(plan.schedule.orders):
        held, most = 0, 0
        kinds: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
        for i in order:
            held += {InstructionKind.F: 1, InstructionKind.I: 0}.get(i.kind, -1)
            most = max(most, held)
            kinds[i.microbatch_index, i.chunk_index][i.kind] += 1
        assert most <= num_chunks * min(limits[rank], num_microbatches)
        assert len(kinds) == num_chunks * num_microbatches
        assert all(dict(own) in ({"F": 1, "B": 1}, {"F": 1, "I": 1, "W": 1}) for own in kinds.values())


def test_stages_in_a_row_take_as_long_as_one_stage() -> None:
    weights = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0]
    merged = [weights[k] + weights[k + 1] for k in (0, 2, 4)]

    graph = dependency_graph(in_a_row(one_forward_one_backward(3, 5), 2))

    time_s = baseline(graph, _chunk_profile(weights, 2)).iteration_time_s
    assert time_s == pytest.approx(full_speed_time_s(split_profile(merged), 3, 5))


def test_memory_for_far_apart_stages_saves_more_than_stages_in_a_row() -> None:
    weights = [1.0] * 8
    plain = in_a_row(one_forward_one_backward(4, 12), 2)
    profile = _chunk_profile(weights, 2)
    deadline_s = baseline(dependency_graph(plain), profile).iteration_time_s

    tight = plan_chunk_order(plain, OrderTask(plain.num_microbatches, profile, deadline_s, [4, 3, 2, 1]))
    roomy = plan_chunk_order(plain, OrderTask(plain.num_microbatches, profile, deadline_s, [4] * 4))

    assert tight.schedule.stage_of_chunk == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert roomy.solved.energy_j < 0.99 * tight.solved.energy_j


def test_too_little_memory_is_refused() -> None:
    plain = in_a_row(one_forward_one_backward(3, 6), 2)
    profile = _chunk_profile([1.0] * 6, 2)
    deadline_s = baseline(dependency_graph(plain), profile).iteration_time_s

    with pytest.raises(
        TargetError, match="no order with 2 stages per GPU was found that is that fast with at most 1, 1"
    ):
        plan_chunk_order(plain, OrderTask(plain.num_microbatches, profile, deadline_s, [1, 1, 1]))
