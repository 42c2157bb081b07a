"""Resets by commands that an idle GPU does not show: confirmed, or found out and repeated, once the GPU computes."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuenergyd.gpu.link.messages import GpuHealth
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.restore.executor import RestoreResult
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.gpu_commands import GpuCommands
from tests.support.worker_link import WorkerLink
from tests.support.worker_site import OWNER, Received, Site, request_clock
from tests.support.worker_site import until as until_within

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils")


@dataclass(slots=True)
class CommandSite(Site):
    """One simulated GPU that a worker changes by commands."""

    commands: GpuCommands | None = None

    def let_reset(self, behaviour: str) -> None:
        """Let the reset misbehave from now on."""
        assert self.commands is not None
        self.commands.let("reset", behaviour)

    def num_resets(self) -> int:
        """Return how often the reset was run."""
        assert self.commands is not None
        return self.commands.num_calls("reset")

    def compute(self) -> None:
        """Have this process compute on the GPU."""
        self.host.attach_process(self.gpus[0], os.getpid())

    def idle(self) -> None:
        """Leave the GPU idle."""
        self.host.detach_process(self.gpus[0], os.getpid())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CommandSite]:
    host = SimulatedHost.create(tmp_path / "world", ["a100-sxm"], seed=3)
    commands = GpuCommands.create(tmp_path / "commands", host.path)
    made = CommandSite(tmp_path, host, driver="command", driver_path=commands.path, commands=commands)
    yield made
    made.end_workers()
    host.close()


async def until(predicate: Callable[[], bool]) -> None:
    """Wait for what takes a few programs and some seconds under load."""
    await until_within(predicate, 60.0)


async def lower_and_reset_while_idle(site: CommandSite, link: WorkerLink, behaviour: str) -> None:
    """Have the worker lower the GPU under load, and restore it when it is idle, by a reset that may misbehave."""
    site.compute()
    await link.lease("L1", site.gpus, OWNER)
    request_clock(link, site.gpus[0], 900)
    await until(lambda: bool(site.received.clock_changes))
    assert site.locks() == [900]
    site.idle()
    site.let_reset(behaviour)

    (outcome,) = await link.restore(site.gpus, "the job ended")

    assert outcome.result is RestoreResult.UNCONFIRMED
    assert "to be confirmed once the GPU computes above 916 MHz" in outcome.detail
    assert site.journalled() == set(site.gpus)
    await until(lambda: site.received.health(site.gpus[0]) is GpuHealth.UNCONFIRMED)


@contextlib.asynccontextmanager
async def lowered_and_reset_while_idle(site: CommandSite, behaviour: str) -> AsyncIterator[tuple[WorkerLink, Received]]:
    site.start_worker()
    async with site.linked() as (link, received):
        await lower_and_reset_while_idle(site, link, behaviour)
        yield link, received


async def test_a_reset_that_had_an_effect_is_confirmed_under_load_without_another_command(site: CommandSite) -> None:
    async with lowered_and_reset_while_idle(site, "works") as (_, received):
        num_resets = site.num_resets()
        site.compute()

        await until(lambda: received.health(site.gpus[0]) is GpuHealth.OK)

        assert (site.journalled(), site.num_resets(), site.locks()) == (set(), num_resets, [None])


@pytest.mark.fault(6)
async def test_a_reset_without_effect_on_an_idle_gpu_is_repeated_when_load_comes(site: CommandSite) -> None:
    async with lowered_and_reset_while_idle(site, "lies") as (_, received):
        assert site.locks() == [900]
        site.let_reset("works")
        num_resets = site.num_resets()
        site.compute()

        await until(lambda: received.health(site.gpus[0]) is GpuHealth.OK)

        assert (site.journalled(), site.num_resets(), site.locks()) == (set(), num_resets + 1, [None])


@pytest.mark.thorough
async def test_a_reset_that_never_has_an_effect_is_named_and_retried_at_intervals(site: CommandSite) -> None:
    async with lowered_and_reset_while_idle(site, "lies") as (_, received):
        site.compute()

        await until(lambda: received.health(site.gpus[0]) is GpuHealth.UNRESTORED)

        reason = received.health_changes[-1].detail
        assert f"command reset of {site.gpus[0]} succeeded without effect: it still runs at 900 MHz" in reason
        assert site.journalled() == set(site.gpus)
        site.let_reset("works")
        await until(lambda: received.health(site.gpus[0]) is GpuHealth.OK)
        assert (site.journalled(), site.locks()) == (set(), [None])


async def test_the_next_job_is_freed_from_the_lock_of_the_last_and_keeps_its_lease(site: CommandSite) -> None:
    async with lowered_and_reset_while_idle(site, "lies") as (link, received):
        site.let_reset("works")
        await link.lease("L2", site.gpus, OWNER)
        assert site.locks() == [900]
        site.compute()

        await until(lambda: received.health(site.gpus[0]) is GpuHealth.OK)

        assert (site.journalled(), site.locks()) == (set(site.gpus), [None])
        request_clock(link, site.gpus[0], 1110)
        await until(lambda: site.locks() == [1110])
        (outcome,) = await link.restore(site.gpus, "the job ended")
        assert outcome.result is RestoreResult.RESTORED  # the GPU computes, and shows it


@pytest.mark.thorough
async def test_a_killed_workers_unconfirmed_reset_is_the_next_ones(site: CommandSite) -> None:
    worker = site.start_worker()
    async with site.linked() as (link, _):
        await lower_and_reset_while_idle(site, link, "lies")
        site.kill(worker, link)
        worker.wait()
    (outcome,) = restore(site.folder / "journal.json")
    assert outcome.result is RestoreResult.UNCONFIRMED
    site.start_worker()
    async with site.linked() as (_, received):
        await until(lambda: received.health(site.gpus[0]) is GpuHealth.UNCONFIRMED)
        site.let_reset("works")
        site.compute()

        await until(lambda: received.health(site.gpus[0]) is GpuHealth.OK)

        assert (site.journalled(), site.locks()) == (set(), [None])
