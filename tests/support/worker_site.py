"""A folder with simulated GPUs and real GPU workers, and the daemon's end of the link to them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.gpu.link.client import LinkEvent, WorkerLost
from gpuenergyd.gpu.link.messages import (
    ClockChangeReport,
    GpuHealth,
    GpuHealthChange,
    GpuSample,
    GpuSettingsRead,
    LeaseOwner,
    Samples,
)
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.restore.policy import RestoreRules
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.waiting import LIMIT_S
from tests.support.worker_link import WorkerLink

ARE_LINES_COUNTED = "COVERAGE_PROCESS_CONFIG" in os.environ
"""Whether `make coverage` runs the tests; only then are workers given the time to end in order."""
END_LIMIT_S = 5.0
OWNER = LeaseOwner("job-1", os.getpid(), os.getuid())


@dataclass(slots=True)
class Received:
    """What the worker sent on one link: a listener that records it."""

    samples: list[GpuSample] = field(default_factory=list)
    clock_changes: list[ClockChangeReport] = field(default_factory=list)
    health_changes: list[GpuHealthChange] = field(default_factory=list)
    settings_read: list[GpuSettingsRead] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __call__(self, event: LinkEvent) -> None:
        match event:
            case Samples():
                self.samples.extend(event.samples)
            case ClockChangeReport():
                self.clock_changes.append(event)
            case GpuHealthChange():
                self.health_changes.append(event)
            case GpuSettingsRead():
                self.settings_read.append(event)
            case WorkerLost():
                self.lost.append(event.reason)

    def health(self, gpu_uuid: str) -> GpuHealth:
        return next((c.health for c in reversed(self.health_changes) if c.gpu_uuid == gpu_uuid), GpuHealth.OK)


@dataclass(slots=True)
class Site:
    """A folder with simulated GPUs, a journal and a socket, and the workers started in it."""

    folder: Path
    host: SimulatedHost
    driver: str = "simulated"
    environment: Mapping[str, str] | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    received: Received = field(default_factory=Received)
    """What the worker sent on the last link."""
    program: Sequence[str] = ("-m", "gpuenergyd.gpu.worker.main")
    """Runs the worker, as arguments of Python."""
    driver_path: Path | None = None
    """The commands file of the command driver; other drivers open the world of the simulated GPUs."""

    @property
    def gpus(self) -> list[str]:
        """The GPUs' UUIDs in order of their index."""
        return [i.gpu_uuid for i in self.host.identities()]

    def locks(self) -> list[int | None]:
        """The clock locks installed now."""
        return [self.host.locked_sm_clock_mhz(g) for g in self.gpus]

    def journalled(self) -> set[str]:
        """The GPUs in the journal on disk."""
        return {e.gpu_uuid for e in Journal(self.folder / "journal.json").read().entries}

    def start_worker(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a worker as the daemon does."""
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", *self.program),
                *("--link", str(self.folder / "link.sock")),
                *("--journal", str(self.folder / "journal.json")),
                *("--driver", self.driver, "--world", str(self.driver_path or self.host.path), *options),
            ],
            env=self.environment,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    async def lower_all(self, link: WorkerLink) -> None:
        """Lease all GPUs, and wait until each has a lock at 900 MHz."""
        await link.lease("L1", self.gpus, OWNER)
        for gpu in self.gpus:
            request_clock(link, gpu, 900)
        await until(lambda: self.locks() == [900] * len(self.gpus))

    def kill(self, worker: subprocess.Popen[bytes], link: WorkerLink) -> None:
        """Kill a worker and its restore sentinel: no process is left that restores."""
        os.kill(link.welcome.sentinel_pid, signal.SIGKILL)
        worker.kill()

    def end_workers(self) -> None:
        """Kill running workers; where lines are counted, terminate them first, since a killed one loses its counts."""
        for process in self.processes:
            if ARE_LINES_COUNTED:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=END_LIMIT_S)
            process.kill()
            process.communicate()

    async def connect(
        self, worker_pid: int | None = None, rules: RestoreRules | None = None, token: str = ""
    ) -> WorkerLink:
        """Connect as the daemon does, to any worker or to this one."""
        self.received = Received()
        return await WorkerLink.connect(
            self.folder / "link.sock", self.received, rules=rules, timeout_s=20.0, token=token, worker_pid=worker_pid
        )

    @contextlib.asynccontextmanager
    async def linked(
        self, rules: RestoreRules | None = None, *, token: str = ""
    ) -> AsyncIterator[tuple[WorkerLink, Received]]:
        """Connect as the daemon does."""
        link = await self.connect(rules=rules, token=token)
        try:
            yield link, self.received
        finally:
            await link.close()


@contextlib.contextmanager
def simulated_site(folder: Path, num_gpus: int, model: str = "a100-sxm") -> Iterator[Site]:
    """Yield that many simulated GPUs held by this process; workers are ended afterwards."""
    host = SimulatedHost.create(folder / "world", [model] * num_gpus, seed=2)
    for identity in host.identities():
        host.attach_process(identity.gpu_uuid, os.getpid())
    made = Site(folder, host)
    try:
        yield made
    finally:
        made.end_workers()
        host.close()


def with_worker(test: Callable[[Site, WorkerLink], Awaitable[None]]) -> Callable[[Site], Coroutine[None, None, None]]:
    """Give a test with the fixture `site` a started worker and a link to it."""

    async def test_with_worker(site: Site) -> None:
        site.start_worker()
        async with site.linked() as (link, _):
            await test(site, link)

    test_with_worker.__name__ = test.__name__
    test_with_worker.__doc__ = test.__doc__
    return test_with_worker


async def until(predicate: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
    """Wait until the predicate holds while the event loop runs."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        await asyncio.sleep(0.002)


def run(main: Awaitable[None]) -> None:
    """Run the coroutine of a test, and end it if it hangs."""

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main

    asyncio.run(bounded())


def request_clock(link: WorkerLink, gpu_uuid: str, sm_clock_mhz: int) -> None:
    link.request_clock(gpu_uuid, ClockRequest(sm_clock_mhz, time.monotonic_ns()))
