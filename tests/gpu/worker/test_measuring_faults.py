"""Measuring faults: readings that are late, missing or differ from the requested clock."""

import os

import pytest

from gpuenergyd.gpu.drivers.nvml import NvmlHost
from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
from tests.gpu.conftest import NvmlWorld
from tests.gpu.worker.test_worker_faults import site
from tests.support.worker_site import OWNER, Site, request_clock, run, until

__all__ = ["site"]


@pytest.mark.fault(13)
def test_clock_under_a_power_limit_is_reported_as_read_not_as_requested(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("capped")
    host = SimulatedHost.create(folder / "world", ["a100-sxm"], seed=2)
    (gpu,) = (identity.gpu_uuid for identity in host.identities())
    host.attach_process(gpu, os.getpid())
    host.set_power_limit(gpu, 250.0)
    capped = Site(folder, host)
    capped.start_worker()

    async def main() -> None:
        async with capped.linked() as (link, received):
            await link.lease("L1", capped.gpus, OWNER)
            request_clock(link, gpu, 600)
            await until(lambda: bool(received.clock_changes))
            host.begin_work(gpu, InstructionWork(0.0, 600.0, 0.2))
            request_clock(link, gpu, 1395)
            await until(lambda: len(received.clock_changes) == 2)
            change = received.clock_changes[1]
            assert (change.requested_sm_clock_mhz, change.error) == (1395, None)
            assert change.actual_sm_clock_mhz is not None
            assert 600 < change.actual_sm_clock_mhz < 1300
            await until(lambda: all(s.is_power_capped for s in received.samples[-5:]))
            assert all((s.sm_clock_mhz or 9999) < 1300 for s in received.samples[-5:])

    try:
        run(main())
    finally:
        capped.end_workers()
        host.close()


@pytest.mark.fault(17)
def test_power_is_the_instantaneous_field_with_the_averaged_call_as_fallback(
    nvml_world: NvmlWorld, nvml_host: NvmlHost
) -> None:
    nvml_world.control.inject("nvmlDeviceGetPowerUsage", num_calls=0)
    instant = nvml_host.read(nvml_world.gpus[0])
    nvml_world.control.inject("nvmlDeviceGetPowerUsage", 999)
    still_instant = nvml_host.read(nvml_world.gpus[0])
    asked_while_there_was_a_field = nvml_world.control.num_hits("nvmlDeviceGetPowerUsage")
    nvml_world.control.clear_faults()
    nvml_world.control.inject("field_186", 3)
    nvml_world.control.inject("nvmlDeviceGetPowerUsage")
    averaged = nvml_host.read(nvml_world.gpus[0])

    assert None not in {instant.power_w, still_instant.power_w, averaged.power_w}
    assert asked_while_there_was_a_field == 0
    assert nvml_world.control.num_hits("nvmlDeviceGetPowerUsage") == 1


@pytest.mark.fault(31)
async def test_driver_stays_open_under_a_lease_so_that_locks_persist(site: Site, nvml_world: NvmlWorld) -> None:
    for index in range(3):
        nvml_world.control.set_persistence(index, is_on=False)
    nvml_world.control.inject("nvmlShutdown")
    site.start_worker()
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus, OWNER)
        for clock in (900, 1005, 900):
            request_clock(link, site.gpus[0], clock)
            await until(lambda clock=clock: site.locks()[0] == clock)  # type: ignore[misc]
        await until(lambda: len(received.samples) > 30)
        assert nvml_world.control.num_hits("nvmlShutdown") == 0
        assert site.locks()[0] == 900


@pytest.mark.fault(49)
async def test_readings_that_take_longer_than_the_period_are_skipped_counted_and_never_queued(
    site: Site, nvml_world: NvmlWorld
) -> None:
    nvml_world.control.inject("nvmlDeviceGetClockInfo", delay_s=0.03)
    site.start_worker("--sample-period-s", "0.01")
    async with site.linked() as (link, received):
        await until(lambda: len(received.samples) > 30)
        counters = await link.ping()
        # Three GPUs of 30 ms each: of ten ticks at most one is kept.
        assert counters.num_late_ticks > len(received.samples)
        read_ns = [s.read_mono_ns for s in received.samples if s.gpu_uuid == site.gpus[0]]
        assert (read_ns[-1] - read_ns[0]) / (len(read_ns) - 1) > 80_000_000
        await link.lease("L1", site.gpus, OWNER)
        request_clock(link, site.gpus[1], 900)
        await until(lambda: site.locks()[1] == 900)
