"""Compiled events that cost what CUDA's cost through torch, for benchmarks on hosts without a GPU.

Each call holds the interpreter's lock, as torch does, and takes 1 to 2 us. The device is as far behind the program as a
GPU behind a launch-bound one: an event completes 20 us after it was recorded, in order. Values that the stream writes
into host memory are written at that instant, by a thread without the lock. Compiled with gcc when the benchmark runs.
"""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.event_device import Anchor
from gpuenergyd.client.timing.watched_requests import WatchedRequests

_SOURCE = r"""
#include <pthread.h>
#include <stdint.h>
#include <time.h>

enum { MAKE_NS = 3000, RECORD_NS = 1200, QUERY_NS = 700, ELAPSED_NS = 1000, WRITE_NS = 1200, LAG_NS = 20000 };
enum { EVENTS = 65536, WRITES = 4096 };

static uint64_t completed_ns[EVENTS], last_ns;
static int num_events;
static struct { uint64_t at_ns; volatile uint32_t *where; uint32_t value; } writes[WRITES];
static unsigned num_put, num_done;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_t writer;
static int has_writer;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void spin(uint64_t until_ns) { while (now_ns() < until_ns); }

static uint64_t enqueue(uint64_t begun_ns, uint64_t cost_ns) {
    spin(begun_ns + cost_ns);
    last_ns = begun_ns + LAG_NS > last_ns ? begun_ns + LAG_NS : last_ns;
    return last_ns;
}

int make_event(void) { spin(now_ns() + MAKE_NS); return num_events < EVENTS ? num_events++ : -1; }
void record(int event) { completed_ns[event] = enqueue(now_ns(), RECORD_NS); }
int query(int event) { spin(now_ns() + QUERY_NS); return now_ns() >= completed_ns[event]; }
void synchronize(int event) { spin(completed_ns[event]); }
void record_aside(int event) { spin(now_ns() + RECORD_NS); completed_ns[event] = now_ns() + LAG_NS; }

double elapsed_ms(int first, int second) {
    spin(now_ns() + ELAPSED_NS);
    return (float)((double)(int64_t)(completed_ns[second] - completed_ns[first]) / 1e6);
}

static void *write_values(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (num_done == num_put) pthread_cond_wait(&changed, &lock);
        unsigned slot = num_done % WRITES;
        uint64_t at_ns = writes[slot].at_ns;
        struct timespec until = { (time_t)(at_ns / 1000000000u), (long)(at_ns % 1000000000u) };
        pthread_mutex_unlock(&lock);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, 0);
        *writes[slot].where = writes[slot].value;
        pthread_mutex_lock(&lock);
        num_done++;
    }
    return 0;
}

void write_value(uint64_t where, uint32_t value) {
    uint64_t begun_ns = now_ns();
    if (!has_writer) has_writer = !pthread_create(&writer, 0, write_values, 0);
    uint64_t at_ns = enqueue(begun_ns, WRITE_NS / 2);
    pthread_mutex_lock(&lock);
    writes[num_put % WRITES].at_ns = at_ns;
    writes[num_put % WRITES].where = (volatile uint32_t *)where;
    writes[num_put++ % WRITES].value = value;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    spin(begun_ns + WRITE_NS);
}
"""


def missing_compiler() -> str | None:
    """Return why the events cannot be compiled; None if they can."""
    return None if shutil.which("gcc") else "no gcc on this host"


class CompiledDevice:
    """An EventDevice of compiled events; one per process."""

    def __init__(self, folder: Path) -> None:
        """Compile the events in a folder."""
        (folder / "events.c").write_text(_SOURCE, encoding="utf-8")
        library = folder / "events.so"
        command = ["gcc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library), str(folder / "events.c")]
        subprocess.run(command, check=True)
        calls, unlocked = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
        calls.elapsed_ms.restype = ctypes.c_double
        calls.write_value.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
        self.graphs = CapturedGraphs()
        self.num_events = 0
        self._make, self.record, self._query = calls.make_event, calls.record, calls.query
        self.elapsed_ms = calls.elapsed_ms
        self._write_value = calls.write_value
        self._record_aside, self._synchronize = calls.record_aside, unlocked.synchronize

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
        self._record_aside(event)
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
