"""A worker on a driver of another package, with clocks, power limits and an energy counter, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import GpuHealth
from gpuenergyd.gpu.restore.executor import RestoreResult
from tests.support.fake_amd.package import install_fake_amd, worker_program
from tests.support.worker_link import WorkerLink
from tests.support.worker_site import OWNER, Site, request_clock, simulated_site, until, with_worker

MISSING = (
    *("workload power profiles", "reading of settings", "a list of processes", "error events"),
    "release of single GPUs",
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with simulated_site(tmp_path, 2) as made:
        install_fake_amd(tmp_path)
        made.driver, made.program = "amd", worker_program(tmp_path)
        yield made


@with_worker
async def test_clocks_and_limits_are_set_and_restored(site: Site, link: WorkerLink) -> None:
    gpu = site.gpus[0]
    before_w = site.host.power_limit_w(gpu)
    await link.lease("L1", [gpu], OWNER)
    request_clock(link, gpu, 1110)
    await until(lambda: site.locks()[0] == 1110)
    assert await link.lower_power_limit("L1", gpu, 300.0, OWNER) == 300.0
    outcomes = await link.restore([gpu], "end")

    assert {outcome.result for outcome in outcomes} == {RestoreResult.RESTORED}
    assert site.locks()[0] is None
    assert site.host.power_limit_w(gpu) == before_w


@with_worker
async def test_energy_is_measured(site: Site, link: WorkerLink) -> None:
    del link
    await until(lambda: any(s.total_energy_j is not None for s in site.received.samples))

    assert all(sample.power_w is not None for sample in site.received.samples)


@with_worker
async def test_what_is_missing_is_named_and_refused(site: Site, link: WorkerLink) -> None:
    gpu = site.gpus[0]
    assert link.welcome.missing_capabilities == MISSING
    await link.lease("L1", [gpu], OWNER)
    for refused, what in (
        (link.set_power_profile("L1", gpu, 1, OWNER), "workload power profiles"),
        (link.release_gpus([gpu], "test"), "release of single GPUs"),
    ):
        with pytest.raises(GpuError, match=f"the driver does not offer {what}"):
            await refused

    assert site.received.health(gpu) is GpuHealth.OK
