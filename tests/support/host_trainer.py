"""A training run on two hosts: PP 4 x DP 2 without torch's model, but with its TCPStore.

Stages 0 and 1 of both replicas run on host 0, stages 2 and 3 on host 1; or, with `are_replicas_whole`, replica 0 on
host 0 and replica 1 on host 1. Neighbours on one host use pipes, those on two hosts TCP; at the end of an iteration
the two replicas of a stage wait for each other. Rank 0 serves the job's store, as `init_process_group` would. torch is
imported once, then hosts and ranks are forked. Each rank records its iterations' durations.

Run `python -m tests.support.host_trainer CONFIG.json`; it exits with both hosts and writes their exit statuses.
"""

import contextlib
import ctypes
import json
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd_across_hosts.ranks.agreed_plans import AgreedPlans
from gpuenergyd_across_hosts.ranks.job_store import JobStore
from gpuenergyd_across_hosts.ranks.pipeline_member import PipelineMember
from gpuenergyd_across_hosts.ranks.pipeline_place import PipelinePlace
from gpuenergyd_across_hosts.ranks.replica_paces import ReplicaOnOneHost
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.training.timers import SimulatedTimer
from tests.support.fake_trainer import BACKWARD, FORWARD, scaled
from tests.support.waiting import LIMIT_S

NUM_STAGES, NUM_REPLICAS, STAGES_PER_HOST = 4, 2, 2
_MORE, _LAST = b".", b"!"
RANK_PRIORITY, DAEMON_PRIORITY = 2, 1
"""Real-time priorities, if permitted: separate hosts would not share cores."""
_CONNECT_LIMIT_S = LIMIT_S
_PERIOD_S = 0.04
_CLONE_NEWNET = 0x40000000
_SLOT = struct.Struct("<qq")
"""Record of a rank in the progress file: pid and completed iterations."""
_DONE = struct.Struct("<dddd")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Configuration of both hosts."""

    folder: str
    addresses: tuple[str, str]
    namespaces: tuple[str, str]
    port: int
    is_managed: bool
    microbatches: int = 3
    max_slowdown: float = 0.05
    duration_scale: float = 2.5
    """Instructions are longer than in a training on one host, since messages between hosts take time."""
    are_replicas_whole: bool = False

    def host_of(self, dp_rank: int, pp_rank: int) -> int:
        return dp_rank if self.are_replicas_whole else pp_rank // STAGES_PER_HOST

    def gpu_index(self, dp_rank: int, pp_rank: int) -> int:
        """Return a rank's GPU on its host."""
        return pp_rank if self.are_replicas_whole else STAGES_PER_HOST * dp_rank + pp_rank % STAGES_PER_HOST

    def done_path(self, dp_rank: int, pp_rank: int) -> Path:
        """A rank's file of iterations."""
        return Path(self.folder) / f"done-{dp_rank}-{pp_rank}"

    def daemon_folder(self, host: int) -> Path:
        return Path(self.folder) / f"host{host}"

    @property
    def progress_path(self) -> Path:
        return Path(self.folder) / "progress"

    @property
    def statuses_path(self) -> Path:
        """File with both hosts' exit statuses."""
        return Path(self.folder) / "statuses.json"

    @property
    def last_when(self) -> Path:
        """When this file exists, the next iteration is the last."""
        return Path(self.folder) / "enough"

    @property
    def straggle_path(self) -> Path:
        """Slowdown factor of the ranks of replica 1, with first and last iteration."""
        return Path(self.folder) / "straggle"


_ALL_RANKS = tuple((dp, pp) for dp in range(NUM_REPLICAS) for pp in range(NUM_STAGES))
_NEIGHBOURS = [((dp, pp), "after", (dp, pp + 1), "before") for dp, pp in _ALL_RANKS if pp + 1 < NUM_STAGES]
_LIKES = [((0, pp), "replica", (1, pp), "replica") for pp in range(NUM_STAGES)]
_LINKS = tuple((*link, number) for number, link in enumerate([*_NEIGHBOURS, *_LIKES]))
"""Connections between ranks: each rank with its name for the connection, and a unique number."""


def rank_index(dp_rank: int, pp_rank: int) -> int:
    """Return a rank's offset in the progress file."""
    return dp_rank * NUM_STAGES + pp_rank


def read_progress(path: Path) -> list[tuple[int, int]]:
    """Return (pid, iterations ended) of every rank."""
    return list(_SLOT.iter_unpack(path.read_bytes()))


class Done(NamedTuple):
    """One iteration of one rank."""

    time_s: float
    """Time until the other replica had finished too."""
    busy_s: float
    """Busy time of its GPU."""
    energy_j: float
    """Energy of its GPU."""
    slower: float
    """Slowdown factor of its work at the same clock."""


def read_done(path: Path) -> list[Done]:
    """Return the complete records of a rank."""
    raw = path.read_bytes()
    return [Done(*values) for values in _DONE.iter_unpack(raw[: len(raw) // _DONE.size * _DONE.size])]


def create_progress(path: Path) -> None:
    """Create an empty progress file."""
    path.write_bytes(bytes(_SLOT.size * NUM_STAGES * NUM_REPLICAS))


class _Line:
    """One byte at a time to and from a neighbour."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing

    def receive(self) -> bytes:
        reply = os.read(self._reading, 1)
        if not reply:
            raise EOFError
        return reply

    def send(self, reply: bytes) -> None:
        os.write(self._writing, reply)


def _pair() -> tuple[_Line, _Line]:
    (a_in, b_out), (b_in, a_out) = os.pipe(), os.pipe()
    return _Line(a_in, a_out), _Line(b_in, b_out)


def _across(config: RunConfig, host: int, number: int) -> _Line:
    address = (config.addresses[1], config.port + 1 + number)
    if host == 1:
        with socket.create_server(address) as listener:
            listener.settimeout(_CONNECT_LIMIT_S)
            link, _ = listener.accept()
    else:
        deadline = time.monotonic() + _CONNECT_LIMIT_S
        while True:
            try:
                link = socket.create_connection(address, 5)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                break
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    held = link.detach()
    return _Line(held, held)


def run_rank(config: RunConfig, host: int, dp_rank: int, pp_rank: int, lines: dict[str, _Line]) -> None:
    """Run one rank until the last iteration, or until a neighbour has ended."""
    store = None
    if dp_rank == pp_rank == 0 and config.is_managed:
        import torch.distributed as dist  # noqa: PLC0415  imported before the fork already

        store = dist.TCPStore(config.addresses[0], config.port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # public, not re-exported
    world = SimulatedHost.open(config.daemon_folder(host) / "world")
    gpu_uuid = world.identities()[config.gpu_index(dp_rank, pp_rank)].gpu_uuid
    world.attach_process(gpu_uuid, os.getpid())
    order = one_forward_one_backward(NUM_STAGES, config.microbatches).orders[pp_rank]
    ratio = config.duration_scale * (1.0 + 0.4 * (pp_rank == NUM_STAGES - 1))
    timer = SimulatedTimer()
    client, stop = _join(config, host, dp_rank, pp_rank, gpu_uuid, timer) if config.is_managed else (None, None)
    before, after = lines.get("before"), lines.get("after")
    with config.progress_path.open("r+b") as file:
        progress = mmap.mmap(file.fileno(), 0)
    done = config.done_path(dp_rank, pp_rank).open("wb", buffering=0)
    is_last, ended, energy_j = False, 0, world.exact_energy_j(gpu_uuid)
    while not is_last:
        begun_ns, busy_ns = time.monotonic_ns(), 0
        is_last = dp_rank == pp_rank == 0 and config.last_when.exists()
        slower = _straggling(config, ended) if dp_rank == 1 else 1.0
        work = {InstructionKind.F: scaled(FORWARD, ratio * slower), InstructionKind.B: scaled(BACKWARD, ratio * slower)}
        if client is not None:
            client.begin_iteration()
        for instruction in order:
            is_forward = instruction.kind is InstructionKind.F
            source, sink = (before, after) if is_forward else (after, before)
            is_last = (source is not None and source.receive() == _LAST) or is_last
            slot = client.begin_instruction(str(instruction.kind), instruction.microbatch_index) if client else -1
            work_begun_ns = time.monotonic_ns()
            world.begin_work(gpu_uuid, work[instruction.kind])
            world.hold(gpu_uuid)
            timer.work_ended_ns = world.finish_work(gpu_uuid)
            busy_ns += timer.work_ended_ns - work_begun_ns
            if client is not None:
                client.end_instruction(slot)
            if sink is not None:
                sink.send(_LAST if is_last else _MORE)
        if client is not None:
            client.end_iteration()
        # Gradient all-reduce: the faster replica waits for the slower one.
        lines["replica"].send(_LAST if is_last else _MORE)
        is_last = lines["replica"].receive() == _LAST or is_last
        ended += 1
        now_j = world.exact_energy_j(gpu_uuid)
        done.write(_DONE.pack((time.monotonic_ns() - begun_ns) / 1e9, busy_ns / 1e9, now_j - energy_j, slower))
        energy_j = now_j
        _SLOT.pack_into(progress, _SLOT.size * rank_index(dp_rank, pp_rank), os.getpid(), ended)
    if client is not None and stop is not None:
        stop()
        client.release()
    world.detach_process(gpu_uuid, os.getpid())
    world.close()
    done.close()
    del store


def _join(
    config: RunConfig, host: int, dp_rank: int, pp_rank: int, gpu_uuid: str, timer: SimulatedTimer
) -> tuple[RankClient, Callable[[], None]]:
    """Join as the adapters do; return a function that leaves."""
    plans = None if config.are_replicas_whole else AgreedPlans()
    socket_path = str(config.daemon_folder(host) / "run" / "gpuenergyd.sock")
    order = one_forward_one_backward(NUM_STAGES, config.microbatches).orders[pp_rank]
    rank = RankDescription(
        job_name="two-hosts",
        run_key="run-1" if plans is None else f"run-1/pp{pp_rank}",
        gpu_uuid=gpu_uuid,
        schedule_name="1f1b",
        num_microbatches=config.microbatches,
        pp_rank=pp_rank if plans is None else 0,
        num_pp_ranks=NUM_STAGES if plans is None else 1,
        dp_rank=dp_rank,
        framework="fake",
        max_slowdown_ratio=config.max_slowdown,
    )
    rows = [(str(i.kind), i.microbatch_index, i.chunk_index) for i in order]
    client = RankClient(rank, order=rows, socket_path=socket_path, timer=timer, agreed_plans=plans)

    def connect() -> JobStore:
        return JobStore(config.addresses[0], config.port, "gpuenergyd/run-1", limit_s=5)

    if plans is not None:
        place = PipelinePlace(pp_rank, NUM_STAGES, dp_rank=dp_rank)
        member = PipelineMember(client, plans, place, connect, socket_path=socket_path, period_s=_PERIOD_S)
        return client, member.stop
    if pp_rank == 0:
        replica = ReplicaOnOneHost(client, connect, dp_rank=dp_rank, socket_path=socket_path, period_s=_PERIOD_S)
        return client, replica.stop
    return client, lambda: None


def _straggling(config: RunConfig, iteration_index: int) -> float:
    """Return the slowdown factor of an iteration, the same on all ranks."""
    try:
        ratio, begin, end = json.loads(config.straggle_path.read_text())
    except (OSError, ValueError):
        return 1.0
    return float(ratio) if begin <= iteration_index < end else 1.0


def main() -> int:
    """Fork both hosts, each into its network namespace; return 0 when both have reported their exit status."""
    raw: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    pairs = {name: tuple(raw[name]) for name in ("addresses", "namespaces")}
    config = RunConfig(**{**raw, **pairs})
    if config.is_managed:
        import torch.distributed as dist  # noqa: PLC0415  once for all ranks

        assert dist.is_available()
    hosts = []
    for host, namespace in enumerate(config.namespaces):
        pid = os.fork()
        if pid == 0:
            enter_namespace(namespace)
            os._exit(_run_host(config, host))
        hosts.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in hosts]
    config.statuses_path.write_text(json.dumps(statuses))
    return 0


def enter_namespace(namespace: str) -> None:
    """Move this process into a network namespace, as `ip netns exec` would."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open("rb") as entered:
        if libc.setns(entered.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _run_host(config: RunConfig, host: int) -> int:
    """Fork this host's ranks; return 0 if all succeeded."""
    lines: dict[tuple[int, int], dict[str, _Line]] = {rank: {} for rank in _ALL_RANKS if config.host_of(*rank) == host}
    for one, this, other, that, _ in _LINKS:
        if one in lines and other in lines:
            lines[one][this], lines[other][that] = _pair()
    children = []
    for (dp, pp), mine in lines.items():
        pid = os.fork()
        if pid == 0:
            _be_rank(config, host, dp, pp, mine, lines)
        children.append(pid)
    for others in lines.values():
        _close(others)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return max(abs(status) for status in statuses)


def _be_rank(
    config: RunConfig, host: int, dp: int, pp: int, mine: dict[str, _Line], lines: dict[tuple[int, int], Any]
) -> None:
    status = 1
    try:
        with contextlib.suppress(
            OSError
        ):  # a GPU's speed does not depend on its host's load; use real-time priority if permitted
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(RANK_PRIORITY))
        for others in lines.values():
            if others is not mine:
                _close(others)
        for one, this, other, that, number in _LINKS:
            if config.host_of(*one) != config.host_of(*other) and (dp, pp) in {one, other}:
                mine[this if (dp, pp) == one else that] = _across(config, host, number)
        run_rank(config, host, dp, pp, mine)
        status = 0
    except (EOFError, ConnectionError):
        pass
    finally:
        os._exit(status)


def _close(lines: dict[str, _Line]) -> None:
    for line in lines.values():
        for fd in {line._reading, line._writing}:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
