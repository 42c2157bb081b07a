"""Python's clocks, sleeps and random bytes in virtual time."""

import ctypes
import datetime as dt
import gc
import os
import struct
import time
from typing import Any

from gpuenergyd_sim.virtual_time.kernel import VirtualKernel

_NS_PER_S = 1_000_000_000
_CPU_CLOCKS = {time.CLOCK_PROCESS_CPUTIME_ID, time.CLOCK_THREAD_CPUTIME_ID}
_UTC_CLOCKS = {time.CLOCK_REALTIME, getattr(time, "CLOCK_REALTIME_COARSE", 5)}


def install(kernel: VirtualKernel) -> None:
    """Replace the functions of `time`, `datetime.now` and `os.urandom`; CPU clocks always show 0."""

    def clock_ns(clock: int) -> int:
        if clock in _CPU_CLOCKS:
            return 0
        return kernel.utc_ns() if clock in _UTC_CLOCKS else kernel.read_mono_ns()

    def now(kind: type[dt.datetime], tz: dt.tzinfo | None = None) -> dt.datetime:
        return kind.fromtimestamp(kernel.utc_ns() / _NS_PER_S, tz)

    time.monotonic_ns = time.perf_counter_ns = kernel.read_mono_ns
    time.monotonic = time.perf_counter = lambda: kernel.read_mono_ns() / _NS_PER_S
    time.time_ns = kernel.utc_ns
    time.time = lambda: kernel.utc_ns() / _NS_PER_S
    time.thread_time_ns = time.process_time_ns = lambda: 0
    time.thread_time = time.process_time = lambda: 0.0
    time.clock_gettime_ns = clock_ns
    time.clock_gettime = lambda clock: clock_ns(clock) / _NS_PER_S
    time.sleep = lambda time_s: kernel.sleep(float(time_s))
    _replace_method(dt.datetime, "now", classmethod(now))
    # Random bytes are the same in every run, because names of jobs contain them.
    os.urandom = _Numbers().bytes


def _replace_method(kind: type, name: str, method: Any) -> None:
    """Replace a method of a class written in C, whose attributes cannot be set."""
    (attributes,) = gc.get_referents(kind.__dict__)
    attributes[name] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


class _Numbers:
    """Bytes of a generator with a fixed seed."""

    def __init__(self) -> None:
        self._state = 1

    def bytes(self, size: int) -> bytes:
        drawn = bytearray()
        while len(drawn) < size:
            self._state = (self._state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
            drawn += struct.pack("<I", self._state >> 32)
        return bytes(drawn[:size])
