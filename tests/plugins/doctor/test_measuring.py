"""`gpuenergyd doctor --measure` agrees with what the fake driver library was told, changes nothing, and is kept."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpuenergyd.cli.exit_codes import EXIT_DEGRADED
from gpuenergyd.cli.main import run
from gpuenergyd.core.host.measured_gpu import ENERGY, IDLE, LOADED, WAITING
from gpuenergyd.errors import DriverError
from gpuenergyd_doctor import measurement_report, measuring
from gpuenergyd_doctor.load import AttachedLoad
from gpuenergyd_doctor.measuring import Durations, measure_gpus
from gpuenergyd_sim.driver.device_model import InstructionWork
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.gpu.conftest import NvmlWorld, fake_nvml_library, nvml_world
from tests.support.daemon_process import running_daemon

__all__ = ["fake_nvml_library", "nvml_world"]

SHORT = Durations(calls_s=0.3, polling_s=1.6, settling_s=0.7, state_s=2.5)
SHORTEST = Durations(0.1, 0.2, 0.1, 0.5)
CAPPED = [InstructionWork(2.0, 8.0, 0.25 + 0.02 * k) for k in range(5)]
RUN = "import sys; from tests.plugins.doctor.test_measuring import measured_here; measured_here(*sys.argv[1:])"
LOCK = """
from gpuenergyd.gpu.drivers.nvml import NvmlHost
host = NvmlHost()
gpu = host.identities()[0]
host.lock_sm_clock(gpu.gpu_uuid, gpu.supported_sm_clocks_mhz[-1])
"""


@pytest.fixture
def gpu_models() -> tuple[str, ...]:
    return ("h200",)


class TrueLoad:
    """Does nothing, waits, or computes at the power limit at clocks that change every 37 ms.

    It writes the GPU's true mean power into a file that has the name of the state.
    """

    def __init__(self, world_path: Path, state: str) -> None:
        self.host, self.state, self.path = SimulatedHost.open(world_path), state, world_path.with_name(state)

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[dict[str, float]]:
        """Act inside the context; a training loop would run ahead by two iterations."""
        stop = threading.Event()

        def act() -> None:
            begin_j, begin_s = self.host.exact_energy_j(gpu_uuid), time.monotonic()
            while not stop.is_set():
                for work in CAPPED:
                    if self.state == LOADED:
                        self.host.begin_work(gpu_uuid, work)
                    stop.wait(0.037)
            passed_s = time.monotonic() - begin_s
            self.path.write_text(str((self.host.exact_energy_j(gpu_uuid) - begin_j) / passed_s))

        with nullcontext() if self.state == IDLE else AttachedLoad(self.host).on(gpu_uuid):
            thread = threading.Thread(target=act)
            thread.start()
            try:
                yield {"run_ahead_s": 0.034, "step_s": 0.017}
            finally:
                stop.set()
                thread.join()


def measured_here(world_path: str) -> None:
    """Run the command for a few seconds, with loads on the simulated GPU; print its JSON."""
    parts: Any = measurement_report
    parts.Durations = lambda: SHORT
    parts.open_load = lambda *_: TrueLoad(Path(world_path), WAITING)
    parts.TorchLoad = lambda: TrueLoad(Path(world_path), LOADED)
    parts = measuring
    parts._NoLoad = lambda: TrueLoad(Path(world_path), IDLE)
    sys.exit(run(["doctor", "--measure", "--json"]))


def test_measurements_agree_with_the_gpu_and_no_function_that_sets_anything_is_called(
    nvml_world: NvmlWorld, tmp_path: Path
) -> None:
    nvml_world.control.forbid_changes()
    environment = nvml_world.environment() | {
        "GPUENERGYD_RUNTIME_DIR": str(tmp_path),
        "GPUENERGYD_STATE_DIR": str(tmp_path),
    }
    world_path = nvml_world.simulated.path
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(world_path)], env=environment, capture_output=True, text=True, check=False
    )
    locked = subprocess.run([sys.executable, "-c", LOCK], env=environment, capture_output=True, check=False)

    assert done.returncode in {0, 4}, done.stderr
    document = json.loads(done.stdout)
    (gpu,) = document["measured"]
    calls = {call["name"]: call for call in gpu["calls"]}
    states = {state["name"]: state for state in gpu["states"]}
    assert locked.returncode == -signal.SIGABRT
    assert set(calls) == {"all values", "without energy", "energy", "settings", "processes"}
    assert 2.4e-3 < calls["energy"]["cpu_s"] < 6e-3
    assert calls["without energy"]["cpu_s"] < 1e-3
    if gpu["counter_period_s"] is not None:  # on a busy host no update may be dated
        assert gpu["counter_period_s"] == pytest.approx(0.1, rel=0.01)
    assert gpu["is_counter_read_apart"]
    assert gpu["power_refresh_s"] == pytest.approx(0.1, abs=0.02)
    assert gpu["clock_refresh_s"] == pytest.approx(0.1, abs=0.03)
    assert 0.0 < gpu["worker_cpu_ratio"] < 0.2
    true_w = {name: float(world_path.with_name(name).read_text()) for name in (IDLE, WAITING, LOADED)}
    assert {name: state["power_w"] for name, state in states.items()} == pytest.approx(true_w, rel=0.05)
    assert states["waiting"]["sm_clock_mhz"] == 1980
    assert states["loaded"]["power_capped_ratio"] > 0.9
    assert gpu["not_measured"] == []
    assert document["kept"].startswith("not kept by a daemon: ")


def test_the_daemon_keeps_what_was_measured_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement_report, "Durations", lambda: SHORTEST)
    with running_daemon(tmp_path) as daemon:
        monkeypatch.setenv("GPUENERGYD_SOCKET", str(daemon.socket_path))

        run(["doctor", "--measure"])

        text = capsys.readouterr().out
        (before,) = daemon.status()["measured_gpus"]
        daemon.stop()
        daemon.start()
        (after,) = daemon.status()["measured_gpus"]

    assert "the daemon keeps these measurements" in text
    assert "A100-SXM4-80GB (simulated)" in text
    assert before == after
    assert [state["name"] for state in after["states"]][:2] == ["idle", WAITING]


def test_a_gpu_that_others_use_is_only_watched(nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_report, "Durations", lambda: SHORTEST)
    monkeypatch.setenv("GPUENERGYD_DRIVER", "nvml")
    nvml_world.simulated.attach_process(nvml_world.gpus[0], os.getpid())
    for name in ("nvmlDeviceGetTotalEnergyConsumption", "field_83"):
        nvml_world.control.inject(name, 3)

    (gpu,), _ = measurement_report.measure_host(None, None)

    assert [state.name for state in gpu.states] == ["in use"]
    assert "energy" not in {call.name for call in gpu.calls}
    assert gpu.not_measured == ("power of an idle GPU and under loads, since 1 process computed on it",)


def test_the_counter_of_a_gpu_without_one_is_not_timed(nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_report, "Durations", lambda: SHORTEST)
    monkeypatch.setenv("GPUENERGYD_DRIVER", "nvml")
    for function in ("nvmlDeviceGetTotalEnergyConsumption", "field_83"):
        nvml_world.control.inject(function, pynvml.NVML_ERROR_NOT_SUPPORTED)

    (gpu,), _ = measurement_report.measure_host(None, None)

    assert ENERGY not in {call.name for call in gpu.calls}
    assert gpu.states[0].power_w is not None


class EndedLoad:
    """A load that is found to have failed when it ends."""

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[dict[str, float]]:
        yield {"run_ahead_s": 0.034, "step_s": 0.017}
        raise DriverError(f"nothing computed on {gpu_uuid}")


def test_a_load_that_fails_while_it_is_watched_has_no_figures(
    nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_LEARNING_LIMIT_S", 0.0)

    (gpu,) = measure_gpus(nvml_world.simulated, {LOADED: EndedLoad}, SHORTEST, lambda _: None)

    assert [state.name for state in gpu.states] == [IDLE]
    assert (gpu.run_ahead_s, gpu.step_s) == (None, None)
    assert gpu.not_measured == (f"loaded: nothing computed on {nvml_world.gpus[0]}",)


def test_a_host_without_a_driver_is_diagnosed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUENERGYD_DRIVER", "simulated")
    monkeypatch.setenv("GPUENERGYD_WORLD_PATH", str(tmp_path / "no-world"))

    assert run(["doctor", "--measure", "--json"]) == EXIT_DEGRADED

    document = json.loads(capsys.readouterr().out)
    assert (document["measured"], document["kept"][:14]) == ([], "not measured: ")
