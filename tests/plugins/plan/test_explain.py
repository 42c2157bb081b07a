"""`gpuenergyd explain` explains the clocks of a plan and rejects invalid options."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.errors import UsageError
from gpuenergyd_plan.explain import explain
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
