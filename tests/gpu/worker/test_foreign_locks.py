"""Clock locks of other programs at the GPU worker: leases stay below them, and restores set them again."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import GpuHealth, GpuSample
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.restore.policy import RestorePolicy, RestoreRules
from gpuenergyd.gpu.worker.foreign_changes import foreign_clock_mhz
from tests.support.worker_site import OWNER, Received, Site, request_clock
from tests.support.worker_site import until as until_within


async def until(predicate: Callable[[], object]) -> None:
    """Wait for what takes some seconds."""
    await until_within(lambda: bool(predicate()), 60.0)


def foreign_mhz(received: Received, gpu_uuid: str) -> int | None:
    """Return the foreign lock that was reported last for a GPU."""
    read = [r.details.foreign_sm_clock_mhz for r in received.settings_read if r.gpu_uuid == gpu_uuid]
    return read[-1] if read else None


def is_seen_at(received: Received, gpu_uuid: str, clock_mhz: int) -> bool:
    """Return whether several samples have shown a clock."""
    return sum((s.gpu_uuid, s.sm_clock_mhz) == (gpu_uuid, clock_mhz) for s in received.samples) > 5


@pytest.mark.parametrize("clock_mhz", [1110, 600])
def test_a_lease_stays_below_a_foreign_lock_and_restores_it(site: Site, clock_mhz: int) -> None:
    """Seen under our lock, kept by a restarted worker, and never exceeded."""
    gpu = site.gpus[0]

    async def see_and_lease_again() -> None:
        worker = site.start_worker()
        async with site.linked() as (link, received):
            await link.lease("L1", [gpu], OWNER)
            request_clock(link, gpu, 900)
            await until(lambda: received.clock_changes and received.clock_changes[-1].effective_mono_ns)
            await until(lambda: is_seen_at(received, gpu, 900))
            site.host.lock_sm_clock(gpu, clock_mhz)
            await until(lambda: received.health(gpu) is GpuHealth.DEGRADED)
            await until(lambda: foreign_mhz(received, gpu) == clock_mhz)
            assert site.locks() == [clock_mhz, None]

            await link.lease("L2", [gpu], OWNER)
            request_clock(link, gpu, 1410)
            await until(lambda: received.clock_changes[-1].requested_sm_clock_mhz == clock_mhz)
            request_clock(link, gpu, 510)
            await until(lambda: site.locks() == [510, None])
            (outcome,) = await link.restore([gpu], "the job ended")

            assert site.locks() == [clock_mhz, None]
            assert outcome.detail == f"clock locked at another program's {clock_mhz} MHz"
            await link.lease("L3", [gpu], OWNER)
            request_clock(link, gpu, 510)
            await until(lambda: site.locks() == [510, None])
            site.kill(worker, link)
            worker.wait()

    async def restart() -> None:
        site.start_worker()
        async with site.linked() as (link, received):
            await until(lambda: site.locks() == [clock_mhz, None])
            await until(lambda: foreign_mhz(received, gpu) == clock_mhz)
            await link.lease("L4", [gpu], OWNER)
            request_clock(link, gpu, 1410)
            await until(lambda: bool(received.clock_changes))
            assert received.clock_changes[-1].requested_sm_clock_mhz == clock_mhz
            await link.restore([gpu], "the job ended")
        assert site.locks() == [clock_mhz, None]

    asyncio.run(see_and_lease_again())
    asyncio.run(restart())


async def test_a_foreign_lock_that_its_owner_removes_is_forgotten_and_one_that_he_changes_is_followed(
    site: Site,
) -> None:
    gpu = site.gpus[0]
    Journal(site.folder / "journal.json").record_foreign_lock(gpu, 1110)
    site.host.lock_sm_clock(gpu, 1110)
    site.start_worker()
    async with site.linked() as (link, received):
        await until(lambda: foreign_mhz(received, gpu) == 1110)
        await until(lambda: is_seen_at(received, gpu, 1110))
        site.host.lock_sm_clock(gpu, 900)
        await until(lambda: foreign_mhz(received, gpu) == 900)
        site.host.reset_sm_clock(gpu)
        await until(lambda: foreign_mhz(received, gpu) is None)
        await link.lease("L1", [gpu], OWNER)
        request_clock(link, gpu, 1410)
        await until(lambda: site.locks() == [1410, None])
        await link.restore([gpu], "the job ended")
    assert site.locks() == [None, None]


async def test_our_own_lock_that_was_taken_for_replaced_is_not_left(site: Site) -> None:
    """A GPU that was slower for a while, without a reason that its driver names, and then runs at our lock again."""
    gpu = site.gpus[0]
    site.start_worker()
    async with site.linked() as (link, received):
        await link.lease("L1", [gpu], OWNER)
        request_clock(link, gpu, 900)
        await until(lambda: is_seen_at(received, gpu, 900))
        site.host.lock_sm_clock(gpu, 600)
        await until(lambda: foreign_mhz(received, gpu) == 600)
        await until(lambda: is_seen_at(received, gpu, 600))

        site.host.lock_sm_clock(gpu, 900)

        await until(lambda: site.locks() == [None, None])
        await until(lambda: foreign_mhz(received, gpu) is None)
        assert received.health(gpu) is GpuHealth.OK
        assert Journal(site.folder / "journal.json").foreign_locks_mhz() == {}


async def test_with_policy_restore_foreign_locks_are_neither_kept_nor_put_back(site: Site) -> None:
    gpu = site.gpus[0]
    site.start_worker()
    async with site.linked(RestoreRules(RestorePolicy.RESTORE)) as (link, received):
        await link.lease("L1", [gpu], OWNER)
        request_clock(link, gpu, 900)
        await until(lambda: received.clock_changes and received.clock_changes[-1].effective_mono_ns)
        site.host.lock_sm_clock(gpu, 1110)
        await until(lambda: received.health(gpu) is GpuHealth.DEGRADED)
        await link.restore([gpu], "the job ended")
    assert site.locks() == [None, None]
    assert Journal(site.folder / "journal.json").foreign_locks_mhz() == {}


@pytest.mark.parametrize(
    ("clock_mhz", "is_limited", "found_mhz"),
    [
        (900, False, 900),
        (893, False, 900),
        (900, True, None),
        (900, None, None),
        (1410, False, None),
        (None, False, None),
    ],
)
def test_a_lock_is_known_by_the_clock_of_a_gpu_that_nothing_else_limits(
    clock_mhz: int | None, *, is_limited: bool | None, found_mhz: int | None
) -> None:
    identity = GpuIdentity("GPU-a", 0, "A100", tuple(range(1410, 200, -15)), is_simulated=True)
    sample = GpuSample("GPU-a", 1, None, None, None, clock_mhz, None, False, is_limited)

    assert foreign_clock_mhz(identity, sample) == found_mhz


def test_foreign_locks_are_forgotten_with_the_boot(tmp_path: Path) -> None:
    Journal(tmp_path / "j", boot_id=lambda: "one").record_foreign_lock("GPU-a", 900)

    assert Journal(tmp_path / "j", boot_id=lambda: "one").foreign_locks_mhz() == {"GPU-a": 900}
    assert Journal(tmp_path / "j", boot_id=lambda: "two").foreign_locks_mhz() == {}
