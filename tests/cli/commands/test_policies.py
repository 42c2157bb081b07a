"""`gpuenergyd policies` lists installed plugins and why broken ones cannot be loaded."""

import json
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from tests.support.installed_distribution import install_distribution


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a distribution whose policy cannot be imported."""
    install_distribution(tmp_path, "broken-plugin", "gpuenergyd.policies", {"shaky": "no_such_module:Policy"})
    monkeypatch.syspath_prepend(str(tmp_path))
    return "shaky"


def test_shipped_policies_are_listed_as_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)["policies"]
    usable = {(row["kind"], row["name"]) for row in rows if row["is_usable"] and row["package"] == "gpuenergyd"}
    for name in ("bubble-aware", "full-speed", "uniform"):
        assert {("policy", name), ("planner", name)} <= usable


def test_a_broken_plugin_is_listed_with_its_reason(broken_plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["policies"]
    assert run(["policies"]) == 0
    table = capsys.readouterr().out

    (row,) = (row for row in rows if row["name"] == broken_plugin)
    assert (row["package"], row["version"], row["is_usable"]) == ("broken-plugin", "1.2", False)
    assert "no_such_module" in row["error"]
    assert "policy shaky is broken: ModuleNotFoundError: No module named 'no_such_module'" in table
