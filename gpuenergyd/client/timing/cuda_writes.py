"""Lets a CUDA stream write numbers into host memory, by `cuStreamWriteValue32` of the driver's library.

`cuStreamWriteValue32` puts a write on a stream, as a kernel launch puts a kernel: it waits for nothing on the host, and
on the GPU it comes after what was launched before. The functions are called with the interpreter's lock, as torch calls
its own, since releasing and acquiring it would take longer. No GPU was at hand for tests: they use a double of
the library.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from gpuenergyd.client.timing.watched_requests import StreamWrite
from gpuenergyd.errors import GpuEnergyError

LIBRARY = "libcuda.so.1"
_REGISTER_PORTABLE_AND_MAPPED = 3


class CudaCallError(GpuEnergyError):
    """A function of the driver returned an error."""


def map_memory(
    address: int, size: int, current_stream: Callable[[], int], *, load: Callable[[str], Any] = ctypes.PyDLL
) -> StreamWrite:
    """Make memory writable for the GPU of the current context; return a function that puts writes to its first word.

    Args:
        address: start of whole pages of this process.
        size: in bytes.
        current_stream: returns the handle of the stream to write on.
        load: returns a library by name.

    Raises:
        OSError: the driver's library cannot be loaded.
        AttributeError: it has no such function.
        CudaCallError: it refuses to map the memory.
    """
    library = load(LIBRARY)
    write_value = library.cuStreamWriteValue32_v2
    write_value.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    on_device = map_for_device(library, address, size)

    def write(number: int) -> bool:
        return not write_value(current_stream(), on_device, number, 0)

    return write


def map_for_device(library: Any, address: int, size: int) -> int:
    """Make whole pages of this process writable for the GPU of the current context; return their address there.

    Raises:
        AttributeError, CudaCallError: as `map_memory`.
    """
    status = library.cuMemHostRegister_v2(
        ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_REGISTER_PORTABLE_AND_MAPPED)
    )
    if status:
        raise CudaCallError(f"cuMemHostRegister: error {status}")
    pointer = ctypes.c_uint64()
    status = library.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0))
    if status:
        raise CudaCallError(f"cuMemHostGetDevicePointer: error {status}")
    return pointer.value
