"""`gpuenergyd explain` explains the clocks of a plan and rejects invalid options."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass, InstructionKind, dependency_graph, gpipe
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.errors import UsageError
from gpuenergyd_plan.explain import explain
from gpuenergyd_plan.explanation import ClockExplanation, ClockReason, explain_clocks
from tests.plugins.plan.invocation import output_of


def _run(*arguments: str | Path) -> str:
    return output_of(explain, *arguments)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a profile of three stages whose clocks trade time for energy."""
    rows = ["stage,instruction,frequency,time,energy"]
    for stage, weight in enumerate((1.0, 1.0, 1.1)):
        for word, work in (("forward", 1.0), ("backward", 2.0)):
            for mhz in range(1400, 600, -50):
                time_s = 0.01 * weight * work * (0.3 + 0.7 * 1400 / mhz)
                rows.append(f"{stage},{word},{mhz},{time_s!r},{time_s * (100 + 300 * (mhz / 1400) ** 3)!r}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_json_explains_every_instruction_with_slack_and_price(table: Path) -> None:
    figures: dict[str, Any] = json.loads(_run(table, "--microbatches", "6", "--blocking-power-w", "60", "--json"))

    assert len(figures["instructions"]) == 2 * 3 * 6
    for row in figures["instructions"]:
        assert row["is_critical"] == (row["slack_s"] <= 1e-9)
        assert row["price_w"] >= 0
        assert row["reason"] in {"critical", "no-room", "cheapest", "room-left"}
        assert row["reason"] != "critical" or row["is_critical"]
    assert any(row["is_critical"] for row in figures["instructions"])
    roomier = figures["with_extra_inflight"]
    assert roomier["saving_ratio"] > figures["saving_ratio"]
    assert any(roomier["extra_inflight"])


def test_named_instructions_are_explained_in_a_sentence(table: Path) -> None:
    printed = " ".join(_run(table, "F0@0", "B5@1", "--microbatches", "6", "--blocking-power-w", "60").split())

    assert "F0@0: 1400 MHz from 0.0000 s for 10 ms, critical" in printed
    assert "1 ms more time would save" in printed
    assert "B5@1: " in printed
    assert "on the critical path: 1350 MHz would save" in printed


def test_summary_counts_reasons_and_shows_the_saving_of_extra_inflight(table: Path) -> None:
    printed = _run(table, "--microbatches", "6", "--blocking-power-w", "60")

    assert "critical" in printed
    assert "--extra-inflight auto" in printed
    assert max(len(line) for line in printed.splitlines()) <= 80


def test_an_unknown_instruction_is_a_usage_error(table: Path) -> None:
    with pytest.raises(UsageError, match="no instruction 'F9@9' in this plan; instructions are F0@0 to B5@2"):
        _run(table, "F9@9", "--microbatches", "6")


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
