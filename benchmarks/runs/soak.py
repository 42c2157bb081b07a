"""Memory growth of the daemon: one hour of sixteen jobs in a few minutes, on a clock that this program controls.

    python benchmarks/runs/soak.py [--hours 1] [--json]      # exit status 1 if it grows by 1 MiB a day or more

The daemon's own parts in one process: HTTP server, jobs, GPUs, history with a real database. Every virtual second each
of 16 jobs reports an iteration over the socket and requests clocks as its tuned plan says; every tenth of a second each
of 16 GPUs is sampled; clients read status, connections open and close, and jobs end and start. Measuring begins when
everything that is kept for fifteen minutes is full. The slope is a robust line (median of pairwise slopes, with its 95
% confidence interval) through the memory after a full collection, extrapolated to a day. malloc_trim runs before each
measurement, so that memory in use is measured and not what malloc caches; Python's allocations and growing object types
show where growth comes from.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import math
import os
import resource
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_START_NS = time.monotonic_ns()
_WALL_NS = time.time_ns()
_now_ns = _START_NS

time.monotonic_ns = lambda: _now_ns  # before anything of ours reads it; the event loop's own timers stay real
time.time_ns = lambda: _WALL_NS + _now_ns - _START_NS

from gpuenergyd.core.clock_request import ClockRequest  # noqa: E402
from gpuenergyd.core.job.rules import JobRules  # noqa: E402
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, full_speed_plan  # noqa: E402
from gpuenergyd.core.policy_api.policy import JobView  # noqa: E402
from gpuenergyd.daemon.api.server import ManualChanges, Server, UserLimits  # noqa: E402
from gpuenergyd.daemon.capped_worker import CappedWorker  # noqa: E402
from gpuenergyd.daemon.gpus.access import AccessRules  # noqa: E402
from gpuenergyd.daemon.gpus.inventory import Gpus  # noqa: E402
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse  # noqa: E402
from gpuenergyd.daemon.host_services import HostParts, host_services  # noqa: E402
from gpuenergyd.daemon.jobs.operators import JobFits, Operators, OrderFile  # noqa: E402
from gpuenergyd.daemon.jobs.past_jobs import PastJobStore  # noqa: E402
from gpuenergyd.daemon.jobs.registry import Jobs  # noqa: E402
from gpuenergyd.daemon.manual_leases.leases import ManualLeases  # noqa: E402
from gpuenergyd.daemon.manual_leases.releases import GpuReleases  # noqa: E402
from gpuenergyd.daemon.ports import JobServices  # noqa: E402
from gpuenergyd.daemon.processes.launch import PolicyChannel  # noqa: E402
from gpuenergyd.daemon.processes.plugins import PolicyNames  # noqa: E402
from gpuenergyd.daemon.processes.policy_client import PolicyFailure  # noqa: E402
from gpuenergyd.daemon.processes.power_queries import PowerQuery  # noqa: E402
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials  # noqa: E402
from gpuenergyd.daemon.runtime.process_tuning import limit_malloc_to_one_arena  # noqa: E402
from gpuenergyd.daemon.settings import load_settings  # noqa: E402
from gpuenergyd.errors import GpuError  # noqa: E402
from gpuenergyd.gpu.device import GpuIdentity  # noqa: E402
from gpuenergyd.gpu.link.messages import GpuSample  # noqa: E402
from gpuenergyd.store import HistoryWriter  # noqa: E402
from gpuenergyd.wire.clock_request import RankClockRequest  # noqa: E402
from tests.support.registration import one_stage_registration  # noqa: E402
from tests.support.worker_link import WorkerByMethods  # noqa: E402

GPUS = 16
MICROBATCHES = 4
CLOCKS_MHZ = (1410, 1200, 900)
NS_PER_S = 1_000_000_000
MAX_GROWTH_MIB_PER_DAY = 1.0
ME = PeerCredentials(os.getpid(), os.getuid(), os.getgid())


class Worker(WorkerByMethods):
    """A worker that does at once what it is told, and keeps nothing."""

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        del gpu_uuid, request


class Policy:
    """A policy that finds its plan at once and stays with it; the job itself proves now and then what it saves."""

    activity = None

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan:
        del policy, job_id
        clocks = [gpu.supported_sm_clocks_mhz[1:] for gpu in view.gpus]
        slower = full_speed_plan("tuned", view.schedule, clocks, reason="for the soak")
        return view.issued_plans[-1] if view.issued_plans else replace(slower, purpose=PlanPurpose.TUNED)

    async def preload(self, policy: str) -> None:
        del policy

    async def drop_job(self, job_id: str) -> None:
        del job_id

    async def divide_power(self, query: PowerQuery) -> PolicyFailure:
        del query
        return PolicyFailure("no power budget in the soak")

    async def check(self, policy: str) -> None:
        del policy

    async def fitted(self, *_: object) -> PolicyFailure:
        return PolicyFailure("no fitted profile in the soak")


async def no_policy_host() -> PolicyChannel:
    """Fail: the soak has no carbon intensities to forecast."""
    raise GpuError("no policy host in the soak")


class Connection:
    """A client's connection, used by one coroutine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, path: Path) -> "Connection":
        return cls(*await asyncio.open_unix_connection(str(path)))

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        self.writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        return await self.reader.readexactly(int(length.split(b":")[1]))


class Soak:
    """The daemon's parts and what happens to them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "socket"
        self.gpus = Gpus()
        self.gpus.update(GpuIdentity(f"GPU-{k}", k, "A100", CLOCKS_MHZ, is_simulated=True) for k in range(GPUS))
        self.history = HistoryWriter(f"sqlite:///{folder / 'history.sqlite3'}")
        worker = Worker()
        self.jobs = Jobs(
            services=JobServices(worker, Policy(), self.history, self.gpus, observation_limit_s=1.0),
            rules=JobRules(),
            default_policy="same",
            default_max_slowdown_ratio=0.0,
            policies=PolicyNames(lambda: ("same",)),
            clock_socket_path="/none",
            max_ranks_per_user=64,
            max_jobs_per_user_per_h=1_000_000,
            silence_limit_s=60.0,
        )
        policy = Policy()
        leases = ManualLeases(worker, self.gpus, self.history)
        settings, capped = load_settings(mode="control", state_dir=folder), CappedWorker(worker, self.gpus)
        parts = HostParts(
            settings, self.gpus, self.jobs, capped, policy.divide_power, self.history, policy.fitted,
            no_policy_host,
        )  # fmt: skip
        self.server = Server(
            self.jobs,
            ManualChanges(worker, leases, GpuReleases(worker, self.gpus, self.history, self.jobs.spawn)),
            Operators(self.jobs, policy.check, OrderFile(folder / "orders.json")),
            JobFits(self.jobs, policy.fitted),
            status=lambda: {"jobs": [runner.job_id for runner in self.jobs], "gpus": GPUS},
            job_detail=lambda _: None,
            past_jobs=PastJobStore(f"sqlite:///{folder / 'history.sqlite3'}", self.history),
            proof_of_use=ProofOfUse(AccessRules(), worker.process_ids),
            host_services={name: service(parts) for name, service in host_services().items()},
            limits=UserLimits(256, 1e9),
        )
        self.connections: list[Connection] = []
        self.tokens: list[str] = []
        self.indices = [0] * GPUS
        self.plans: list[list[dict[str, Any]]] = [[] for _ in range(GPUS)]
        """Received by each rank and not replaced by a newer one: the first is in force."""
        self.num_records = self.num_runs = 0

    async def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(64)
        listener.setblocking(False)
        self.history.start()
        await self.server.start(listener)
        for number in range(GPUS):
            self.connections.append(await Connection.open(self.path))
            self.tokens.append(await self.register(number))

    async def register(self, number: int) -> str:
        self.num_runs += 1
        registration = one_stage_registration(
            f"GPU-{number}",
            f"soak-{number}",
            run_key=str(self.num_runs),
            num_microbatches=MICROBATCHES,
            order=[["FB"[k % 2], k // 2, 0] for k in range(2 * MICROBATCHES)],
        )
        answer = await self.connections[number].ask("POST", "/v1/ranks", json.dumps(registration).encode())
        self.indices[number] = 0
        self.plans[number] = []
        return str(json.loads(answer)["rank_token"])

    async def second(self, number: int) -> None:
        """Let one virtual second pass."""
        global _now_ns  # noqa: PLW0603  the clock that all parts read
        for tenth in range(10):
            _now_ns += NS_PER_S // 10
            elapsed_s = (_now_ns - _START_NS) / NS_PER_S
            self.jobs.handle_samples(
                [
                    GpuSample(f"GPU-{k}", _now_ns, 300.0, 300.0 * elapsed_s, _now_ns - 1000, 1410, 50.0 + tenth, False)
                    for k in range(GPUS)
                ]
            )
        await asyncio.gather(*(self.report(k) for k in range(GPUS)))
        self.jobs.check_time_limits()
        if number % 10 == 0:
            visitor = await Connection.open(self.path)
            await visitor.ask("GET", "/v1/status")
            await visitor.ask("GET", "/discover")
            visitor.writer.close()
        if number % 120 == 60:
            gone = number // 120 % GPUS
            body = json.dumps({"rank_token": self.tokens[gone]}).encode()
            await self.connections[gone].ask("POST", "/v1/release", body)
            while self.gpus[f"GPU-{gone}"].claim is not None:  # noqa: ASYNC110  nobody tells when a job has ended
                await asyncio.sleep(0)
            self.tokens[gone] = await self.register(gone)

    async def report(self, number: int) -> None:
        plans = self.plans[number]
        while len(plans) > 1 and plans[1]["apply_at_iteration"] <= self.indices[number]:
            plans.pop(0)
        is_in_force = plans and plans[0]["apply_at_iteration"] <= self.indices[number]
        plan_epoch = plans[0]["plan_epoch"] if is_in_force else 0
        for *_, clock_mhz in plans[0]["changes"] if is_in_force else ():
            self.num_records += 1
            token = bytes.fromhex(self.tokens[number])
            request = ClockRequest(clock_mhz, _now_ns, plan_epoch=plan_epoch)
            self.jobs.clock_requests.admit(RankClockRequest(token, self.num_records, request), ME)
        end_ns = _now_ns
        begin_ns = end_ns - NS_PER_S
        step_ns = NS_PER_S // (2 * MICROBATCHES)
        rows = [
            ["FB"[k % 2], k // 2, 0, begin_ns + k * step_ns, begin_ns + (k + 1) * step_ns]
            for k in range(2 * MICROBATCHES)
        ]
        body = {
            "rank_token": self.tokens[number],
            "iteration_index": self.indices[number],
            "plan_epoch": plan_epoch,
            "begin_mono_ns": begin_ns,
            "end_mono_ns": end_ns,
            "next_begin_mono_ns": end_ns,
            "instructions": rows,
        }
        self.indices[number] += 1
        answer = await self.connections[number].ask("POST", "/v1/iterations", json.dumps(body).encode())
        plans += json.loads(answer)["plans"]

    async def stop(self) -> None:
        for connection in self.connections:
            connection.writer.close()
        await self.server.close()
        await self.jobs.close("the soak is over")
        await asyncio.to_thread(self.history.close, 30.0)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


_libc = ctypes.CDLL(None)
limit_malloc_to_one_arena()  # as the daemon does: so C's figures are those of the whole process
_libc.mallinfo2.restype = _MallInfo


@dataclass(frozen=True, slots=True)
class Point:
    """Memory at one instant."""

    day: float
    resident_kib: int
    malloc_used_kib: int
    """Handed out by malloc, the pages of Python's own allocator not among it."""
    python_blocks: int
    """Handed out by Python's own allocator."""

    @classmethod
    def at(cls, day: float) -> "Point":
        """Look after a full collection."""
        resident = memory_kib()
        info = _libc.mallinfo2()
        used = (info.uordblks + info.hblkhd) // 1024
        return cls(day, resident, used, sys.getallocatedblocks())


def objects_by_kind() -> Counter[str]:
    """Return how many objects of each kind the collector knows."""
    return Counter(type(thing).__qualname__ for thing in gc.get_objects())


def memory_kib() -> int:
    """Return the process's anonymous memory after a full collection and malloc_trim."""
    gc.collect()
    _libc.malloc_trim(0)
    return int(Path("/proc/self/status").read_text(encoding="ascii").partition("RssAnon:")[2].split()[0])


async def soak(hours: float, warmup_hours: float, folder: Path) -> dict[str, object]:
    """Return what was measured."""
    parts = Soak(folder)
    await parts.start()
    points: list[Point] = []
    kinds: Counter[str] = Counter()
    for number in range(round((warmup_hours + hours) * 3600)):
        await parts.second(number)
        if number % 60 == 0 and number >= warmup_hours * 3600:
            while not await asyncio.to_thread(parts.history.flush, 60.0):
                pass
            points.append(Point.at(number / 86_400))
            if len(points) == 1:
                kinds = objects_by_kind()
    grown = objects_by_kind()
    grown.subtract(kinds)
    num_runs, num_records = parts.num_runs, parts.num_records
    await parts.stop()
    days = [point.day for point in points]
    memory = slope(days, [point.resident_kib / 1024 for point in points])
    return {
        "virtual_hours": hours,
        "iterations": round(GPUS * hours * 3600),
        "jobs": num_runs,
        "clock_records": num_records,
        "memory_kib_first_last": [points[0].resident_kib, points[-1].resident_kib],
        "memory_kib_every_ten_minutes": [point.resident_kib for point in points[::10]],
        "memory_mib_per_day": round(memory.middle, 2),
        "memory_mib_per_day_95": [round(memory.low, 2), round(memory.high, 2)],
        "malloc_used_mib_per_day": round(slope(days, [point.malloc_used_kib / 1024 for point in points]).middle, 2),
        "malloc_used_kib_first_last": [points[0].malloc_used_kib, points[-1].malloc_used_kib],
        "python_blocks_per_day": round(slope(days, [point.python_blocks for point in points]).middle),
        "python_blocks_first_last": [points[0].python_blocks, points[-1].python_blocks],
        "objects_grown": sum(grown.values()),
        "objects_grown_most": dict(grown.most_common(8)),
        "cpu_s": round(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), 1),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


@dataclass(frozen=True, slots=True)
class Slope:
    """A robust slope and its 95 % interval."""

    low: float
    middle: float
    high: float


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """Return the median of the slopes between all pairs of points (Theil and Sen): a jump or two do not move it.

    The interval is Sen's, from the variance of Kendall's rank statistic; it takes the points for independent.
    """
    n = len(xs)
    slopes = sorted((ys[j] - ys[i]) / (xs[j] - xs[i]) for i in range(n) for j in range(i + 1, n))
    if not slopes:
        return Slope(-math.inf, 0.0, math.inf)
    half = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = (round(len(slopes) / 2 + sign * half) for sign in (-1, 1))
    return Slope(slopes[max(0, low)], median(slopes), slopes[min(len(slopes) - 1, high)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--warmup-hours", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = asyncio.run(soak(options.hours, options.warmup_hours, Path(folder)))
    is_flat = float(str(result["memory_mib_per_day"])) < MAX_GROWTH_MIB_PER_DAY
    result["verdict"] = f"{'flat' if is_flat else 'GROWS'}: {result['memory_mib_per_day']} MiB a day"
    print(json.dumps(result) if options.json else "\n".join(f"{key:24} {value}" for key, value in result.items()))
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
