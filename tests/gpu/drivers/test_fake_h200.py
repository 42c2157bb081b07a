"""The fake driver library shows an H200 as one was measured: values kept for 100 ms, energy that costs CPU time."""

import time

import pytest

from gpuenergyd.gpu.drivers.nvml import NvmlHost
from gpuenergyd_sim.driver.device_model import InstructionWork
from gpuenergyd_sim.driver.device_parameters import device_parameters
from tests.gpu.conftest import NvmlWorld

H200, A100 = 0, 1
LONG = InstructionWork(2.0, 8.0, 0.161)


@pytest.fixture
def gpu_models() -> tuple[str, ...]:
    return ("h200", "a100-sxm")


def test_an_energy_reading_of_an_h200_uses_milliseconds_of_cpu_time(nvml_host: NvmlHost, nvml_world: NvmlWorld) -> None:
    cpu_ns = {gpu: [nvml_host.read_energy(nvml_world.gpus[gpu]).cpu_ns for _ in range(9)] for gpu in (H200, A100)}

    assert min(cpu_ns[H200]) > 2_000_000
    assert min(cpu_ns[A100]) < 1_000_000


def test_all_other_values_of_an_h200_are_up_to_100_ms_old(nvml_host: NvmlHost, nvml_world: NvmlWorld) -> None:
    gpu = nvml_world.gpus[H200]
    before = nvml_host.read_without_energy(gpu)
    before_ns = time.monotonic_ns()
    nvml_world.simulated.begin_work(gpu, LONG)
    seen = [(time.monotonic_ns(), nvml_host.read_without_energy(gpu))]
    while seen[-1][1].power_w == before.power_w:
        seen.append((time.monotonic_ns(), nvml_host.read_without_energy(gpu)))

    assert before.total_energy_j is None
    assert seen[-1][0] - before_ns > 50_000_000
    assert (seen[-1][1].power_w or 0.0) > 500.0


def test_an_h200_keeps_its_clock_and_draws_little_while_it_waits(nvml_world: NvmlWorld) -> None:
    model = device_parameters("h200")

    assert model.blocking_power_w == 126
    assert model.idle_power_w == 80
    assert nvml_world.simulated.identities()[H200].supported_sm_clocks_mhz[0] == 1980
