"""Instruments inside a measured daemon: durations of event-loop turns and requests.

`benchmarks/runs/load.py` imports this module first in the daemon. It keeps histograms with bins of 2^(1/4) and writes
them as JSON to the file LOAD_INSTRUMENTS on SIGUSR2, which also resets them. A turn of the event loop is the time
between two waits for events; no other request is served meanwhile. Wall time beyond CPU time is spent in other threads
(the GIL) and processes, so the loop's CPU time between a request and its reply approximates the latency on an idle
machine, apart from the rest of the turn in which the request arrived.
"""

# ruff: noqa: SLF001  instruments access private members
import asyncio
import gc
import json
import math
import os
import selectors
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

STEPS_PER_DOUBLING = 4


class Histogram:
    """A histogram of durations with 19 % resolution, and the maximum."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = defaultdict(int)
        self.total_ns = 0
        self.longest_ns = 0

    def add(self, duration_ns: int) -> None:
        self.counts[math.ceil(STEPS_PER_DOUBLING * math.log2(max(1, duration_ns)))] += 1
        self.total_ns += duration_ns
        self.longest_ns = max(self.longest_ns, duration_ns)

    def quantile_ms(self, q: float) -> float:
        """Return the upper edge of the bin that contains a quantile."""
        left = q * sum(self.counts.values())
        for step in sorted(self.counts):
            left -= self.counts[step]
            if left <= 0:
                return round(float(min(2.0 ** (step / STEPS_PER_DOUBLING), self.longest_ns)) / 1e6, 3)
        return 0.0

    def summary(self) -> dict[str, float]:
        return {
            "count": sum(self.counts.values()),
            "total_s": round(self.total_ns / 1e9, 3),
            "p50_ms": self.quantile_ms(0.5),
            "p99_ms": self.quantile_ms(0.99),
            "p999_ms": self.quantile_ms(0.999),
            "max_ms": round(self.longest_ns / 1e6, 3),
        }


class Instruments:
    """Measurements since the last reset."""

    def __init__(self) -> None:
        self.reset()
        self._turn_begins_ns = self._turn_cpu_ns = 0
        self._arrived: dict[int, tuple[int, int, int]] = {}
        self._num_others = 0
        self._collecting_ns = 0

    def reset(self) -> None:
        self.turns, self.turns_cpu, self.requests, self.requests_cpu = (Histogram() for _ in range(4))
        self.overtaken_by: list[int] = []
        self.collections = (Histogram(), Histogram(), Histogram())

    def install(self) -> None:
        self._watch_turns()
        self._watch_requests()
        gc.callbacks.append(self._collected)
        signal.signal(signal.SIGUSR2, self._write)

    def _watch_turns(self) -> None:
        select = selectors.EpollSelector.select

        def watched(selector: selectors.EpollSelector, timeout: float | None = None) -> Any:
            if self._turn_begins_ns:
                self.turns.add(time.perf_counter_ns() - self._turn_begins_ns)
                self.turns_cpu.add(time.thread_time_ns() - self._turn_cpu_ns)
            ready = select(selector, timeout)
            self._turn_begins_ns, self._turn_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            return ready

        selectors.EpollSelector.select = watched  # type: ignore[method-assign,assignment]  # patched for measurement

    def _watch_requests(self) -> None:
        """Measure from the last bytes read to the first reply written, for this user's connections only."""
        from gpuenergyd.daemon.api.connection_guard import GuardedProtocol  # noqa: PLC0415  the import path is set up now

        received = GuardedProtocol.data_received

        def arrives(guard: GuardedProtocol, data: bytes) -> None:
            if guard.peer.uid == os.getuid():
                now_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
                self._arrived[id(guard._transport)] = now_ns, cpu_ns, self._num_others
            received(guard, data)

        GuardedProtocol.data_received = arrives  # type: ignore[method-assign,assignment]  # as above
        transport_class = asyncio.selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
        write = transport_class.write

        def writes(transport: Any, data: bytes) -> None:
            write(transport, data)
            arrived = self._arrived.pop(id(transport), None)
            if arrived is None:
                self._num_others += 1
            else:
                self.requests.add(time.perf_counter_ns() - arrived[0])
                self.requests_cpu.add(time.thread_time_ns() - arrived[1])
                self.overtaken_by.append(self._num_others - arrived[2])

        transport_class.write = writes

    def _of_overtaken(self, q: float) -> int:
        """Return a quantile of the number of other users' replies sent while one of this user's requests waited."""
        ordered = sorted(self.overtaken_by) or [0]
        return ordered[round(q * (len(ordered) - 1))]

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_ns = time.thread_time_ns()
        else:
            self.collections[info["generation"]].add(time.thread_time_ns() - self._collecting_ns)

    def _write(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        path = Path(os.environ["LOAD_INSTRUMENTS"])
        parts = {
            "turns": self.turns,
            "turns_cpu": self.turns_cpu,
            "requests_inside": self.requests,
            "requests_inside_cpu": self.requests_cpu,
            **{f"collections_{generation}_cpu": seen for generation, seen in enumerate(self.collections)},
        }
        seen: dict[str, Any] = {name: part.summary() for name, part in parts.items()}
        seen["others_answered_first"] = {"p50": self._of_overtaken(0.5), "p99": self._of_overtaken(0.99)}
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(seen), encoding="utf-8")
        unfinished.rename(path)
        self.reset()


def install() -> None:
    """Install the instruments."""
    Instruments().install()


def disable_fair_queueing() -> None:
    """Let any number of requests start per turn: the reference for `FairQueue`."""
    from gpuenergyd.daemon.api import fair_queue  # noqa: PLC0415  as above

    fair_queue.FairQueue.__init__.__defaults__ = (math.inf, *fair_queue.FairQueue.__init__.__defaults__[1:])  # type: ignore[index]


def profile_callbacks() -> None:
    """Print the CPU time of each event-loop callback at exit."""
    import atexit  # noqa: PLC0415  seldom needed

    seen: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    run = asyncio.events.Handle._run

    def named(callback: Callable[..., object]) -> str:
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.Task):
            return getattr(owner.get_coro(), "__qualname__", "task")
        name = getattr(callback, "__qualname__", None)
        return name if name is not None else type(callback).__name__

    def timed(handle: asyncio.Handle) -> None:
        name = named(handle._callback)  # type: ignore[attr-defined]
        begin_ns = time.thread_time_ns()
        run(handle)
        took_ns = time.thread_time_ns() - begin_ns
        row = seen[name]
        row[0] += 1
        row[1] += took_ns
        row[2] = max(row[2], took_ns)

    def report() -> None:
        print(f"{'callback':60} {'times':>8} {'ms each':>8} {'ms total':>10} {'ms max':>10}", file=sys.stderr)
        for name, (count, total_ns, most_ns) in sorted(seen.items(), key=lambda row: -row[1][1])[:20]:
            columns = f"{total_ns / count / 1e6:8.3f} {total_ns / 1e6:10.1f} {most_ns / 1e6:10.2f}"
            print(f"{name[:60]:60} {count:8} {columns}", file=sys.stderr)

    asyncio.events.Handle._run = timed  # type: ignore[method-assign,assignment]  # as above
    atexit.register(report)
