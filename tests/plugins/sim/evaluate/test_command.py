"""`gpuenergyd evaluate` runs policies side by side on one virtual training."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from tests.support.installed_distribution import install_distribution

SHORT = ("--stages", "2", "--microbatches", "4", "--max-slowdown", "0.05", "--iterations", "40")

BROKEN_POLICY = '''
class Broken:
    """A policy of a stranger."""

    def next_plan(self, view):
        raise ValueError("no plan today")
'''


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the JSON of an evaluation that succeeds."""
    assert run(["evaluate", *arguments, *SHORT, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_policy_that_lowers_clocks_saves_within_the_permitted_slowdown_and_full_speed_saves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = figures(capsys, "uniform", "full-speed")

    uniform, full_speed = found["policies"]
    assert (uniform["policy"], full_speed["policy"]) == ("uniform", "full-speed")
    assert uniform["saving_ratio"] > 0.03
    assert uniform["slowdown_ratio"] <= 0.055
    assert uniform["total_saving_ratio"] < uniform["saving_ratio"]
    assert uniform["regret_ratio"] > 0
    assert abs(full_speed["saving_ratio"]) < 0.01
    assert abs(full_speed["slowdown_ratio"]) < 0.002
    assert full_speed["num_plans"] == 0
    assert found["full_speed"]["energy_j"] > 0


def test_the_same_seed_gives_the_same_figures_and_another_seed_others(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (figures(capsys, "uniform", "--seed", seed) for seed in ("3", "3", "4"))

    assert first == again
    assert first["policies"] != other["policies"]


def test_the_table_names_the_pipeline_and_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", "uniform", *SHORT, "--gpu-model", "a40"]) == 0

    pipeline, titles, full_speed, uniform = capsys.readouterr().out.splitlines()
    assert pipeline == "2 stages x 4 microbatches on simulated a40, seed 0"
    assert titles.split() == ["policy", "energy", "saving", "time", "slowdown", "regret", "overall", "saving"]
    assert full_speed.split()[:2] == ["full", "speed"]
    assert uniform.split()[0] == "uniform"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "no policy 'nope'; installed: "),
        (("uniform", "uniform"), "each policy once, not uniform uniform"),
        (("uniform", "--gpu-model", "b300"), "unknown simulated GPU model 'b300'; available: "),
        (("uniform", "--max-slowdown", "2"), "--max-slowdown 2"),
        (("uniform", "--stages", "0"), "'--stages': must be greater than or equal to 1"),
        (("uniform", "--iterations", "10"), "'--iterations': must be greater than or equal to 40"),
        ((), "POLICY"),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", *arguments]) in {1, 2}

    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


def test_a_policy_that_raises_is_named_with_its_error_and_the_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_policy.py").write_text(BROKEN_POLICY)
    install_distribution(tmp_path, "broken", "gpuenergyd.policies", {"broken": "broken_policy:Broken"})
    monkeypatch.syspath_prepend(tmp_path)

    assert run(["evaluate", "broken", *SHORT]) == 1

    captured = capsys.readouterr()
    assert "broken" in captured.out
    assert captured.err.splitlines()[-1] == "gpuenergyd: policy 'broken' failed: ValueError('no plan today')"
