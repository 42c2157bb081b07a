"""Contract of a GPU driver and of each capability, tested on each implementation that has it."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest

from gpuenergyd.errors import GpuNotFoundError, GpuUnsupportedError
from gpuenergyd.gpu.device import (
    GpuDriver,
    HasClocks,
    HasEnergyCounter,
    HasPowerLimit,
    HasPowerProfiles,
    HasProcesses,
    HasRelease,
    HasSettings,
    missing_capabilities,
    require_capability,
)
from gpuenergyd.gpu.drivers.nvml import NvmlHost
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.gpu.conftest import NvmlWorld
from tests.support.fake_amd.driver import AmdHost, open_driver
from tests.support.virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class Subject:
    """A driver, with functions that keep its GPUs busy and let time pass."""

    controller: GpuDriver
    keep_busy: Callable[[str], None]
    pass_time: Callable[[float], object]
    another: Callable[[], GpuDriver]


CapabilityT = TypeVar("CapabilityT")


def having(capability: type[CapabilityT], subject: Subject) -> CapabilityT:
    """Return a driver as one with a capability; skip the test for one without."""
    if not isinstance(subject.controller, capability):
        pytest.skip(f"{type(subject.controller).__name__} has no such capability")
    return subject.controller


@pytest.fixture(params=["simulated", "nvml", "amd"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each implementation in turn: the simulated one in virtual time, vendors' on fake libraries in real time."""
    opened: list[GpuDriver] = []

    def remember(controller: GpuDriver) -> GpuDriver:
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
    elif request.param == "amd":
        simulated: SimulatedHost = request.getfixturevalue("real_time_host")
        yield Subject(
            remember(open_driver(simulated.path)),
            lambda gpu: simulated.attach_process(gpu, os.getpid()),
            threading.Event().wait,
            lambda: remember(open_driver(simulated.path)),
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
    energy = having(HasEnergyCounter, subject).read_energy(gpu)
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

    having(HasClocks, subject).lock_sm_clock(one, target)
    subject.pass_time(0.2)

    assert subject.controller.read(one).sm_clock_mhz == target
    assert subject.controller.read(other).sm_clock_mhz == others[0]


def test_reset_restores_the_maximum_clock(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    subject.keep_busy(gpu)
    supported = subject.controller.identities()[0].supported_sm_clocks_mhz
    clocks = having(HasClocks, subject)
    clocks.lock_sm_clock(gpu, supported[20])
    subject.pass_time(0.2)

    clocks.reset_sm_clock(gpu)
    clocks.reset_sm_clock(gpu)
    subject.pass_time(0.2)

    assert subject.controller.read(gpu).sm_clock_mhz == supported[0]


def test_lock_outlives_the_controller_that_set_it(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    subject.keep_busy(gpu)
    clock = subject.controller.identities()[0].supported_sm_clocks_mhz[10]
    having(HasClocks, subject)
    setter = subject.another()
    require_capability(setter, HasClocks).lock_sm_clock(gpu, clock)
    setter.close()
    subject.pass_time(0.2)

    assert subject.controller.read(gpu).sm_clock_mhz == clock


def test_clock_that_is_not_supported_is_refused(subject: Subject) -> None:
    clocks, identity = having(HasClocks, subject), subject.controller.identities()[0]

    for clock in (identity.supported_sm_clocks_mhz[0] + 15, identity.supported_sm_clocks_mhz[3] + 1, 1, -5):
        with pytest.raises(GpuUnsupportedError, match=str(clock)):
            clocks.lock_sm_clock(identity.gpu_uuid, clock)


def test_unknown_gpu_is_refused_by_every_call(subject: Subject) -> None:
    driver = subject.controller
    calls: list[Callable[[], object]] = [lambda: driver.read("GPU-none")]
    if isinstance(driver, HasEnergyCounter):
        calls.append(partial(driver.read_energy, "GPU-none"))
    if isinstance(driver, HasProcesses):
        calls.append(partial(driver.process_ids, "GPU-none"))
    if isinstance(driver, HasClocks):
        calls += [partial(driver.lock_sm_clock, "GPU-none", 1200), partial(driver.reset_sm_clock, "GPU-none")]
    if isinstance(driver, HasPowerLimit):
        calls.append(partial(driver.power_limit_w, "GPU-none"))

    for call in calls:
        with pytest.raises(GpuNotFoundError, match="GPU-none"):
            call()


def test_power_limit_is_read_set_and_kept_within_its_range(subject: Subject) -> None:
    limits, identity = having(HasPowerLimit, subject), subject.controller.identities()[0]
    gpu, low_w, high_w = identity.gpu_uuid, identity.min_power_limit_w, identity.max_power_limit_w
    assert low_w is not None
    assert high_w is not None

    limits.set_power_limit(gpu, low_w + 50.0)

    assert limits.power_limit_w(gpu) == low_w + 50.0
    for beyond in (low_w - 1.0, high_w + 1.0):
        with pytest.raises(GpuUnsupportedError, match="is out of range"):
            limits.set_power_limit(gpu, beyond)
    assert limits.power_limit_w(gpu) == low_w + 50.0


def test_settings_agree_with_the_identity_and_the_power_limit(subject: Subject) -> None:
    settings, identity = having(HasSettings, subject), subject.controller.identities()[0]
    details = settings.details(identity.gpu_uuid)

    assert details.min_power_limit_w == identity.min_power_limit_w
    assert details.max_power_limit_w == identity.max_power_limit_w
    assert details.power_limit_w == having(HasPowerLimit, subject).power_limit_w(identity.gpu_uuid)


def test_processes_on_a_gpu_are_known_by_their_host_pid(subject: Subject) -> None:
    gpu = subject.controller.identities()[0].gpu_uuid
    subject.keep_busy(gpu)

    assert os.getpid() in having(HasProcesses, subject).process_ids(gpu)


def test_gpu_without_an_observe_only_reason_can_be_controlled(subject: Subject) -> None:
    assert subject.controller.observe_only_reasons() == {}


def test_a_released_gpu_is_reopened_as_it_was(subject: Subject) -> None:
    driver, identity = having(HasRelease, subject), subject.controller.identities()[0]
    driver.release([identity.gpu_uuid])

    assert driver.reopen([identity.gpu_uuid]) == (identity,)


def test_a_driver_lacks_what_its_vendor_does_not_offer(subject: Subject) -> None:
    missing = missing_capabilities(subject.controller)

    if isinstance(subject.controller, AmdHost):
        assert len(missing) == 5
        with pytest.raises(GpuUnsupportedError, match="does not offer workload power profiles"):
            require_capability(subject.controller, HasPowerProfiles)
    else:
        assert set(missing) <= {"error events"}
