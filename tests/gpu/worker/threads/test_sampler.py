"""Samples show a counter's value at its last dated update, or as read if no recent update could be dated."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from gpuenergyd.gpu.device import EnergyReading, GpuReading
from gpuenergyd.gpu.worker.threads.sampler import Sampler

GPU = "GPU-0"
PERIOD_NS = 50_000_000


@dataclass
class Counter:
    """A driver with one GPU of 100 W whose counter has a period; reads take no time."""

    now_ns: int = 1

    @property
    def energy_j(self) -> float:
        """The counter's value now."""
        return 100.0 * (self.now_ns // PERIOD_NS) * PERIOD_NS / 1e9

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        assert gpu_uuid == GPU
        return EnergyReading(self.now_ns, 0, self.energy_j)

    def read(self, gpu_uuid: str) -> GpuReading:
        return GpuReading(gpu_uuid, self.now_ns, total_energy_j=self.energy_j)


def _fail(*arguments: Any) -> None:
    pytest.fail(f"unexpected call: {arguments}")


def test_a_value_whose_last_dated_update_is_long_ago_is_shown_as_read() -> None:
    driver = Counter()
    sampler = Sampler(
        cast("Any", driver),
        [GPU],
        period_s=0.1,
        on_samples=_fail,
        on_settled=_fail,
        on_health=_fail,
        on_counter_reset=_fail,
    )
    gpu = sampler._gpus[GPU]
    for driver.now_ns in range(1, 500_000_000, 1_000_000):
        sampler._read_energy(gpu)
    driver.now_ns = 525_000_000
    dated = sampler._read(gpu)
    assert dated is not None
    assert dated.energy_edge_mono_ns == pytest.approx(500_000_000, abs=1_000_000)
    assert dated.total_energy_j == 50.0

    driver.now_ns = 5_000_000_000  # at an update, so that nobody knows whether it has come
    undated = sampler._read(gpu)

    assert undated is not None
    assert undated.energy_edge_mono_ns is None
    assert undated.total_energy_j == 500.0
