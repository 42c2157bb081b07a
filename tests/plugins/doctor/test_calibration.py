"""`gpuenergyd calibrate` on a real daemon: measures simulated GPUs, keeps the result, and always restores them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd_sim.driver.device_parameters import A100_SXM
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world import create_world
from gpuenergyd_sim.driver.world_kinds import WorldKind, parameters_in
from tests.plugins.locks.test_administrator import ASK_AS_NOBODY, NOBODY
from tests.support.client_process import daemon_for_everybody
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.waiting import LIMIT_S, wait_until

CALL_S, SETTLE_S = 0.08, 0.012
"""Of the simulated GPU whose latencies are known: a call of constant duration, beside which delays of a busy host
are small, and the mean of an exponential."""
_COMMAND = "from gpuenergyd.cli.main import main; main()"


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with daemon_for_everybody() as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    """A daemon whose GPUs must be free and restored at the end of the test."""
    yield shared
    assert shared.is_as_found()
    assert not Journal(shared.journal_path).read().entries
    assert [gpu["calibration_lease"] for gpu in shared.status()["gpus"]] == [None] * 4


def command(daemon: DaemonProcess, *arguments: str) -> int:
    return run([*arguments, "--socket", str(daemon.socket_path)])


def switching(daemon: DaemonProcess) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["gpus"][0]["switching"]
    return found


def is_calibrating(daemon: DaemonProcess) -> bool:
    return any(gpu["calibration_lease"] and gpu["requested_sm_clock_mhz"] for gpu in daemon.status()["gpus"])


@contextmanager
def long_calibration(daemon: DaemonProcess) -> Iterator["subprocess.Popen[str]"]:
    """Run a calibration that takes a minute, in a process of its own, for the duration of a block."""
    arguments = ["calibrate", "2", "--changes", "200", "--socket", str(daemon.socket_path)]
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _COMMAND, *arguments], stdout=pipe, stderr=pipe, text=True)
    try:
        wait_until(lambda: is_calibrating(daemon))
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_the_measured_latencies_are_those_of_the_gpu_and_outlive_the_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(
        parameters_in(WorldKind.UNKIND, A100_SXM), call_median_s=CALL_S, call_sigma=0.0, call_outlier_ratio=0.0,
        settle_mean_s=SETTLE_S, settle_target_spread=0.0, settle_tail_ratio=0.0,
    )  # fmt: skip
    create_world(tmp_path / "world", [model], seed=7, now_ns=time.monotonic_ns())
    with running_daemon(tmp_path) as daemon:
        assert switching(daemon)["basis"] == "published"

        assert command(daemon, "calibrate", "--changes", "4", "--json") == 0
        (gpu,) = json.loads(capsys.readouterr().out)["gpus"]
        known = switching(daemon)

        assert (gpu["phase"], gpu["num_done"]) == ("done", gpu["num_changes"])
        targets = {(target["direction"], target["sm_clock_mhz"]): target for target in gpu["targets"]}
        assert len(targets) == 10
        assert all(target["num_changes"] >= 3 for target in targets.values())
        assert median(target["call_s"] for target in targets.values()) == pytest.approx(CALL_S, rel=0.3)
        whole = {e["direction"]: e for e in known["seen"] if e["from_region"] is None}
        # The median of an exponential is 0.69 of its mean; the driver reports clocks 3 ms early, never before the call.
        true_s = CALL_S + max(0.0, 0.69 * SETTLE_S - model.reported_early_s)
        assert [e["median_s"] for e in whole.values()] == pytest.approx([true_s] * 2, rel=0.3)
        assert known["basis"] == "measured"
        assert known["num_seen"] + known["num_unseen"] > 40
        assert daemon.is_as_found()

        daemon.stop()
        daemon.start()

        again = switching(daemon)
        assert (again["basis"], again["num_seen"]) == ("measured_earlier", 0)
        assert again["num_earlier"] == known["num_seen"] + known["num_unseen"]
        assert (again["raise_s"], again["lower_s"]) == pytest.approx((known["raise_s"], known["lower_s"]), rel=0.25)
        assert command(daemon, "status") == 0
        assert "measured by an earlier daemon on 1 of 1 GPU" in " ".join(capsys.readouterr().out.split())

        daemon.stop()
        path = tmp_path / "state" / "switch-latencies.json"
        saved = json.loads(path.read_text())
        saved["models"][0]["driver_version"] = "570.1"
        path.write_text(json.dumps(saved))
        daemon.start()

        assert switching(daemon)["basis"] == "published"
        assert "measured anew: driver version simulated-" in daemon.log


def test_a_table_shows_every_direction_and_target_clock(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(daemon, "calibrate", "1", "3", "--changes", "3") == 0

    printed = capsys.readouterr()
    assert [line.partition(" (")[0] for line in printed.err.splitlines()] == ["GPU 1", "GPU 3"]
    assert "changes between 1410, 1290, 1200, 1095, 960, 780 MHz, about" in printed.err
    assert printed.out.count("raise to 1410 ") == printed.out.count("lower to 780 ") == 2
    assert "Times until the driver reports the new clock. Jobs correct them" in printed.out
    assert "lease calibration-" in daemon.log


def test_a_dry_run_shows_the_changes_and_their_time_and_leases_nothing(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(daemon, "calibrate", "--dry-run") == 0
    assert command(daemon, "calibrate", "0", "--dry-run", "--json") == 0

    *lines, as_json = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [f"would measure GPU {k}" for k in range(4)]
    planned = json.loads(as_json)
    assert planned["calibration_id"] is None
    assert planned["gpus"][0]["num_changes"] > 200
    assert planned["gpus"][0]["expected_s"] > 1.0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "reason"),
    [
        (("9",), 1, "no GPU '9' on this host"),
        (("0", "--changes", "0"), 2, "--changes"),
        (("0", "--changes", "201"), 2, "--changes"),
    ],
)
def test_an_invalid_request_is_one_line(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], exit_code: int, reason: str
) -> None:
    assert command(daemon, "calibrate", *arguments) == exit_code

    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1


def test_a_gpu_in_use_by_a_job_is_refused(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with training(daemon, arguments=("--policy", "uniform")):
        wait_until(lambda: all(gpu["job_id"] for gpu in daemon.status()["gpus"]))

        assert command(daemon, "calibrate", "0") == 1

        (error,) = capsys.readouterr().err.splitlines()
        assert "has been in use by job" in error
    wait_until(lambda: daemon.job() is None)


def test_a_leased_gpu_is_refused_and_the_others_are_not_leased(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(daemon, "lock", "1", "1200") == 0
    capsys.readouterr()

    assert command(daemon, "calibrate") == 1

    (error,) = capsys.readouterr().err.splitlines()
    assert "has been leased to the administrator" in error
    assert daemon.locks_mhz() == [None, 1200, None, None]
    assert command(daemon, "lock", "1", "--release") == 0


def test_a_gpu_that_a_process_computes_on_is_refused(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    host = SimulatedHost.open(daemon.world_path)
    gpu_uuid = host.identities()[2].gpu_uuid
    host.attach_process(gpu_uuid, os.getpid())
    try:
        assert command(daemon, "calibrate", "2") == 1
    finally:
        host.detach_process(gpu_uuid, os.getpid())
        host.close()

    (error,) = capsys.readouterr().err.splitlines()
    assert f"GPU {gpu_uuid} is not idle: processes {os.getpid()} compute on it" in error


def test_an_observing_daemon_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon(tmp_path, mode="observe") as daemon:
        assert command(daemon, "calibrate", "0") == 1

        (error,) = capsys.readouterr().err.splitlines()
        assert "mode = 'observe': the daemon never changes a GPU" in error


def test_a_user_without_administrator_rights_is_refused(daemon: DaemonProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    arguments = [str(daemon.socket_path), "/v1/calibrations", str(NOBODY), "{}"]

    asked = subprocess.run(
        [sys.executable, "-I", "-c", ASK_AS_NOBODY, *arguments], capture_output=True, text=True, check=True
    )

    status, answer = json.loads(asked.stdout)
    assert status == 403
    assert "allowed: root of this host" in answer["error"]


@pytest.mark.kill
def test_a_killed_command_restores_its_gpu_at_once(daemon: DaemonProcess) -> None:
    with long_calibration(daemon) as process:
        process.kill()
        process.wait(LIMIT_S)

        wait_until(daemon.is_as_found)
        wait_until(lambda: daemon.status()["gpus"][2]["calibration_lease"] is None)
        assert f"process {process.pid} ended" in daemon.log

    wait_until(lambda: command(daemon, "calibrate", "2", "--dry-run") == 0)


def test_an_interrupted_command_restores_its_gpu_at_once(daemon: DaemonProcess) -> None:
    with long_calibration(daemon) as process:
        process.send_signal(signal.SIGINT)

        assert process.wait(LIMIT_S) == 130
        wait_until(daemon.is_as_found)
        wait_until(lambda: daemon.status()["gpus"][2]["calibration_lease"] is None)


def test_a_calibration_ends_when_another_process_computes_on_its_gpu_or_its_lease_is_released(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    host = SimulatedHost.open(daemon.world_path)
    gpu_uuid = host.identities()[2].gpu_uuid
    with long_calibration(daemon) as process:
        assert command(daemon, "calibrate", "3") == 1
        assert f"process {process.pid} is calibrating GPUs" in capsys.readouterr().err

        host.attach_process(gpu_uuid, os.getpid())
        assert process.wait(LIMIT_S) == 1
        host.detach_process(gpu_uuid, os.getpid())
        printed = process.stderr.read() if process.stderr is not None else ""

    assert f"processes {os.getpid()} began to compute on GPU {gpu_uuid}" in printed
    host.close()
    with long_calibration(daemon) as process:
        assert command(daemon, "lock", "--release", "2") == 0

        assert process.wait(LIMIT_S) == 1
        printed = process.stderr.read() if process.stderr is not None else ""

    assert f"the lease of GPU {gpu_uuid} has ended" in printed


def test_an_unknown_calibration_is_not_found(daemon: DaemonProcess) -> None:
    client = daemon.client()

    with pytest.raises(Exception, match="404: no calibration 'none'"):
        client.get("/v1/calibrations/none")

    client.close()
