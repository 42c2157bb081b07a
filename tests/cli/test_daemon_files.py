"""Commands read the files of the daemon of GPUENERGYD_SOCKET, and name what they looked at."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.cli.daemon_files import find_daemon_files
from gpuenergyd.cli.main import run
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.sample_history import write_sample_history
from tests.support.waiting import wait_until


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave no setting of the environment but folders of its own; return the default runtime folder."""
    for name in [n for n in os.environ if n.startswith("GPUENERGYD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPUENERGYD_RUNTIME_DIR", str(tmp_path / "default" / "run"))
    monkeypatch.setenv("GPUENERGYD_STATE_DIR", str(tmp_path / "default" / "state"))
    return tmp_path / "default" / "run"


@pytest.fixture
def daemon(tmp_path: Path, clean: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonProcess]:
    clean.mkdir(parents=True)
    with running_daemon(tmp_path / "elsewhere") as running:
        monkeypatch.setenv("GPUENERGYD_SOCKET", str(running.socket_path))
        yield running


def test_commands_read_the_files_of_the_daemon_on_the_socket(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    files = daemon.status()["files"]
    assert run(["lock", "0", "900"]) == 0
    wait_until(lambda: Path(files["history_path"]).exists())
    capsys.readouterr()

    assert run(["restore", "--dry-run", "--json"]) == 0
    restored = json.loads(capsys.readouterr().out)
    assert run(["report"]) == 0
    reported = capsys.readouterr().out
    run(["doctor", "--json"])
    findings = {each["subject"]: each["detail"] for each in json.loads(capsys.readouterr().out)["findings"]}

    assert [outcome["result"] for outcome in restored["outcomes"]] == ["would_restore"]
    assert restored["journal"] == files["journal_path"]
    assert reported.strip() == "no jobs in this period"
    assert str(daemon.socket_path) in findings["socket"]
    assert files["history_path"] in findings["database"]
    assert files["world_path"] == str(daemon.world_path)


def test_the_pue_of_the_settings_counts_for_the_daemons_history_only(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = write_sample_history(clean.parent / "state" / "history.sqlite3")
    monkeypatch.setenv("GPUENERGYD_SOCKET", str(clean / "none.sock"))
    monkeypatch.setenv("GPUENERGYD_PUE", "1.5")

    def cost_and_pue(*arguments: str) -> tuple[float, float]:
        assert run(["report", "--json", "--price-per-kwh", "1", *arguments]) == 0
        (job,) = json.loads(capsys.readouterr().out)["jobs"]
        return job["cost"], job["pue"]

    cost, pue = cost_and_pue("--database", str(history))
    assert pue == 1.0
    assert cost_and_pue() == pytest.approx((1.5 * cost, 1.5))
    assert cost_and_pue("--pue", "1.2") == pytest.approx((1.2 * cost, 1.2))


def test_what_was_looked_at_is_named_if_nothing_is_found(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["restore", "--dry-run"]) == 0

    journal = daemon.status()["files"]["journal_path"]
    expected = f"nothing to restore in {journal} (daemon at {daemon.socket_path})"
    assert capsys.readouterr().out.strip() == expected


def test_without_a_daemon_the_settings_count_and_the_socket_is_named(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = clean / "none.sock"
    clean.mkdir(parents=True)
    monkeypatch.setenv("GPUENERGYD_SOCKET", str(socket))

    assert run(["report"]) == 1
    error = capsys.readouterr().err
    assert run(["restore", "--dry-run"]) == 0

    history = clean.parent / "state" / "history.sqlite3"
    assert error == (
        f"gpuenergyd: no history at {history}, named by the settings, no daemon at {socket}; --database reads another"
        " one\n"
    )
    assert f"{clean / 'journal.json'} (no daemon at {socket})" in capsys.readouterr().out
    assert not find_daemon_files(str(socket)).is_running
