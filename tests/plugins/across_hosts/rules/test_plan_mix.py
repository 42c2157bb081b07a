"""Plans of a straggler's pace that ranks may begin at different iterations: no mix of two plans is slower."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd_across_hosts.rules.plan_mix import MAX_MIXED_RATIO, may_be_mixed, node_clocks_mhz
from tests.support.examples import examples

SCHEDULE = one_forward_one_backward(3, 3)
GRAPH = dependency_graph(SCHEDULE)
TOP_MHZ = 1400
CLOCKS = (TOP_MHZ, 1200, 1000, 800)
NUM_NODES = len(GRAPH.instructions)


def full_speed(times_s: list[float], *, without: int = 0) -> IterationObservation:
    """Return an iteration at full speed with the time of each class of instruction, but for the first ones."""
    samples = tuple(
        InstructionSample(key.pp_rank, key.kind, (ClockShare(TOP_MHZ, time_s),), 1)
        for key, time_s in list(zip(GRAPH.classes, times_s, strict=True))[without:]
    )
    return IterationObservation(0, "baseline", 1.0, samples, ())


def duration_s(times_s: list[float], clocks: list[Any]) -> float:
    return makespan_s(
        GRAPH, [times_s[key] * TOP_MHZ / (mhz or TOP_MHZ) for key, mhz in zip(GRAPH.class_of, clocks, strict=True)]
    )


TIMES = st.lists(st.floats(0.5, 2.0), min_size=len(GRAPH.classes), max_size=len(GRAPH.classes))
PLANS = st.lists(st.sampled_from([None, *CLOCKS]), min_size=NUM_NODES, max_size=NUM_NODES)


@settings(max_examples=examples(200))
@given(TIMES, PLANS, PLANS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_no_mix_of_plans_that_may_be_mixed_is_slower(
    times_s: list[float], now: list[Any], after: list[Any], is_late: list[bool]
) -> None:
    if not may_be_mixed(GRAPH, full_speed(times_s), now, after, [TOP_MHZ] * 3):
        return

    mixed = [
        before if is_late[instruction.pp_rank] else then
        for instruction, before, then in zip(GRAPH.instructions, now, after, strict=True)
    ]
    assert duration_s(times_s, mixed) <= (1 + MAX_MIXED_RATIO) * duration_s(times_s, after) + 1e-9


@given(TIMES, PLANS)
def test_lower_clocks_everywhere_may_be_mixed_in_and_full_speed_may_not(times_s: list[float], now: list[Any]) -> None:
    seen, tops = full_speed(times_s), [TOP_MHZ] * 3
    lowest: list[int | None] = [min(CLOCKS)] * NUM_NODES

    assert may_be_mixed(GRAPH, seen, now, lowest, tops)
    assert not may_be_mixed(GRAPH, seen, lowest, [None] * NUM_NODES, tops)


def test_without_a_time_for_each_instruction_nothing_may_be_mixed() -> None:
    seen = full_speed([1.0] * len(GRAPH.classes), without=1)

    assert not may_be_mixed(GRAPH, seen, [None] * NUM_NODES, [None] * NUM_NODES, [TOP_MHZ] * 3)


def test_clocks_of_a_plan_are_in_the_order_of_the_graph_and_full_speed_for_ranks_without_any() -> None:
    of_rank_1 = tuple(1000 + k for k in range(len(SCHEDULE.orders[1])))
    plan = ClockPlan("p", PlanPurpose.TUNED, (RankClocks(1, of_rank_1),))

    clocks = node_clocks_mhz(SCHEDULE, plan)

    expected = [None] * len(SCHEDULE.orders[0]) + list(of_rank_1) + [None] * len(SCHEDULE.orders[2])
    assert clocks == expected
