"""Lease handover: a daemon that restarts in order keeps its leases; every other end of a daemon restores the clocks."""

import pytest

from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.worker.leases import HandoverResult, LeaseHandover
from tests.support.worker_link import WorkerLink
from tests.support.worker_site import OWNER, Site, request_clock, until, with_worker

TOKEN = "0123456789abcdef" * 2


async def lower_and_go(site: Site, keep_s: float) -> None:
    """Connect as a daemon that lowers the first GPU's clock, hands over and ends."""
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus[:1], OWNER)
        request_clock(link, site.gpus[0], 1110)
        await until(lambda: bool(received.clock_changes))
        await link.hand_over(TOKEN, keep_s)


@pytest.mark.fault(40)
async def test_daemon_with_the_handover_token_takes_over_the_leases(site: Site) -> None:
    site.start_worker()
    await lower_and_go(site, 60.0)
    async with site.linked(token=TOKEN) as (link, received):
        assert link.welcome.has_taken_over
        assert site.locks() == [1110, None]
        request_clock(link, site.gpus[0], 1050)
        await until(lambda: bool(received.clock_changes))
        assert site.locks() == [1050, None]
    await until(lambda: site.locks() == [None, None])


@pytest.mark.fault(40)
@pytest.mark.parametrize("token", ["", "f" * 32])
async def test_daemon_without_the_handover_token_finds_every_clock_restored(site: Site, token: str) -> None:
    site.start_worker()
    await lower_and_go(site, 60.0)
    async with site.linked(token=token) as (link, _):
        assert not link.welcome.has_taken_over
        await until(lambda: site.locks() == [None, None])


async def test_expired_handover_restores_the_clocks(site: Site) -> None:
    site.start_worker()
    await lower_and_go(site, 0.2)
    await until(lambda: site.locks() == [None, None] and not site.journalled())


async def test_worker_that_exits_with_its_daemon_keeps_no_leases(site: Site) -> None:
    worker = site.start_worker("--exit-with-daemon")
    await lower_and_go(site, 60.0)
    await until(lambda: worker.poll() == 0)
    assert (site.locks(), site.journalled()) == ([None, None], set())
    assert not (site.folder / "link.sock").exists()


@pytest.mark.fault(5)
async def test_silent_daemon_is_assumed_dead_and_its_clocks_are_restored(site: Site) -> None:
    site.start_worker("--daemon-silence-limit-s", "0.5")
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus[:1], OWNER)
        request_clock(link, site.gpus[0], 1110)
        await until(lambda: site.locks() == [1110, None])
        await until(lambda: site.locks() == [None, None])
        await until(lambda: bool(received.lost))
    async with site.linked() as (link, _):
        for _ in range(8):
            await link.ping()


@with_worker
async def test_handover_with_a_short_token_or_invalid_time_is_refused(site: Site, link: WorkerLink) -> None:
    for token, keep_s in (("short", 1.0), (TOKEN, 0.0), (TOKEN, 1e9)):
        with pytest.raises(GpuError, match="expected up to 60 s and at least 32 characters"):
            await link.hand_over(token, keep_s)
    assert site.locks() == [None, None]


def test_handover_token_works_once() -> None:
    handover = LeaseHandover()
    handover.offer(TOKEN, 5.0)
    before = handover.claim(TOKEN)
    assert handover.begin(100.0)

    assert before is HandoverResult.NOTHING_KEPT
    assert not handover.has_expired(104.9)
    assert handover.claim(TOKEN) is HandoverResult.TAKEN_OVER
    assert handover.claim(TOKEN) is HandoverResult.NOTHING_KEPT
    assert not handover.has_expired(200.0)
    assert not handover.begin(300.0)
