"""The GPU worker on the fake driver library: it releases and reopens a GPU, and reports what others set."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import GpuHealth
from tests.gpu.conftest import NvmlWorld
from tests.support.worker_site import OWNER, Site, request_clock, until


@pytest.fixture
def site(tmp_path: Path, nvml_world: NvmlWorld) -> Iterator[Site]:
    """Three GPUs behind the unmodified NVML binding; workers are ended afterwards."""
    made = Site(tmp_path, nvml_world.simulated, driver="nvml", environment=nvml_world.environment())
    yield made
    made.end_workers()


async def test_a_leased_gpu_is_restored_released_and_reopened(site: Site, nvml_world: NvmlWorld) -> None:
    site.start_worker()
    async with site.linked() as (link, received):
        first, second, _ = site.gpus
        await link.lease("L1", [first], OWNER)
        request_clock(link, first, 1110)
        await until(lambda: site.locks()[0] == 1110)

        await link.release_gpus([first], "released for a test")

        assert site.locks()[0] is None
        assert received.health(first) is GpuHealth.RELEASED
        assert [len(nvml_world.control.holders(index) - {os.getpid()}) for index in range(3)] == [0, 1, 1]
        with pytest.raises(GpuError, match="is released"):
            await link.lease("L1", [first], OWNER)
        foreign_w = 250.0
        nvml_world.simulated.set_power_limit(second, foreign_w)
        await until(lambda: any(read.details.power_limit_w == foreign_w for read in received.settings_read))
        assert not next(r for r in received.settings_read if r.details.power_limit_w == foreign_w).is_our_power_limit

        (identity,) = await link.reopen_gpus([first])

        assert identity.gpu_uuid == first
        await until(lambda: received.health(first) is GpuHealth.OK)
        await link.lease("L1", [first], OWNER)
        assert await link.lower_power_limit("L1", first, 300.0, OWNER) == 300.0
        await until(lambda: any(read.is_our_power_limit for read in received.settings_read))
        await link.restore([first], "done")
