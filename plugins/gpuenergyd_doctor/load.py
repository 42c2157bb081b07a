"""The loads that calibrations and `doctor --measure` need, as an idle GPU does not show the clock that is set."""

import ctypes
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from gpuenergyd.errors import DriverError, GpuNotFoundError
from gpuenergyd.gpu.device import AttachesProcesses
from gpuenergyd.gpu.drivers.opening import DRIVERS, open_driver

_LIBRARY = "libcuda.so.1"
_SPIN_CYCLES = 15_000_000
"""About 10 ms."""
_LAUNCHES_PER_WAIT = 4
_WARP_THREADS = 32
_SCHED_BLOCKING_SYNC = 4
_UUID_BYTES = 16
_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 10.0
SPIN_PTX = b"""
.version 6.0
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 cycles)
{
    .reg .pred %p<2>;
    .reg .u64 %rd<5>;
    ld.param.u64 %rd1, [cycles];
    mov.u64 %rd2, %clock64;
AGAIN:
    mov.u64 %rd3, %clock64;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra AGAIN;
    ret;
}
"""


class GpuLoad(Protocol):
    """Keeps GPUs busy."""

    def on(self, gpu_uuid: str) -> AbstractContextManager[Mapping[str, float] | None]:
        """Compute on a GPU inside the context; it yields what the load measured itself, by names of `MeasuredGpu`.

        Raises:
            GpuError: the GPU cannot be used. `DriverError` also at the end of the context, if computing failed.
        """
        ...


class AttachedLoad:
    """Attaches this process to simulated GPUs, so that they show their clocks as busy GPUs do."""

    def __init__(self, host: AttachesProcesses) -> None:
        self._host = host

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[None]:
        """Attach this process to a GPU inside the context."""
        self._host.attach_process(gpu_uuid, os.getpid())
        try:
            yield
        finally:
            self._host.detach_process(gpu_uuid, os.getpid())


def open_load(driver: str, world_path: str | None) -> GpuLoad:
    """Return the load for the daemon's GPUs; `world_path` is the file that describes them to a driver without NVML.

    Raises:
        DriverError: CUDA or the driver cannot be opened.
    """
    if driver not in DRIVERS:
        host = open_driver(driver, None if world_path is None else Path(world_path))
        if isinstance(host, AttachesProcesses):
            return AttachedLoad(host)
    return CudaLoad()


class CudaLoad:
    """Computes on the GPUs of this host, one thread per GPU: a single warp that counts clock cycles, again and again.

    It needs nothing but the driver's CUDA library, and makes the GPU run at the clock set, far below its power limit.
    """

    def __init__(self) -> None:
        """Load the CUDA driver library.

        Raises:
            DriverError: there is none, or it cannot be initialized.
        """
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it may hide the GPU that was named
        try:
            self._cuda = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise DriverError(f"cannot load {_LIBRARY}, which keeps a GPU busy for calibration: {error}") from None
        self._call("cuInit", 0)

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[None]:
        """Compute on a GPU inside the context."""
        device = self._device(gpu_uuid)
        stop, started = threading.Event(), threading.Event()
        failures: list[DriverError] = []

        def compute() -> None:
            try:
                self._compute(device, started, stop)
            except DriverError as error:
                failures.append(error)
            finally:
                started.set()

        thread = threading.Thread(target=compute, name="calibration load", daemon=True)
        thread.start()
        try:
            if not started.wait(_START_LIMIT_S):
                raise DriverError(f"CUDA did not start on GPU {gpu_uuid} within {_START_LIMIT_S:g} s")
            if not failures:
                yield
        finally:
            stop.set()
            thread.join(_STOP_LIMIT_S)
        if failures:
            raise failures[0]

    def _device(self, gpu_uuid: str) -> int:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            device = ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(device), ordinal)
            raw = (ctypes.c_ubyte * _UUID_BYTES)()
            self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
            if f"GPU-{uuid.UUID(bytes=bytes(raw))}" == gpu_uuid:
                return device.value
        raise GpuNotFoundError(f"CUDA has no GPU {gpu_uuid} among its {count.value}; does this process see its device?")

    def _compute(self, device: int, started: threading.Event, stop: threading.Event) -> None:
        context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxSetFlags_v2", device, _SCHED_BLOCKING_SYNC)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxSetCurrent", context)
            self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(SPIN_PTX))
            self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"spin"))
            cycles = ctypes.c_uint64(_SPIN_CYCLES)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(cycles))
            grid_and_block = (1, 1, 1, _WARP_THREADS, 1, 1)
            while not stop.is_set():
                for _ in range(_LAUNCHES_PER_WAIT):
                    self._call("cuLaunchKernel", function, *grid_and_block, 0, None, arguments, None)
                started.set()
                self._call("cuCtxSynchronize")
        finally:
            self._cuda.cuDevicePrimaryCtxRelease_v2(device)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library, which returns 0 or an error code.

        Raises:
            DriverError: it failed, or the driver is too old to have it.
        """
        try:
            code = getattr(self._cuda, name)(*arguments)
        except AttributeError:
            raise DriverError(f"{_LIBRARY} has no {name}; the driver is too old") from None
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"CUDA: {name} failed: {(text.value or b'').decode() or code}")
