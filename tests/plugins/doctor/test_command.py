"""`gpuenergyd doctor` finds problems on a host and changes nothing."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.gpu.restore.journal import Control, Journal, JournalEntry, KnownBy
from gpuenergyd.store import HistoryWriter
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.gpu.conftest import NvmlWorld, fake_nvml_library, gpu_models, nvml_world
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.waiting import wait_until

__all__ = ["fake_nvml_library", "gpu_models", "nvml_world"]

AS_NOBODY = """
import contextlib, io, os, sys
from gpuenergyd.cli.main import run

with contextlib.redirect_stdout(io.StringIO()):
    run(["doctor", "--json"])  # loads everything while the files can still be read
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(run(["doctor", "--json"]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of two simulated GPUs with a settled daemon's folders, and nobody running."""
    return simulated_host(tmp_path, monkeypatch)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users can look into; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def simulated_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    SimulatedHost.create(folder / "world", ["a100-sxm"] * 2, seed=7).close()
    for name in ("run", "state"):
        (folder / name).mkdir()
    for name in [n for n in os.environ if n.startswith("GPUENERGYD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPUENERGYD_DRIVER", "simulated")
    monkeypatch.setenv("GPUENERGYD_WORLD_PATH", str(folder / "world"))
    monkeypatch.setenv("GPUENERGYD_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("GPUENERGYD_STATE_DIR", str(folder / "state"))
    return folder


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the exit code and the findings by subject."""
    capsys.readouterr()
    code = run(["doctor", "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    assert document["is_degraded"] == (code == 4)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in document["findings"]:
        assert (finding["fix"] is None) == (finding["level"] == "fine")
        found.setdefault(finding["subject"], []).append(finding)
    return code, found


def degraded(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [f["subject"] for findings in found.values() for f in findings if f["level"] == "degraded"]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
        if path.name != "world"  # a simulated GPU goes on living when it is looked at
    }


def test_a_healthy_host_is_fine_and_nothing_is_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = HistoryWriter(folder / "state" / "history.sqlite3")
    writer.start()
    writer.close(30)
    before = contents(folder)

    code, found = doctor(capsys)

    assert (code, degraded(found)) == (0, [])
    assert set(found) >= {"driver", "permissions", "persistence mode", "clocks", "socket", "database", "disk"}
    assert set(found) >= {"time", "carbon source", "units"}
    assert found["driver"][0]["detail"].startswith("simulated: 2 GPUs: ")
    assert contents(folder) == before


def test_text_has_one_line_per_finding_and_the_fix_below(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()

    where = next(i for i, line in enumerate(lines) if line.startswith("note      socket: no daemon runs at"))
    assert str(folder) in lines[where]
    assert "gpuenergyd serve" in lines[where + 1]


def test_gpus_left_changed_by_a_dead_daemon_are_found_with_the_command_to_restore_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = SimulatedHost.open(folder / "world")
    gpu_uuid = host.identities()[0].gpu_uuid
    host.close()
    journal = folder / "run" / "journal.json"
    Journal(journal).add(
        [
            JournalEntry(
                gpu_uuid, Control.SM_CLOCK_LOCK, None, KnownBy.ASSUMED_DEFAULT, "L", "j", 1, 0, None, "simulated",
                str(folder / "world"), 0, 900.0,
            )
        ]
    )  # fmt: skip
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "run" / "gpuenergyd.sock"))
    (folder / "state" / "history.sqlite3").write_bytes(b"no database" * 500)

    code, found = doctor(capsys)
    run(["restore", "--journal", str(journal)])
    _, after = doctor(capsys)

    assert code == 4
    assert degraded(found) == ["clocks", "socket", "database"]
    assert found["clocks"][0]["fix"].startswith(f"`gpuenergyd restore --journal {journal}`")
    assert degraded(after) == ["socket", "database"]


def test_invalid_settings_are_a_finding_and_other_checks_continue(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.toml").write_text('mode = "fast"\n')

    code, found = doctor(capsys, "--config", str(folder / "config.toml"))

    assert code == 4
    assert f"{folder / 'config.toml'}: mode = 'fast'" in found["settings"][0]["detail"]
    assert {"driver", "socket", "units"} <= set(found)


def test_degraded_reasons_of_a_running_daemon_are_findings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon(folder) as daemon:
        wait_until(lambda: daemon.status()["store"]["num_rows_written"] > 0)
        code, found = doctor(capsys)
        daemon.database_path.write_bytes(b"no database" * 9000)
        wait_until(lambda: any(".recover" in reason for reason in daemon.status()["degraded_reasons"]))
        code_damaged, damaged = doctor(capsys)

    assert (code, degraded(found)) == (0, [])
    assert found["permissions"][0]["detail"] == "the daemon may change all GPUs"
    assert code_damaged == 4
    assert "moved it to" in damaged["daemon"][0]["detail"]


def test_a_user_without_permission_gets_the_group_to_join(public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    folder = simulated_host(public_folder, monkeypatch)
    daemon = DaemonProcess(folder).start()
    try:
        seen = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, check=False)
    finally:
        daemon.stop()

    assert seen.returncode == 4, seen.stderr
    (refused,) = [f for f in json.loads(seen.stdout)["findings"] if f["subject"] == "socket"]
    assert refused["level"] == "degraded"
    assert refused["fix"].startswith("`usermod -aG root nobody`")


@pytest.mark.usefixtures("folder")
def test_a_host_behind_nvml_shows_mig_persistence_and_versions_that_do_not_match(
    nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUENERGYD_DRIVER", "nvml")
    nvml_world.control.set_mig(0, is_on=True)
    nvml_world.control.set_persistence(1, is_on=False)

    code, found = doctor(capsys)
    nvml_world.control.inject("nvmlInitWithFlags", 18)
    code_mismatched, mismatched = doctor(capsys)

    assert code == code_mismatched == 4
    assert degraded(found) == ["clocks"]
    assert "MIG is enabled" in found["clocks"][0]["detail"]
    assert [f["level"] for f in found["persistence mode"]] == ["note"]
    assert degraded(mismatched) == ["driver"]
    assert "reload the driver" in mismatched["driver"][0]["fix"]


@pytest.mark.usefixtures("folder")
def test_a_hanging_driver_does_not_block_the_diagnosis(
    nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUENERGYD_DRIVER", "nvml")
    monkeypatch.setattr("gpuenergyd_doctor.host_facts._DRIVER_TIMEOUT_S", 0.2)
    nvml_world.control.inject("nvmlDeviceGetPersistenceMode", num_calls=1, delay_s=2.0)

    code, found = doctor(capsys)

    assert code == 4
    assert "did not respond within 0.2 s" in found["driver"][0]["detail"]


def test_a_daemon_whose_simulated_worker_has_failed_is_not_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in os.environ if n.startswith("GPUENERGYD_")]:
        monkeypatch.delenv(name)
    broken = tmp_path / "broken"
    broken.write_bytes(b"this is no world file")
    daemon = DaemonProcess(tmp_path / "daemon", overrides={"world_path": str(broken)})
    daemon.process = daemon.launch()
    try:
        wait_until(daemon.socket_path.exists)
        wait_until(lambda: "GPU worker" in daemon.log)
        code, found = doctor(capsys, "--socket", str(daemon.socket_path))
    finally:
        daemon.stop()

    assert code == 4
    assert {"driver", "permissions", "daemon"} <= set(degraded(found))
    assert found["clocks"][0]["level"] != "fine"
    assert "supported clocks" not in json.dumps(found)
