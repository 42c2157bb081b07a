import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from gpuenergyd.errors import DriverError
from gpuenergyd_sim import InstructionWork, SimulatedHost
from gpuenergyd_sim.driver.device_model import blocking_power_w, working_power_w
from gpuenergyd_sim.driver.device_parameters import A100_SXM
from tests.support.virtual_time import VirtualTime

WORK = InstructionWork(memory_time_s=0.01, compute_time_s=0.04, power_coefficient_w_per_mhz=0.2)


def _uuid(host: SimulatedHost) -> str:
    return host.identities()[0].gpu_uuid


def test_instruction_takes_its_model_time_within_the_noise(host: SimulatedHost, virtual_time: VirtualTime) -> None:
    gpu = _uuid(host)
    begun_ns = virtual_time.now_ns

    host.begin_work(gpu, WORK)
    host.hold(gpu, sleep=virtual_time.sleep)

    assert (virtual_time.now_ns - begun_ns) / 1e9 == pytest.approx(0.05, rel=0.01)


def test_clock_change_during_work_affects_only_the_rest(host: SimulatedHost, virtual_time: VirtualTime) -> None:
    gpu = _uuid(host)
    host.begin_work(gpu, WORK)
    virtual_time.sleep(0.02)
    left_at_max_s = host.remaining_s(gpu)

    host.lock_sm_clock(gpu, 705)
    virtual_time.sleep(0.02)  # long enough for call and settling, so the lock is in force
    gone_before_lock_s = 0.05 - left_at_max_s
    left_s = host.remaining_s(gpu)

    assert gone_before_lock_s == pytest.approx(0.02, abs=0.001)
    assert 0.0 < left_s < 0.09
    host.hold(gpu, sleep=virtual_time.sleep)
    assert host.remaining_s(gpu) == 0.0


def test_raised_clock_during_work_shortens_the_wait(host: SimulatedHost, virtual_time: VirtualTime) -> None:
    """hold() sleeps for intervals that end before the work even if the clock rises at once."""
    gpu = _uuid(host)
    host.lock_sm_clock(gpu, 705)
    virtual_time.sleep(0.05)
    begun_ns = virtual_time.now_ns
    host.begin_work(gpu, WORK)
    slices: list[float] = []

    def sleep(duration_s: float) -> None:
        if not slices:
            host.reset_sm_clock(gpu)
            assert duration_s < 0.05
        slices.append(duration_s)
        virtual_time.sleep(duration_s)

    host.hold(gpu, sleep=sleep)
    overshoot_s = -host.remaining_s(gpu)

    assert overshoot_s == 0.0
    assert 0.05 < (virtual_time.now_ns - begun_ns) / 1e9 < 0.09
    assert len(slices) < 12


def test_energy_counter_equals_the_integral_of_power(host: SimulatedHost, virtual_time: VirtualTime) -> None:
    gpu = _uuid(host)
    begin_j = host.exact_energy_j(gpu)
    expected_j = 0.0
    for _ in range(20):
        begun_ns = virtual_time.now_ns
        host.begin_work(gpu, WORK)
        host.hold(gpu, sleep=virtual_time.sleep)
        host.finish_work(gpu)
        worked_s = (virtual_time.now_ns - begun_ns) / 1e9
        virtual_time.sleep(0.03)
        expected_j += working_power_w(A100_SXM, WORK, 1410) * worked_s + blocking_power_w(A100_SXM, 1410) * 0.03

    assert host.exact_energy_j(gpu) - begin_j == pytest.approx(expected_j, rel=0.02)  # leakage moves by some kelvins


def test_counter_shows_the_energy_of_its_last_update(host: SimulatedHost, virtual_time: VirtualTime) -> None:
    gpu = _uuid(host)
    shown: dict[float, int] = {}
    for _ in range(1000):
        virtual_time.sleep(0.001)
        reading = host.read(gpu)
        assert reading.total_energy_j is not None
        assert reading.total_energy_j <= host.exact_energy_j(gpu)
        shown.setdefault(reading.total_energy_j, reading.read_mono_ns)
    edges = list(shown.values())[1:]

    assert len(edges) in {9, 10}
    assert all(abs(b - a - 100_000_000) <= 1_000_000 for a, b in pairwise(edges))


def test_lock_takes_the_call_latency_and_holds(host: SimulatedHost, virtual_time: VirtualTime) -> None:
    gpu = _uuid(host)
    latencies_s = []
    for clock in [1200, 1110] * 200:
        before_ns = virtual_time.now_ns
        host.lock_sm_clock(gpu, clock)
        latencies_s.append((virtual_time.now_ns - before_ns) / 1e9)
    virtual_time.sleep(0.05)

    assert host.locked_sm_clock_mhz(gpu) == 1110
    assert host.read(gpu).sm_clock_mhz == 1110
    assert sorted(latencies_s)[200] == pytest.approx(0.0045, rel=0.15)
    assert max(latencies_s) > 0.02


def test_lock_is_not_in_force_before_it_has_settled(host: SimulatedHost, virtual_time: VirtualTime) -> None:
    gpu = _uuid(host)

    host.lock_sm_clock(gpu, 900)
    at_return = host.read(gpu).sm_clock_mhz
    virtual_time.sleep(0.05)

    assert at_return == 1410
    assert host.read(gpu).sm_clock_mhz == 900


def test_idle_gpu_is_never_pinned_high(tmp_path: Path, virtual_time: VirtualTime) -> None:
    host = SimulatedHost.create(tmp_path / "w", ["a40"], mono_ns=virtual_time.mono_ns, sleep=virtual_time.sleep)
    gpu = _uuid(host)

    host.lock_sm_clock(gpu, 1740)
    virtual_time.sleep(200.0)  # it was made warm

    assert host.read(gpu).sm_clock_mhz == 210
    assert host.read(gpu).power_w == pytest.approx(35.0, rel=0.3)
    host.close()


def test_dead_process_leaves_the_gpu_idle_and_its_work_unfinished(
    host: SimulatedHost, virtual_time: VirtualTime
) -> None:
    gpu = _uuid(host)
    host.detach_process(gpu, os.getpid())
    with subprocess.Popen(["sleep", "60"]) as process:
        host.attach_process(gpu, process.pid)
        host.begin_work(gpu, InstructionWork(10.0, 10.0, 0.2))
        assert host.process_ids(gpu) == (process.pid,)
        process.kill()
        process.wait()
    virtual_time.sleep(0.01)

    assert host.process_ids(gpu) == ()
    assert host.remaining_s(gpu) == 0.0
    assert host.read(gpu).sm_clock_mhz == A100_SXM.idle_sm_clock_mhz


def test_same_seed_creates_the_same_world(tmp_path: Path) -> None:
    durations = []
    for name in ("a", "b"):
        clock = VirtualTime()
        host = SimulatedHost.create(tmp_path / name, ["h200"], seed=11, mono_ns=clock.mono_ns, sleep=clock.sleep)
        for _ in range(5):
            host.begin_work(_uuid(host), WORK)
            host.hold(_uuid(host), sleep=clock.sleep)
        host.lock_sm_clock(_uuid(host), 1500)
        durations.append((clock.now_ns, host.exact_energy_j(_uuid(host))))
        host.close()

    assert durations[0] == durations[1]


def test_world_file_is_not_overwritten(host: SimulatedHost) -> None:
    with pytest.raises(DriverError, match="File exists"):
        SimulatedHost.create(host.path, ["a40"])


def test_file_that_is_not_a_world_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")

    with pytest.raises(DriverError, match="is not a world file"):
        SimulatedHost.open(tmp_path / "x")
    with pytest.raises(DriverError, match="No such file"):
        SimulatedHost.open(tmp_path / "y")
