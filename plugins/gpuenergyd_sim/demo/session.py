"""Runs a demo: starts a private daemon, trains under it until enough planned iterations have run, stops both.

The same code runs in real time, with separate processes, and in virtual time, with everything in one process.
"""

import math
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_sim.demo.request import DemoRequest
from gpuenergyd_sim.private_daemon.daemon import forget_settings, wait_for_daemon

if TYPE_CHECKING:
    from gpuenergyd.client.connection import DaemonClient
    from gpuenergyd.daemon.settings import Settings

JOB_NAME = "demo-gpt"
FAKE_NVML_VARIABLE = "GPUENERGYD_FAKE_NVML_WORLD"
"""Variable with the folder of the simulated GPUs behind a fake NVML library, such as that of the tests."""
_STATUS_PERIOD_S = 0.5
_END_TIMEOUT_S = 10.0
_RESTORE_LIMIT_S = 60.0


class SessionHost(Protocol):
    """The host on which the demo's processes run."""

    def start_daemon(self, settings: "Settings", config: Path) -> None:
        """Start the daemon; `settings` result from the configuration file and the demo's options."""
        ...

    def start_training(self, arguments: list[str], variables: Mapping[str, str]) -> None:
        """Start the training program, `gpuenergyd_sim.training.gpt`."""
        ...

    def training_step(self) -> str | None:
        """Return the training program's last message about its start, if any."""
        ...

    def has_training_ended(self) -> bool: ...

    def check(self) -> None:
        """Check that no process has failed.

        Raises:
            UsageError, GpuEnergyError: a process has failed; the message says why.
        """
        ...

    def kill_worker(self, status: Mapping[str, Any]) -> None:
        """Kill the GPU worker, whose process id is in the daemon's status."""
        ...

    def stop_training(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """The outcome of a training under the daemon."""

    reason: str
    """Why there are too few planned iterations; empty if there are enough."""
    world: Path


class Progress(Protocol):
    """Shows the demo's steps and the daemon's status."""

    def announce(self, text: str) -> None: ...

    def show(self, status: dict[str, Any]) -> None: ...


def demo_settings(request: DemoRequest, folder: Path, world: Path) -> "Settings":
    """Write the daemon's configuration file into the demo's folder, and return the settings."""
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  start fast

    forget_settings(kept={FAKE_NVML_VARIABLE})
    config = folder / "config.toml"
    config.touch()
    if request.grid is not None:
        budget = request.max_slowdown_ratio
        config.write_text(request.grid.configuration(folder, seed=request.seed, budget_ratio=budget), encoding="utf-8")
    return load_settings(
        config,
        mode="control",  # needed for GPUs behind a fake NVML library
        driver=request.driver,
        world_path=world,
        runtime_dir=folder / "run",
        state_dir=folder / "state",
        policy=request.policy,
        max_slowdown_ratio=request.max_slowdown_ratio,
        baseline_iterations=request.baseline_iterations,
    )


def run_session(request: DemoRequest, folder: Path, host: SessionHost, progress: Progress) -> SessionOutcome:
    """Train until enough planned iterations have run, and end the training; the daemon keeps running.

    Raises:
        UsageError, GpuEnergyError: daemon or training failed.
    """
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import HOURS_VARIABLE  # noqa: PLC0415

    world = open_world(request, folder)
    (folder / "tmp").mkdir()
    settings = demo_settings(request, folder, world)
    client = DaemonClient(str(settings.socket_path))
    host.start_daemon(settings, folder / "config.toml")
    wait_for_daemon(client, host.check)
    progress.announce("training a small GPT: real torch pipeline and gradients, simulated GPUs; importing torch")
    variables = {
        "GPUENERGYD_SOCKET": str(settings.socket_path),
        "TMPDIR": str(folder / "tmp"),  # torch leaves temporary folders behind
        **({HOURS_VARIABLE: str(request.grid.job_hours)} if request.grid is not None else {}),
    }
    host.start_training(
        [
            "--world", str(world),
            "--stages", str(request.num_gpus),
            "--microbatches", str(request.num_microbatches),
            "--seed", str(request.seed),
            "--job", JOB_NAME,
            *request.run_ahead_options,
        ],
        variables,
    )  # fmt: skip
    reason = _watch(request, client, host, world, progress)
    progress.announce("stopping the training")
    host.stop_training()
    _wait_for_end(client)
    client.close()
    return SessionOutcome(reason, world)


def open_world(request: DemoRequest, folder: Path) -> Path:
    """Return the folder of the simulated GPUs: a new one, or that of the fake NVML library.

    Raises:
        GpuEnergyError: NVML lists real GPUs, or too few simulated ones.
    """
    from gpuenergyd.gpu.drivers.opening import open_driver  # noqa: PLC0415  start fast
    from gpuenergyd_sim.driver.host import SimulatedHost  # noqa: PLC0415

    if request.driver == "simulated":
        world = folder / "world"
        models = [request.gpu_model] * request.num_gpus
        SimulatedHost.create(world, models, seed=request.seed, kind=request.simulation).close()
        return world
    nvml = open_driver(request.driver, None)
    shown = [identity.gpu_uuid for identity in nvml.identities()]
    nvml.close()
    simulated: list[str] = []
    if behind := os.environ.get(FAKE_NVML_VARIABLE):
        simulated_host = SimulatedHost.open(Path(behind))
        simulated = [identity.gpu_uuid for identity in simulated_host.identities()]
        simulated_host.close()
    if behind is None or shown != simulated:
        raise GpuEnergyError(
            "the demo runs on simulated GPUs only, but NVML lists real GPUs on this host; use --driver simulated"
        )
    if len(shown) < request.num_gpus:
        raise GpuEnergyError(f"--gpus {request.num_gpus}: NVML lists only {count_text(len(shown), 'simulated GPU')}")
    return Path(behind)


def check_clocks_are_restored(world: Path) -> None:
    """Check that no simulated GPU has a clock lock.

    Raises:
        GpuEnergyError: the daemon has left a clock lock behind.
    """
    if locked := _locked_gpus(world):
        raise GpuEnergyError(f"the daemon has left a clock lock on simulated GPU {', '.join(map(str, locked))}")


def _locked_gpus(world: Path) -> list[int]:
    """Return the indices of the simulated GPUs that have a clock lock."""
    from gpuenergyd_sim.driver.host import SimulatedHost  # noqa: PLC0415  start fast

    with closing(SimulatedHost.open(world)) as host:
        return [gpu.index for gpu in host.identities() if host.locked_sm_clock_mhz(gpu.gpu_uuid) is not None]


def _wait_for_end(client: "DaemonClient") -> None:
    """Wait until the end of the job is in the history, or a time limit; the daemon then finishes the job itself."""
    until = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < until:
        status = client.get_status()
        if status["ended_jobs"] and not status["store"]["num_records_waiting"]:
            return
        time.sleep(0.05)


class _WorkerFault:
    """Kills the GPU worker once, when a GPU has a clock lock, and waits until no GPU has one."""

    def __init__(self, after_s: float | None, host: SessionHost, world: Path, progress: Progress) -> None:
        self._after_s, self._host, self._world, self._progress = after_s, host, world, progress
        self._due_at = math.inf
        self._is_first = after_s is not None

    def provoke(self, status: Mapping[str, Any]) -> None:
        """Kill the worker if it is time; call this repeatedly after the job has registered.

        Raises:
            GpuEnergyError: a lock was left behind.
        """
        if self._is_first:
            self._is_first = False
            self._due_at = time.monotonic() + (self._after_s or 0.0)
        if time.monotonic() < self._due_at or not (lowered := _locked_gpus(self._world)):
            return
        self._due_at = math.inf
        self._host.kill_worker(status)
        killed_at = time.monotonic()
        while left := _locked_gpus(self._world):
            if time.monotonic() > killed_at + _RESTORE_LIMIT_S:
                raise GpuEnergyError(f"the killed GPU worker has left a clock lock on GPU {', '.join(map(str, left))}")
            time.sleep(0.01)
        after_s = time.monotonic() - killed_at
        self._progress.announce(
            f"killed the GPU worker while {count_text(len(lowered), 'GPU')} had a clock lock; none had one"
            f" {after_s:.2f} s later"
        )


def _watch(request: DemoRequest, client: "DaemonClient", host: SessionHost, world: Path, progress: Progress) -> str:
    """Show the daemon's status until enough planned iterations have run; return "", or why they never will."""
    extra_time_s = request.grid.extra_time().total_seconds() if request.grid is not None else 0.0
    until = time.monotonic() + request.time_limit_s + extra_time_s
    fault = _WorkerFault(request.kills_worker_after_s, host, world, progress)
    while True:
        host.check()
        if host.has_training_ended():
            raise GpuEnergyError("the training exited before enough planned iterations had run")
        status = client.get_status()
        job = status["jobs"][0] if status["jobs"] else None
        if job is not None:
            progress.show(status)
            fault.provoke(status)
            if request.is_finished(job):
                return ""
            if (reason := request.reason_for_no_plan(job)) is not None:
                return reason
        elif step := host.training_step():
            progress.announce(step)
        if time.monotonic() > until:
            return _late(request, job)
        time.sleep(_STATUS_PERIOD_S)


def _late(request: DemoRequest, job: Mapping[str, Any] | None) -> str:
    if job is None:
        raise GpuEnergyError(f"no job has registered within {request.time_limit_s:g} s")
    return (
        f"there were not enough planned iterations within {request.time_limit_s:g} s (--time-limit-s); phase"
        f" {job['phase']}: {job['plan_reason']}"
    )
