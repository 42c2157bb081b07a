import ast
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.errors import DriverError, GpuError, GpuLostError, GpuPermissionError, GpuUnsupportedError
from gpuenergyd.gpu.drivers.nvml import NvmlHost
from gpuenergyd.gpu.drivers.nvml_errors import nvml_error
from gpuenergyd.gpu.worker.threads.counter_edges import EnergyEdges
from gpuenergyd_sim.driver.device_model import InstructionWork
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.gpu.conftest import NvmlWorld
from tests.support.processes import finished
from tests.support.waiting import LIMIT_S, wait_until

CODES = sorted(
    value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(value, int)
)


def test_unknown_return_code_is_a_one_line_error() -> None:
    assert str(nvml_error(4711, "nvmlX", "GPU-a")) == ("nvmlX of GPU-a: unknown NVML return code (NVML error 4711)")


@pytest.mark.parametrize("code", CODES)
def test_every_code_a_call_can_return_reaches_the_caller_as_a_typed_error_of_that_gpu_alone(
    nvml_world: NvmlWorld, nvml_host: NvmlHost, code: int
) -> None:
    nvml_world.control.inject("nvmlDeviceSetGpuLockedClocks", code, gpu_index=1)

    with pytest.raises(GpuError, match=rf"{nvml_world.gpus[1]}: .+ \(NVML error {code}\)") as caught:
        nvml_host.lock_sm_clock(nvml_world.gpus[1], 1200)
    nvml_host.lock_sm_clock(nvml_world.gpus[0], 1200)

    assert type(caught.value) is type(nvml_error(code, ""))
    assert nvml_world.simulated.locked_sm_clock_mhz(nvml_world.gpus[0]) == 1200
    assert nvml_world.simulated.locked_sm_clock_mhz(nvml_world.gpus[1]) is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (4, GpuPermissionError),
        (15, GpuLostError),
        (16, GpuLostError),
        (17, GpuPermissionError),
        (24, GpuUnsupportedError),
    ],
)
def test_codes_that_callers_handle_differently_have_errors_of_their_own(code: int, kind: type[GpuError]) -> None:
    assert type(nvml_error(code, "")) is kind


@pytest.mark.fault(11)
@pytest.mark.parametrize("code", [10, 19, 999])
def test_busy_driver_is_called_three_times(nvml_world: NvmlWorld, nvml_host: NvmlHost, code: int) -> None:
    nvml_world.control.inject("nvmlDeviceSetGpuLockedClocks", code, num_calls=2)

    nvml_host.lock_sm_clock(nvml_world.gpus[0], 1200)
    nvml_world.control.clear_faults()
    nvml_world.control.inject("nvmlDeviceSetGpuLockedClocks", code)
    with pytest.raises(DriverError, match=f"NVML error {code}"):
        nvml_host.lock_sm_clock(nvml_world.gpus[0], 1110)

    assert nvml_world.control.num_hits("nvmlDeviceSetGpuLockedClocks") == 3
    assert nvml_world.simulated.locked_sm_clock_mhz(nvml_world.gpus[0]) == 1200


@pytest.mark.fault(10)
def test_unsupported_value_is_none_and_not_queried_again(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    reasons = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
    for name in ("nvmlDeviceGetTotalEnergyConsumption", "field_83", *reasons):
        nvml_world.control.inject(name, 3)

    readings = [nvml_host.read(nvml_world.gpus[0]) for _ in range(5)]

    assert all(r.total_energy_j is None and r.is_power_capped is None for r in readings)
    assert all(r.power_w is not None for r in readings)
    assert nvml_world.control.num_hits("nvmlDeviceGetTotalEnergyConsumption") == 1
    assert [nvml_world.control.num_hits(name) for name in reasons] == [1, 1]


def test_older_driver_without_newer_functions_is_read_call_by_call(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    for name in ("nvmlDeviceGetFieldValues", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"):
        nvml_world.control.inject(name, 13)

    reading = nvml_host.read(nvml_world.gpus[0])

    assert None not in {reading.power_w, reading.total_energy_j, reading.temperature_celsius, reading.is_power_capped}


def test_a_field_that_fails_for_once_is_read_again(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    for field in ("field_83", "field_186"):
        nvml_world.control.inject(field, 999, num_calls=1)
    nvml_host.read(nvml_world.gpus[0])
    nvml_world.control.inject("nvmlDeviceGetPowerUsage", 3)

    assert nvml_host.read(nvml_world.gpus[0]).power_w is not None


def test_defective_sensors_leave_all_other_values(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    energy = "field_83", "nvmlDeviceGetTotalEnergyConsumption"
    for name in (*energy, "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates"):
        nvml_world.control.inject(name, 999, gpu_index=0)
    for name in ("field_186", "nvmlDeviceGetPowerUsage"):
        nvml_world.control.inject(name, 999, gpu_index=1)

    first, second = (nvml_host.read(gpu) for gpu in nvml_world.gpus[:2])
    assert {first.total_energy_j, first.temperature_celsius, first.utilization_ratio, second.power_w} == {None}
    assert nvml_host.read_energy(nvml_world.gpus[0]).total_energy_j is None
    assert None not in {first.power_w, first.sm_clock_mhz, first.is_clock_limited}
    assert None not in {second.total_energy_j, second.sm_clock_mhz, second.temperature_celsius}


def test_gpu_that_is_lost_from_the_start_hides_no_other(nvml_world: NvmlWorld) -> None:
    nvml_world.control.inject("*", 15, gpu_index=0)

    host = NvmlHost()

    assert [i.gpu_uuid for i in host.identities()] == nvml_world.gpus[1:]
    host.close()


@pytest.mark.fault(48)
def test_driver_reload_is_survived_and_the_counter_restarts(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    gpu = nvml_world.gpus[0]
    edges = EnergyEdges()
    nvml_world.control.inject("nvmlDeviceGetUtilizationRates", 3, num_calls=1)
    edges.observe(1, nvml_host.read(gpu).total_energy_j)

    nvml_world.simulated.reload_driver()
    nvml_world.control.reload_driver()
    after = nvml_host.read(gpu)
    edges.observe(2, after.total_energy_j)

    assert after.utilization_ratio is not None
    assert after.total_energy_j is not None
    assert after.total_energy_j < 1000.0
    assert edges.edge_energy_j is None


def test_a_call_with_a_handle_of_before_a_reload_is_made_again(
    nvml_world: NvmlWorld, nvml_host: NvmlHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pynvml.nvmlDeviceGetUtilizationRates

    def stale(_: Any) -> None:
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", original)
        nvml_host.release(nvml_world.gpus[2:])
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", stale)

    assert nvml_host.read(nvml_world.gpus[0]).utilization_ratio is not None


def test_mig_and_missing_clocks_make_a_gpu_observe_only_with_the_reason(nvml_world: NvmlWorld) -> None:
    nvml_world.control.set_mig(1, is_on=True)
    nvml_world.control.inject("nvmlDeviceGetSupportedGraphicsClocks", 3, gpu_index=2)

    host = NvmlHost()

    reasons = host.observe_only_reasons()
    assert set(reasons) == set(nvml_world.gpus[1:])
    assert "MIG is enabled" in reasons[nvml_world.gpus[1]]
    assert "lists no supported clocks" in reasons[nvml_world.gpus[2]]
    assert host.read(nvml_world.gpus[1]).power_w is not None
    host.close()


def test_without_privilege_everything_is_read_and_nothing_set(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    nvml_world.control.set_privileged(False)
    gpu = nvml_world.gpus[0]

    changes: list[Callable[[], None]] = [
        lambda: nvml_host.lock_sm_clock(gpu, 1200),
        lambda: nvml_host.reset_sm_clock(gpu),
        lambda: nvml_host.set_power_limit(gpu, 200.0),
    ]
    for change in changes:
        with pytest.raises(GpuPermissionError, match="CAP_SYS_ADMIN"):
            change()

    assert nvml_host.read(gpu).total_energy_j is not None
    assert nvml_world.simulated.num_clock_sets(gpu) == 0


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv to drop a capability"
)
def test_privilege_is_cap_sys_admin_and_not_uid_0(nvml_world: NvmlWorld) -> None:
    nvml_world.control.set_privileged(None)
    code = (
        "from gpuenergyd.gpu.drivers.nvml import NvmlHost\n"
        "host = NvmlHost()\n"
        "host.lock_sm_clock(host.identities()[0].gpu_uuid, 1200)\n"
    )
    without = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]

    def run(*prefix: str) -> subprocess.CompletedProcess[str]:
        return finished([*prefix, sys.executable, "-c", code], env=nvml_world.environment())

    assert run().returncode == 0
    refused = run(*without)
    assert "GpuPermissionError" in refused.stderr


def test_without_persistence_mode_a_lock_ends_with_the_last_client_and_not_before(nvml_world: NvmlWorld) -> None:
    """Without a client the driver unloads and loses its locks; a worker with a lease stays a client."""
    nvml_world.control.set_persistence(0, is_on=False)
    worker, short_lived = (_Client(nvml_world.environment()) for _ in range(2))
    worker.lock_all_at(1200)

    short_lived.end()
    _Client(nvml_world.environment()).end()
    while_held = [nvml_world.simulated.locked_sm_clock_mhz(gpu) for gpu in nvml_world.gpus[:2]]
    worker.end()
    _Client(nvml_world.environment()).end()

    assert while_held == [1200, 1200]
    assert [nvml_world.simulated.locked_sm_clock_mhz(gpu) for gpu in nvml_world.gpus[:2]] == [None, 1200]


class _Client:
    """Another process with the driver open, killed at the end."""

    def __init__(self, environment: dict[str, str]) -> None:
        code = (
            "import sys\n"
            "from gpuenergyd.gpu.drivers.nvml import NvmlHost\n"
            "host = NvmlHost()\n"
            "print('open', flush=True)\n"
            "for line in sys.stdin:\n"
            "    for gpu in host.identities():\n"
            "        host.lock_sm_clock(gpu.gpu_uuid, int(line))\n"
            "    print('locked', flush=True)\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "open"

    def lock_all_at(self, sm_clock_mhz: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{sm_clock_mhz}\n")
        self._process.stdin.flush()
        assert self._answer() == "locked"

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def test_critical_errors_are_reported_with_their_gpu(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    seen: list[tuple[str, int] | None] = []
    thread = threading.Thread(target=lambda: seen.append(nvml_host.await_xid(20.0)))
    thread.start()

    def is_reported() -> bool:
        nvml_world.control.raise_xid(1, 79)
        return bool(seen)

    wait_until(is_reported)
    thread.join()

    assert seen == [(nvml_world.gpus[1], 79)]
    assert nvml_host.await_xid(0.01) is None


def _open_host(environment: dict[str, str]) -> str:
    code = (
        "from gpuenergyd.gpu.drivers.nvml import NvmlHost\n"
        "from gpuenergyd.errors import GpuEnergyError\n"
        "try:\n    NvmlHost(); print('opened')\n"
        "except GpuEnergyError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout.strip()


@pytest.mark.fault(12)
@pytest.mark.parametrize(("code", "advice"), [(9, "load the nvidia kernel module"), (18, "reload the driver")])
def test_error_of_a_driver_that_cannot_be_opened_names_the_remedy(
    nvml_world: NvmlWorld, code: int, advice: str
) -> None:
    nvml_world.control.inject("nvmlInitWithFlags", code)

    assert advice in _open_host(nvml_world.environment())


@pytest.mark.fault(12)
def test_error_of_a_missing_library_names_the_package_to_install(tmp_path: Path) -> None:
    fake = tmp_path / "libnvidia-ml.so.1"
    fake.write_bytes(b"not a library")

    output = _open_host({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})

    assert output.startswith("DriverError")
    assert "libnvidia-ml.so.1 was not found" in output


@pytest.mark.fault(12)
def test_library_without_a_symbol_leaves_the_value_out(nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        if name.endswith("Reasons"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return getattr(pynvml.nvmlLib, name)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", missing)
    host = NvmlHost()

    reading = host.read(nvml_world.gpus[0])

    assert reading.is_power_capped is None
    assert reading.power_w is not None
    host.close()


@pytest.mark.parametrize(
    ("reasons", "is_limited"), [(0, False), (0x2, False), (0x4, True), (0x1, True), (0x100, True), (1 << 40, True)]
)
def test_any_reason_but_clocks_that_were_set_may_keep_the_clock_down(
    nvml_host: NvmlHost, nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch, reasons: int, *, is_limited: bool
) -> None:
    """A reason that a newer driver has must not look like the lock of another program."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda _: reasons)

    assert nvml_host.read(nvml_world.gpus[0]).is_clock_limited is is_limited


@pytest.mark.parametrize(
    ("has_link", "has_module_power", "scope"),
    [
        (True, True, EnergyScope.MODULE),
        (True, False, EnergyScope.GPU),
        (False, True, EnergyScope.GPU),
        (True, True, EnergyScope.UNKNOWN),
    ],
    ids=["GH200", "GB10", "H200", "failing driver"],
)
def test_energy_of_a_superchip_is_that_of_its_module_and_power_too(
    nvml_world: NvmlWorld,
    monkeypatch: pytest.MonkeyPatch,
    scope: EnergyScope,
    *,
    has_link: bool,
    has_module_power: bool,
) -> None:
    read_fields = pynvml.nvmlDeviceGetFieldValues

    def with_module(handle: object, wanted: list[Any]) -> Any:
        values = read_fields(handle, wanted)
        for value in values:
            if value.scopeId == pynvml.NVML_POWER_SCOPE_MODULE:
                value.nvmlReturn = 0 if has_module_power else pynvml.NVML_ERROR_NOT_SUPPORTED
                value.value.uiVal = 900_000
        return values

    def link(_: object) -> SimpleNamespace:
        if scope is EnergyScope.UNKNOWN:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return SimpleNamespace(isC2cEnabled=int(has_link))

    monkeypatch.setattr(pynvml, "nvmlDeviceGetC2cModeInfoV", link)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", with_module)
    host = NvmlHost()

    assert {identity.energy_scope for identity in host.identities()} == {scope}
    is_module = scope is EnergyScope.MODULE
    assert (host.read(nvml_world.gpus[0]).power_w == 900.0) is is_module
    assert (host.read_without_energy(nvml_world.gpus[0]).power_w == 900.0) is is_module
    host.close()


def test_we_call_no_wrapper_that_discards_the_return_code() -> None:
    """Some functions of the binding report success whatever the driver returns, so the daemon must not use them."""
    tree = ast.parse(Path(pynvml.__file__).read_text())
    silent = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and "_nvmlGetFunctionPointer" in (source := ast.dump(node))
        and "_nvmlCheckReturn" not in source
        and "NVMLError" not in source
    }
    ours = (Path(__file__).resolve().parents[3] / "gpuenergyd" / "gpu" / "drivers" / "nvml.py").read_text()

    assert "nvmlDeviceSetPowerManagementLimit_v2" in silent
    assert [name for name in sorted(silent) if f'"{name}"' in ours or f"pynvml.{name}(" in ours] == []


def test_fake_library_and_python_model_agree_on_the_same_trace(
    nvml_world: NvmlWorld, nvml_host: NvmlHost, tmp_path: Path
) -> None:
    """Two copies of one world, one advanced by the library alone, the other by Python alone."""
    gpus = nvml_world.gpus
    for gpu in gpus:
        nvml_world.simulated.attach_process(gpu, os.getpid())
        nvml_world.simulated.begin_work(gpu, InstructionWork(0.1, 0.25, 0.25))
    shutil.copy(nvml_world.simulated.path, tmp_path / "copy")
    twin = SimulatedHost.open(tmp_path / "copy")

    begin_j = {gpu: twin.read(gpu).total_energy_j or 0.0 for gpu in gpus}
    pairs = []
    for gpu in gpus:
        wait_until(lambda gpu=gpu: twin.remaining_s(gpu) == 0.0)  # type: ignore[misc]
        while (twin.read(gpu).total_energy_j or 0.0) < begin_j[gpu] + 20.0:
            pass  # both run in real time; this world is ours alone
        before, by_library, after = twin.read(gpu), nvml_host.read(gpu), twin.read(gpu)
        while before.total_energy_j != after.total_energy_j:  # an update of the counter lay between the looks
            before, by_library, after = twin.read(gpu), nvml_host.read(gpu), twin.read(gpu)
        pairs.append((before, by_library, begin_j[gpu]))

    for by_python, by_library, since_j in pairs:
        assert by_python.total_energy_j is not None
        assert by_library.total_energy_j is not None
        spent_j = by_python.total_energy_j - since_j
        assert by_library.total_energy_j - since_j == pytest.approx(spent_j, rel=0.005)
        assert by_library.temperature_celsius == pytest.approx(by_python.temperature_celsius, abs=0.6)
        assert by_library.sm_clock_mhz == by_python.sm_clock_mhz
    twin.close()


def test_a_released_gpu_is_opened_by_nobody_and_the_others_go_on(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    first, *others = nvml_world.gpus
    nvml_host.lock_sm_clock(others[0], min(nvml_host.identities()[1].supported_sm_clocks_mhz))

    nvml_host.release([first])

    assert [nvml_world.control.holders(index) for index in range(3)] == [set(), {os.getpid()}, {os.getpid()}]
    for uuid in others:
        assert nvml_host.read(uuid).sm_clock_mhz is not None
    with pytest.raises(GpuLostError, match="is released"):
        nvml_host.read(first)
    assert nvml_world.control.holders(0) == set()


def test_a_released_gpu_stays_closed_when_the_driver_is_reloaded(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    first, second, _ = nvml_world.gpus
    nvml_host.release([first])

    nvml_world.control.reload_driver()

    assert nvml_host.read(second).sm_clock_mhz is not None
    assert nvml_world.control.holders(0) == set()


def test_a_gpu_is_reopened_with_what_has_changed(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    first, second, _ = nvml_world.gpus
    nvml_host.release([first])
    nvml_world.control.set_mig(0, is_on=True)

    (identity,) = nvml_host.reopen([first])

    assert (identity.gpu_uuid, identity.index) == (first, 0)
    assert "MIG is enabled" in nvml_host.observe_only_reasons()[first]
    assert nvml_host.read(first).sm_clock_mhz is not None
    assert nvml_host.read(second).sm_clock_mhz is not None


def test_all_gpus_released_close_the_driver_for_an_upgrade(nvml_world: NvmlWorld, nvml_host: NvmlHost) -> None:
    nvml_host.release(nvml_world.gpus)

    assert nvml_host.await_xid(0.0) is None
    assert [nvml_world.control.holders(index) for index in range(3)] == [set()] * 3
    nvml_world.control.inject("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, num_calls=1)
    with pytest.raises(DriverError):
        nvml_host.reopen(nvml_world.gpus)
    with pytest.raises(GpuLostError, match="is released"):
        nvml_host.read(nvml_world.gpus[0])
    assert len(nvml_host.reopen(nvml_world.gpus)) == 3
    assert all(nvml_host.read(uuid).sm_clock_mhz is not None for uuid in nvml_world.gpus)


ODD_ERRORS = [
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    TypeError("of the binding"),
    KeyError("x"),
    MemoryError(),
]


def _failing_for(index: int, function: str, error: Exception) -> Callable[..., Any]:
    """Return a function of the binding that raises for one GPU."""
    original, handle_of = getattr(pynvml, function), pynvml.nvmlDeviceGetHandleByIndex

    def call(handle: Any, *arguments: Any) -> Any:
        if function == "nvmlDeviceGetHandleByIndex":
            is_failing = handle == index
        else:
            is_failing = _address(handle) == _address(handle_of(index))
        if is_failing:
            raise error
        return original(handle, *arguments)

    return call


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


@pytest.mark.fault(56)
@pytest.mark.parametrize("error", ODD_ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetName", "nvmlDeviceGetSupportedMemoryClocks", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMigMode"],
)
def test_a_gpu_whose_properties_cannot_be_read_is_listed_with_the_reason_and_hides_no_other(
    nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception
) -> None:
    pynvml.nvmlInit()
    monkeypatch.setattr(pynvml, function, _failing_for(1, function, error))

    host = NvmlHost()

    assert [own.gpu_uuid for own in host.identities()] == nvml_world.gpus
    (failed,) = host.observe_only_reasons().items()
    assert failed[0] == nvml_world.gpus[1]
    assert f"the NVML binding failed: {error!r}" in failed[1]
    assert all(host.read(gpu).sm_clock_mhz for gpu in nvml_world.gpus)
    host.lock_sm_clock(nvml_world.gpus[0], 900)
    host.close()


@pytest.mark.fault(56)
@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_gpu_of_unknown_uuid_is_listed_and_each_call_names_the_reason(
    nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    pynvml.nvmlInit()
    monkeypatch.setattr(pynvml, function, _failing_for(0, function, ODD_ERRORS[0]))

    host = NvmlHost()

    found = [own.gpu_uuid for own in host.identities()]
    assert found == ["GPU-0-of-unknown-UUID", *nvml_world.gpus[1:]]
    for call in (host.read, host.read_energy, host.details, host.process_ids, host.reset_sm_clock):
        with pytest.raises(DriverError, match="the NVML binding failed: UnicodeDecodeError"):
            call(found[0])
    assert host.read(found[1]).sm_clock_mhz
    host.close()


@pytest.mark.fault(56)
@pytest.mark.parametrize("error", ODD_ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetClockInfo", "nvmlDeviceGetFieldValues", "nvmlDeviceGetTotalEnergyConsumption"]
)
def test_whatever_a_reading_raises_is_a_typed_error_of_its_gpu(
    nvml_world: NvmlWorld, nvml_host: NvmlHost, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception
) -> None:
    pynvml.nvmlInit()
    monkeypatch.setattr(pynvml, function, _failing_for(2, function, error))
    read = nvml_host.read_energy if function == "nvmlDeviceGetTotalEnergyConsumption" else nvml_host.read

    if function == "nvmlDeviceGetClockInfo":
        with pytest.raises(DriverError, match=f"{function} of {nvml_world.gpus[2]}: the NVML binding failed"):
            read(nvml_world.gpus[2])
    else:  # there is another call for the same value
        assert read(nvml_world.gpus[2]).total_energy_j is not None

    assert read(nvml_world.gpus[0]).total_energy_j is not None


def test_names_that_are_bytes_are_texts(nvml_world: NvmlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in older versions of the binding."""
    for function in ("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlSystemGetDriverVersion"):
        original = getattr(pynvml, function)
        monkeypatch.setattr(pynvml, function, lambda *arguments, own=original: own(*arguments).encode())
    plain = nvml_world.simulated.identities()[0].model_name

    host = NvmlHost()

    identity = host.identities()[0]
    assert identity.gpu_uuid == nvml_world.gpus[0]
    assert not identity.model_name.startswith("b'")
    assert identity.model_name.split()[0] == plain.split()[0]
    assert identity.driver_version == "599.00.00"
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: b"NVIDIA \xff")
    assert NvmlHost().identities()[0].model_name == "NVIDIA \N{REPLACEMENT CHARACTER}"
    host.close()
