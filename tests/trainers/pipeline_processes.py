"""Real torch pipelines in forked gloo processes, for tests: each rank runs a function and returns what it found."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RUN_LIMIT_S = 120.0


def run_ranks(num_ranks: int, folder: Path, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `body(rank, *args)` in one process per rank inside a gloo process group; return what each returned."""
    context = multiprocessing.get_context("fork")
    receivers, processes = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, num_ranks, folder, sender, body, args))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        results = []
        for rank, receiver in enumerate(receivers):
            assert receiver.poll(RUN_LIMIT_S), f"rank {rank} said nothing for {RUN_LIMIT_S} s"
            results.append(pickle.loads(receiver.recv_bytes()))
        # A rank that fails takes its neighbours with it: the one whose own error it was is told first.
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error is not None]
        assert not errors, min(errors, key=lambda error: "closed by peer" in error)
        return [result for _, result in results]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for receiver in receivers:
            receiver.close()


def _run(rank: int, num_ranks: int, folder: Path, sender: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=num_ranks)
        result = body(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        sender.send_bytes(pickle.dumps((None, result)))
    except BaseException:  # noqa: BLE001  the parent raises it
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
