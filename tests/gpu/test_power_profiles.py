"""Workload power profiles: both drivers alike, journalled before they are requested, and only ours are removed."""

import os
import shutil
from pathlib import Path

import pynvml
import pytest

from gpuenergyd.errors import DriverError, GpuError, GpuNotFoundError, GpuPermissionError, GpuUnsupportedError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.drivers.nvml import NvmlHost
from gpuenergyd.gpu.link.messages import LeaseOwner, PowerProfiles, SetPowerProfile
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.restore.executor import RestoreResult
from gpuenergyd.gpu.restore.journal import Control, Journal
from gpuenergyd.gpu.restore.policy import RestorePolicy, RestoreRules
from gpuenergyd.gpu.worker.driver_requests import DriverRequests
from gpuenergyd_command_driver.driver import CommandHost, Commands
from gpuenergyd_sim.driver.device_parameters import B200, MAX_P, MAX_Q
from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
from tests.gpu.conftest import NvmlWorld
from tests.support.virtual_time import VirtualTime
from tests.support.waiting import wait_until

OWNER = LeaseOwner("job-1", os.getpid(), os.getuid())
_UPDATE = "nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1"


@pytest.fixture
def gpu_models() -> tuple[str, ...]:
    """A GPU with workload power profiles, and one without."""
    return ("b200", "a100-sxm")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.json")


@pytest.fixture
def gpu(host: SimulatedHost) -> str:
    return host.identities()[0].gpu_uuid


@pytest.fixture
def requests(host: SimulatedHost, journal: Journal) -> DriverRequests:
    """The requests of a daemon for the simulated GPUs."""
    return DriverRequests(host, journal, "simulated", host.path, RestoreRules(RestorePolicy.RESTORE))


@pytest.fixture(params=["simulated", "nvml", "command"])
def controller(request: pytest.FixtureRequest) -> GpuController:
    """Each implementation in turn."""
    host: GpuController = request.getfixturevalue("nvml_host" if request.param == "nvml" else "host")
    return CommandHost(Commands(), host) if request.param == "command" else host


def test_profiles_are_requested_and_removed_one_by_one(controller: GpuController) -> None:
    identity = controller.identities()[0]
    gpu = identity.gpu_uuid
    assert identity.power_profiles == (MAX_P, MAX_Q)
    assert controller.requested_power_profiles(gpu) == frozenset()

    controller.request_power_profile(gpu, MAX_Q)
    controller.request_power_profile(gpu, MAX_Q)
    assert controller.requested_power_profiles(gpu) == {MAX_Q}
    assert (controller.details(gpu).requested_power_profiles, controller.details(gpu).enforced_power_profiles) == (
        ("1", "1")
    )
    controller.request_power_profile(gpu, MAX_P)
    assert controller.requested_power_profiles(gpu) == {MAX_P, MAX_Q}
    controller.clear_power_profile(gpu, MAX_Q)
    controller.clear_power_profile(gpu, MAX_Q)

    assert controller.requested_power_profiles(gpu) == {MAX_P}


def test_what_a_gpu_does_not_offer_is_refused(controller: GpuController) -> None:
    with_profiles, without = (identity.gpu_uuid for identity in controller.identities())

    with pytest.raises(GpuUnsupportedError, match=r"no workload power profile 7 of .*; offered: 0, 1"):
        controller.request_power_profile(with_profiles, 7)
    with pytest.raises(GpuUnsupportedError, match=r"no workload power profile 1 of .*; offered: none"):
        controller.request_power_profile(without, MAX_Q)
    with pytest.raises(GpuUnsupportedError):
        controller.requested_power_profiles(without)
    with pytest.raises(GpuNotFoundError, match="GPU-none"):
        controller.requested_power_profiles("GPU-none")
    assert controller.details(without).requested_power_profiles is None


def test_a_driver_without_the_newer_call_is_asked_by_the_older_ones(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    nvml_world.control.inject(_UPDATE, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    gpu = nvml_world.gpus[0]

    nvml_host.request_power_profile(gpu, MAX_Q)
    assert nvml_host.requested_power_profiles(gpu) == {MAX_Q}
    nvml_host.clear_power_profile(gpu, MAX_Q)

    assert nvml_host.requested_power_profiles(gpu) == frozenset()
    assert nvml_world.control.num_hits(_UPDATE) == 2


def test_a_driver_that_demands_privilege_says_what_is_missing(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    nvml_world.control.inject(_UPDATE, pynvml.NVML_ERROR_NO_PERMISSION)

    with pytest.raises(GpuPermissionError, match="no permission; run the GPU worker with CAP_SYS_ADMIN"):
        nvml_host.request_power_profile(nvml_world.gpus[0], MAX_Q)


def test_max_q_lowers_clock_and_power_of_a_simulated_gpu(
    host: SimulatedHost, gpu: str, virtual_time: VirtualTime
) -> None:
    work = InstructionWork(memory_time_s=0.6, compute_time_s=0.4, power_coefficient_w_per_mhz=0.2)

    def run() -> tuple[float, float, int]:
        begin_s, begin_j = virtual_time.mono_ns() / 1e9, host.exact_energy_j(gpu)
        host.begin_work(gpu, work)
        clock_mhz = host.read(gpu).sm_clock_mhz or 0
        host.hold(gpu, sleep=virtual_time.sleep)
        host.finish_work(gpu)
        return virtual_time.mono_ns() / 1e9 - begin_s, host.exact_energy_j(gpu) - begin_j, clock_mhz

    time_s, energy_j, clock_mhz = run()
    host.request_power_profile(gpu, MAX_Q)
    slower_s, less_j, lower_mhz = run()
    host.clear_power_profile(gpu, MAX_Q)
    host.request_power_profile(gpu, MAX_P)
    again_s, _, again_mhz = run()

    assert (clock_mhz, lower_mhz, again_mhz) == (1965, 1770, 1965)
    assert slower_s / time_s == pytest.approx(0.6 + 0.4 / B200.max_q_clock_ratio, rel=0.02)
    assert again_s == pytest.approx(time_s, rel=0.02)
    assert 0.75 < less_j / energy_j < 0.95


def test_fake_library_and_python_model_agree_under_a_profile(
    nvml_world: NvmlWorld, nvml_host: NvmlHost, tmp_path: Path
) -> None:
    gpu = nvml_world.gpus[0]
    nvml_host.request_power_profile(gpu, MAX_Q)
    nvml_world.simulated.attach_process(gpu, os.getpid())
    nvml_world.simulated.begin_work(gpu, InstructionWork(0.1, 0.25, 0.25))
    shutil.copy(nvml_world.simulated.path, tmp_path / "copy")
    twin = SimulatedHost.open(tmp_path / "copy")
    begin_j = twin.read(gpu).total_energy_j or 0.0

    wait_until(lambda: twin.remaining_s(gpu) == 0.0)
    while (twin.read(gpu).total_energy_j or 0.0) < begin_j + 20.0:
        pass
    before, by_library, after = twin.read(gpu), nvml_host.read(gpu), twin.read(gpu)
    while before.total_energy_j != after.total_energy_j:
        before, by_library, after = twin.read(gpu), nvml_host.read(gpu), twin.read(gpu)

    assert before.total_energy_j is not None
    assert by_library.total_energy_j is not None
    spent_j = before.total_energy_j - begin_j
    assert by_library.total_energy_j - begin_j == pytest.approx(spent_j, rel=0.005)
    assert by_library.sm_clock_mhz == before.sm_clock_mhz == 1770
    twin.close()


def test_ours_is_replaced_and_removed_and_a_removal_without_one_calls_no_driver(
    requests: DriverRequests, host: SimulatedHost, gpu: str, journal: Journal
) -> None:
    without = host.identities()[1].gpu_uuid

    assert requests.set_power_profile(SetPowerProfile("L1", without, None, OWNER)) == PowerProfiles(())
    assert requests.set_power_profile(SetPowerProfile("L1", gpu, MAX_P, OWNER)) == PowerProfiles((MAX_P,))
    assert requests.set_power_profile(SetPowerProfile("L1", gpu, MAX_Q, OWNER)) == PowerProfiles((MAX_Q,))
    assert journal.our_power_profile(gpu) == MAX_Q
    host.reload_driver()
    assert requests.set_power_profile(SetPowerProfile("L1", gpu, MAX_Q, OWNER)) == PowerProfiles((MAX_Q,))
    assert requests.set_power_profile(SetPowerProfile("L1", gpu, None, OWNER)) == PowerProfiles(())
    assert journal.read().entries == ()


def test_a_profile_that_stays_although_it_was_removed_stays_in_the_journal(
    requests: DriverRequests, host: SimulatedHost, gpu: str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests.set_power_profile(SetPowerProfile("L1", gpu, MAX_Q, OWNER))

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedHost, "clear_power_profile", lambda *_: None)
        with pytest.raises(DriverError, match="is still requested after its removal"):
            requests.set_power_profile(SetPowerProfile("L1", gpu, None, OWNER))
    assert journal.our_power_profile(gpu) == MAX_Q
    restore(journal.path)

    assert host.requested_power_profiles(gpu) == frozenset()


@pytest.mark.fault(14)
@pytest.mark.parametrize("profile", [MAX_P, MAX_Q])
def test_beside_the_request_of_another_program_ours_is_not_made(
    requests: DriverRequests, host: SimulatedHost, gpu: str, journal: Journal, profile: int
) -> None:
    host.request_power_profile(gpu, MAX_Q)

    with pytest.raises(GpuError, match="another program has requested workload power profile 1 of"):
        requests.set_power_profile(SetPowerProfile("L1", gpu, profile, OWNER))

    assert journal.read().entries == ()
    assert host.requested_power_profiles(gpu) == {MAX_Q}


@pytest.mark.fault(14)
def test_a_restore_removes_ours_and_leaves_what_another_program_has_requested_since(
    requests: DriverRequests, host: SimulatedHost, gpu: str, journal: Journal
) -> None:
    requests.set_power_profile(SetPowerProfile("L1", gpu, MAX_Q, OWNER))
    host.request_power_profile(gpu, MAX_P)

    (would,) = restore(journal.path, is_dry_run=True)
    (outcome,) = restore(journal.path)

    assert would.detail.startswith("remove workload power profile 1; changed by job job-1")
    assert (outcome.result, outcome.detail) == (RestoreResult.RESTORED, "workload power profile 1 removed")
    assert host.requested_power_profiles(gpu) == {MAX_P}
    assert journal.read().entries == ()


@pytest.mark.fault(4, 14)
def test_a_profile_is_removed_whether_its_worker_was_killed_before_or_after_a_driver_call(
    requests: DriverRequests, host: SimulatedHost, gpu: str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[tuple[bytes, frozenset[int]]] = []

    def watch(name: str) -> None:
        call = getattr(SimulatedHost, name)

        def watched(self: SimulatedHost, gpu_uuid: str, power_profile: int) -> None:
            for number in range(2):
                body = journal.path.read_bytes() if journal.path.exists() else b""
                moments.append((body, self.requested_power_profiles(gpu_uuid)))
                if number == 0:
                    call(self, gpu_uuid, power_profile)

        patch.setattr(SimulatedHost, name, watched)

    with monkeypatch.context() as patch:
        watch("request_power_profile")
        watch("clear_power_profile")
        for profile in (MAX_Q, MAX_P, MAX_Q, None):
            requests.set_power_profile(SetPowerProfile("L1", gpu, profile, OWNER))

    assert len(moments) == 2 * 6
    for body, requested in moments:
        assert body
        journal.path.write_bytes(body)
        for profile in (MAX_P, MAX_Q):
            change = host.request_power_profile if profile in requested else host.clear_power_profile
            change(gpu, profile)
        (outcome,) = restore(journal.path)
        assert (outcome.control, outcome.result) == (Control.POWER_PROFILE, RestoreResult.RESTORED)
        assert host.requested_power_profiles(gpu) == frozenset()


def test_a_removal_without_effect_is_tried_again(
    requests: DriverRequests, host: SimulatedHost, gpu: str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests.set_power_profile(SetPowerProfile("L1", gpu, MAX_Q, OWNER))
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedHost, "clear_power_profile", lambda *_: None)
        (failed,) = restore(journal.path)
    (outcome,) = restore(journal.path)

    assert (failed.result, outcome.result) == (RestoreResult.FAILED, RestoreResult.RESTORED)
    assert "is still requested after its removal" in failed.detail
    assert host.requested_power_profiles(gpu) == frozenset()
