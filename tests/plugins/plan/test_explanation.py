"""Explanations of clocks."""

from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass, InstructionKind, dependency_graph, gpipe
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd_plan.explanation import ClockExplanation, ClockReason, explain_clocks

F, B = InstructionKind.F, InstructionKind.B
FAST_RANK = instruction_profile(
    [ClockOption(1400, 1.0, 100.0), ClockOption(1000, 2.0, 80.0), ClockOption(900, 4.5, 70.0)], where="rank 0"
)
SLOW_RANK = instruction_profile([ClockOption(1400, 3.0, 300.0), ClockOption(1000, 4.0, 280.0)], where="rank 1")
PROFILE = PipelineProfile(
    {InstructionClass(r, k): (FAST_RANK, SLOW_RANK)[r] for r in range(2) for k in (F, B)}, blocking_power_w=10.0
)
GRAPH = dependency_graph(gpipe(2, 2))


def _explained(clocks: dict[str, int]) -> dict[str, ClockExplanation]:
    chosen = {i: clocks.get(str(i), 1400) for i in GRAPH.instructions}
    explained = explain_clocks(GRAPH, PROFILE, chosen, {Instruction(0, F, 0): 40.0})
    return {str(e.instruction): e for e in explained}


def test_reasons_follow_slack_and_table() -> None:
    explained = _explained({"F1@0": 1000})

    assert explained["F0@0"].reason is ClockReason.CRITICAL
    assert explained["F1@1"].reason is ClockReason.CRITICAL
    # rank 1 needs F1 at 4.0; at 1000 MHz it ends at 3.0, and 900 MHz takes 2.5 more
    assert explained["F1@0"].reason is ClockReason.NO_ROOM
    # B0 of rank 0 may take 3.0 until B1 comes back, at 1000 MHz it would take 2.0
    assert explained["B0@0"].reason is ClockReason.ROOM_LEFT
    assert _explained({"F1@0": 900})["F1@0"].reason is ClockReason.CHEAPEST


def test_neighbours_are_the_next_options_worth_considering() -> None:
    explained = _explained({"F1@0": 1000})["F1@0"]

    assert explained.faster is not None
    assert explained.slower is not None
    assert (explained.faster.sm_clock_mhz, explained.slower.sm_clock_mhz) == (1400, 900)


def test_price_is_known_only_where_the_planner_gave_one() -> None:
    explained = _explained({})

    assert explained["F0@0"].price_w == 40.0
    assert explained["F0@1"].price_w is None


def test_the_explanation_names_the_next_clock_and_the_limit() -> None:
    explained = _explained({"F1@0": 1000})

    assert "1000 MHz would save 30 J and take 1e+03 ms more, which would lengthen" in explained["F0@0"].sentence(10.0)
    assert "slack is only 1e+03 ms" in explained["F1@0"].sentence(10.0)
    assert "this is the cheapest clock" in _explained({"F1@0": 900})["F1@0"].sentence(10.0)


def test_the_explanation_of_unused_slack_names_its_other_uses() -> None:
    explained = _explained({"F1@0": 1000})

    assert "of 2e+03 ms slack, used by other instructions" in explained["B0@0"].sentence(10.0)
