"""Wall-clock jumps, suspended hosts and months of uptime: control uses the monotonic clock, memory stays bounded."""

import gc
import sys
import time
from datetime import UTC, datetime, timedelta
from types import FunctionType, ModuleType

import pytest

from gpuenergyd.core.measurement.telemetry import ClockHistory
from gpuenergyd.daemon.gpus.inventory import Gpu
from gpuenergyd.daemon.gpus.switches import switch_calibration
from gpuenergyd.daemon.runtime.sleep_watch import SleepWatch
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.store.records import Record, RollupRecord
from tests.support.job_stage import Stage, plan, settle
from tests.support.virtual_time import VirtualTime

NS_PER_S = 1_000_000_000


def gpu() -> Gpu:
    identity = GpuIdentity("GPU-a", 0, "A100", (1410, 900), is_simulated=True)
    return Gpu(identity, ClockHistory(1410), switch_calibration(identity))


def sample(mono_ns: int, total_energy_j: float) -> GpuSample:
    return GpuSample(
        gpu_uuid="GPU-a", read_mono_ns=mono_ns, power_w=100.0, total_energy_j=total_energy_j,
        energy_edge_mono_ns=mono_ns, sm_clock_mhz=1410, temperature_celsius=40.0, is_power_capped=False,
    )  # fmt: skip


@pytest.mark.fault(26)
@pytest.mark.parametrize("jump", [timedelta(days=365), timedelta(days=-365), timedelta(hours=1)], ids=str)
async def test_a_wall_clock_jump_causes_no_silent_job_and_no_lost_or_negative_energy(
    monkeypatch: pytest.MonkeyPatch, jump: timedelta
) -> None:
    stage, watched = Stage(plan("tuned-1", 1200)), gpu()
    stage.jobs.silence_limit_s = 60.0
    real_time_ns, jump_ns = time.time_ns, round(jump.total_seconds()) * NS_PER_S
    stage.join()
    await stage.iterate(times=3)
    leased = list(stage.worker.calls)
    monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + jump_ns)
    stage.jobs.check_time_limits()
    await settle()
    await stage.iterate()
    assert stage.worker.calls == leased == [("lease", ("GPU-0", "GPU-1"))]
    await stage.jobs.close("test over")
    monkeypatch.setattr(time, "time_ns", real_time_ns)
    records: list[Record] = []
    begin_ns = time.monotonic_ns()
    for tenth in range(200):
        if tenth == 100:
            monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + jump_ns)
        records += watched.record_sample(sample(begin_ns + tenth * NS_PER_S // 10, tenth * 10.0))

    seconds = [r for r in records if isinstance(r, RollupRecord) and r.bucket_s == 1]
    days = {(r.started_at - datetime.now(tz=UTC)) // timedelta(days=30) for r in seconds}
    assert all(r.energy_j is not None and r.energy_j >= 0 for r in seconds)
    measured_s = sum(r.measured_s for r in seconds)
    assert measured_s > 17
    assert sum(r.energy_j or 0.0 for r in seconds) == pytest.approx(100.0 * measured_s)
    assert abs(jump) < timedelta(days=30) or len(days) >= 2


@pytest.mark.fault(27)
def test_time_suspended_is_the_difference_of_boot_and_monotonic_clock() -> None:
    awake, booted = VirtualTime(), VirtualTime()
    watch = SleepWatch(booted.mono_ns, awake.mono_ns)

    first = watch.slept_s()
    for clock in (awake, booted):
        clock.sleep(3600.0)
    after_an_hour_awake = watch.slept_s()
    booted.sleep(7200.0)
    after_a_nap = watch.slept_s()

    assert (first, after_an_hour_awake) == (0.0, 0.0)
    assert after_a_nap == pytest.approx(7200.0)
    assert watch.slept_s() == 0.0


@pytest.mark.fault(27)
async def test_after_a_suspend_every_job_starts_at_full_speed_without_energy_for_the_gap() -> None:
    stage, watched = Stage(plan("tuned-1", 1200)), gpu()
    stage.join()
    await stage.iterate(times=3)
    stage.jobs.host_slept(7200.0)
    await settle()
    assert stage.worker.calls[-1] == ("restore", ("GPU-0", "GPU-1"))
    assert "the host slept for 7200 s" in stage.events("restore")[-1].reason
    await stage.jobs.close("test over")
    watched.counter.record(1 * NS_PER_S, 100.0)
    watched.counter.record(2 * NS_PER_S, 200.0)
    watched.counter.interrupt()
    watched.counter.record(3 * NS_PER_S, 90_000.0)
    watched.counter.record(4 * NS_PER_S, 90_100.0)

    assert watched.counter.energy_j(1 * NS_PER_S, 2 * NS_PER_S) == pytest.approx(100.0)
    assert watched.counter.energy_j(2 * NS_PER_S, 3 * NS_PER_S) is None
    assert watched.counter.energy_j(3 * NS_PER_S, 4 * NS_PER_S) == pytest.approx(100.0)


def size_bytes(root: object) -> int:
    """Return the memory that an object and all that it refers to hold; not of code, which others share."""
    found: dict[int, object] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in found and not isinstance(one, type | FunctionType | ModuleType):
            found[id(one)] = one
            waiting += gc.get_referents(one)
    return sum(map(sys.getsizeof, found.values()))


@pytest.mark.fault(52)
def test_the_state_of_a_gpu_stops_growing_after_a_quarter_of_an_hour() -> None:
    watched, now_ns, held_bytes = gpu(), time.monotonic_ns(), []
    for second in range(0, 4 * 3600, 4):
        watched.record_sample(sample(now_ns + second * NS_PER_S, second * 100.0))
        if second and second % 1800 == 0:
            held_bytes.append(size_bytes(watched))

    assert max(held_bytes) - held_bytes[0] < 2**10, held_bytes
