"""`gpuenergyd config get`: one value for scripts, all of them with default and source for people."""

import json
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run


def test_one_key_prints_its_value_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[policy]\ndefault = "cost"\n')

    assert run(["config", "get", "policy", "--config", str(path)]) == 0

    assert capsys.readouterr().out == "cost\n"


def test_all_settings_are_shown_with_default_and_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("max_slowdown_ratio = 0.05\n")

    assert run(["config", "get", "--config", str(path), "--json"]) == 0

    shown = {one["key"]: one for one in json.loads(capsys.readouterr().out)["settings"]}
    own = shown["max_slowdown_ratio"]
    assert own == {"key": "max_slowdown_ratio", "value": 0.05, "default": 0.0, "source": f"file {path}"}
    assert shown["policy"]["source"] == "default"
    assert run(["config", "get", "--config", str(path)]) == 0
    assert "max_slowdown_ratio" in capsys.readouterr().out


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "get", "nothing"]) == 2
    assert run(["config", "get", "--config", str(tmp_path / "missing")]) == 2

    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("gpuenergyd: no setting 'nothing'; valid: ")
    assert "cannot read" in second
