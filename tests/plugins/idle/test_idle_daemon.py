"""Idle GPUs of a real daemon: who holds a context is lowered, who works is lifted, and any death restores."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
from tests.deploy.test_slurm import prefix_of
from tests.deploy.test_slurm import run as run_script
from tests.plugins.idle.idle_kills import SOON, VICTIMS, IdleKills
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.fake_nvml.library import build_library, compiler
from tests.support.waiting import LIMIT_S, wait_until

WORK = InstructionWork(memory_time_s=0.0, compute_time_s=0.5, power_coefficient_w_per_mhz=0.1)
LOW_MHZ = 210
ENABLED = {"idle": {"enabled": True, "after_s": 1.0}}


@contextmanager
def idle_daemon(folder: Path, **overrides: Any) -> Iterator[tuple[DaemonProcess, SimulatedHost, str]]:
    """Run a daemon whose first GPU has a process that does nothing."""
    settings = {"service_options": ENABLED, "requires_gpu_use": False, **overrides}
    with running_daemon(folder, **settings) as daemon:
        host = SimulatedHost.open(daemon.world_path)
        gpu = host.identities()[0].gpu_uuid
        host.attach_process(gpu, os.getpid())
        try:
            yield daemon, host, gpu
        finally:
            host.close()


def _of_first(daemon: DaemonProcess) -> dict[str, Any]:
    gpus = daemon.status()["idle"]["gpus"]
    return dict(gpus[0]) if gpus else {"use": None, "is_lowered": False}


def test_a_gpu_with_an_idle_context_is_lowered_and_work_lifts_it(tmp_path: Path) -> None:
    with idle_daemon(tmp_path) as (daemon, host, gpu):
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) == LOW_MHZ, log=lambda: daemon.log)
        shown = _of_first(daemon)
        assert shown["is_lowered"]
        assert shown["lowered_sm_clock_mhz"] == LOW_MHZ
        assert "until work, a process, a job or a lease comes" in shown["reason"]
        assert [lock for lock in daemon.locks_mhz() if lock is not None] == [LOW_MHZ]

        host.begin_work(gpu, WORK)
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) is None)
        wait_until(lambda: _of_first(daemon)["lost_s"] > 0)
        assert not daemon.status()["is_degraded"]


def test_only_observed_gpus_are_counted_and_never_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with idle_daemon(tmp_path, service_options={"idle": {"after_s": 1.0}}) as (daemon, host, gpu):
        wait_until(lambda: any(own["could_lower_s"] > 0 for own in _of_first(daemon).get("by_use", ())))
        assert not _of_first(daemon)["is_lowered"]
        assert host.num_clock_sets(gpu) == 0
        assert run(["idle", "show", "--socket", str(daemon.socket_path)]) == 0
        assert "idle with a context" in capsys.readouterr().out
        connection = HttpConnection(str(daemon.socket_path))
        text = connection.request("GET", "/v1/metrics", None, limit_s=LIMIT_S)[1].decode()
        connection.close()
        assert f'gpuenergyd_gpu_use_seconds_total{{gpu_uuid="{gpu}",index="0",' in text
        assert f'gpuenergyd_gpu_idle_lowered{{gpu_uuid="{gpu}",index="0",' in text

    for command in ("report --group-by state", "idle report"):
        assert run([*command.split(), "--database", str(daemon.database_path), "--json"]) == 0
        states = {own["state"]: own for own in json.loads(capsys.readouterr().out)["groups"] if own["gpu_uuid"] == gpu}
        assert states["idle-context"]["time_s"] > 1
        assert states["idle-context"]["energy_j"] > 0
    for command in ("report --group-by state", "report --format html"):
        assert run([*command.split(), "--database", str(daemon.database_path)]) == 0
        assert "of GPU hours idle with a context" in capsys.readouterr().out


def test_a_job_gets_its_gpu_at_full_speed(tmp_path: Path) -> None:
    with idle_daemon(tmp_path, policy="full-speed") as (daemon, host, gpu):
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) == LOW_MHZ)
        with training(daemon):
            daemon.wait_for_phase("baseline", "tuned")
            assert host.locked_sm_clock_mhz(gpu) is None


def test_a_long_pause_that_a_job_announced_is_lowered_until_its_next_iteration_begins(tmp_path: Path) -> None:
    work = InstructionWork(memory_time_s=0.0, compute_time_s=0.02, power_coefficient_w_per_mhz=0.2)
    with idle_daemon(tmp_path, prologue=SOON, policy="uniform", silence_limit_s=0.5) as (daemon, host, gpu):
        rank = RankDescription(job_name="loop", gpu_uuid=gpu, max_slowdown_ratio=0.2)
        client = RankClient(rank, order=[("F", 0, 0)], socket_path=str(daemon.socket_path))

        def is_planned() -> bool:
            client.begin_iteration()
            slot = client.begin_instruction("F", 0)
            host.begin_work(gpu, work)
            host.hold(gpu)
            host.finish_work(gpu)
            client.end_instruction(slot)
            client.end_iteration()
            lock_mhz, job = host.locked_sm_clock_mhz(gpu), daemon.job()
            return job is not None and job["phase"] == "tuned" and lock_mhz not in {None, LOW_MHZ}

        wait_until(is_planned, log=lambda: daemon.log)
        client.pause()
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) == LOW_MHZ, log=lambda: f"{_of_first(daemon)} {daemon.log}")
        assert (daemon.job() or {})["is_suspended"]
        assert not daemon.status()["is_degraded"]

        client.begin_iteration()  # its clock request lifts, before any work and any report
        client.begin_instruction("F", 0)
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) != LOW_MHZ)
        assert _of_first(daemon)["use"] == "idle-context"
        client.release()


@pytest.mark.parametrize("starter", ["idle lift --for 600", "run -- true", "prolog.sh"])
def test_who_is_about_to_start_a_program_lifts_at_once_and_for_a_while(starter: str, tmp_path: Path) -> None:
    with idle_daemon(tmp_path, prologue=SOON) as (daemon, host, gpu):
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) == LOW_MHZ)
        if starter == "prolog.sh":
            assert run_script(starter, prefix_of(tmp_path, daemon), tmp_path / "journal.json") == 0
        else:
            command = [sys.executable, "-m", "gpuenergyd.cli.main", *starter.split()]
            own = {"GPUENERGYD_SOCKET": str(daemon.socket_path), "CUDA_VISIBLE_DEVICES": gpu[:12]}  # as CUDA permits
            subprocess.run(command, env={**os.environ, **own}, check=True)
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) is None)
        wait_until(lambda: _of_first(daemon)["reason"] == "lifted by request")


@pytest.mark.parametrize("victim", ["daemon", "worker", "worker_and_sentinel"])
def test_any_death_restores_a_lowered_gpu(victim: str, tmp_path: Path) -> None:
    with idle_daemon(tmp_path) as (daemon, host, gpu):
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) == LOW_MHZ)
        worker = daemon.status()["worker"]
        sets_before = host.num_clock_sets(gpu)
        if victim == "daemon":
            os.kill(daemon.pid, signal.SIGKILL)
        else:
            if victim == "worker_and_sentinel":
                os.kill(worker["sentinel_pid"], signal.SIGKILL)
            os.kill(worker["pid"], signal.SIGKILL)
        wait_until(lambda: host.num_clock_sets(gpu) > sets_before)
        wait_until(lambda: host.locked_sm_clock_mhz(gpu) is None or victim != "daemon")


@pytest.mark.thorough
def test_no_kill_leaves_an_idle_gpu_lowered(tmp_path: Path) -> None:
    rig = IdleKills(tmp_path, random.Random(3))
    try:
        kills = list(rig.run(2 * len(VICTIMS)))
    finally:
        rig.close()
    assert [kill for kill in kills if kill.num_left or not kill.num_lowered] == []


def _nvidia_smi(*options: str) -> str:
    """Run the `nvidia-smi` of the fake driver library for the first GPU, which must not refuse."""
    command = [str(build_library() / "bin" / "nvidia-smi"), "-i", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_with_nvml_status_explains_other_tools_work_and_their_lock_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_library()))
    monkeypatch.setenv("GPUENERGYD_FAKE_NVML_WORLD", str(tmp_path / "world"))
    settings = {"driver": "nvml", "mode": "control", "service_options": ENABLED}
    daemon = DaemonProcess(tmp_path, overrides=settings, prologue=SOON)
    with FakeNvmlControl(daemon.world_path) as control:
        control.set_privileged(True)
        daemon.start()
        host = SimulatedHost.open(daemon.world_path)
        gpu = host.identities()[0].gpu_uuid
        host.attach_process(gpu, os.getpid())
        try:
            wait_until(lambda: host.locked_sm_clock_mhz(gpu) == LOW_MHZ, log=lambda: daemon.log)
            assert run(["status", "--socket", str(daemon.socket_path)]) == 0
            explained = "GPU 0 lowered, idle with a context: 210 MHz until work, a process, a job or a lease comes"
            assert explained in " ".join(capsys.readouterr().out.split())
            fields = "--query-gpu=clocks.sm,clocks.max.sm,utilization.gpu"
            assert _nvidia_smi(fields, "--format=csv,noheader,nounits") == "210, 1410, 0"
            _nvidia_smi("--lock-gpu-clocks=210,900")
            wait_until(lambda: not _of_first(daemon)["is_lowered"], log=lambda: str(_of_first(daemon)))
            host.begin_work(gpu, WORK)
            wait_until(lambda: _of_first(daemon)["use"] == "other-work")
            assert host.locked_sm_clock_mhz(gpu) == 900
        finally:
            assert daemon.stop() == 0
        assert host.locked_sm_clock_mhz(gpu) == 900
        host.close()
