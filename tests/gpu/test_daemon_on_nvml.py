"""The whole daemon on the unmodified NVML binding: training computes on the GPUs of the fake driver library."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run as run_command
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd_doctor.load import AttachedLoad
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.daemon_process import DaemonProcess, training
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.waiting import LIMIT_S, wait_until


@pytest.fixture
def control(daemon: DaemonProcess) -> Iterator[FakeNvmlControl]:
    """The fault injector of the fake driver library."""
    with FakeNvmlControl(daemon.world_path) as made:
        made.set_privileged(True)
        yield made


def test_job_is_tuned_and_restored_through_nvml(daemon: DaemonProcess, control: FakeNvmlControl) -> None:
    del control
    daemon.start()

    with training(daemon, iterations=100_000, arguments=("--policy", "uniform")):
        wait_until(daemon.is_lowered)
        assert all(not gpu["is_simulated"] for gpu in daemon.status()["gpus"])
    wait_until(lambda: daemon.job() is None)

    wait_until(daemon.is_as_found)
    assert daemon.stop() == 0
    assert restore(daemon.journal_path) == ()


def test_switch_latencies_are_calibrated_through_nvml_and_belong_to_its_driver_version(
    daemon: DaemonProcess, control: FakeNvmlControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is a process on the simulated GPUs that the fake library shows: it needs no CUDA."""
    del control
    load = AttachedLoad(SimulatedHost.open(daemon.world_path))
    monkeypatch.setattr("gpuenergyd_doctor.load.open_load", lambda *_: load)
    daemon.start()

    assert run_command(["calibrate", "0", "--changes", "2", "--socket", str(daemon.socket_path)]) == 0

    assert daemon.status()["gpus"][0]["switching"]["basis"] == "measured"
    assert daemon.is_as_found()
    assert daemon.stop() == 0
    (saved,) = json.loads((daemon.folder / "state" / "switch-latencies.json").read_text())["models"]
    assert saved["driver_version"] == "599.00.00"
    assert len(saved["switches"]) >= 20


@pytest.mark.fault(7)
def test_hanging_driver_call_stops_neither_status_nor_other_gpus_nor_training(
    daemon: DaemonProcess, control: FakeNvmlControl
) -> None:
    """Training continues on the GPU with the hanging call too, but its clock is no longer set."""
    daemon.start()

    with training(daemon, iterations=100_000, arguments=("--policy", "uniform")) as run:
        wait_until(daemon.is_lowered)
        control.inject("nvmlDeviceGetFieldValues", gpu_index=0, num_calls=1, delay_s=60.0)
        wait_until(lambda: daemon.status()["gpus"][0]["state"] == "wedged")
        wedged_mono_ns = time.monotonic_ns()

        status = daemon.status()
        assert status["gpus"][0]["reading_age_s"] > 5.0
        wait_until(lambda: all(gpu["reading_age_s"] < 1.0 for gpu in daemon.status()["gpus"][1:]))
        assert daemon.status()["worker"]["is_alive"]
        wait_until(lambda: _reported_since(daemon, wedged_mono_ns))
        now = daemon.status()["gpus"][0]
        assert now["state"] == "wedged"
        assert now["reading_age_s"] > status["gpus"][0]["reading_age_s"]
        assert run.process.poll() is None


def _reported_since(daemon: DaemonProcess, mono_ns: int) -> bool:
    job = daemon.job()
    assert job is not None
    age_s = job["last_report_age_s"]
    return age_s is not None and age_s * 1e9 < time.monotonic_ns() - mono_ns - 1e9


def test_without_a_mode_real_gpus_are_only_observed_which_log_and_status_say(
    daemon: DaemonProcess, control: FakeNvmlControl, capsys: pytest.CaptureFixture[str]
) -> None:
    del control
    del daemon.overrides["mode"]
    daemon.start()

    with training(daemon, arguments=("--policy", "uniform")) as run:
        wait_until(lambda: (daemon.job() or {}).get("num_iterations", 0) > 20, 60)
        status = daemon.status()
        shown = run_command(["status", "--socket", str(daemon.socket_path)]), capsys.readouterr().out
        assert run.finish() == 0

    assert (status["mode"], {gpu["state"] for gpu in status["gpus"]}) == ("observe", {"observe_only"})
    assert "mode observe: no mode is set" in status["mode_note"]
    assert daemon.log.count(status["mode_note"]) == 1
    assert (shown[0], status["mode_note"] in " ".join(shown[1].split())) == (0, True)
    assert daemon.is_as_found()


def test_a_proof_is_refused_before_it_begins_while_the_daemon_observes(
    daemon: DaemonProcess, control: FakeNvmlControl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del control
    del daemon.overrides["mode"]
    daemon.start()

    assert run_command(["prove", "--socket", str(daemon.socket_path), "--out", str(tmp_path / "proof"), "--", "x"]) == 2

    assert "mode = 'observe': the daemon never changes a GPU; set mode = \"control\"" in capsys.readouterr().err
    assert not (tmp_path / "proof").exists()


@pytest.mark.fault(9)
def test_daemon_without_privilege_only_observes(daemon: DaemonProcess, control: FakeNvmlControl) -> None:
    control.set_privileged(False)
    daemon.start()

    with training(daemon, iterations=30, arguments=("--policy", "uniform")) as run:
        assert run.wait(LIMIT_S) == 0
    wait_until(lambda: daemon.job() is None)

    assert daemon.is_as_found()
    assert daemon.status()["worker"]["is_alive"]


@pytest.mark.fault(48)
def test_a_released_gpu_can_be_reset_while_a_job_goes_on_and_is_reopened(
    daemon: DaemonProcess, control: FakeNvmlControl
) -> None:
    """A reset needs that no process has the GPU open; the fake library knows who has."""
    daemon.start()
    socket = ("--socket", str(daemon.socket_path))

    def state() -> str:
        return str(daemon.status()["gpus"][0]["state"])

    with training(daemon, arguments=("--policy", "uniform", "--ranks", "2", "--first-gpu", "0")) as on_it:
        wait_until(daemon.is_lowered, log=lambda: daemon.log)
        worker_pid = daemon.status()["worker"]["pid"]
        assert worker_pid in control.holders(0)

        assert run_command(["release-gpu", "0", *socket]) == 0

        assert state() == "released"
        assert worker_pid not in control.holders(0)
        assert worker_pid in control.holders(1)
        wait_until(daemon.is_as_found)
        reset_by_administrator(daemon, control)
        assert (daemon.job() or {})["num_faults"] <= 1
        num_iterations = (daemon.job() or {})["num_iterations"]
        wait_until(lambda: (daemon.job() or {})["num_iterations"] > num_iterations + 10)
        assert daemon.is_as_found()

        assert run_command(["release-gpu", "0", "--reopen", *socket]) == 0

        wait_until(lambda: state() == "ok")
        wait_until(daemon.is_lowered, log=lambda: daemon.log)
        assert daemon.status()["worker"]["num_restarts"] == 0
        assert on_it.finish() == 0
    assert run_command(["release-gpu", "0", "--reopen", *socket]) == 1
    assert run_command(["release-gpu", "all", *socket]) == 0
    assert control.holders(0) | control.holders(1) | control.holders(2) | control.holders(3) == set()
    assert run_command(["release-gpu", "all", "--for", "1", *socket]) == 0  # the last command counts
    wait_until(lambda: {gpu["state"] for gpu in daemon.status()["gpus"]} == {"ok"})
    assert daemon.stop() == 0


def reset_by_administrator(daemon: DaemonProcess, control: FakeNvmlControl) -> None:
    """Reset GPU 0 as `nvidia-smi --gpu-reset` does: refused while it is open, and its settings are gone."""
    assert control.holders(0) == set()
    host = SimulatedHost.open(daemon.world_path)
    host.reset_sm_clock(host.identities()[0].gpu_uuid)
    host.close()
