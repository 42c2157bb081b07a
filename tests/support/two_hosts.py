"""Two simulated hosts: a network namespace, a daemon and four simulated GPUs each, and one training run across both."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpuenergyd.errors import GpuEnergyError
from tests.support.daemon_process import ROOT, DaemonProcess, wait_for_death
from tests.support.host_trainer import (
    DAEMON_PRIORITY,
    NUM_REPLICAS,
    NUM_STAGES,
    STAGES_PER_HOST,
    Done,
    RunConfig,
    create_progress,
    read_done,
    read_progress,
)
from tests.support.processes import task_ids
from tests.support.waiting import LIMIT_S, wait_until

_PORT = 29_541
_POLL_S = 0.2
"""Interval between status requests, since the daemons share two cores."""
_SOON, _NEVER = 2, 2**31
"""First iteration of a slowdown, ahead of every rank; and an iteration that is never reached."""
NUM_RANKS = NUM_STAGES * NUM_REPLICAS


class NoNetworkNamespaceError(Exception):
    """Network namespaces cannot be created on this host."""


@dataclass(slots=True)
class TwoHosts:
    """Two hosts connected by one link; `start_training` runs PP 4 x DP 2 across both."""

    folder: Path
    overrides: dict[str, Any] = field(default_factory=dict)
    daemons: list[DaemonProcess] = field(default_factory=list)
    launcher: subprocess.Popen[bytes] | None = None
    config: RunConfig = field(init=False)
    """Directory of the latest training."""
    names: tuple[str, str] = ("", "")
    """Names of their network namespaces."""

    def __post_init__(self) -> None:
        self.names = (f"ged{os.getpid()}a", f"ged{os.getpid()}b")
        _run("ip", "netns", "add", self.names[0])
        _run("ip", "netns", "add", self.names[1])
        _run("ip", "link", "add", "hop", "netns", self.names[0], "type", "veth", "peer", "hop", "netns", self.names[1])
        for host, name in enumerate(self.names):
            _run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "hop")
            _run("ip", "-n", name, "link", "set", "hop", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            launcher = ("ip", "netns", "exec", name)
            overrides = {**self.overrides, "host_name": f"host{host}"}
            self.daemons.append(DaemonProcess(self.run_folder / f"host{host}", 4, overrides, launcher=launcher))

    @property
    def addresses(self) -> tuple[str, str]:
        """The hosts' addresses on the link between them."""
        return "10.77.0.1", "10.77.0.2"

    @property
    def run_folder(self) -> Path:
        return self.folder

    def start_daemons(self) -> None:
        """Start both daemons at once."""
        for daemon in self.daemons:
            daemon.process = daemon.launch()
        for daemon in self.daemons:
            wait_until(daemon.is_ready)
            _prefer(daemon)

    def kill_daemon(self, host: int) -> None:
        """Kill a host's daemon; its GPU worker outlives it briefly."""
        daemon = self.daemons[host]
        assert daemon.process is not None
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.wait(LIMIT_S)

    def start_daemon(self, host: int) -> None:
        """Start a host's daemon again."""
        _prefer(self.daemons[host].start())

    def start_training(self, *, is_managed: bool = True, **changes: Any) -> None:
        """Start all eight ranks on both hosts."""
        create_progress(self.progress_path)
        config_path = self.folder / "config.json"
        self.statuses_path.unlink(missing_ok=True)
        self.config = RunConfig(str(self.folder), self.addresses, self.names, _PORT, is_managed, **changes)
        config_path.write_text(json.dumps(asdict(self.config)))
        with (self.folder / "training.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.support.host_trainer", str(config_path)]
            self.launcher = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log, start_new_session=True)

    @property
    def progress_path(self) -> Path:
        """File with the progress of all ranks."""
        return self.folder / "progress"

    def pids(self) -> list[int]:
        """Return the pid of every rank, 0 before its first iteration has ended."""
        return [pid for pid, _ in read_progress(self.progress_path)]

    def iterations(self) -> list[int]:
        """Return the number of iterations that every rank has completed."""
        return [ended for _, ended in read_progress(self.progress_path)]

    def wait_for_progress(self, num_iterations: int = 3, timeout_s: float = LIMIT_S) -> None:
        """Wait until every rank has completed this many further iterations."""
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

    def plans_in_force(self) -> list[set[str]]:
        """Return the tuned plans that each replica's ranks follow, from their daemons; "none" for no plan."""
        found: list[set[str]] = [set() for _ in range(NUM_REPLICAS)]
        num_parts = 0
        for host, daemon in enumerate(self.daemons):
            try:
                status = daemon.status()
            except GpuEnergyError:
                continue
            index_of = {gpu["gpu_uuid"]: gpu["index"] for gpu in status["gpus"]}
            for job in status["jobs"]:
                if job["ranks"]:
                    first_gpu = index_of[job["ranks"][0]["gpu_uuid"]]
                    replica = host if self.config.are_replicas_whole else first_gpu // STAGES_PER_HOST
                    is_followed = job["plan_purpose"] == "tuned" and job["num_iterations_of_plan"] > 1
                    found[replica].add(job["plan_id"] if is_followed else "none")
                    num_parts += 1
        expected = NUM_REPLICAS if self.config.are_replicas_whole else NUM_RANKS
        return found if num_parts == expected else [{"none"}]

    def is_planned(self) -> bool:
        """Return whether all ranks of each replica follow one tuned plan, and GPUs of both hosts are slowed down."""
        one_each = all(len(plans) == 1 and "none" not in plans for plans in self.plans_in_force())
        return one_each and all(self.lowered())

    def wait_for_plan(self, timeout_s: float) -> None:
        """Wait until all ranks of each replica follow one tuned plan, and GPUs of both hosts are slowed down."""
        wait_until(self.is_planned, timeout_s)

    def pipelines(self) -> list[dict[str, Any]]:
        """Return the leading host's status of the pipelines across hosts."""
        try:
            jobs = self.daemons[0].status()["jobs"]
        except GpuEnergyError:
            return []
        return [job["pipeline"] for job in jobs if job["pipeline"] is not None]

    def set_straggler(self, ratio: float | None) -> None:
        """Slow replica 1 down by a factor from an iteration soon on, or back to normal."""
        path, soon = self.config.straggle_path, max(self.iterations()) + _SOON
        values = (ratio, soon, _NEVER) if ratio is not None else (*json.loads(path.read_text())[:2], soon)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(values))
        new.replace(path)

    def replica(self, dp_rank: int) -> dict[str, Any] | None:
        """Return the status of a replica across hosts, None if there is none."""
        daemon = self.daemons[self.config.host_of(dp_rank, 0)]
        try:
            status = daemon.status()
        except GpuEnergyError:
            return None
        first_gpu = status["gpus"][self.config.gpu_index(dp_rank, 0)]["gpu_uuid"]
        for job in status["jobs"]:
            if job["ranks"] and job["ranks"][0]["gpu_uuid"] == first_gpu:
                whole: dict[str, Any] | None = job if self.config.are_replicas_whole else job["pipeline"]
                return whole
        return None

    def done(self, dp_rank: int) -> list[list[Done]]:
        """Return the iteration records of each rank of a replica."""
        return [read_done(self.config.done_path(dp_rank, pp_rank)) for pp_rank in range(NUM_STAGES)]

    def set_link(self, state: str) -> None:
        """Cut the link between the hosts (`down`) or restore it (`up`)."""
        _run("ip", "-n", self.names[0], "link", "set", "hop", state)

    @property
    def statuses_path(self) -> Path:
        """File with both hosts' exit statuses."""
        return self.folder / "statuses.json"

    def wait_for_end(self, timeout_s: float = LIMIT_S) -> list[int]:
        """Wait until all ranks have ended and return both hosts' exit statuses."""
        assert self.launcher is not None
        self.launcher.wait(timeout_s)
        self.launcher = None
        (self.folder / "enough").unlink(missing_ok=True)
        statuses: list[int] = json.loads(self.statuses_path.read_text())
        return statuses

    def kill_training(self) -> None:
        pids = [pid for pid in self.pids() if pid] if self.progress_path.exists() else []
        if self.launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait(LIMIT_S)
            self.launcher = None
        for pid in pids:
            wait_for_death(pid)

    def close(self) -> None:
        """Stop everything and remove the namespaces."""
        self.kill_training()
        for daemon in self.daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.stop()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _prefer(daemon: DaemonProcess) -> None:
    """Give a daemon real-time priority: a real host does not share its cores with this machine's other work."""
    status = daemon.status()
    for pid in (daemon.pid, status["worker"]["pid"], status["policy_host"]["pid"]):
        for task in task_ids(pid):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(task, os.SCHED_RR, os.sched_param(DAEMON_PRIORITY))


@contextmanager
def two_hosts(folder: Path, **overrides: Any) -> Iterator[TwoHosts]:
    """Run two hosts during a block; raise NoNetworkNamespaceError if that is not permitted, or without `ip`."""
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
        output = getattr(error, "stderr", b"") or b""
        raise NoNetworkNamespaceError(f"{' '.join(command)}: {output.decode().strip() or error}") from None
