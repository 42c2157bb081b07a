"""A workload power profile under a worker: reported as ours, no foreign lock, removed with the lease or by the next."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import GpuHealth
from gpuenergyd.gpu.restore.executor import RestoreResult
from gpuenergyd.gpu.restore.journal import Control
from gpuenergyd_sim.driver.device_parameters import MAX_P, MAX_Q
from tests.support.worker_link import WorkerLink
from tests.support.worker_site import OWNER, Received, Site, request_clock, simulated_site, until, with_worker

TOP_MHZ, UNDER_MAX_Q_MHZ = 1965, 1770


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A simulated B200 held by this process."""
    with simulated_site(tmp_path, 1, "b200") as made:
        yield made


def samples_under_profile(received: Received) -> list[int]:
    """Return the instants at which the GPU was read at the clock of the profile, in ns."""
    return [s.read_mono_ns for s in received.samples if s.sm_clock_mhz == UNDER_MAX_Q_MHZ]


@with_worker
async def test_a_profile_needs_a_lease_and_is_removed_with_it(site: Site, link: WorkerLink) -> None:
    (gpu,) = site.gpus
    with pytest.raises(GpuError, match="does not cover"):
        await link.set_power_profile("L1", gpu, MAX_Q, OWNER)
    await link.lease("L1", [gpu], OWNER, sets_clocks=False)
    assert site.journalled() == set()
    assert await link.set_power_profile("L1", gpu, MAX_P, OWNER) == (MAX_P,)
    assert await link.set_power_profile("L1", gpu, MAX_Q, OWNER) == (MAX_Q,)
    await until(lambda: bool(site.received.settings_read) and site.received.settings_read[-1].our_power_profile == 1)
    assert site.journalled() == {gpu}

    assert {(o.control, o.result) for o in await link.restore([gpu], "end")} == {
        (Control.POWER_PROFILE, RestoreResult.RESTORED)
    }
    assert site.host.requested_power_profiles(gpu) == frozenset()
    assert site.journalled() == set()


@pytest.mark.fault(14)
@with_worker
async def test_a_gpu_below_our_lock_by_our_profile_is_not_locked_by_another_program(
    site: Site, link: WorkerLink
) -> None:
    (gpu,) = site.gpus
    await link.lease("L1", [gpu], OWNER)
    request_clock(link, gpu, TOP_MHZ)
    await until(lambda: site.locks() == [TOP_MHZ])

    await link.set_power_profile("L1", gpu, MAX_Q, OWNER)
    await until(lambda: bool(samples_under_profile(site.received)))
    begin_ns = samples_under_profile(site.received)[0]
    await until(lambda: samples_under_profile(site.received)[-1] > begin_ns + 3_000_000_000)  # a lock shows within 2 s

    assert site.received.health(gpu) is GpuHealth.OK
    assert all(read.details.foreign_sm_clock_mhz is None for read in site.received.settings_read)
    assert site.host.requested_power_profiles(gpu) == {MAX_Q}


@pytest.mark.fault(4)
def test_the_next_worker_removes_what_a_killed_one_has_added(site: Site) -> None:
    (gpu,) = site.gpus

    async def add_and_die() -> None:
        worker = site.start_worker()
        async with site.linked() as (link, _):
            await link.lease("L1", [gpu], OWNER)
            await link.set_power_profile("L1", gpu, MAX_Q, OWNER)
            site.kill(worker, link)
            worker.wait()

    async def restart() -> None:
        site.start_worker()
        async with site.linked():
            await until(lambda: site.host.requested_power_profiles(gpu) == frozenset())
            await until(lambda: site.journalled() == set())

    asyncio.run(add_and_die())
    assert site.host.requested_power_profiles(gpu) == {MAX_Q}
    asyncio.run(restart())
