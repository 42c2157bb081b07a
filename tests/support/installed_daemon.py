"""The daemon run by its installed systemd units, on a separate host with simulated GPUs."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_install.installation import apply_steps, plan_install
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.systemd_host import INSTALLED, SystemdHost, systemd_host
from tests.support.waiting import LIMIT_S, wait_until

CORE, WORKER = "gpuenergyd.service", "gpuenergyd-gpu.service"
SOCKETS = ("gpuenergyd.socket", "gpuenergyd-gpu.socket", "gpuenergyd-policy.socket")
_CONFIG = """
driver = "simulated"
world_path = "/mnt/world"
sample_period_s = 0.02
warmup_iterations = 1
baseline_iterations = 3
keep_on_restart_s = 60
carbon_zone = "XX"
carbon_source = "fixed"
carbon_fixed_g_per_kwh = 321.0
"""
_POLICY = {
    "always_low.py": """
from dataclasses import replace

from gpuenergyd.core.pipeline.plan import PlanPurpose, full_speed_plan


class AlwaysLow:
    def next_plan(self, view):
        plan = full_speed_plan("always-low", view.schedule, [(990,)] * len(view.gpus), reason="always low")
        return replace(plan, purpose=PlanPurpose.TUNED)
""",
    "always_low-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: always-low\nVersion: 1.0\n",
    "always_low-1.0.dist-info/entry_points.txt": "[gpuenergyd.policies]\nalways-low = always_low:AlwaysLow\n",
}
"""A fixed plan, far within the permitted slowdown: load on the machine must not change the clocks of a test."""
_EARLY = "[Unit]\nDefaultDependencies=no\n"
"""Nothing else boots on this host."""


@dataclass(slots=True)
class InstalledDaemon:
    """Units, their processes, and the GPUs they control."""

    host: SystemdHost
    world: SimulatedHost
    num_gpus: int

    def client(self) -> DaemonClient:
        """Return a connection to the daemon through the host's root folder."""
        return DaemonClient(f"/proc/{self.host.init_pid}/root/run/gpuenergyd/gpuenergyd.sock")

    @property
    def log(self) -> str:
        """Log output of the services so far."""
        return (self.host.shared / "log").read_text(encoding="utf-8")

    def status(self) -> dict[str, Any]:
        client = self.client()
        try:
            return client.get_status()
        finally:
            client.close()

    def job(self) -> dict[str, Any] | None:
        """Return the only job, None if there is none."""
        with contextlib.suppress(GpuEnergyError):
            jobs: list[dict[str, Any]] = self.status()["jobs"]
            return jobs[0] if jobs else None
        return None

    def is_ready(self) -> bool:
        """Return whether the daemon replies and has a GPU worker."""
        with contextlib.suppress(GpuEnergyError):
            return bool(self.status()["worker"]["is_alive"])
        return False

    def locks_mhz(self) -> list[int | None]:
        """Return the clock lock of every GPU, None if unlocked."""
        return [self.world.locked_sm_clock_mhz(identity.gpu_uuid) for identity in self.world.identities()]

    def is_lowered(self) -> bool:
        """Return whether every GPU is locked below its maximum."""
        return all(lock is not None and lock < 1410 for lock in self.locks_mhz())

    def is_as_found(self) -> bool:
        """Return whether no GPU has a lock."""
        return all(lock is None for lock in self.locks_mhz())

    def seconds_until_restored(self, since_ns: int, limit_s: float = LIMIT_S) -> float:
        """Wait until every GPU is restored; return the time since an instant."""
        wait_until(self.is_as_found, limit_s)
        return (time.monotonic_ns() - since_ns) / 1e9

    def kill(self, unit: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a unit's main process; return the instant before it."""
        return self.host.signal(unit, number)

    @contextmanager
    def training(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a fake training on the host for the duration of a block."""
        command = self.host.command(
            *("sh", "-c", 'cd /opt/tree && exec "$@"', "-", str(INSTALLED / "bin/python"), "-m"),
            *("tests.support.fake_trainer", "--socket", "/run/gpuenergyd/gpuenergyd.sock", "--world", "/mnt/world"),
            *("--iterations", "1000000", "--ranks", str(self.num_gpus), *arguments),
        )
        with (self.host.folder / "training").open("ab") as log:
            process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait(LIMIT_S)
            self.host.run("sh", "-c", "pkill -KILL -f '[t]ests.support.fake_trainer' || true")

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Train until a job's clocks are lowered, and for the duration of a block."""
        with self.training("--policy", "always-low", "--max-slowdown", "1"):
            wait_until(self.is_lowered)
            yield


@contextmanager
def installed_daemon(folder: Path, *, num_gpus: int = 2, watchdog_s: float | None = None) -> Iterator[InstalledDaemon]:
    """Boot a host with the daemon's units installed and running; the watchdog timeouts can be set."""
    root = folder / "image"
    root.mkdir()
    apply_steps(plan_install(root, INSTALLED / "bin" / "python", replaces_changed=False))
    etc = root / "etc"
    units: dict[str, str] = {}
    for name in (path.name for path in (etc / "systemd" / "system").iterdir()):
        sandbox = "[Service]\nReadWritePaths=/mnt\nStandardError=append:/mnt/log\n" if name.endswith(".service") else ""
        watchdog = f"WatchdogSec={watchdog_s:g}\n" if watchdog_s and name in {CORE, WORKER} else ""
        units[f"{name}.d/test.conf"] = _EARLY + sandbox + watchdog
    config = etc / "gpuenergyd" / "config.toml"
    config.write_text(
        config.read_text(encoding="utf-8").replace('mode = "observe"', 'mode = "control"'), encoding="utf-8"
    )
    with config.open("a", encoding="utf-8") as file:
        file.write(_CONFIG)
    with systemd_host(folder / "host", units=units, etc=etc, site=_POLICY) as host:
        world_path = host.shared / "world"
        SimulatedHost.create(world_path, ["a100-sxm"] * num_gpus, seed=7, kind=WorldKind.UNKIND).close()
        world_path.chmod(0o666)
        world = SimulatedHost.open(world_path)
        host.systemctl("start", *SOCKETS, CORE)
        daemon = InstalledDaemon(host, world, num_gpus)
        try:
            wait_until(daemon.is_ready)
            yield daemon
        finally:
            world.close()
