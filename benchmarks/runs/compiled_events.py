"""Compiled events that cost what CUDA's cost through torch, for benchmarks on hosts without a GPU.

Each call holds the interpreter's lock, as torch does, and takes 1 to 2 us. The device is as far behind the program as a
GPU behind a launch-bound one: an event completes 20 us after it was recorded, in order. Values that the stream writes
into host memory are written at once: the thread that waits for one looks every 0.5 ms only. Compiled with gcc when the
benchmark runs.

The times between events are CPU time of the training thread, so that other programs on the host change nothing of what
the client does. They leave out what the program does between `stop_clock` and `start_clock`.
"""

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.event_device import Anchor
from gpuenergyd.client.timing.watched_requests import WatchedRequests

_SOURCE = r"""
#include <stdint.h>
#include <time.h>

enum { MAKE_NS = 3000, RECORD_NS = 1200, QUERY_NS = 700, ELAPSED_NS = 1000, WRITE_NS = 1200, LAG_NS = 20000 };
enum { EVENTS = 65536 };

static uint64_t completed_ns[EVENTS], device_ns[EVENTS], last_ns, stopped_ns, left_out_ns;
static unsigned num_events;
static clockid_t device_clock = CLOCK_MONOTONIC;

static uint64_t read_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t now_ns(void) { return read_ns(CLOCK_MONOTONIC); }
static void spin(uint64_t until_ns) { while (now_ns() < until_ns); }

void use_clock(int clock) { device_clock = clock; }
void stop_clock(void) { stopped_ns = read_ns(device_clock); }
void start_clock(void) { left_out_ns += read_ns(device_clock) - stopped_ns; }

int make_event(void) { spin(now_ns() + MAKE_NS); return num_events++ % EVENTS; }
int query(int event) { spin(now_ns() + QUERY_NS); return now_ns() >= completed_ns[event]; }
void synchronize(int event) { spin(completed_ns[event]); }

void record(int event) {
    uint64_t begun_ns = now_ns();
    device_ns[event] = read_ns(device_clock) - left_out_ns;
    spin(begun_ns + RECORD_NS);
    completed_ns[event] = last_ns = begun_ns + LAG_NS > last_ns ? begun_ns + LAG_NS : last_ns;
}

double elapsed_ms(int first, int second) {
    spin(now_ns() + ELAPSED_NS);
    return (float)((double)(int64_t)(device_ns[second] - device_ns[first]) / 1e6);
}

void write_value(uint64_t where, uint32_t value) {
    spin(now_ns() + WRITE_NS);
    *(volatile uint32_t *)where = value;
}
"""


def missing_compiler() -> str | None:
    """Return why the events cannot be compiled; None if they can."""
    return None if shutil.which("gcc") else "no gcc on this host"


class CompiledDevice:
    """An EventDevice of compiled events; one per process, made by the training thread."""

    def __init__(self, folder: Path) -> None:
        """Compile the events in a folder."""
        (folder / "events.c").write_text(_SOURCE, encoding="utf-8")
        library = folder / "events.so"
        command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(folder / "events.c")]
        subprocess.run(command, check=True)
        calls, unlocked = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
        calls.elapsed_ms.restype = ctypes.c_double
        calls.write_value.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
        self.graphs = CapturedGraphs()
        self.num_events = 0
        self._make, self.record, self._query = calls.make_event, calls.record, calls.query
        self.elapsed_ms = calls.elapsed_ms
        self._write_value = calls.write_value
        self._synchronize = unlocked.synchronize
        self.stop_clock, self.start_clock = calls.stop_clock, calls.start_clock
        calls.use_clock(time.pthread_getcpuclockid(threading.get_ident()))

    def make_event(self) -> int:
        """Return a new event."""
        self.num_events += 1
        return int(self._make())

    def has_completed(self, event: int) -> bool:
        """Return whether the device has reached an event."""
        return bool(self._query(event))

    def make_anchor(self) -> Anchor:
        """Complete an event now."""
        event = self.make_event()
        before_ns = time.monotonic_ns()
        self.record(event)
        self._synchronize(event)
        after_ns = time.monotonic_ns()
        return Anchor(event, (before_ns + after_ns) // 2, after_ns - before_ns)

    def open_requests(self) -> WatchedRequests:
        """Return what sends requests when the stream reaches them."""

        def map_memory(address: int, _size: int) -> Callable[[int], bool]:
            def write(number: int) -> bool:
                self._write_value(address, number)
                return True

            return write

        self.requests = WatchedRequests(map_memory)
        return self.requests

    def is_capturing(self) -> bool:
        """Return False: nothing is captured here."""
        return False

    def calls(self) -> AbstractContextManager[None]:
        """Return a context in which another thread may call the device."""
        return self.graphs.gate.calls()

    def make_node_event(self) -> None:
        """Return None: there are no graphs here."""

    def node_ms(self, first: int, node: int) -> None:
        """Return None."""
