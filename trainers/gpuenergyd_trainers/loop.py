"""Joins a plain training loop to the daemon in one line: `for batch in iterations(loader, job="resnet"):`."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import gpuenergyd
from gpuenergyd.client.loop import LoopIteration

T = TypeVar("T")


def iterations(
    batches: Iterable[T],
    *,
    job: str,
    gpu_uuid: str | None = None,
    socket_path: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
) -> Iterator[T]:
    """Yield the batches; what the loop's body does with one is one iteration, loading the next is outside.

    For single-GPU, DistributedDataParallel and FSDP loops: one clock per iteration, each process its own GPU.
    """
    with gpuenergyd.job(
        job, gpu_uuid=gpu_uuid, socket_path=socket_path, policy=policy, max_slowdown_ratio=max_slowdown_ratio
    ) as joined:
        for batch in batches:
            with joined.iteration():
                yield batch


class StepMarks:
    """A loop that somebody else runs, known only by what its callbacks tell: begin, end, pause, close."""

    def __init__(
        self,
        job: str,
        *,
        gpu_uuid: str | None = None,
        socket_path: str | None = None,
        run_key: str | None = None,
        policy: str | None = None,
        max_slowdown_ratio: float | None = None,
    ) -> None:
        self._job = gpuenergyd.job(
            job,
            gpu_uuid=gpu_uuid,
            socket_path=socket_path,
            run_key=run_key,
            policy=policy,
            max_slowdown_ratio=max_slowdown_ratio,
        )
        self._iteration: LoopIteration | None = None

    def begin(self) -> None:
        """An iteration begins; one that never ended is forgotten."""
        self._forget()
        self._iteration = self._job.iteration()
        self._iteration.__enter__()

    def end(self) -> None:
        """The iteration ended well."""
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.__exit__(None, None, None)

    def pause(self) -> None:
        """No iteration follows now, but evaluation, a checkpoint or such."""
        self._forget()
        self._job.pause()

    def close(self) -> None:
        """Training is over: leave the job."""
        self._forget()
        self._job.__exit__(None, None, None)

    def _forget(self) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.__exit__(RuntimeError, None, None)
