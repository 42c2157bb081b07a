"""One rank of a test's training on each of two hosts, as processes."""

import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

from tests.support.two_hosts import TwoHosts


def run_on(hosts: TwoHosts, be_rank: Callable[[int, TwoHosts, Any], None], *, limit_s: float) -> list[Any]:
    """Run one rank on each host; return what each has sent, by rank."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in hosts.names]
    ranks = [context.Process(target=be_rank, args=(rank, hosts, pipe[1])) for rank, pipe in enumerate(pipes)]
    try:
        for process in ranks:
            process.start()
        assert all(receiver.poll(limit_s) for receiver, _ in pipes), "a rank said nothing"
        found = [pickle.loads(receiver.recv_bytes()) for receiver, _ in pipes]
        for process in ranks:
            process.join(30)
        return found
    finally:
        for process in ranks:
            process.kill()
            process.join()
        for pipe in pipes:
            for end in pipe:
                end.close()
