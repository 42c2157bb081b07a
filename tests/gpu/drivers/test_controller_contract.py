"""Contract of GpuController, tested on each implementation."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from gpuenergyd.errors import GpuNotFoundError, GpuUnsupportedError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.drivers.nvml import NvmlHost
from gpuenergyd.gpu.drivers.simulated import SimulatedHost
from tests.gpu.conftest import NvmlWorld
from tests.support.virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class Subject:
    """A controller, with functions that keep its GPUs busy and let time pass."""

    controller: GpuController
    keep_busy: Callable[[str], None]
    pass_time: Callable[[float], object]
    another: Callable[[], GpuController]


@pytest.fixture(params=["simulated", "nvml"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each implementation in turn: the simulated one in virtual time, NVML on the fake library in real time."""
    opened: list[GpuController] = []

    def remember(controller: GpuController) -> GpuController:
        opened.append(controller)
        return controller

    if request.param == "simulated":
        host: SimulatedHost = request.getfixturevalue("host")
        clock: VirtualTime = request.getfixturevalue("virtual_time")
        yield Subject(
            host,
            lambda _: None,
            clock.sleep,
            lambda: remember(SimulatedHost(host.path, mono_ns=clock.mono_ns, sleep=clock.sleep)),
        )
    else:
        world: NvmlWorld = request.getfixturevalue("nvml_world")
        yield Subject(
            request.getfixturevalue("nvml_host"),
            lambda gpu: world.simulated.attach_process(gpu, os.getpid()),
            threading.Event().wait,
            lambda: remember(NvmlHost()),
        )
    for controller in opened:
        controller.close()


def test_every_gpu_reports_the_version_of_its_driver(subject: Subject) -> None:
    versions = {identity.driver_version for identity in subject.controller.identities()}

    assert len(versions) >= 1
    assert all(versions)


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
        assert reading.temperature_celsius is not None
        assert 0.0 < reading.temperature_celsius < 120.0
        assert reading.total_energy_j is not None
        assert reading.sm_clock_mhz is not None
        assert reading.sm_clock_mhz <= identity.supported_sm_clocks_mhz[0]
        assert reading.is_power_capped in {True, False, None}


def test_the_energy_counter_alone_is_that_of_a_reading_dated_within_its_call(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    before = subject.controller.read(gpu)
    energy = subject.controller.read_energy(gpu)
    after = subject.controller.read(gpu)

    assert before.total_energy_j is not None
    assert energy.total_energy_j is not None
    assert after.total_energy_j is not None
    assert before.total_energy_j <= energy.total_energy_j <= after.total_energy_j
    assert before.read_mono_ns <= energy.read_mono_ns <= after.read_mono_ns
    assert energy.took_ns >= 0


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
    supported, others = (i.supported_sm_clocks_mhz for i in subject.controller.identities()[:2])
    target = supported[len(supported) // 2]

    subject.controller.lock_sm_clock(one, target)
    subject.pass_time(0.2)

    assert subject.controller.read(one).sm_clock_mhz == target
    assert subject.controller.read(other).sm_clock_mhz == others[0]


def test_reset_restores_the_maximum_clock(subject: Subject) -> None:
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
        lambda: controller.read_energy("GPU-none"),
        lambda: controller.process_ids("GPU-none"),
        lambda: controller.lock_sm_clock("GPU-none", 1200),
        lambda: controller.reset_sm_clock("GPU-none"),
    ]

    for call in calls:
        with pytest.raises(GpuNotFoundError, match="GPU-none"):
            call()


def test_power_limit_is_read_set_and_kept_within_its_range(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    details = subject.controller.details(gpu)
    assert details.min_power_limit_w is not None
    assert details.max_power_limit_w is not None
    assert subject.controller.identities()[0].min_power_limit_w == details.min_power_limit_w

    subject.controller.set_power_limit(gpu, details.min_power_limit_w + 50.0)

    assert subject.controller.power_limit_w(gpu) == details.min_power_limit_w + 50.0
    for beyond in (details.min_power_limit_w - 1.0, details.max_power_limit_w + 1.0):
        with pytest.raises(GpuUnsupportedError, match="is out of range"):
            subject.controller.set_power_limit(gpu, beyond)
    assert subject.controller.power_limit_w(gpu) == details.min_power_limit_w + 50.0


def test_processes_on_a_gpu_are_known_by_their_host_pid(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    subject.keep_busy(gpu)

    assert os.getpid() in subject.controller.process_ids(gpu)


def test_gpu_without_an_observe_only_reason_can_be_controlled(subject: Subject) -> None:
    assert subject.controller.observe_only_reasons() == {}
