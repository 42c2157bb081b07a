"""NVML driver: implements GpuController for real GPUs. The only module that imports the NVML binding.

For a clock lock, SUCCESS only means that the request was accepted. NVML cannot read a lock back, so the worker reads
the clock instead. A lock is set as (lowest supported, requested): it is a cap, and an idle GPU may still drop below it.
GPUs are identified by UUID, since handles and indices change when the driver is reloaded; all are then mapped again.

Longer than 400 lines, since only this file calls the library, and converts its units, errors and lost devices.
"""
# The binding creates its error classes and their `value` at run time:
# pyright: reportAttributeAccessIssue=false

import contextlib
import ctypes
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pynvml

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import DriverError, GpuError, GpuLostError, GpuNotFoundError, GpuUnsupportedError
from gpuenergyd.gpu.device import MIG_ENABLED, EnergyReading, GpuDetails, GpuIdentity, GpuReading
from gpuenergyd.gpu.drivers.nvml_errors import NEVER_HERE, TRANSIENT, UNINITIALIZED, nvml_error
from gpuenergyd.gpu.drivers.published_figures import published_blocking_power_w, published_switch_latency_s

_NUM_TRIES = 3
_RETRY_PAUSE_S = 0.01
_SEARCH_PERIOD_S = 5.0
_DEFECT_PAUSE_S = 1.0
_FIELD_TOTAL_ENERGY = 83
_FIELD_INSTANT_POWER = 186
_REASON_SW_POWER_CAP = 0x4
_REASON_SET_CLOCKS = 0x2
"""Reason that clocks set by programs can cause. Any other reason, known or not, may keep the clock down."""
_FIELDS_SMOOTHING = (
    pynvml.NVML_FI_PWR_SMOOTHING_ENABLED,
    pynvml.NVML_FI_PWR_SMOOTHING_ACTIVE_PRESET_PROFILE,
    pynvml.NVML_FI_PWR_SMOOTHING_APPLIED_TMP_FLOOR,
    pynvml.NVML_FI_PWR_SMOOTHING_SECONDARY_POWER_FLOOR,
)
_CURRENT_PROFILES = "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"
_FULL_PERFORMANCE = 0
_TEMPERATURE_GPU = 0
_XID = 0x8
_EVENTS_LIMIT_S = 5.0
_EVENTS_PAUSE_S = 0.05


@dataclass(slots=True)
class _Device:
    """One GPU: its present handle, and the functions that it does not support."""

    identity: GpuIdentity
    handle: Any
    unsupported: set[str]
    observe_only_reason: str | None
    memory_clock_mhz: int | None = None
    """Last reading in the full-performance state (P0)."""
    pci_bus_id: str | None = None
    """Address by which this GPU can be opened without opening the others."""
    failed_mono_s: dict[str, float] = field(default_factory=dict)
    """When functions failed that the other values do not depend on, as one defective sensor makes them."""
    failure: str | None = None
    """Why the GPU cannot be used at all, because the binding does not return a UUID for it."""


@contextlib.contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    """Convert exceptions of the binding that are not NVML errors, for example for a non-UTF-8 name, to DriverError."""
    try:
        yield
    except (pynvml.NVMLError, GpuError):
        raise
    except Exception as error:  # noqa: BLE001 - any exception of the binding affects this call only
        raise DriverError(f"{what}: the NVML binding failed: {error!r:.200}") from None


class NvmlHost:
    """The GPUs of this host. Reading needs no privileges; changing needs CAP_SYS_ADMIN."""

    def __init__(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Open the driver and query the capabilities of every GPU.

        Raises:
            DriverError: no driver, no library, no usable GPU, or mismatched versions.
        """
        self._sleep = sleep
        self._jitter = random.Random()  # noqa: S311 - spreads retries, guards nothing
        self._guard = threading.RLock()
        self._generation = 0
        self._connected_mono_s = 0.0
        self._driver_version: str | None = None
        self._devices: dict[str, _Device] = {}
        self._released: set[str] = set()
        self._events_guard = threading.Lock()
        """Held while waiting for GPU events, which keeps the GPUs open."""
        self._is_events_paused = threading.Event()
        """Set during a release, since a thread that waits for events in a loop would otherwise keep the guard."""
        self._connect()
        if not self._devices:
            raise DriverError("the NVIDIA driver reports no usable GPU; run `nvidia-smi` for details")

    @classmethod
    def open(cls, path: Path | None) -> Self:
        """Open the driver, which needs no file."""
        del path
        return cls()

    # Reading

    def identities(self) -> tuple[GpuIdentity, ...]:
        return tuple(sorted((d.identity for d in self._devices.values()), key=lambda i: i.index))

    def observe_only_reasons(self) -> Mapping[str, str]:
        return {uuid: d.observe_only_reason for uuid, d in self._devices.items() if d.observe_only_reason}

    def read(self, gpu_uuid: str) -> GpuReading:
        """Return a reading; power and energy come from one field query if the driver supports it."""
        with _typed_errors(f"reading {gpu_uuid}"):
            return self._read(gpu_uuid, *self._power_and_energy(gpu_uuid))

    def read_without_energy(self, gpu_uuid: str) -> GpuReading:
        """Return a reading without the energy, which may take a thousand times as long as all other values."""
        with _typed_errors(f"reading {gpu_uuid}"):
            values = self._sense(gpu_uuid, "nvmlDeviceGetFieldValues", [self._power_field(gpu_uuid)])
            return self._read(gpu_uuid, self._power_mw(gpu_uuid, values), None)

    def _read(self, gpu_uuid: str, power_mw: int | None, energy_mj: int | None) -> GpuReading:
        read_mono_ns = time.monotonic_ns()
        sm_clock_mhz = self._ask(gpu_uuid, "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)
        sm_clock_by_mono_ns = time.monotonic_ns()
        reasons = self._sense(gpu_uuid, "nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # the name before driver 535
            reasons = self._sense(gpu_uuid, "nvmlDeviceGetCurrentClocksThrottleReasons")
        utilization = self._sense(gpu_uuid, "nvmlDeviceGetUtilizationRates")
        return GpuReading(
            gpu_uuid=gpu_uuid,
            read_mono_ns=read_mono_ns,
            power_w=None if power_mw is None else power_mw / 1000.0,
            total_energy_j=None if energy_mj is None else energy_mj / 1000.0,
            sm_clock_mhz=sm_clock_mhz,
            temperature_celsius=self._temperature(gpu_uuid),
            is_power_capped=None if reasons is None else bool(reasons & _REASON_SW_POWER_CAP),
            is_clock_limited=None if reasons is None else bool(reasons & ~_REASON_SET_CLOCKS),
            sm_clock_by_mono_ns=sm_clock_by_mono_ns,
            utilization_ratio=None if utilization is None else utilization.gpu / 100.0,
        )

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Return only the energy counter, with one driver call if possible."""
        with _typed_errors(f"reading the energy of {gpu_uuid}"):
            called_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
            energy_mj = self._sense(gpu_uuid, "nvmlDeviceGetTotalEnergyConsumption")
            if energy_mj is None:
                energy_mj = self._power_and_energy(gpu_uuid)[1]
            returned_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns() - cpu_ns
            energy_j = None if energy_mj is None else energy_mj / 1000.0
        return EnergyReading((called_ns + returned_ns) // 2, returned_ns - called_ns, energy_j, cpu_ns)

    def details(self, gpu_uuid: str) -> GpuDetails:
        """Return power limits, application clocks, modes, power profiles and smoothing, and the PCI address."""
        with _typed_errors(f"reading the settings of {gpu_uuid}"):
            return self._details(gpu_uuid)

    def _details(self, gpu_uuid: str) -> GpuDetails:
        mig = self._ask(gpu_uuid, "nvmlDeviceGetMigMode")
        display = self._ask(gpu_uuid, "nvmlDeviceGetDisplayActive")
        profiles = self._power_profiles(gpu_uuid)
        is_smoothing, profile, floor_w, secondary_floor_w = self._power_smoothing(gpu_uuid)
        limits_mw = self._ask(gpu_uuid, "nvmlDeviceGetPowerManagementLimitConstraints") or (None, None)
        persistence = self._ask(gpu_uuid, "nvmlDeviceGetPersistenceMode")
        return GpuDetails(
            power_limit_w=_watts(self._ask(gpu_uuid, "nvmlDeviceGetPowerManagementLimit")),
            min_power_limit_w=_watts(limits_mw[0]),
            max_power_limit_w=_watts(limits_mw[1]),
            is_persistent=None if persistence is None else bool(persistence),
            pci_address=_pci_address(self._ask(gpu_uuid, "nvmlDeviceGetPciInfo")),
            enforced_power_limit_w=_watts(self._ask(gpu_uuid, "nvmlDeviceGetEnforcedPowerLimit")),
            is_mig_enabled=None if mig is None else bool(mig[0]),
            is_display_active=None if display is None else bool(display),
            application_sm_clock_mhz=self._ask(gpu_uuid, "nvmlDeviceGetApplicationsClock", pynvml.NVML_CLOCK_SM),
            application_memory_clock_mhz=self._ask(gpu_uuid, "nvmlDeviceGetApplicationsClock", pynvml.NVML_CLOCK_MEM),
            memory_clock_mhz=self._memory_clock_mhz(gpu_uuid),
            max_memory_clock_mhz=self._ask(gpu_uuid, "nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM),
            is_power_smoothing_on=None if is_smoothing is None else bool(is_smoothing),
            power_smoothing_profile=profile,
            power_floor_w=None if floor_w is None else float(floor_w),
            secondary_power_floor_w=None if secondary_floor_w is None else float(secondary_floor_w),
            requested_power_profiles=None if profiles is None else _profile_text(profiles.requestedProfilesMask),
            enforced_power_profiles=None if profiles is None else _profile_text(profiles.enforcedProfilesMask),
        )

    def _memory_clock_mhz(self, gpu_uuid: str) -> int | None:
        """Return the memory clock in the full-performance state, or its last value if the GPU is in another state."""
        device = self._device(gpu_uuid)
        before = self._ask(gpu_uuid, "nvmlDeviceGetPerformanceState")
        clock_mhz = self._ask(gpu_uuid, "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM)
        if before == _FULL_PERFORMANCE == self._ask(gpu_uuid, "nvmlDeviceGetPerformanceState"):
            device.memory_clock_mhz = clock_mhz
        return device.memory_clock_mhz

    def _power_smoothing(self, gpu_uuid: str) -> tuple[int | None, ...]:
        """Return power smoothing's switch, profile, floor and secondary floor in W; None for what is unsupported."""
        name, unsupported = "power smoothing", self._device(gpu_uuid).unsupported
        fields = list(_FIELDS_SMOOTHING)
        values = None if name in unsupported else self._ask(gpu_uuid, "nvmlDeviceGetFieldValues", fields)
        if values is None:
            return (None,) * len(fields)
        if NEVER_HERE.issuperset(value.nvmlReturn for value in values):
            unsupported.add(name)
        return tuple(int(value.value.uiVal) if value.nvmlReturn == 0 else None for value in values)

    def _power_profiles(self, gpu_uuid: str) -> Any:
        """Return the masks of valid, requested and enforced workload power profiles; None if unsupported."""
        profiles = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
        is_known = self._ask(gpu_uuid, _CURRENT_PROFILES, ctypes.byref(profiles)) is not None
        return profiles if is_known else None

    def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of processes that compute on the GPU; empty if the driver does not report them."""
        with _typed_errors(f"listing the processes on {gpu_uuid}"):
            processes = self._ask(gpu_uuid, "nvmlDeviceGetComputeRunningProcesses")
            return tuple(int(p.pid) for p in processes or ())

    def await_xid(self, timeout_s: float) -> tuple[str, int] | None:
        """Return UUID and Xid number of the next critical error; None if none occurs in time, or if unsupported.

        Raises:
            DriverError: the driver failed; a retry may succeed.
        """
        if self._released and self._released >= self._devices.keys():
            self._sleep(timeout_s)
            return None
        if self._is_events_paused.is_set():
            self._sleep(min(timeout_s, _EVENTS_PAUSE_S))
            return None
        with self._events_guard, _typed_errors("waiting for events"):
            return self._await_xid(timeout_s)

    def _await_xid(self, timeout_s: float) -> tuple[str, int] | None:
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            if error.value in NEVER_HERE:
                self._sleep(timeout_s)
                return None
            raise nvml_error(error.value, "event set") from None
        try:
            for device in [device for device in self._devices.values() if device.handle is not None]:
                with contextlib.suppress(pynvml.NVMLError):  # a GPU without Xid events must not hide the others
                    pynvml.nvmlDeviceRegisterEvents(device.handle, _XID, events)
            data = pynvml.nvmlEventSetWait_v2(events, round(timeout_s * 1000))
            return _uuid_text(pynvml.nvmlDeviceGetUUID(data.device)), int(data.eventData)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise nvml_error(error.value, "waiting for events") from None
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def release(self, gpu_uuids: Collection[str]) -> None:
        """Release GPUs by closing the driver and reopening it only for the others.

        NVML has no call that releases a single GPU. The caller makes no other calls for these GPUs while this runs.

        Raises:
            GpuNotFoundError: no such GPU.
            DriverError: a thread still waits for events, or the other GPUs cannot be reopened.
        """
        for gpu_uuid in gpu_uuids:
            self._device(gpu_uuid)
        self._is_events_paused.set()
        try:
            self._release(gpu_uuids)
        finally:
            self._is_events_paused.clear()

    def _release(self, gpu_uuids: Collection[str]) -> None:
        if not self._events_guard.acquire(timeout=_EVENTS_LIMIT_S):
            raise DriverError("the driver does not return from waiting for events; restart the GPU worker")
        try:
            with self._guard:
                self._released.update(gpu_uuids)
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
                self._connect()
        finally:
            self._events_guard.release()

    def reopen(self, gpu_uuids: Collection[str]) -> tuple[GpuIdentity, ...]:
        """Open released GPUs again; return their identities, which may have changed.

        Raises:
            GpuLostError: a GPU is missing; the others are open.
            DriverError: the driver cannot be opened; all GPUs stay released.
        """
        with self._guard:
            before = set(self._released)
            self._released.difference_update(gpu_uuids)
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            try:
                self._connect()
            except DriverError:
                self._released = before
                raise
            missing = [uuid for uuid in gpu_uuids if self._device(uuid).handle is None]
            self._released.update(missing)
            for uuid in (uuid for uuid in gpu_uuids if uuid not in missing):
                known = self._devices[uuid]
                self._identify(uuid, known.identity.index, known.handle)
        if missing:
            raise GpuLostError(f"the driver does not list {', '.join(missing)}")
        return tuple(identity for identity in self.identities() if identity.gpu_uuid in gpu_uuids)

    def close(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    # Controlling

    def lock_sm_clock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        """Lock the SM clock at a supported value."""
        clocks = self._device(gpu_uuid).identity.supported_sm_clocks_mhz
        if sm_clock_mhz not in clocks:
            known = f"{count_text(len(clocks), 'clock')} from {clocks[-1]} to {clocks[0]} MHz" if clocks else "none"
            raise GpuUnsupportedError(
                f"{sm_clock_mhz} MHz is not a supported SM clock of {gpu_uuid}; supported: {known}"
            )
        self._call(gpu_uuid, "nvmlDeviceSetGpuLockedClocks", clocks[-1], sm_clock_mhz)

    def reset_sm_clock(self, gpu_uuid: str) -> None:
        self._call(gpu_uuid, "nvmlDeviceResetGpuLockedClocks")

    def power_limit_w(self, gpu_uuid: str) -> float:
        return float(self._call(gpu_uuid, "nvmlDeviceGetPowerManagementLimit")) / 1000.0

    def set_power_limit(self, gpu_uuid: str, power_limit_w: float) -> None:
        """Set the power limit with version 1 of the call, because the binding's version 2 discards errors."""
        low_mw, high_mw = self._call(gpu_uuid, "nvmlDeviceGetPowerManagementLimitConstraints")
        if not low_mw <= power_limit_w * 1000.0 <= high_mw:
            raise GpuUnsupportedError(
                f"power limit {power_limit_w:g} W of {gpu_uuid} is out of range"
                f" ({low_mw / 1000:g}-{high_mw / 1000:g} W)"
            )
        self._call(gpu_uuid, "nvmlDeviceSetPowerManagementLimit", round(power_limit_w * 1000.0))

    def requested_power_profiles(self, gpu_uuid: str) -> frozenset[int]:
        profiles = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
        self._call(gpu_uuid, _CURRENT_PROFILES, ctypes.byref(profiles))
        return frozenset(_profile_numbers(profiles.requestedProfilesMask))

    def request_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        offered = self._device(gpu_uuid).identity.power_profiles
        if power_profile not in offered:
            known = ", ".join(map(str, offered)) or "none"
            raise GpuUnsupportedError(f"no workload power profile {power_profile} of {gpu_uuid}; offered: {known}")
        self._update_power_profiles(gpu_uuid, pynvml.NVML_POWER_PROFILE_OPERATION_SET, power_profile)

    def clear_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        self._update_power_profiles(gpu_uuid, pynvml.NVML_POWER_PROFILE_OPERATION_CLEAR, power_profile)

    def _update_power_profiles(self, gpu_uuid: str, operation: int, power_profile: int) -> None:
        """Add or remove one profile, with the older separate calls if the driver lacks the combined one."""
        update = pynvml.c_nvmlWorkloadPowerProfileUpdateProfiles_v1_t(operation=operation)
        update.updateProfilesMask.mask[power_profile // 32] = 1 << power_profile % 32
        try:
            self._call(gpu_uuid, "nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1", ctypes.byref(update))
        except GpuUnsupportedError:
            profiles = pynvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
            profiles.requestedProfilesMask = update.updateProfilesMask
            verb = "Clear" if operation == pynvml.NVML_POWER_PROFILE_OPERATION_CLEAR else "Set"
            name = f"nvmlDeviceWorkloadPowerProfile{verb}RequestedProfiles"
            self._call(gpu_uuid, name, ctypes.byref(profiles))

    # The driver

    def _power_and_energy(self, gpu_uuid: str) -> tuple[int | None, int | None]:
        """Return milliwatts and millijoules; a field that is missing in the query is read by a separate call."""
        fields = [self._power_field(gpu_uuid), _FIELD_TOTAL_ENERGY]
        values = self._sense(gpu_uuid, "nvmlDeviceGetFieldValues", fields)
        if values is not None and NEVER_HERE.issuperset(value.nvmlReturn for value in values):
            self._device(gpu_uuid).unsupported.add("nvmlDeviceGetFieldValues")
        power_mw = self._power_mw(gpu_uuid, values)
        if values is not None and values[1].nvmlReturn == 0:
            return power_mw, int(values[1].value.ullVal)
        return power_mw, self._sense(gpu_uuid, "nvmlDeviceGetTotalEnergyConsumption")

    def _power_field(self, gpu_uuid: str) -> tuple[int, int]:
        """Return field and scope of the power that belongs to the energy counter."""
        is_module = self._device(gpu_uuid).identity.energy_scope is EnergyScope.MODULE
        return _FIELD_INSTANT_POWER, pynvml.NVML_POWER_SCOPE_MODULE if is_module else pynvml.NVML_POWER_SCOPE_GPU

    def _energy_scope(self, gpu_uuid: str) -> EnergyScope:
        """Return what the counter covers: the module of a superchip, if the driver knows the power of such a module.

        A link between GPU and processor alone does not tell: GB10 has one, and no module. On GH200 the counter is the
        module's (ml-energy/zeus, pull requests 172 and 242).
        """
        try:
            mode = self._ask(gpu_uuid, "nvmlDeviceGetC2cModeInfoV")
            if mode is None or not mode.isC2cEnabled:
                return EnergyScope.GPU
            field = _FIELD_INSTANT_POWER, pynvml.NVML_POWER_SCOPE_MODULE
            values = self._ask(gpu_uuid, "nvmlDeviceGetFieldValues", [field])
        except GpuError:
            return EnergyScope.UNKNOWN
        return EnergyScope.MODULE if values is not None and values[0].nvmlReturn == 0 else EnergyScope.GPU

    def _power_mw(self, gpu_uuid: str, values: Any) -> int | None:
        """Return the present power in milliwatts by fields, or the mean of about a second if that is all there is."""
        if values is not None and values[0].nvmlReturn == 0:
            return int(values[0].value.uiVal)
        power_mw: int | None = self._sense(gpu_uuid, "nvmlDeviceGetPowerUsage")
        return power_mw

    def _temperature(self, gpu_uuid: str) -> float | None:
        celsius = self._sense(gpu_uuid, "nvmlDeviceGetTemperatureV", _TEMPERATURE_GPU)
        if celsius is None:
            celsius = self._sense(gpu_uuid, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
        return None if celsius is None else float(celsius)

    def _sense(self, gpu_uuid: str, name: str, *arguments: object) -> Any:
        """Return a value that the others do not depend on; None also for a while after the driver failed to read it."""
        device = self._device(gpu_uuid)
        if time.monotonic() - device.failed_mono_s.get(name, -math.inf) < _DEFECT_PAUSE_S:
            return None
        try:
            return self._ask(gpu_uuid, name, *arguments)
        except DriverError:
            if device.failure is not None:
                raise
            device.failed_mono_s[name] = time.monotonic()
            return None

    def _ask(self, gpu_uuid: str, name: str, *arguments: object) -> Any:
        """Return the result of a call; None if GPU or driver do not support it, which is remembered."""
        device = self._device(gpu_uuid)
        if name in device.unsupported:
            return None
        try:
            return self._call(gpu_uuid, name, *arguments)
        except GpuUnsupportedError:
            device.unsupported.add(name)
            return None

    def _call(self, gpu_uuid: str, name: str, *arguments: object) -> Any:
        """Call an NVML function for one GPU; retry if it is busy, and use a new handle after a driver reload."""
        failure = self._device(gpu_uuid).failure
        if failure is not None:
            raise DriverError(failure)
        code = 0
        for attempt in range(_NUM_TRIES):
            generation = self._generation
            handle = self._device(gpu_uuid).handle
            if handle is None:
                with self._guard:  # another thread may be reopening the driver
                    handle = self._device(gpu_uuid).handle
            if handle is None:
                raise self._missing(gpu_uuid)
            try:
                with _typed_errors(f"{name} of {gpu_uuid}"):
                    return getattr(pynvml, name)(handle, *arguments)
            except pynvml.NVMLError as error:
                code = error.value
            if code == UNINITIALIZED:
                self._reconnect(generation)
            elif code in TRANSIENT and attempt + 1 < _NUM_TRIES:
                self._sleep(_RETRY_PAUSE_S * self._jitter.uniform(0.5, 1.5))
            elif self._generation == generation:  # else the handle may be one of before a reload
                break
        raise nvml_error(code, name, gpu_uuid)

    def _missing(self, gpu_uuid: str) -> GpuError:
        """Return the error for a GPU missing since a driver reload; search for it again if some time has passed."""
        if gpu_uuid in self._released:
            return GpuLostError(f"{gpu_uuid} is released")
        if time.monotonic() - self._connected_mono_s > _SEARCH_PERIOD_S:
            self._reconnect(self._generation)
        return GpuLostError(f"{gpu_uuid} is missing since the driver was reloaded")

    def _device(self, gpu_uuid: str) -> _Device:
        try:
            return self._devices[gpu_uuid]
        except KeyError:
            raise GpuNotFoundError(f"no GPU {gpu_uuid!r}; known GPUs: {', '.join(self._devices)}") from None

    def _reconnect(self, seen_generation: int) -> None:
        """Reopen the driver, unless another thread has just done so."""
        with self._guard:
            if self._generation != seen_generation:
                return
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            self._connect()

    def _connect(self) -> None:
        self._generation += 1
        self._connected_mono_s = time.monotonic()
        for device in self._devices.values():
            device.handle = None
        if self._released and self._released >= self._devices.keys():
            return  # nothing may be opened
        try:
            with _typed_errors("opening the NVIDIA driver"):
                if self._released:  # each GPU is opened when its handle is requested
                    pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_ATTACH)
                else:
                    pynvml.nvmlInit()
                num_gpus = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            raise nvml_error(error.value, "opening the NVIDIA driver") from None
        with contextlib.suppress(pynvml.NVMLError, DriverError), _typed_errors("the driver's version"):
            self._driver_version = _text(pynvml.nvmlSystemGetDriverVersion()) or None
        if self._released:
            self._open_known()
            return
        for index in range(num_gpus):
            with contextlib.suppress(GpuError):  # a GPU that cannot be opened must not hide the others
                self._discover(index)

    def _open_known(self) -> None:
        """Open the known, unreleased GPUs by their PCI address, since a search by index would open all."""
        for gpu_uuid, device in self._devices.items():
            if gpu_uuid not in self._released and device.pci_bus_id is not None:
                with contextlib.suppress(pynvml.NVMLError, DriverError), _typed_errors("opening a GPU"):
                    device.handle = pynvml.nvmlDeviceGetHandleByPciBusId(device.pci_bus_id)

    def _discover(self, index: int) -> None:
        try:
            with _typed_errors(f"querying GPU {index}"):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpu_uuid = _uuid_text(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError as error:
            raise nvml_error(error.value, f"querying GPU {index}") from None
        except DriverError as error:
            gpu_uuid = f"GPU-{index}-of-unknown-UUID"
            unknown = GpuIdentity(gpu_uuid, index, "unknown", (), is_simulated=False)
            self._devices.setdefault(gpu_uuid, _Device(unknown, None, set(), str(error), failure=str(error)))
            return
        known = self._devices.get(gpu_uuid)
        if known is not None:
            known.handle = handle
            known.unsupported.clear()  # the driver may be another one
            return
        self._identify(gpu_uuid, index, handle)

    def _identify(self, gpu_uuid: str, index: int, handle: Any) -> None:
        """Query the properties of a GPU, which a reset or a MIG change may have changed.

        If a query fails, that property is unknown, and the GPU is only observed, with the failure as reason.
        """
        unnamed = GpuIdentity(gpu_uuid, index, "unknown", (), is_simulated=False, driver_version=self._driver_version)
        device = self._devices[gpu_uuid] = _Device(unnamed, handle, set(), None)
        failures: list[str] = []

        def ask(what: Callable[[], Any]) -> Any:
            try:
                with _typed_errors(f"the properties of {gpu_uuid}"):
                    return what()
            except GpuError as error:
                failures.append(str(error))
                return None

        device.pci_bus_id = ask(lambda: _bus_id(self._ask(gpu_uuid, "nvmlDeviceGetPciInfo")))
        model_name = ask(lambda: _text(self._ask(gpu_uuid, "nvmlDeviceGetName"))) or "unknown"
        clocks = ask(lambda: self._supported_sm_clocks_mhz(gpu_uuid)) or ()
        limits_mw = ask(lambda: self._ask(gpu_uuid, "nvmlDeviceGetPowerManagementLimitConstraints")) or (None, None)
        mig = ask(lambda: self._ask(gpu_uuid, "nvmlDeviceGetMigMode"))
        profiles = ask(lambda: self._power_profiles(gpu_uuid))
        if failures:
            device.observe_only_reason = failures[0]
        elif not clocks:
            device.observe_only_reason = "the driver lists no supported clocks"
        elif mig is not None and mig[0]:
            device.observe_only_reason = MIG_ENABLED
        default_w = ask(lambda: _watts(self._ask(gpu_uuid, "nvmlDeviceGetPowerManagementDefaultLimit")))
        device.identity = replace(
            unnamed,
            model_name=model_name,
            supported_sm_clocks_mhz=clocks,
            default_power_limit_w=default_w,
            blocking_power_w=published_blocking_power_w(model_name),
            switch_latency_s=published_switch_latency_s(model_name),
            energy_scope=self._energy_scope(gpu_uuid),
            min_power_limit_w=ask(lambda: _watts(limits_mw[0])),
            max_power_limit_w=ask(lambda: _watts(limits_mw[1])),
            power_profiles=() if profiles is None else _profile_numbers(profiles.perfProfilesMask),
        )

    def _supported_sm_clocks_mhz(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the clocks that can be locked, in descending order."""
        memory_clocks = self._ask(gpu_uuid, "nvmlDeviceGetSupportedMemoryClocks") or ()
        if not memory_clocks:
            return ()
        clocks = self._ask(gpu_uuid, "nvmlDeviceGetSupportedGraphicsClocks", max(memory_clocks)) or ()
        return tuple(sorted({int(clock) for clock in clocks if clock > 0}, reverse=True))


def _uuid_text(value: Any) -> str:
    """Return a UUID from the binding; raise if it is not printable ASCII text, since it could not be stored."""
    text = _text(value)
    if not text or not text.isascii() or not text.isprintable():
        raise ValueError(f"the UUID is {value!r:.80}")
    return text


def _text(value: Any) -> str | None:
    """Return a text from the binding, which some versions return as bytes; replace what is not UTF-8."""
    if value is None:
        return None
    raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
    return raw.decode("utf-8", "replace")


def _pci_address(info: Any) -> str | None:
    """Return a PCI address in the kernel's form, with four domain digits instead of NVML's eight."""
    bus_id = _bus_id(info)
    return None if bus_id is None else bus_id[-12:].lower()


def _bus_id(info: Any) -> str | None:
    if info is None:
        return None
    return _text(info.busId)


def _profile_numbers(mask: Any) -> tuple[int, ...]:
    """Return the numbers of the bits that are set in a mask of 255."""
    return tuple(number for number in range(255) if mask.mask[number // 32] >> number % 32 & 1)


def _profile_text(mask: Any) -> str:
    return ",".join(map(str, _profile_numbers(mask)))


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000.0
