"""The demo's training program: a small GPT in a torch pipeline over gloo, one process per rank.

    python -m gpuenergyd_sim.training.gpt --world WORLD --stages 4 --job gpt-demo

starts all ranks on the simulated GPUs of a world file. Training runs for --iterations, or until SIGTERM; ranks end when
their parent does.
"""

import argparse
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch
import torch.distributed as dist

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError, GpuNotFoundError, UsageError
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.stream_signals import StreamSignals
from gpuenergyd_sim.training.gpt_pipeline import PIPELINES, GptRank, RunAhead
from gpuenergyd_trainers.torch_pipelining import attach

_PR_SET_PDEATHSIG = 1
_MAX_RUN_AHEAD = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with all ranks; return the exit code."""
    return _run_all_ranks(parse_options(arguments))


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked options, with the files that the ranks need to find each other and to stop."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check_schedule(options)
        _check_gpus(options)
    except GpuEnergyError as error:
        parser.error(str(error))
    # Anonymous files disappear with the processes, however these end.
    options.init_file = f"/proc/self/fd/{os.memfd_create('gpt-demo-rendezvous')}"
    options.signals_file = Path(f"/proc/self/fd/{os.memfd_create('gpt-demo-signals')}")
    options.stop_fd = os.memfd_create("gpt-demo-stop")
    options.run_key = f"gpt-demo-{os.getpid()}"
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuenergyd_sim.training.gpt", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "--stages",
        type=int,
        default=4,
        help="number of pipeline ranks (default 4); some schedules run two stages on each",
    )
    add("--world", type=Path, required=True, help="world file of the simulated GPUs")
    add("--job", default="gpt-demo", help="job name")
    add("--socket", help="path of the daemon's socket")
    add("--iterations", type=int, help="number of iterations; by default unlimited")
    add("--microbatches", type=int, default=8)
    add("--schedule", choices=sorted(PIPELINES), default="1f1b")
    add("--losses-out", type=Path, help="file for each iteration's loss, as an exact hexadecimal float")
    add("--no-daemon", action="store_true", help="do not join the daemon")
    add("--duration-scale", type=float, default=1.0, help="factor on the duration of simulated instructions")
    add(
        "--run-ahead",
        type=float,
        help="iterations that may be launched ahead of the simulated GPU; by default the program waits for each"
        " instruction",
    )
    add("--seed", type=int, default=0)
    return parser


def _check_schedule(options: argparse.Namespace) -> None:
    if options.stages < 1 or options.microbatches < 1:
        raise UsageError(f"--stages {options.stages} --microbatches {options.microbatches}: both must be >= 1")
    if options.run_ahead is not None and not 0 < options.run_ahead <= _MAX_RUN_AHEAD:
        raise UsageError(f"--run-ahead {options.run_ahead:g}: must be above 0 and at most {_MAX_RUN_AHEAD}")
    if options.schedule == "1f1b" and options.microbatches < options.stages:
        raise UsageError(
            f"--microbatches {options.microbatches}: torch's 1F1B needs at least --stages {options.stages}"
        )


def _check_gpus(options: argparse.Namespace) -> None:
    host = SimulatedHost.open(options.world)
    num_gpus = len(host.identities())
    host.close()
    if num_gpus < options.stages:
        raise GpuNotFoundError(f"--stages {options.stages}: {options.world} has {count_text(num_gpus, 'GPU')}")


def _run_all_ranks(options: argparse.Namespace) -> int:
    sys.stdout.write(
        f"gpt: torch {torch.__version__} is imported; {count_text(options.stages, 'pipeline stage')} are starting\n"
    )
    sys.stdout.flush()
    context = multiprocessing.get_context("fork")  # torch is loaded once; no thread runs yet

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        os.write(options.stop_fd, b"stop")

    ranks = [
        context.Process(target=_run_rank, args=(options, rank), name=f"rank-{rank}") for rank in range(options.stages)
    ]
    for process in ranks:
        process.start()
    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    running = list(ranks)
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in ranks):
            for process in running:
                process.kill()
    for process in ranks:
        process.join()
    failed = [process for process in ranks if process.exitcode]
    for process in failed:
        sys.stderr.write(f"gpt: {process.name} exited with code {process.exitcode}\n")
    return 1 if failed else 0


def _run_rank(options: argparse.Namespace, rank: int) -> None:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{options.init_file}", rank=rank, world_size=options.stages)
    try:
        with ExitStack() as cleanup:
            train(options, rank, cleanup)
    finally:
        dist.destroy_process_group()


def train(
    options: argparse.Namespace,
    rank: int,
    cleanup: ExitStack,
    *,
    open_signals: Callable[[Path, int], StreamSignals] = StreamSignals,
) -> None:
    """Train as one rank of the default process group, until the end that the options set."""
    training = GptRank(options.schedule, rank, options.stages, options.microbatches, seed=options.seed)
    host = SimulatedHost.open(options.world)
    cleanup.callback(host.close)
    gpu_uuid = host.identities()[rank].gpu_uuid
    run_ahead = None
    if options.run_ahead is not None:
        run_ahead = RunAhead(options.run_ahead, options.signals_file, open_signals)
    cleanup.enter_context(
        training.simulate_on(host, gpu_uuid, duration_scale=options.duration_scale, run_ahead=run_ahead)
    )
    if not options.no_daemon:
        handle = attach(
            training.schedule,
            job=options.job,
            gpu_uuid=gpu_uuid,
            socket_path=options.socket,
            run_key=options.run_key,
            timer=training.timer,
        )
        cleanup.callback(handle.detach)
    losses_out = _open_losses(options, cleanup) if training.is_last else None
    cleanup.callback(training.synchronize)
    iteration_index = 0
    while _is_to_continue(options, iteration_index):
        losses = training.step(iteration_index)
        if losses_out is not None:
            losses_out.write(f"{float(torch.stack(losses).detach().mean()).hex()}\n")
            losses_out.flush()
        iteration_index += 1


def _open_losses(options: argparse.Namespace, cleanup: ExitStack) -> TextIO | None:
    if options.losses_out is None:
        return None
    losses_out: TextIO = options.losses_out.open("w", encoding="ascii")
    cleanup.callback(losses_out.close)
    return losses_out


def _is_to_continue(options: argparse.Namespace, iteration_index: int) -> bool:
    """Return rank 0's decision on all ranks: ranks that stop at different iterations would deadlock."""
    if options.iterations is not None and iteration_index >= options.iterations:
        return False
    decision = torch.tensor([int(os.fstat(options.stop_fd).st_size > 0)])
    dist.broadcast(decision, src=0)
    return not decision.item()


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
