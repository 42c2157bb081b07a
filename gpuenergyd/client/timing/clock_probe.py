"""Measures the SM clock of the GPU that the program computes on: one thread on the GPU counts its cycles for 50 us.

The kernel runs on a stream of its own, beside whatever the program computes, and writes into host memory, so that no
call asks for its result. It is launched through the driver's library in the program's own context, from its own thread.
When it ran follows from the GPU's timer: each kernel began after its launch, and had ended before its result was seen,
which bounds the difference of the two clocks ever closer. No GPU was at hand for tests: they use a compiled double of
the library. On an H200 such a kernel showed the clock beside full load, 0.1 MHz from the reported one at rest.
"""

import ctypes
import mmap
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, NamedTuple

from gpuenergyd.client.timing.cuda_writes import LIBRARY, CudaCallError, map_for_device

_COUNTED_NS, _PAUSE_NS = 50_000, 2_000_000
_NUM_SLOTS, _SLOT_WORDS, _WORD_BYTES = 32, 4, 8
_NON_BLOCKING = 1
_MAX_COUNTED_NS = 2 * _COUNTED_NS
"""Counts that took longer are dropped: another process's work came between, and cycles on another SM do not compare."""
_KEPT_NS = 10_000_000_000
"""The GPU's timer and the host's drift by some 10 us in this time."""
_MAX_WIDTH_NS = 5_000_000
"""Readings that are dated less exactly are dropped."""
_MAX_READINGS, _MAX_DIFFERENCES = 128, 512
PROBE_PTX = b"""
.version 6.0
.target sm_70
.address_size 64

.visible .entry probe(.param .u64 out, .param .u64 counted, .param .u64 number)
{
    .reg .pred %p<3>;
    .reg .u64 %rd<12>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [counted];
    ld.param.u64 %rd3, [number];
    mov.u64 %rd4, %globaltimer;
TICK:
    mov.u64 %rd5, %globaltimer;
    setp.eq.u64 %p1, %rd5, %rd4;
    @%p1 bra TICK;
    mov.u64 %rd6, %clock64;
COUNT:
    mov.u64 %rd7, %globaltimer;
    sub.u64 %rd8, %rd7, %rd5;
    setp.lt.u64 %p2, %rd8, %rd2;
    @%p2 bra COUNT;
    mov.u64 %rd9, %clock64;
    sub.u64 %rd10, %rd9, %rd6;
    st.volatile.global.u64 [%rd1], %rd10;
    st.volatile.global.u64 [%rd1+8], %rd8;
    st.volatile.global.u64 [%rd1+16], %rd5;
    membar.sys;
    st.volatile.global.u64 [%rd1+24], %rd3;
    ret;
}
"""
_kept_for_good: list[mmap.mmap] = []
"""The device may write after the client has left, so the memory is never unmapped."""


class TrueClock(NamedTuple):
    """A clock, and the bounds of the instant at which it was counted, in ns of the host's monotonic clock."""

    early_mono_ns: int
    late_mono_ns: int
    sm_clock_mhz: int


class ClockProbe:
    """Launches probes in the context that is current on the training thread, and dates their results."""

    def __init__(self, *, load: Callable[[str], Any] = ctypes.PyDLL, mono_ns: Callable[[], int] = monotonic_ns) -> None:
        """Prepare the kernel; on the training thread.

        Raises:
            OSError, AttributeError: there is no library of the driver, or it lacks a function.
            CudaCallError: no context is current, or the driver refuses.
        """
        self._cuda, self._mono_ns = load(LIBRARY), mono_ns
        context, module, self._function, self._stream = (ctypes.c_void_p() for _ in range(4))
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            raise CudaCallError("no CUDA context is current")
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        _kept_for_good.append(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._on_device = map_for_device(self._cuda, address, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("Q")
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PROBE_PTX))
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, ctypes.c_char_p(b"probe"))
        self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))
        self._number = 0
        self._launched: deque[tuple[int, int]] = deque()
        """Number and instant of the launches whose results have not been seen."""
        self._differences: deque[tuple[int, int, int]] = deque(maxlen=_MAX_DIFFERENCES)
        """Instants, and bounds of the host's clock minus the GPU's timer."""
        self._counted: deque[tuple[int, int, int]] = deque(maxlen=_MAX_READINGS)
        """Begin and end by the GPU's timer, and clock in MHz."""
        self._next_ns = 0

    def probe(self) -> None:
        """Launch a probe, unless there was one just before; on the training thread, while no graph is captured.

        Raises:
            CudaCallError: the driver refuses.
        """
        now_ns = self._mono_ns()
        if self._launched:
            self._collect(now_ns)
        if now_ns < self._next_ns or len(self._launched) == _NUM_SLOTS:
            return
        self._next_ns = now_ns + _PAUSE_NS
        self._number += 1
        slot = self._number % _NUM_SLOTS * _SLOT_WORDS
        values = [ctypes.c_uint64(v) for v in (self._on_device + slot * _WORD_BYTES, _COUNTED_NS, self._number)]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._launched.append((self._number, self._mono_ns()))
        self._call("cuLaunchKernel", self._function, *(1, 1, 1, 1, 1, 1), 0, self._stream, arguments, None)

    def pop_clocks(self) -> tuple[TrueClock, ...]:
        """Return the clocks that were counted since the last call and can be dated."""
        self._collect(self._mono_ns())
        if not self._differences:
            return ()
        low_ns = max(low for _, low, _ in self._differences)
        high_ns = min(high for _, _, high in self._differences)
        counted, self._counted = self._counted, deque(maxlen=_MAX_READINGS)
        if not 0 <= high_ns - low_ns <= _MAX_WIDTH_NS:
            return ()
        return tuple(TrueClock(begun_ns + low_ns, ended_ns + high_ns, mhz) for begun_ns, ended_ns, mhz in counted)

    def _collect(self, now_ns: int) -> None:
        """Take the results that have been written."""
        while self._launched:
            number, launched_ns = self._launched[0]
            slot = number % _NUM_SLOTS * _SLOT_WORDS
            cycles, passed_ns, begun_ns, written = self._words[slot : slot + _SLOT_WORDS]
            if written != number:
                break
            self._launched.popleft()
            ended_ns = begun_ns + passed_ns
            self._differences.append((now_ns, launched_ns - begun_ns, now_ns - ended_ns))
            if 0 < passed_ns <= _MAX_COUNTED_NS:
                self._counted.append((begun_ns, ended_ns, round(1000 * cycles / passed_ns)))
        while self._differences and self._differences[0][0] < now_ns - _KEPT_NS:
            self._differences.popleft()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise CudaCallError(f"{name}: error {status}")
