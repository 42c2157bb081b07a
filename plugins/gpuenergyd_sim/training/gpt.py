"""The demo's training program: a small GPT in a torch pipeline over gloo, one process per rank.

    python -m gpuenergyd_sim.training.gpt --world WORLD --stages 4 --job gpt-demo

starts all ranks on the simulated GPUs of a world file; with --rank it runs one of them, and without --world on the CPU
at full speed. Training runs for --iterations, or until --stop-file appears, or until SIGTERM; ranks end when their
parent does.
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

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError, GpuNotFoundError, UsageError
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.stream_signals import StreamSignals
from gpuenergyd_sim.training.gpt_pipeline import PIPELINES, GptRank, RunAhead
from gpuenergyd_trainers.torch_pipelining import attach

_PR_SET_PDEATHSIG = 1
_MAX_RUN_AHEAD = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank, or start all of them; return the exit code."""
    options = parse_options(arguments)
    if options.rank is None:
        return _run_all_ranks(options)
    _run_rank(options, options.rank)
    return 0


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked options; without --rank, add the files that the ranks need to find each other and to stop."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check_schedule(options)
        if options.world is not None:
            _check_gpus(options)
        if options.rank is not None:
            _check_rank(options)
    except GpuEnergyError as error:
        parser.error(str(error))
    if options.rank is None:
        # Anonymous files disappear with the processes, however these end.
        if options.init_file is None and options.master_port is None:
            options.init_file = Path(f"/proc/self/fd/{os.memfd_create('gpt-demo-rendezvous')}")
        options.signals_file = options.signals_file or Path(f"/proc/self/fd/{os.memfd_create('gpt-demo-signals')}")
        options.run_key = options.run_key or f"gpt-demo-{os.getpid()}"
        options.stop_fd = os.memfd_create("gpt-demo-stop")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuenergyd_sim.training.gpt", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rank", type=int, help="run this rank only")
    add(
        "--stages",
        type=int,
        default=4,
        help="number of pipeline ranks (default 4); some schedules run two stages on each",
    )
    add("--master-port", type=int, help="TCP port of 127.0.0.1 for the rendezvous of the ranks")
    add("--init-file", type=Path, help="file for the rendezvous of the ranks")
    add(
        "--world",
        type=Path,
        help="world file of the simulated GPUs; by default stages run on the CPU without simulated durations",
    )
    add("--gpu-uuid", help="UUID of this rank's GPU; by default the world's GPU with the rank's index")
    add("--job", default="gpt-demo", help="job name")
    add("--run-key", help="key that differs between runs of the same job")
    add("--socket", help="path of the daemon's socket")
    add("--iterations", type=int, help="number of iterations; by default unlimited")
    add("--stop-file", type=Path, help="stop when this file appears")
    add("--microbatches", type=int, default=8)
    add("--schedule", choices=sorted(PIPELINES), default="1f1b")
    add("--extra-inflight", type=_counts, help="with 1f1b: extra microbatches in flight on each rank, e.g. 2,2,1,0")
    add("--losses-out", type=Path, help="file for each iteration's loss, as an exact hexadecimal float")
    add("--no-daemon", action="store_true", help="do not join the daemon")
    add("--duration-scale", type=float, default=1.0, help="factor on the duration of simulated instructions")
    add(
        "--run-ahead",
        type=float,
        help="iterations that may be launched ahead of the simulated GPU; by default the program waits for each"
        " instruction",
    )
    add("--signals-file", type=Path, help="with --rank and --run-ahead: file for the signals between the ranks' GPUs")
    add("--sync-each-step", action="store_true", help="wait for the GPU after each step, as a read of the loss does")
    add("--seed", type=int, default=0)
    parser.set_defaults(stop_fd=None)
    return parser


def _check_schedule(options: argparse.Namespace) -> None:
    if options.stages < 1 or options.microbatches < 1:
        raise UsageError(f"--stages {options.stages} --microbatches {options.microbatches}: both must be >= 1")
    if options.extra_inflight is not None:
        if options.schedule != "1f1b":
            raise UsageError(f"--extra-inflight requires --schedule 1f1b, not {options.schedule}")
        one_forward_one_backward(options.stages, options.microbatches, options.extra_inflight)
    if options.run_ahead is not None and not 0 < options.run_ahead <= _MAX_RUN_AHEAD:
        raise UsageError(f"--run-ahead {options.run_ahead:g}: must be above 0 and at most {_MAX_RUN_AHEAD}")
    if options.schedule == "1f1b" and options.microbatches < options.stages:
        raise UsageError(
            f"--microbatches {options.microbatches}: torch's 1F1B needs at least --stages {options.stages}"
        )


def _check_rank(options: argparse.Namespace) -> None:
    if not 0 <= options.rank < options.stages:
        raise UsageError(f"--rank {options.rank}: must be 0 to {options.stages - 1}")
    if options.init_file is None and options.master_port is None:
        raise UsageError("--rank requires --init-file or --master-port, where the ranks meet")
    if options.run_ahead is not None and options.signals_file is None:
        raise UsageError("--rank with --run-ahead requires --signals-file")


def _check_gpus(options: argparse.Namespace) -> None:
    host = SimulatedHost.open(options.world)
    try:
        uuids = [gpu.gpu_uuid for gpu in host.identities()]
    finally:
        host.close()
    if options.gpu_uuid is None and len(uuids) < options.stages:
        raise GpuNotFoundError(f"--stages {options.stages}: {options.world} has {count_text(len(uuids), 'GPU')}")
    if options.gpu_uuid is not None and options.gpu_uuid not in uuids:
        raise GpuNotFoundError(f"no GPU {options.gpu_uuid!r}; valid: {', '.join(uuids)}")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


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
    if options.rank is None:  # the launcher decides when to stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet_at = f"file://{options.init_file}" if options.init_file else f"tcp://127.0.0.1:{options.master_port}"
    dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=options.stages)
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
    training = GptRank(
        options.schedule,
        rank,
        options.stages,
        options.microbatches,
        extra_inflight=options.extra_inflight,
        seed=options.seed,
    )
    gpu_uuid = options.gpu_uuid
    if options.world is not None:
        host = SimulatedHost.open(options.world)
        cleanup.callback(host.close)
        gpu_uuid = gpu_uuid or host.identities()[rank].gpu_uuid
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
        if options.sync_each_step:
            training.synchronize()
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
    if options.stop_file is None and options.stop_fd is None:
        return True
    is_stop_requested = options.stop_file is not None and options.stop_file.exists()
    is_stop_requested |= options.stop_fd is not None and os.fstat(options.stop_fd).st_size > 0
    decision = torch.tensor([int(is_stop_requested)])
    dist.broadcast(decision, src=0)
    return not decision.item()


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
