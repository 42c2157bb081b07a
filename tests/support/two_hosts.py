"""Two simulated hosts: a network namespace, a daemon and four simulated GPUs each, and one training run over both."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuenergyd.errors import GpuEnergyError
from tests.support.daemon_process import ROOT, DaemonProcess, wait_for_death
from tests.support.host_trainer import NUM_REPLICAS, NUM_STAGES, create_progress, read_progress
from tests.support.waiting import wait_until

_PORT = 29_541
NUM_RANKS = NUM_STAGES * NUM_REPLICAS


class NoNetworkNamespaceError(Exception):
    """This host lets nobody make network namespaces."""


@dataclass(slots=True)
class TwoHosts:
    """Two hosts joined by one link; `start_training` runs PP 4 x DP 2 over both."""

    folder: Path
    overrides: dict[str, Any] = field(default_factory=dict)
    daemons: list[DaemonProcess] = field(default_factory=list)
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    num_runs: int = 0
    _names: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        self._names = (f"ged{os.getpid()}a", f"ged{os.getpid()}b")
        _run("ip", "netns", "add", self._names[0])
        _run("ip", "netns", "add", self._names[1])
        _run(
            "ip", "link", "add", "hop", "netns", self._names[0], "type", "veth", "peer", "hop", "netns", self._names[1]
        )
        for host, name in enumerate(self._names):
            _run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "hop")
            _run("ip", "-n", name, "link", "set", "hop", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            launcher = ("ip", "netns", "exec", name)
            self.daemons.append(DaemonProcess(self.run_folder / f"host{host}", 4, self.overrides, launcher=launcher))

    @property
    def addresses(self) -> tuple[str, str]:
        """The hosts' addresses on the link between them."""
        return "10.77.0.1", "10.77.0.2"

    @property
    def run_folder(self) -> Path:
        """Where all of it lives."""
        return self.folder

    def start_daemons(self) -> None:
        """Start both daemons at once."""
        for daemon in self.daemons:
            daemon.process = daemon.launch()
        for daemon in self.daemons:
            wait_until(daemon.is_ready, 60)

    def start_training(self, *, is_managed: bool = True, **changes: Any) -> None:
        """Start all eight ranks on both hosts."""
        self.num_runs += 1
        create_progress(self.progress_path)
        config_path = self.folder / "config.json"
        config = {"folder": str(self.folder), "addresses": self.addresses, "port": _PORT, "is_managed": is_managed}
        config_path.write_text(json.dumps({**config, **changes}))
        for host, name in enumerate(self._names):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.support.host_trainer"]
            with (self.folder / f"training{host}.log").open("ab") as log:
                process = subprocess.Popen(
                    [*command, str(config_path), str(host)], cwd=ROOT, stderr=log, stdout=log, start_new_session=True
                )
            self.launchers.append(process)

    @property
    def progress_path(self) -> Path:
        """Where the ranks note how far they are."""
        return self.folder / "progress"

    def pids(self) -> list[int]:
        """Return the pid of every rank; 0 before its first iteration has ended."""
        return [pid for pid, _ in read_progress(self.progress_path)]

    def iterations(self) -> list[int]:
        """Return how many iterations every rank has ended."""
        return [ended for _, ended in read_progress(self.progress_path)]

    def wait_for_progress(self, num_iterations: int = 3, timeout_s: float = 60.0) -> None:
        """Return once every rank has ended so many further iterations."""
        before = self.iterations()
        wait_until(
            lambda: all(now >= then + num_iterations for now, then in zip(self.iterations(), before, strict=True)),
            timeout_s,
        )

    def lowered(self) -> list[int]:
        """Return how many GPUs of each host are locked below their maximum."""
        return [sum(lock is not None and lock < 1410 for lock in daemon.locks_mhz()) for daemon in self.daemons]

    def is_as_found(self) -> bool:
        """Return whether no GPU of any host has a lock."""
        return all(daemon.is_as_found() for daemon in self.daemons)

    def pipelines(self) -> list[dict[str, Any]]:
        """Return what the leading host says of the pipelines across hosts."""
        try:
            jobs = self.daemons[0].status()["jobs"]
        except GpuEnergyError:
            return []
        return [job["pipeline"] for job in jobs if job["pipeline"] is not None]

    def set_link(self, state: str) -> None:
        """Cut the link between the hosts (`down`), or mend it (`up`)."""
        _run("ip", "-n", self._names[0], "link", "set", "hop", state)

    def end_training(self, timeout_s: float = 60.0) -> list[int]:
        """Let the run end in order and return the launchers' exit statuses."""
        (self.folder / "enough").touch()
        return self.wait_for_end(timeout_s)

    def wait_for_end(self, timeout_s: float = 60.0) -> list[int]:
        """Return the launchers' exit statuses once both have ended."""
        statuses = [launcher.wait(timeout_s) for launcher in self.launchers]
        self.launchers.clear()
        (self.folder / "enough").unlink(missing_ok=True)
        return statuses

    def kill_training(self) -> None:
        """End all ranks at once."""
        pids = [pid for pid in self.pids() if pid] if self.progress_path.exists() else []
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait(10)
        self.launchers.clear()
        for pid in pids:
            wait_for_death(pid)

    def close(self) -> None:
        """End everything and remove the namespaces."""
        self.kill_training()
        for daemon in self.daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.stop()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def two_hosts(folder: Path, **overrides: Any) -> Iterator[TwoHosts]:
    """Run two hosts for the length of a block.

    Raises:
        NoNetworkNamespaceError: not allowed here, or no `ip` command.
    """
    hosts = TwoHosts(folder, overrides)
    try:
        hosts.start_daemons()
        yield hosts
    finally:
        hosts.close()


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        raise NoNetworkNamespaceError(f"{' '.join(command)}: {said.decode().strip() or error}") from None
