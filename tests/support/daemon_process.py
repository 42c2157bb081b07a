"""A real daemon with a real GPU worker and simulated GPUs, which tests may query and kill."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.fork_server import SERVER, ForkedProcess
from tests.support.processes import child_pids
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
_DAEMON, _TRAINER = "tests.support.daemon_main", "tests.support.fake_trainer"
_RUN_DAEMON = f"import sys; from {_DAEMON} import main; sys.exit(main(sys.argv[1:]))"
"""For what a daemon does within a second on an idle machine."""
AnyProcess = subprocess.Popen[bytes] | ForkedProcess


@dataclass(slots=True)
class DaemonProcess:
    """A daemon in its own folder."""

    folder: Path
    num_gpus: int = 4
    overrides: dict[str, Any] = field(default_factory=dict)
    process: AnyProcess | None = None
    python: str = sys.executable
    """Interpreter, and hence environment, of the daemon."""
    prologue: str = ""
    """Python code that runs first in the daemon's process, such as a benchmark's instruments."""
    launcher: tuple[str, ...] = ()
    """Command prefix, for example to enter a network namespace."""
    kind: WorldKind = WorldKind.UNKIND
    """Behavior of the simulated GPUs."""
    model: str = "a100-sxm"
    """Of the simulated GPUs."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.world_path.exists():
            SimulatedHost.create(self.world_path, [self.model] * self.num_gpus, seed=7, kind=self.kind).close()

    @property
    def world_path(self) -> Path:
        """The simulated GPUs."""
        return self.folder / "world"

    @property
    def socket_path(self) -> Path:
        return self.folder / "run" / "gpuenergyd.sock"

    @property
    def clock_socket_path(self) -> Path:
        return self.folder / "run" / "clock.sock"

    @property
    def journal_path(self) -> Path:
        return self.folder / "run" / "journal.json"

    @property
    def database_path(self) -> Path:
        return self.folder / "state" / "history.sqlite3"

    @property
    def log(self) -> str:
        """Log output of the daemon and its children so far."""
        return (self.folder / "log").read_text(encoding="utf-8")

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self.process is not None
        return self.process.pid

    def launch(self) -> AnyProcess:
        """Start the daemon without waiting for it; forked where nothing of its command is replaced."""
        settings = {
            "driver": "simulated",
            "world_path": str(self.world_path),
            "runtime_dir": str(self.folder / "run"),
            "state_dir": str(self.folder / "state"),
            "sample_period_s": 0.02,
            "warmup_iterations": 1,
            "baseline_iterations": 3,
            "history_reserve_bytes": 0,
            **self.overrides,
        }
        log_path, arguments = self.folder / "log", [json.dumps(settings)]
        if not (self.launcher or self.prologue) and self.python == sys.executable:
            return SERVER.fork(_DAEMON, arguments, log=log_path)
        with log_path.open("ab") as log:
            command = [*self.launcher, self.python, "-c", f"{self.prologue}\n{_RUN_DAEMON}", *arguments]
            return subprocess.Popen(command, stderr=log, stdout=log, cwd=ROOT)

    def start(self) -> "DaemonProcess":
        """Start the daemon and wait until it replies."""
        self.process = self.launch()
        try:
            wait_until(self.is_ready)
        except AssertionError:
            self.stop()
            raise AssertionError(f"the daemon did not start:\n{self.log}") from None
        return self

    def is_ready(self) -> bool:
        """Return whether the daemon replies and has a GPU worker."""
        assert self.process is not None
        assert self.process.poll() is None, f"the daemon ended:\n{self.log}"
        with contextlib.suppress(GpuEnergyError):
            return bool(self.status()["worker"]["is_alive"])
        return False

    def client(self) -> DaemonClient:
        return DaemonClient(str(self.socket_path), limit_s=LIMIT_S)

    def status(self) -> dict[str, Any]:
        client = self.client()
        try:
            return client.get_status()
        finally:
            client.close()

    def job(self) -> dict[str, Any] | None:
        """Return the only job, None if there is none."""
        jobs: list[dict[str, Any]] = self.status()["jobs"]
        return jobs[0] if jobs else None

    def wait_for_phase(self, *phases: str, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait until the job is in one of these phases and return it."""
        wait_until(lambda: (job := self.job()) is not None and job["phase"] in phases, timeout_s)
        job = self.job()
        assert job is not None
        return job

    def stop(self) -> int:
        """Stop the daemon gracefully; return its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(LIMIT_S)
            raise

    # --- the simulated GPUs ---

    def locks_mhz(self) -> list[int | None]:
        """Return the clock lock of every GPU, None if unlocked."""
        host = SimulatedHost.open(self.world_path)
        try:
            return [host.locked_sm_clock_mhz(identity.gpu_uuid) for identity in host.identities()]
        finally:
            host.close()

    def is_lowered(self) -> bool:
        """Return whether any GPU is locked below its maximum."""
        return any(lock is not None and lock < 1410 for lock in self.locks_mhz())

    def is_as_found(self) -> bool:
        """Return whether no GPU has a lock."""
        return all(lock is None for lock in self.locks_mhz())

    def trainer(self, *, iterations: int, arguments: Sequence[str] = ()) -> "Training":
        """Start a fake training run."""
        last_when = Path(tempfile.mkdtemp(dir=self.folder)) / "enough"
        options = ["--socket", str(self.socket_path), "--world", str(self.world_path)]
        options += ["--iterations", str(iterations), "--last-when", str(last_when), *arguments]
        return Training(SERVER.fork(_TRAINER, options, is_session_leader=True), last_when)


@dataclass(slots=True)
class Training:
    """A fake training run: a launcher and one process per rank, in their own session."""

    process: ForkedProcess
    last_when: Path
    """When this file exists, the next iteration is the last."""

    def finish(self, timeout_s: float = LIMIT_S) -> int:
        """End the run gracefully; return the exit status."""
        self.last_when.touch()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> int:
        """Return the exit status."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Kill the run and wait until every rank is gone, since ranks outlive the launcher briefly."""
        ranks = child_pids(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        for rank in ranks:
            wait_for_death(rank)


@contextmanager
def running_daemon(
    folder: Path,
    *,
    prologue: str = "",
    kind: WorldKind = WorldKind.UNKIND,
    gpu_model: str = "a100-sxm",
    **overrides: Any,
) -> Iterator[DaemonProcess]:
    """Run a daemon for the duration of a block."""
    daemon = DaemonProcess(folder, overrides=overrides, prologue=prologue, kind=kind, model=gpu_model).start()
    try:
        yield daemon
    finally:
        daemon.stop()


@contextmanager
def training(daemon: DaemonProcess, *, iterations: int = 100_000, arguments: Sequence[str] = ()) -> Iterator[Training]:
    """Run a fake training for the duration of a block."""
    run = daemon.trainer(iterations=iterations, arguments=arguments)
    try:
        yield run
    finally:
        run.kill()


def wait_for_death(pid: int, timeout_s: float = LIMIT_S) -> None:
    """Wait until a process has ended, which need not be a child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([pidfd], [], [], timeout_s)
        assert readable, f"process {pid} did not end within {timeout_s} s"
    finally:
        os.close(pidfd)
