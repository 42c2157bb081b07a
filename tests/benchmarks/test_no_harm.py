"""The benchmark of what the daemon costs whole programs: its arithmetic, its verdicts, and one short pair."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "runs" / "no_harm.py"


@pytest.fixture
def no_harm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("no_harm")


def run(
    no_harm: Any, time_s: float, *, losses: tuple[tuple[str | None, ...], ...] = (("0x1p+0",),), **more: Any
) -> Any:
    return no_harm.Run(time_s, 0.9 * time_s, 100.0, losses, 0, 0, **more)


def pairs(no_harm: Any, *times_s: tuple[float, float]) -> Any:
    found = no_harm.Pairs()
    for without_s, with_s in times_s:
        found.add(run(no_harm, without_s), run(no_harm, with_s))
    return found


def test_time_energy_and_losses_are_those_of_the_rows_after_the_first(no_harm: Any, tmp_path: Path) -> None:
    for index, lasted_s in enumerate((1.0, 2.0)):
        rows = [
            {"t": 30.0 + lasted_s * k, "dt": 30.0 if k == 0 else 0.8 * lasted_s, "e": 5.0, "loss": f"{index} {k}",
             "paused": 10, "lowered": k}
            for k in range(4)
        ]  # fmt: skip
        (tmp_path / f"rows.{index}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="ascii")

    found = no_harm.read_rows(tmp_path / "rows", 2)

    assert found.time_s == pytest.approx(6.0)
    assert found.steps_s == pytest.approx(4.8)
    assert found.energy_j == pytest.approx(30.0)
    assert found.losses == (("0 0", "0 1", "0 2", "0 3"), ("1 0", "1 1", "1 2", "1 3"))
    assert (found.num_paused, found.num_lowered) == (80, 12)
    with pytest.raises(ValueError, match="rank 2 has written 0 rows; at least 2 are needed"):
        no_harm.read_rows(tmp_path / "rows", 3)


def test_a_program_fails_only_if_its_whole_interval_lies_above_the_limit(no_harm: Any) -> None:
    quiet = no_harm.Conditions()
    longer = pairs(no_harm, (100.0, 104.0), (100.0, 104.2), (100.0, 103.8)).figures(quiet)
    uncertain = pairs(no_harm, (100.0, 101.0), (100.0, 110.0), (100.0, 102.0)).figures(quiet)
    single = pairs(no_harm, (100.0, 110.0)).figures(quiet)

    assert (longer["is_met"], uncertain["is_met"], single["is_met"]) == (False, True, True)
    assert longer["longer_ratio"] == pytest.approx(0.03)
    half = 4.302653 * 0.002 / math.sqrt(3)
    assert (longer["longer_low_ratio"], longer["longer_high_ratio"]) == pytest.approx((0.03 - half, 0.03 + half))
    assert single["longer_low_ratio"] is None
    assert single["pauses_longer_ratio"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("slowdown_ratio", "num_busy", "name", "limit_ratio", "allowance_s"),
    [
        (0.0, 0, "longer_max_ratio", 0.005, 1.0),
        (0.0, 4, "busy_longer_max_ratio", 0.01, 2.0),
        (0.02, 0, "slowdown_0_02_longer_max_ratio", 0.025, 1.0),
    ],
)
def test_limit_allowance_and_field_follow_the_conditions(
    no_harm: Any, slowdown_ratio: float, num_busy: int, name: str, limit_ratio: float, allowance_s: float
) -> None:
    conditions = no_harm.Conditions(slowdown_ratio, num_busy)
    found = pairs(no_harm, (100.0, 103.0)).figures(conditions)
    figures = no_harm.summary({"a": found, "none": no_harm.Pairs().figures(conditions)}, {}, conditions)

    assert (conditions.limit_ratio, conditions.allowance_s) == pytest.approx((limit_ratio, allowance_s))
    assert figures[name] == pytest.approx((3.0 - allowance_s) / 100.0)


@pytest.mark.parametrize("problem", ["losses differ", "exit status 1"])
def test_other_losses_or_an_error_fail_whatever_the_time(no_harm: Any, problem: str) -> None:
    is_other = problem == "losses differ"
    joined = run(
        no_harm, 90.0, losses=(("0x1p+1" if is_other else "0x1p+0",),), problems=() if is_other else (problem,)
    )
    found = no_harm.Pairs()
    found.add(run(no_harm, 100.0), joined)

    figures = found.figures(no_harm.Conditions())

    assert (figures["is_met"], figures["problems"]) == (False, [problem])


def test_an_unknown_program_is_refused_with_the_known_ones() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--only", "nope"], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 2
    assert "no program 'nope'; valid: ddp, fsdp2, gan, " in done.stderr


@pytest.mark.torch
@pytest.mark.thorough
def test_a_short_pair_of_a_real_program_and_a_real_daemon() -> None:
    pytest.importorskip("torch")
    options = ("--only", "gan", "--pairs", "1", "--steps-ratio", "0.02", "--json")
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=400, check=False)

    figures = json.loads(done.stdout)
    own = figures["longer_by_program"]["gan"]
    assert done.returncode == 0, done.stderr
    assert (own["n"], own["problems"], figures["skipped"]) == (1, [], {})
    assert figures["longer_max_ratio"] == own["longer_ratio"]
    assert own["without_s"] > 0
