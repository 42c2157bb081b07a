"""Simulated GPUs of the unkind world, in virtual time: what each disturbance does to training and to readings."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd_sim.driver.device_model import InstructionWork
from gpuenergyd_sim.driver.device_parameters import A100_SXM, MODELS, DeviceParameters
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world import create_world
from gpuenergyd_sim.driver.world_kinds import WorldKind, parameters_in
from tests.support.virtual_time import VirtualTime

MS = 1_000_000
EXACT = replace(A100_SXM, time_noise_ratio=0.0, call_sigma=0.0, call_outlier_ratio=0.0)
WORK = InstructionWork(memory_time_s=0.1, compute_time_s=0.0, power_coefficient_w_per_mhz=0.2)


@pytest.fixture
def clock() -> VirtualTime:
    return VirtualTime()


@pytest.fixture
def host_of(tmp_path: Path, clock: VirtualTime) -> Iterator[Callable[[DeviceParameters], SimulatedHost]]:
    opened: list[SimulatedHost] = []

    def make(model: DeviceParameters) -> SimulatedHost:
        path = tmp_path / f"world-{len(opened)}"
        create_world(path, [model], seed=3, now_ns=clock.now_ns)
        opened.append(SimulatedHost(path, mono_ns=clock.mono_ns, sleep=clock.sleep))
        return opened[-1]

    yield make
    for host in opened:
        host.close()


def uuid_of(host: SimulatedHost) -> str:
    return host.identities()[0].gpu_uuid


def test_reads_take_their_time_and_are_dated_to_the_middle_of_the_call(host_of: Any, clock: VirtualTime) -> None:
    host = host_of(replace(EXACT, read_s=0.004))
    begin_ns = clock.now_ns
    energy = host.read_energy(uuid_of(host))
    assert (energy.took_ns, energy.read_mono_ns - begin_ns) == (4 * MS, 2 * MS)

    begin_ns = clock.now_ns
    reading = host.read(uuid_of(host))  # four calls, of which the first reads the energy
    assert (reading.read_mono_ns - begin_ns, clock.now_ns - begin_ns) == (2 * MS, 16 * MS)


def test_a_list_of_processes_takes_its_time(host_of: Any, clock: VirtualTime) -> None:
    host = host_of(replace(EXACT, process_list_s=0.005))
    begin_ns = clock.now_ns
    host.process_ids(uuid_of(host))

    assert clock.now_ns - begin_ns == 5 * MS


@pytest.mark.parametrize(("stall_s", "took_s"), [(0.0, 0.1), (0.003, 0.103)])
def test_a_set_call_stalls_the_running_instruction(
    host_of: Any, clock: VirtualTime, stall_s: float, took_s: float
) -> None:
    host = host_of(replace(EXACT, set_stall_s=stall_s))
    begin_ns = clock.now_ns
    host.begin_work(uuid_of(host), WORK)
    host.lock_sm_clock(uuid_of(host), 1410)  # the clock it has already
    host.hold(uuid_of(host), sleep=clock.sleep)

    assert (host.finish_work(uuid_of(host)) - begin_ns) / 1e9 == pytest.approx(took_s, abs=1e-6)


def test_a_clock_is_reported_before_it_takes_effect(host_of: Any) -> None:
    host = host_of(replace(EXACT, settle_mean_s=0.05, reported_early_s=10.0))
    gpu_uuid = uuid_of(host)
    host.begin_work(gpu_uuid, InstructionWork(0.0, 1.0, 0.2))
    host.lock_sm_clock(gpu_uuid, 705)
    left_s = host.remaining_s(gpu_uuid)

    assert host.read(gpu_uuid).sm_clock_mhz == 705
    assert host.remaining_s(gpu_uuid) == pytest.approx(left_s)  # it still runs at 1410 MHz


def settle_times_s(host: SimulatedHost, clock: VirtualTime, sm_clock_mhz: int, count: int) -> list[float]:
    gpu_uuid = uuid_of(host)
    times_s = []
    for _ in range(count):
        for target_mhz, is_measured in ((1410, False), (sm_clock_mhz, True)):
            host.begin_work(gpu_uuid, InstructionWork(100.0, 0.0, 0.2))
            host.lock_sm_clock(gpu_uuid, target_mhz)
            begin_ns = clock.now_ns
            while host.read(gpu_uuid).sm_clock_mhz != target_mhz:
                clock.sleep(0.0005)
            if is_measured:
                times_s.append((clock.now_ns - begin_ns) / 1e9)
    return times_s


@pytest.mark.thorough
def test_settling_has_tails_and_a_median_of_its_own_at_each_target(host_of: Any, clock: VirtualTime) -> None:
    tails: Any = {"settle_tail_ratio": 0.05, "settle_tail_min_s": 0.2, "settle_tail_max_s": 0.4}
    host = host_of(replace(EXACT, settle_mean_s=0.01, settle_target_spread=1.0, **tails))
    by_target = {mhz: sorted(settle_times_s(host, clock, mhz, 150)) for mhz in (705, 900, 1095)}

    medians_s = [times_s[75] for times_s in by_target.values()]
    assert max(medians_s) > 1.5 * min(medians_s)
    in_tail = [time_s for times_s in by_target.values() for time_s in times_s if time_s >= 0.2]
    assert 0.02 < len(in_tail) / 450 < 0.1
    assert max(in_tail) <= 0.401


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_a_part_time_sensor_sees_what_happens_in_its_window_only(
    host_of: Any, clock: VirtualTime, ratio: float
) -> None:
    """Work in the first half of each period: a sensor that works in its last quarter or half sees none of it."""
    model = replace(EXACT, energy_sampled_ratio=ratio, leakage_w_per_k=0.0, energy_update_s=0.1)
    host = host_of(model)
    gpu_uuid = uuid_of(host)
    last_j = host.read(gpu_uuid).total_energy_j
    while host.read(gpu_uuid).total_energy_j == last_j:  # find the begin of a period
        clock.sleep(0.0001)
    before_j, true_before_j = host.read(gpu_uuid).total_energy_j, host.exact_energy_j(gpu_uuid)
    for _ in range(10):
        host.begin_work(gpu_uuid, InstructionWork(0.0, 0.04, 0.2))
        clock.sleep(0.0999)
        host.finish_work(gpu_uuid)
        clock.sleep(0.0001)
    seen_j = host.read(gpu_uuid).total_energy_j - before_j
    true_j = host.exact_energy_j(gpu_uuid) - true_before_j

    assert seen_j < 0.6 * true_j
    assert seen_j == pytest.approx(model.idle_power_w * 1.0, rel=0.25)


def test_a_part_time_sensor_is_exact_under_a_constant_load(host_of: Any, clock: VirtualTime) -> None:
    host = host_of(replace(EXACT, energy_sampled_ratio=0.25, leakage_w_per_k=0.0))
    gpu_uuid = uuid_of(host)
    host.begin_work(gpu_uuid, InstructionWork(0.0, 100.0, 0.2))
    clock.sleep(1.0)
    before_j, true_before_j = host.read(gpu_uuid).total_energy_j, host.exact_energy_j(gpu_uuid)
    clock.sleep(5.0)
    seen_j = host.read(gpu_uuid).total_energy_j - before_j

    assert seen_j == pytest.approx(host.exact_energy_j(gpu_uuid) - true_before_j, rel=0.001)


@pytest.mark.parametrize("key", sorted(MODELS))
def test_every_model_has_an_unkind_variant_that_differs_only_in_its_driver(key: str) -> None:
    model = MODELS[key]
    unkind = parameters_in(WorldKind.UNKIND, model)

    assert parameters_in(WorldKind.KIND, model) == model
    assert unkind.read_s > 0
    assert unkind.set_stall_s > 0
    assert unkind.settle_tail_max_s > unkind.settle_tail_min_s > 0
    assert math.isclose(unkind.typical_w_per_mhz, model.typical_w_per_mhz)
    assert unkind.supported_sm_clocks_mhz == model.supported_sm_clocks_mhz
