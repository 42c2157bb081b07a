"""Torch pipelines in forked gloo processes for tests: each rank runs a function and returns its result."""

import logging
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpuenergyd_trainers.joining.handle import Handle
from tests.client.fake_daemon import wait_for_report

RUN_LIMIT_S = 400.0
END_LIMIT_S = 20.0
"""Time limit for a rank to exit after its result, before it is killed."""


def run_ranks(
    num_ranks: int,
    folder: Path,
    body: Callable[..., Any],
    *args: Any,
    limit_s: float = RUN_LIMIT_S,
    prepare: Callable[[int], str] | None = None,
) -> list[Any]:
    """Run `body(rank, *args)` in one process per rank in a gloo process group; return the results by rank.

    `prepare(rank)` is called first in each process and returns how the group finds its members.
    """
    find_others = prepare if prepare is not None else partial(_on_this_host, folder)
    context = multiprocessing.get_context("fork")
    receivers, processes = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, num_ranks, find_others, sender, body, args))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        results = []
        for rank, receiver in enumerate(receivers):
            assert receiver.poll(limit_s), f"rank {rank} said nothing for {limit_s} s"
            results.append(pickle.loads(receiver.recv_bytes()))
        # A rank that fails takes its neighbours with it: the one whose own error it was is told first.
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error is not None]
        assert not errors, min(errors, key=lambda error: "closed by peer" in error)
        for process in processes:
            process.join(END_LIMIT_S)  # one that is killed takes with it which lines it ran
        return [result for _, result in results]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for receiver in receivers:
            receiver.close()


class LoggedLines(logging.Handler):
    """The lines of this project that a process logs for its user."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []
        logging.getLogger("gpuenergyd").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


class Pace:
    """Delays each iteration of a rank until the daemon has the previous report, so that no report is dropped."""

    def __init__(self, handle: Handle, rank: int, socket_path: str | None, *, first_iteration: int = 0) -> None:
        self._handle = handle
        self._rank = rank
        self._socket_path = socket_path
        self._first_iteration = first_iteration

    def keep(self) -> None:
        """Wait for the report that the begin of the present step has sent."""
        self._wait_for(self._iteration_index() - 1)

    def finish(self) -> None:
        """Wait for the last report after detaching."""
        self._wait_for(self._iteration_index())

    def _iteration_index(self) -> int:
        assert self._handle._rank is not None
        return self._handle._rank.client.iteration_index

    def _wait_for(self, iteration_index: int) -> None:
        if self._socket_path is not None and iteration_index >= self._first_iteration:
            wait_for_report(self._socket_path, self._rank, iteration_index)


def _on_this_host(folder: Path, rank: int) -> str:
    del rank
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return f"file://{folder / 'rendezvous'}"


def _run(
    rank: int,
    num_ranks: int,
    find_others: Callable[[int], str],
    sender: Any,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=find_others(rank), rank=rank, world_size=num_ranks)
        result = body(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        sender.send_bytes(pickle.dumps((None, result)))
    except BaseException:  # noqa: BLE001  the parent raises it
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
