"""Pipeline training processes without torch: 1F1B through pipes, each instruction takes its simulated GPU's time.

Run `python -m tests.support.fake_trainer --socket PATH --world PATH --ranks 4 --microbatches 8 --iterations 50`. With
`--last-when FILE` the first iteration that starts after FILE exists is the last one. With `--replicas N` there are N
pipelines that finish each iteration together; the last one is slower by `--slow-ratio` while the file `--slow-while`
exists. With `--stage-ranks N` each stage has N ranks, which wait for each other in each instruction. While
`--pause-while` exists, ranks pause between iterations; while `--swap-while` exists, rank 0 swaps its first two
instructions.
"""

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost

FORWARD = InstructionWork(memory_time_s=0.001, compute_time_s=0.004, power_coefficient_w_per_mhz=0.2)
BACKWARD = InstructionWork(memory_time_s=0.002, compute_time_s=0.008, power_coefficient_w_per_mhz=0.2)

_PAUSE_S = 0.5
"""Duration of an evaluation between iterations."""
_MORE, _LAST = b".", b"!"
_RankKey = tuple[int, int, int]
"""Replica, pipeline rank, and number in the stage."""


def scaled(work: InstructionWork, ratio: float) -> InstructionWork:
    """Return work that is longer by a factor."""
    return InstructionWork(work.memory_time_s * ratio, work.compute_time_s * ratio, work.power_coefficient_w_per_mhz)


def run_rank(options: argparse.Namespace, pp_rank: int, stage_rank: int, pipes: Mapping[str, int]) -> None:
    """Run one rank until its iterations are done or a neighbour has ended."""
    host = SimulatedHost.open(options.world)
    gpu_index = (options.replica * options.ranks + pp_rank) * options.stage_ranks + stage_rank
    gpu_uuid = host.identities()[options.first_gpu + gpu_index].gpu_uuid
    host.attach_process(gpu_uuid, os.getpid())
    schedule = one_forward_one_backward(options.ranks, options.microbatches)
    order = schedule.orders[pp_rank]
    ratio = 1.0 + 0.4 * (pp_rank == options.ranks - 1)
    usual_work = {InstructionKind.F: scaled(FORWARD, ratio), InstructionKind.B: scaled(BACKWARD, ratio)}
    slow_work = {kind: scaled(work, options.slow_ratio) for kind, work in usual_work.items()}
    to_replicas, from_replicas, to_siblings, from_siblings = (
        [pipes[name] for name in sorted(pipes) if name.startswith(way)]
        for way in ("to_replica", "from_replica", "to_sibling", "from_sibling")
    )
    slow_while: Path | None = options.slow_while if options.replica == options.replicas - 1 else None
    rank = RankDescription(
        job_name=options.job, run_key=options.run_key, gpu_uuid=gpu_uuid, schedule_name="1f1b",
        num_microbatches=options.microbatches, pp_rank=pp_rank, dp_rank=options.replica, num_pp_ranks=options.ranks,
        stage_rank=stage_rank, num_stage_ranks=options.stage_ranks, framework="fake", policy=options.policy,
        max_slowdown_ratio=options.max_slowdown,
    )  # fmt: skip
    rows = [(str(i.kind), i.microbatch_index, i.chunk_index) for i in order]
    client = RankClient(rank, order=rows, socket_path=str(options.socket))
    is_agreed_last = False
    for iteration in range(options.iterations):
        is_last = iteration + 1 == options.iterations or is_agreed_last
        if pp_rank == stage_rank == 0 and options.replicas == 1 and options.last_when is not None:
            is_last = is_last or options.last_when.exists()
        work = slow_work if slow_while is not None and slow_while.exists() else usual_work
        if pp_rank == 0 and options.pause_while is not None and options.pause_while.exists():
            time.sleep(_PAUSE_S)
        is_swapped = pp_rank == 0 and options.swap_while is not None and options.swap_while.exists()
        client.begin_iteration()
        for instruction in (order[1], order[0], *order[2:]) if is_swapped else order:
            is_forward = instruction.kind is InstructionKind.F
            # The first forward from the previous rank carries whether this iteration is the last.
            is_last = _receive(pipes.get("from_previous" if is_forward else "from_next")) == _LAST or is_last
            slot = client.begin_instruction(str(instruction.kind), instruction.microbatch_index)
            host.begin_work(gpu_uuid, work[instruction.kind])
            host.hold(gpu_uuid)
            host.finish_work(gpu_uuid)
            is_last = _meet(to_siblings, from_siblings, _LAST if is_last else _MORE) or is_last
            client.end_instruction(slot)
            _send(pipes.get("to_next" if is_forward else "to_previous"), _LAST if is_last else _MORE)
        client.end_iteration()
        if pp_rank == 0:
            is_enough = options.replica == 0 and options.last_when is not None and options.last_when.exists()
            is_agreed_last = _meet(to_replicas, from_replicas, _LAST if is_enough else _MORE)
        if is_last:
            break
    client.release()
    host.detach_process(gpu_uuid, os.getpid())
    host.close()


def launch(options: argparse.Namespace) -> int:
    """Fork all ranks (faster than starting interpreters) and wait; return 0 if all finished."""
    replicas, ranks, siblings = range(options.replicas), range(options.ranks), range(options.stage_ranks)
    ends: dict[_RankKey, dict[str, int]] = {own: {} for own in product(replicas, ranks, siblings)}
    for replica, sibling in product(replicas, siblings):
        for rank in range(options.ranks - 1):
            earlier, later = ends[replica, rank, sibling], ends[replica, rank + 1, sibling]
            later["from_previous"], earlier["to_next"] = os.pipe()
            earlier["from_next"], later["to_previous"] = os.pipe()
        for other in (other for other in replicas if other != replica):
            read, write = os.pipe()
            ends[other, 0, sibling][f"from_replica_{replica}"] = read
            ends[replica, 0, sibling][f"to_replica_{other}"] = write
        for other, rank in ((other, rank) for other, rank in product(siblings, ranks) if other != sibling):
            read, write = os.pipe()
            ends[replica, rank, other][f"from_sibling_{sibling}"] = read
            ends[replica, rank, sibling][f"to_sibling_{other}"] = write
    children = [_fork_rank(options, own, ends) for own in ends]
    for fd in (fd for pipes in ends.values() for fd in pipes.values()):
        os.close(fd)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def _fork_rank(options: argparse.Namespace, own: _RankKey, ends: Mapping[_RankKey, Mapping[str, int]]) -> int:
    """Fork one rank of one replica, which keeps only its own pipes, and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for other, pipes in ends.items():
            for fd in pipes.values() if other != own else ():
                os.close(fd)
        options.replica, pp_rank, stage_rank = own
        with contextlib.suppress(EOFError, BrokenPipeError):
            run_rank(options, pp_rank, stage_rank, ends[own])
            status = 0
    except Exception:  # noqa: BLE001  said here, for a fork must never return into what forked it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pipelines until their iterations are done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stage-ranks", type=int, default=1)
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--last-when", type=Path, default=None)
    parser.add_argument("--job", default="fake")
    parser.add_argument("--run-key", default="run-1")
    parser.add_argument("--policy", default=None)
    # Enough slowdown for every policy to lower clocks and keep them lowered on a loaded host.
    parser.add_argument("--max-slowdown", type=float, default=0.5)
    parser.add_argument("--replicas", type=int, default=1)
    parser.set_defaults(replica=0)
    parser.add_argument("--slow-while", type=Path, default=None)
    parser.add_argument("--pause-while", type=Path, default=None)
    parser.add_argument("--swap-while", type=Path, default=None)
    parser.add_argument("--slow-ratio", type=float, default=3.0)
    options = parser.parse_args(arguments)
    return launch(options)


def _receive(fd: int | None) -> bytes:
    if fd is None:
        return _MORE
    reply = os.read(fd, 1)
    if not reply:
        raise EOFError
    return reply


def _meet(to_others: Sequence[int], from_others: Sequence[int], reply: bytes) -> bool:
    """Wait for other ranks at a common point; return whether one of them says that this is the last iteration."""
    for fd in to_others:
        os.write(fd, reply)
    return _LAST in {reply, *(_receive(fd) for fd in from_others)} if to_others else False


def _send(fd: int | None, reply: bytes) -> None:
    if fd is not None:
        os.write(fd, reply)


if __name__ == "__main__":
    sys.exit(main())
