"""What every GpuController must do, run on each implementation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuenergyd.errors import GpuNotFoundError, GpuUnsupportedError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.simulated import SimulatedHost
from tests.support.virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class Subject:
    """A controller, a way to keep its GPUs busy, and a way to let time pass."""

    controller: GpuController
    keep_busy: Callable[[str], None]
    pass_time: Callable[[float], None]
    another: Callable[[], GpuController]


@pytest.fixture(params=["simulated"])
def subject(tmp_path: Path, host: SimulatedHost, virtual_time: VirtualTime) -> Iterator[Subject]:
    """Each implementation in turn."""
    del tmp_path
    opened: list[SimulatedHost] = []

    def another() -> GpuController:
        opened.append(SimulatedHost(host.path, mono_ns=virtual_time.mono_ns, sleep=virtual_time.sleep))
        return opened[-1]

    yield Subject(host, lambda _: None, virtual_time.sleep, another)
    for controller in opened:
        controller.close()


def test_identities_are_stable_and_ordered_by_index(subject: Subject) -> None:
    identities = subject.controller.identities()

    assert identities == subject.controller.identities()
    assert [i.index for i in identities] == list(range(len(identities)))
    assert len({i.gpu_uuid for i in identities}) == len(identities)
    assert all(list(i.supported_sm_clocks_mhz) == sorted(i.supported_sm_clocks_mhz, reverse=True) for i in identities)


def test_reading_is_complete_and_in_range(subject: Subject) -> None:
    for identity in subject.controller.identities():
        reading = subject.controller.read(identity.gpu_uuid)

        assert reading.gpu_uuid == identity.gpu_uuid
        assert reading.power_w is not None
        assert 1.0 < reading.power_w < 1000.0
        assert reading.total_energy_j is not None
        assert reading.sm_clock_mhz is not None
        assert reading.sm_clock_mhz <= identity.supported_sm_clocks_mhz[0]
        assert reading.is_power_capped in {True, False, None}


def test_energy_never_decreases_and_grows_while_busy(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    subject.keep_busy(gpu)
    seen = []
    for _ in range(10):
        seen.append(subject.controller.read(gpu).total_energy_j or 0.0)
        subject.pass_time(0.15)

    assert seen == sorted(seen)
    assert seen[-1] > seen[0] + 10.0


def test_lock_caps_the_clock_of_one_gpu_only(subject: Subject) -> None:
    one, other = (i.gpu_uuid for i in subject.controller.identities()[:2])
    for gpu in (one, other):
        subject.keep_busy(gpu)
    supported = subject.controller.identities()[0].supported_sm_clocks_mhz
    target = supported[len(supported) // 2]

    subject.controller.lock_sm_clock(one, target)
    subject.pass_time(0.2)

    assert subject.controller.read(one).sm_clock_mhz == target
    assert subject.controller.read(other).sm_clock_mhz == supported[0]


def test_reset_gives_the_maximum_back(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    subject.keep_busy(gpu)
    supported = subject.controller.identities()[0].supported_sm_clocks_mhz
    subject.controller.lock_sm_clock(gpu, supported[20])
    subject.pass_time(0.2)

    subject.controller.reset_sm_clock(gpu)
    subject.controller.reset_sm_clock(gpu)
    subject.pass_time(0.2)

    assert subject.controller.read(gpu).sm_clock_mhz == supported[0]


def test_lock_outlives_the_controller_that_set_it(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    subject.keep_busy(gpu)
    clock = subject.controller.identities()[0].supported_sm_clocks_mhz[10]
    setter = subject.another()
    setter.lock_sm_clock(gpu, clock)
    setter.close()
    subject.pass_time(0.2)

    assert subject.controller.read(gpu).sm_clock_mhz == clock


def test_clock_that_is_not_supported_is_refused(subject: Subject) -> None:
    identity = subject.controller.identities()[0]

    for clock in (identity.supported_sm_clocks_mhz[0] + 15, identity.supported_sm_clocks_mhz[3] + 1, 1, -5):
        with pytest.raises(GpuUnsupportedError, match=str(clock)):
            subject.controller.lock_sm_clock(identity.gpu_uuid, clock)


def test_unknown_gpu_is_refused_by_every_call(subject: Subject) -> None:
    controller = subject.controller
    calls: list[Callable[[], object]] = [
        lambda: controller.read("GPU-none"),
        lambda: controller.process_ids("GPU-none"),
        lambda: controller.lock_sm_clock("GPU-none", 1200),
        lambda: controller.reset_sm_clock("GPU-none"),
    ]

    for call in calls:
        with pytest.raises(GpuNotFoundError, match="GPU-none"):
            call()
