"""Switch calibration: the worker's settling times against the exact instants of the simulated GPUs."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median_low

import pytest

from gpuenergyd.core.measurement.telemetry import ClockHistory
from gpuenergyd.core.pipeline.switching import Direction, LatencyBasis
from gpuenergyd.daemon.gpus.inventory import Gpu
from gpuenergyd.daemon.gpus.switches import observed_switch, switch_calibration
from gpuenergyd.gpu.device import GpuReading
from gpuenergyd.gpu.drivers.nvml import NvmlHost
from gpuenergyd.gpu.link.messages import ClockChangeReport
from gpuenergyd.gpu.worker.threads.clock_settling import EffectWatch
from gpuenergyd_sim.driver.device_parameters import A100_SXM, DeviceParameters
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world import World, create_world
from tests.gpu.conftest import NvmlWorld
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.virtual_time import VirtualTime
from tests.support.worker_site import OWNER, Received, Site, request_clock, run, until

NUM_CHANGES = 32
CLOCKS_MHZ = (900, 1410)


@dataclass(frozen=True, slots=True)
class Seen:
    """A clock change as the worker reported it, and the exact instant of its effect."""

    change: ClockChangeReport
    effective_mono_ns: int

    @property
    def is_true(self) -> bool:
        """Whether the exact instant is between the two readings that bracket it."""
        low_ns, high_ns = self.change.unseen_until_mono_ns, self.change.effective_mono_ns
        return (low_ns or 0) < self.effective_mono_ns and (high_ns is None or self.effective_mono_ns <= high_ns)

    @property
    def width_s(self) -> float:
        """The time between the two readings that bracket the effect; infinite where none showed it."""
        change = self.change
        if change.effective_mono_ns is None:
            return math.inf
        return (change.effective_mono_ns - (change.unseen_until_mono_ns or change.returned_mono_ns)) / 1e9

    @property
    def latency_s(self) -> float:
        """The exact latency, without waits for other GPUs."""
        return (self.effective_mono_ns - self.change.due_mono_ns - self.change.blocked_ns) / 1e9


@pytest.fixture(params=["simulated", "nvml"])
def make_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[DeviceParameters], Site]]:
    """Return a function that creates a site of three GPUs of one model, opened through either driver."""
    made: list[Site] = []

    def make(model: DeviceParameters) -> Site:
        world = tmp_path / "world"
        create_world(world, [model] * 3, seed=5, now_ns=0)
        host = SimulatedHost.open(world)
        environment = None
        if request.param == "nvml":
            library_folder = request.getfixturevalue("fake_nvml_library")
            environment = {
                **os.environ,
                "LD_LIBRARY_PATH": str(library_folder),
                "GPUENERGYD_FAKE_NVML_WORLD": str(world),
            }
            with FakeNvmlControl(world) as control:
                control.set_privileged(True)
        made.append(Site(tmp_path, host, request.param, environment))
        for gpu in made[-1].gpus:
            host.attach_process(gpu, os.getpid())
        return made[-1]

    yield make
    for site in made:
        site.end_workers()
        site.host.close()


def changes_and_truth(site: Site) -> list[Seen]:
    """Have a worker change one GPU's clock back and forth, each change after the effect of the previous one."""
    world, seen = World(site.host.path), []
    site.start_worker()

    async def main() -> None:
        async with site.linked() as (link, received):
            await link.lease("L1", site.gpus, OWNER)
            for k in range(NUM_CHANGES):
                clock = CLOCKS_MHZ[k % 2]
                request_clock(link, site.gpus[0], clock)
                await until(partial(_has_been_sampled, site, received, k, clock), timeout_s=50.0)
                with world.gpu(0) as record:
                    seen.append(Seen(received.clock_changes[k], record.state.pending_at_ns))

    run(main())
    return seen


def _has_been_sampled(site: Site, received: Received, position: int, clock: int) -> bool:
    """Return whether the worker has reported the change and then read its clock."""
    if len(received.clock_changes) <= position:
        return False
    returned_ns = received.clock_changes[position].returned_mono_ns
    return any(
        s.gpu_uuid == site.gpus[0] and s.sm_clock_mhz == clock and s.read_mono_ns > returned_ns
        for s in received.samples[-60:]
    )


@pytest.mark.parametrize(("call_s", "settle_s"), [(0.025, 0.0001), (0.004, 0.021)])
def test_readings_of_the_worker_bracket_the_effect_of_every_change(
    make_site: Callable[[DeviceParameters], Site], call_s: float, settle_s: float
) -> None:
    """The brackets hold at any load of the machine, which only widens them."""
    site = make_site(steady_model(call_s, settle_s))

    seen = changes_and_truth(site)

    identity = site.host.identities()[0]
    gpu = Gpu(identity, ClockHistory(1410), switch_calibration(identity))
    for each in seen:
        gpu.record_clock_change(each.change)
    assert all(each.is_true for each in seen)
    assert min(each.width_s for each in seen) < 0.25 * (call_s + settle_s)
    assert gpu.view().switch_latency.basis is LatencyBasis.MEASURED
    whole = {e.direction: e for e in gpu.switching.estimates() if e.from_region is None}
    assert set(whole) == set(Direction)
    for estimate in whole.values():
        assert estimate.num_seen >= NUM_CHANGES // 2 - 6
        assert estimate.call_s >= call_s


@pytest.mark.parametrize(("call_s", "settle_s"), [(0.025, 0.0001), (0.004, 0.021)])
def test_latency_of_25_ms_is_found_within_the_resolution_of_the_readings(
    tmp_path: Path, call_s: float, settle_s: float
) -> None:
    """In virtual time: each reading comes at the instant that the watch requests."""
    virtual, watch = VirtualTime(), EffectWatch()
    create_world(tmp_path / "world", [steady_model(call_s, settle_s)], seed=5, now_ns=virtual.now_ns)
    host = SimulatedHost(tmp_path / "world", mono_ns=virtual.mono_ns, sleep=virtual.sleep)
    uuid = host.identities()[0].gpu_uuid
    host.attach_process(uuid, os.getpid())
    identity = host.identities()[0]
    gpu, seen = Gpu(identity, ClockHistory(1410), switch_calibration(identity)), []
    world = World(host.path, mono_ns=virtual.mono_ns)
    for k in range(NUM_CHANGES):
        virtual.sleep(0.5)
        watch.observe(host.read(uuid))
        called_ns = virtual.now_ns
        host.lock_sm_clock(uuid, CLOCKS_MHZ[k % 2])
        with world.gpu(0) as record:
            effective_ns = record.state.pending_at_ns
        watch.await_effect(
            ClockChangeReport(uuid, CLOCKS_MHZ[k % 2], called_ns, called_ns, virtual.now_ns, None, None, None)
        )
        seen.append(Seen(settled(watch, host, virtual), effective_ns))
        gpu.record_clock_change(seen[-1].change)
    host.close()

    assert all(each.is_true for each in seen)
    assert gpu.view().switch_latency.basis is LatencyBasis.MEASURED
    whole = {e.direction: e for e in gpu.switching.estimates() if e.from_region is None}
    assert set(whole) == set(Direction)
    for direction, estimate in whole.items():
        true_s = median_low(
            s.latency_s for s in seen if (s.change.requested_sm_clock_mhz == 1410) is (direction == "raise")
        )
        assert estimate.num_seen >= NUM_CHANGES // 2 - 6
        assert estimate.median_s == pytest.approx(true_s, abs=0.75 * estimate.resolution_s + 0.15 * true_s)
        assert estimate.resolution_s <= max(0.001, settle_s / 6)
        assert estimate.call_s == pytest.approx(call_s)


def settled(watch: EffectWatch, host: SimulatedHost, virtual: VirtualTime) -> ClockChangeReport:
    """Read at the instants that the watch requests until it reports the change."""
    while True:
        virtual.now_ns = max(virtual.now_ns, watch.next_read_ns)
        reported = watch.observe(host.read(host.identities()[0].gpu_uuid))
        if reported is not None:
            return reported


def steady_model(call_s: float, settle_s: float) -> DeviceParameters:
    """Return an A100 whose driver calls all take the same time."""
    return replace(A100_SXM, call_median_s=call_s, call_sigma=0.0, call_outlier_ratio=0.0, settle_mean_s=settle_s)


def test_an_effect_during_a_slow_reading_has_a_later_latest_time() -> None:
    """NVML reads the counters first and the clock later: the effect may come in between."""
    watch = EffectWatch()
    watch.observe(reading(0.0, 1410))
    watch.await_effect(awaited(900, returned_ms=10.0))
    assert watch.observe(reading(12.0, 1410)) is None

    reported = watch.observe(replace(reading(13.0, 900), sm_clock_by_mono_ns=30_000_000))

    assert reported is not None
    assert (reported.unseen_until_mono_ns, reported.effective_mono_ns) == (12_000_000, 30_000_000)


def test_nvml_reading_says_by_when_the_clock_had_been_read(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    nvml_world.control.inject("nvmlDeviceGetClockInfo", gpu_index=0, num_calls=1, delay_s=0.05)

    read = nvml_host.read(nvml_world.gpus[0])

    assert read.sm_clock_by_mono_ns is not None
    assert read.sm_clock_by_mono_ns - read.read_mono_ns >= 50_000_000


def reading(at_ms: float, clock_mhz: int) -> GpuReading:
    return GpuReading("GPU-0", round(at_ms * 1e6), sm_clock_mhz=clock_mhz)


def awaited(requested_mhz: int, *, returned_ms: float) -> ClockChangeReport:
    returned_ns = round(returned_ms * 1e6)
    return ClockChangeReport(
        "GPU-0", requested_mhz, returned_ns - 5_000_000, returned_ns - 4_000_000, returned_ns, None, None, None
    )


def reads_until_reported(
    watch: EffectWatch, effective_ms: float, *, before_mhz: int, after_mhz: int
) -> tuple[ClockChangeReport, int]:
    """Read at the instants that the watch requests; return the reported change and the number of readings."""
    for num_reads in range(1, 500):
        at_ms = watch.next_read_ns / 1e6
        reported = watch.observe(reading(at_ms, after_mhz if at_ms >= effective_ms else before_mhz))
        if reported is not None:
            return reported, num_reads
    raise AssertionError("never reported")


@pytest.mark.parametrize("settle_ms", [0.4, 3.0, 12.0, 35.0])
def test_effect_is_bracketed_to_a_millisecond_or_an_eighth_of_it(settle_ms: float) -> None:
    watch = EffectWatch()
    watch.observe(reading(0.0, 1410))
    watch.await_effect(awaited(900, returned_ms=10.0))

    reported, num_reads = reads_until_reported(watch, 10.0 + settle_ms, before_mhz=1410, after_mhz=900)

    low_ns, high_ns = reported.unseen_until_mono_ns or reported.returned_mono_ns, reported.effective_mono_ns
    assert high_ns is not None
    assert reported.previous_sm_clock_mhz == 1410
    assert low_ns <= (10.0 + settle_ms) * 1e6 <= high_ns
    assert high_ns - low_ns <= max(1.0, settle_ms / 8) * 1e6
    assert num_reads <= 25
    assert watch.next_read_ns == 0


def test_slow_gpu_is_watched_longer_next_time() -> None:
    watch = EffectWatch()
    watch.observe(reading(0.0, 1410))
    watch.await_effect(awaited(900, returned_ms=10.0))
    timed_out, _ = reads_until_reported(watch, 80.0, before_mhz=1410, after_mhz=900)
    watch.observe(reading(90.0, 900))
    watch.await_effect(awaited(1410, returned_ms=110.0))

    reported, _ = reads_until_reported(watch, 180.0, before_mhz=900, after_mhz=1410)

    assert timed_out.effective_mono_ns is None
    assert timed_out.unseen_until_mono_ns is not None
    assert reported.effective_mono_ns is not None


def test_idle_gpu_without_a_visible_raise_does_not_lengthen_the_watch() -> None:
    watch = EffectWatch()
    watch.observe(reading(0.0, 210))
    for k in range(4):
        watch.await_effect(awaited(1410, returned_ms=100.0 * (k + 1)))
        reported, num_reads = reads_until_reported(watch, 1e9, before_mhz=210, after_mhz=1410)

        assert reported.effective_mono_ns is None
        assert observed_switch(reported) is None
        assert num_reads <= 25
