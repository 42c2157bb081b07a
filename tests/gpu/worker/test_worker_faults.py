"""The real worker on the unmodified NVML binding and the fake driver library: a fault affects its GPU only."""

import os
import time
from collections.abc import Iterator

import pytest

from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import GpuHealth
from gpuenergyd.gpu.restore import parallel
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.restore.executor import RestoreResult
from tests.gpu.conftest import NvmlWorld
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.waiting import LIMIT_S, wait_until
from tests.support.worker_link import WorkerLink
from tests.support.worker_site import OWNER, Site, request_clock, run, until, with_worker

SHORT = ("--read-deadline-s", "0.5", "--set-deadline-s", "0.5")


@pytest.fixture
def site(nvml_world: NvmlWorld) -> Iterator[Site]:
    """Three simulated GPUs that workers open through NVML."""
    for gpu in nvml_world.gpus:
        nvml_world.simulated.attach_process(gpu, os.getpid())
    made = Site(nvml_world.simulated.path.parent, nvml_world.simulated, "nvml", nvml_world.environment())
    yield made
    made.end_workers()


@pytest.fixture
def control(nvml_world: NvmlWorld) -> FakeNvmlControl:
    """The fault injector of the fake driver library."""
    return nvml_world.control


@pytest.mark.fault(7)
async def test_hanging_set_call_wedges_its_gpu_only(site: Site, control: FakeNvmlControl) -> None:
    control.inject("nvmlDeviceSetGpuLockedClocks", gpu_index=1, num_calls=1, delay_s=3.0)
    site.start_worker(*SHORT)
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus, OWNER)
        request_clock(link, site.gpus[1], 900)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: received.health(site.gpus[1]) is GpuHealth.WEDGED)
        await until(lambda: site.locks()[0] == 900)
        request_clock(link, site.gpus[2], 1005)
        await until(lambda: site.locks()[2] == 1005)
        await link.ping()
        with pytest.raises(GpuError, match="is wedged"):
            await link.lease("L2", site.gpus[1:2], OWNER)
        outcomes = {o.gpu_uuid: o.result for o in await link.restore(site.gpus, "its job is over")}
        assert outcomes[site.gpus[1]] is RestoreResult.FAILED
        assert outcomes[site.gpus[0]] is RestoreResult.RESTORED
        assert site.journalled() == {site.gpus[1]}
        # The call returns at last, and has lowered the clock: the worker restores it unasked.
        await until(lambda: received.health(site.gpus[1]) is GpuHealth.OK)
        assert site.locks() == [None, None, None]
        assert site.journalled() == set()


@pytest.mark.fault(7)
async def test_hanging_read_call_wedges_its_gpu_only(site: Site, control: FakeNvmlControl) -> None:
    site.start_worker(*SHORT)
    async with site.linked() as (link, received):
        await until(lambda: len(received.samples) > 30)
        control.inject("nvmlDeviceGetClockInfo", gpu_index=2, num_calls=1, delay_s=3.0)
        await until(lambda: received.health(site.gpus[2]) is GpuHealth.WEDGED)
        received.samples.clear()
        await until(lambda: len(received.samples) > 30)
        assert site.gpus[2] not in {s.gpu_uuid for s in received.samples}
        await link.lease("L1", site.gpus[:2], OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        await until(lambda: site.gpus[2] in {s.gpu_uuid for s in received.samples})
        await until(lambda: received.health(site.gpus[2]) is GpuHealth.OK)


@pytest.mark.fault(53)
@pytest.mark.parametrize("hanging", [(1,), (0, 1)])
def test_gpus_beside_hanging_set_calls_are_served_and_restored_long_before_the_deadline(
    site: Site, control: FakeNvmlControl, hanging: tuple[int, ...]
) -> None:
    """The usual deadlines of 10 and 30 s: nothing here waits for them."""
    for index in hanging:
        control.inject("nvmlDeviceSetGpuLockedClocks", gpu_index=index, num_calls=1, delay_s=60.0)
    worker = site.start_worker()

    async def main() -> None:
        async with site.linked() as (link, received):
            await link.lease("L1", site.gpus, OWNER)
            for index in (*hanging, 2):
                request_clock(link, site.gpus[index], 900)
            await until(lambda: site.locks()[2] == 900)
            request_clock(link, site.gpus[2], 1005)
            await until(lambda: site.locks()[2] == 1005)
            await until(lambda: control.num_hits("nvmlDeviceSetGpuLockedClocks") == len(hanging))
            received.samples.clear()
            await until(lambda: {s.gpu_uuid for s in received.samples} == set(site.gpus))
            outcomes = {o.gpu_uuid: o.result for o in await link.restore(site.gpus, "its job is over")}
            assert site.locks()[2] is None
            assert outcomes[site.gpus[2]] is RestoreResult.RESTORED
            for index in hanging:
                assert outcomes[site.gpus[index]] is RestoreResult.FAILED
                await until(lambda index=index: received.health(site.gpus[index]) is GpuHealth.UNRESTORED)  # type: ignore[misc]
            await link.lease("L2", site.gpus[2:], OWNER)
            request_clock(link, site.gpus[2], 900)
            await until(lambda: site.locks()[2] == 900)

    run(main())
    wait_until(lambda: site.locks()[2] is None)
    worker.terminate()
    assert worker.wait(timeout=20) == 0


@pytest.mark.fault(53)
async def test_gpus_beside_a_hanging_read_call_are_read_long_before_the_deadline(
    site: Site, control: FakeNvmlControl
) -> None:
    site.start_worker()
    async with site.linked() as (_, received):
        await until(lambda: {s.gpu_uuid for s in received.samples} == set(site.gpus))
        for index in (0, 1):
            control.inject("nvmlDeviceGetClockInfo", gpu_index=index, num_calls=1, delay_s=60.0)
        await until(lambda: control.num_hits("nvmlDeviceGetClockInfo") == 2)
        received.samples.clear()
        await until(lambda: len(received.samples) > 30)
        assert {s.gpu_uuid for s in received.samples} == {site.gpus[2]}
        site.host.set_power_limit(site.gpus[2], 200.0)
        await until(
            lambda: any(r.gpu_uuid == site.gpus[2] and r.details.power_limit_w == 200.0 for r in received.settings_read)
        )


@pytest.mark.fault(53)
def test_restore_command_restores_the_gpus_beside_one_whose_call_hangs(
    site: Site, control: FakeNvmlControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = site.start_worker()

    async def main() -> None:
        async with site.linked() as (link, _):
            await site.lower_all(link)
            site.kill(worker, link)

    run(main())
    worker.wait()
    monkeypatch.setenv("GPUENERGYD_FAKE_NVML_WORLD", str(site.host.path))
    monkeypatch.setattr(parallel, "CALL_LIMIT_S", 1.0)
    control.inject("nvmlDeviceResetGpuLockedClocks", gpu_index=1, num_calls=1, delay_s=3.0)

    outcomes = {o.gpu_uuid: o for o in restore(site.folder / "journal.json")}

    assert [outcomes[gpu].result for gpu in site.gpus] == [
        RestoreResult.RESTORED,
        RestoreResult.FAILED,
        RestoreResult.RESTORED,
    ]
    assert "has not returned for 1 s" in outcomes[site.gpus[1]].detail
    assert site.journalled() == {site.gpus[1]}
    wait_until(lambda: site.journalled() == set())
    assert site.locks() == [None, None, None]


async def test_worker_ends_while_a_call_hangs_and_its_sentinel_restores_that_gpu(
    site: Site, control: FakeNvmlControl
) -> None:
    """The journal still lists the GPU whose reset call hung; the next call for it returns."""
    control.inject("nvmlDeviceResetGpuLockedClocks", gpu_index=0, num_calls=1, delay_s=60.0)
    worker = site.start_worker(*SHORT, "--exit-with-daemon")
    async with site.linked() as (link, _):
        await site.lower_all(link)

    assert worker.wait(timeout=LIMIT_S) == 0
    wait_until(lambda: site.locks() == [None, None, None])
    wait_until(lambda: site.journalled() == set())


@pytest.mark.fault(8)
async def test_lost_gpu_is_reported_and_stops_no_other(site: Site, control: FakeNvmlControl) -> None:
    site.start_worker()
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus, OWNER)
        control.inject("*", 15, gpu_index=1)
        await until(lambda: received.health(site.gpus[1]) is GpuHealth.LOST)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        request_clock(link, site.gpus[1], 900)
        await until(lambda: any(c.gpu_uuid == site.gpus[1] and c.error for c in received.clock_changes))
        control.clear_faults()
        await until(lambda: received.health(site.gpus[1]) is GpuHealth.OK)


async def test_failed_restore_is_reported_journalled_and_retried_until_it_succeeds(
    site: Site, control: FakeNvmlControl
) -> None:
    site.start_worker()
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus[:1], OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        control.inject("nvmlDeviceResetGpuLockedClocks", 999)
        (outcome,) = await link.restore(site.gpus[:1], "test")
        assert outcome.result is RestoreResult.FAILED
        assert site.journalled() == {site.gpus[0]}
        await until(lambda: received.health(site.gpus[0]) is GpuHealth.UNRESTORED)
        control.inject("nvmlDeviceGetClockInfo", 10, gpu_index=0)
        await until(lambda: received.health(site.gpus[0]) is GpuHealth.DEGRADED)
        control.clear_faults()
        await until(lambda: received.health(site.gpus[0]) is GpuHealth.OK)
        assert site.locks()[0] is None
        assert site.journalled() == set()


@pytest.mark.fault(9)
async def test_without_permission_a_gpu_is_observe_only_and_leases_give_the_reason(
    site: Site, control: FakeNvmlControl
) -> None:
    control.set_privileged(False)
    site.start_worker()
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus, OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: received.health(site.gpus[0]) is GpuHealth.OBSERVE_ONLY)
        with pytest.raises(GpuError, match="CAP_SYS_ADMIN"):
            await link.lease("L1", site.gpus[:1], OWNER)
        await until(lambda: len(received.samples) > 10)
        assert site.locks() == [None, None, None]


@pytest.mark.fault(30)
async def test_mig_gpu_is_observe_only_and_leases_give_the_reason(site: Site, control: FakeNvmlControl) -> None:
    control.set_mig(0, is_on=True)
    site.start_worker()
    async with site.linked() as (link, received):
        assert received.health(site.gpus[0]) is GpuHealth.OBSERVE_ONLY
        with pytest.raises(GpuError, match="MIG is enabled"):
            await link.lease("L1", site.gpus, OWNER)
        control.inject("nvmlDeviceGetClockInfo", 10, gpu_index=0)
        await until(lambda: received.health(site.gpus[0]) is not GpuHealth.OBSERVE_ONLY)
        with pytest.raises(GpuError, match="MIG is enabled"):
            await link.lease("L1", site.gpus, OWNER)
        control.clear_faults()
        await until(lambda: received.health(site.gpus[0]) is GpuHealth.OBSERVE_ONLY)
        await link.lease("L1", site.gpus[1:], OWNER)
        request_clock(link, site.gpus[1], 900)
        await until(lambda: site.locks()[1] == 900)
        control.set_mig(1, is_on=True)
        await until(lambda: received.health(site.gpus[1]) is GpuHealth.OBSERVE_ONLY and site.locks()[1] is None)
        control.set_mig(1, is_on=False)
        await until(lambda: received.health(site.gpus[1]) is GpuHealth.OK)
        await until(lambda: site.gpus[0] in {s.gpu_uuid for s in received.samples})


async def test_observe_only_worker_changes_nothing(site: Site) -> None:
    site.start_worker("--observe-only")
    async with site.linked() as (link, received):
        with pytest.raises(GpuError, match="started with --observe-only"):
            await link.lease("L1", site.gpus, OWNER)
        await until(lambda: {s.gpu_uuid for s in received.samples} == set(site.gpus))


async def test_observe_only_worker_ends_with_its_daemon_so_that_the_next_one_reads_the_mode_again(site: Site) -> None:
    worker = site.start_worker("--observe-only")
    async with site.linked() as (link, _):
        await link.hand_over("t" * 32, 10.0)

    assert worker.wait(30) == 0


@pytest.mark.fault(8)
@pytest.mark.parametrize(("xid", "health"), [(79, GpuHealth.LOST), (48, GpuHealth.DEGRADED)])
async def test_critical_error_changes_the_gpus_health(
    site: Site, control: FakeNvmlControl, xid: int, health: GpuHealth
) -> None:
    site.start_worker()
    async with site.linked() as (_, received):
        deadline = time.monotonic() + LIMIT_S
        while received.health(site.gpus[2]) is GpuHealth.OK:
            control.raise_xid(2, xid)
            seen = len(received.samples)
            await until(lambda seen=seen: len(received.samples) > seen)  # type: ignore[misc]
            assert time.monotonic() < deadline
        assert received.health(site.gpus[2]) is health
        assert f"Xid {xid}" in received.health_changes[-1].detail


@pytest.mark.fault(48)
async def test_driver_reload_under_a_lease_is_survived(site: Site, control: FakeNvmlControl) -> None:
    site.start_worker()
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus, OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        site.host.reload_driver()
        control.reload_driver()
        received.samples.clear()
        await until(lambda: any((s.total_energy_j or 1e9) < 1000.0 for s in received.samples))
        # The same clock as before: it must be set anew, not taken for granted.
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        assert {o.result for o in await link.restore(site.gpus, "end")} == {RestoreResult.RESTORED}


@pytest.mark.fault(48)
async def test_lock_lost_by_a_driver_reload_is_not_taken_for_another_programs_and_the_lease_stays(
    site: Site, control: FakeNvmlControl
) -> None:
    worker = site.start_worker()
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus[:1], OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: any(s.gpu_uuid == site.gpus[0] and s.sm_clock_mhz == 900 for s in received.samples))
        site.host.reload_driver()
        site.host.attach_process(site.gpus[0], os.getpid())
        control.reload_driver()
        received.samples.clear()
        await until(lambda: sum((s.sm_clock_mhz or 0) > 900 for s in received.samples) > 100)
        assert received.health(site.gpus[0]) is GpuHealth.OK
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
    worker.terminate()
    assert worker.stderr is not None
    assert b"the driver was reloaded and its clock lock is gone" in worker.stderr.read()


@pytest.mark.fault(56)
async def test_gpu_whose_name_is_not_utf_8_is_only_observed_and_the_others_are_served(site: Site) -> None:
    name = site.host.identities()[1].model_name.encode()
    content = site.host.path.read_bytes()
    with site.host.path.open("r+b") as world:
        world.seek(content.index(name))
        world.write(b"\xff")
    site.start_worker()
    async with site.linked() as (link, received):
        assert [own.gpu_uuid for own in link.welcome.identities] == site.gpus
        assert received.health(site.gpus[1]) is GpuHealth.OBSERVE_ONLY
        with pytest.raises(GpuError, match="the NVML binding failed: UnicodeDecodeError"):
            await link.lease("L1", site.gpus[1:2], OWNER)
        await link.lease("L1", [site.gpus[0], site.gpus[2]], OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        await until(lambda: {s.gpu_uuid for s in received.samples} == set(site.gpus))


@pytest.mark.fault(14)
@with_worker
async def test_lock_released_by_another_program_ends_the_lease_and_is_reported(site: Site, link: WorkerLink) -> None:
    await site.lower_all(link)
    site.host.lock_sm_clock(site.gpus[0], 1305)
    await until(lambda: site.received.health(site.gpus[0]) is GpuHealth.DEGRADED)
    assert "another program changed its clock lock" in site.received.health_changes[-1].detail
    await link.restore(site.gpus, "end")
    assert site.locks() == [1305, None, None]
    assert site.journalled() == set()


@pytest.mark.fault(14)
@with_worker
async def test_a_gpu_that_another_program_changed_is_healthy_once_it_is_leased_again(
    site: Site, link: WorkerLink
) -> None:
    gpu = site.gpus[0]
    await link.lease("L1", [gpu], OWNER)
    request_clock(link, gpu, 900)
    await until(lambda: site.locks()[0] == 900)
    site.host.lock_sm_clock(gpu, 1305)
    await until(lambda: site.received.health(gpu) is GpuHealth.DEGRADED)

    await link.lease("L2", [gpu], OWNER)

    await until(lambda: site.received.health(gpu) is GpuHealth.OK)
    request_clock(link, gpu, 900)
    await until(lambda: site.locks()[0] == 900)
    await link.restore([gpu], "end")


@pytest.mark.fault(12)
async def test_worker_unit_waits_for_an_unavailable_driver(site: Site, control: FakeNvmlControl) -> None:
    control.inject("nvmlInitWithFlags", 9, num_calls=2)
    site.start_worker()
    async with site.linked() as (link, _):
        assert [i.gpu_uuid for i in link.welcome.identities] == site.gpus


def test_child_process_fails_at_once_without_a_driver(site: Site, control: FakeNvmlControl) -> None:
    control.inject("nvmlInitWithFlags", 9)
    worker = site.start_worker("--exit-with-daemon")

    wait_until(lambda: worker.poll() is not None)

    assert worker.returncode == 1
    assert worker.stderr is not None
    assert b"load the nvidia kernel module" in worker.stderr.read()
