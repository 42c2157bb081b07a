"""Adapter for plain training loops: `for batch in iterations(loader, job="resnet"):`."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import gpuenergyd
from gpuenergyd.client.loop import LoopIteration

T = TypeVar("T")


def iterations(
    batches: Iterable[T],
    *,
    job: str | None = None,
    gpu_uuid: str | None = None,
    socket_path: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
) -> Iterator[T]:
    """Yield the batches; the body of the loop is one iteration, without loading the next batch.

    For loops on one GPU, with DistributedDataParallel or with FSDP: one clock per iteration, one GPU per process.
    """
    with gpuenergyd.job(
        job, gpu_uuid=gpu_uuid, socket_path=socket_path, policy=policy, max_slowdown_ratio=max_slowdown_ratio
    ) as joined:
        for batch in batches:
            with joined.iteration():
                yield batch


class StepMarks:
    """Iterations of a loop that a framework runs, marked from its callbacks."""

    def __init__(
        self,
        job: str | None = None,
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
        """Begin an iteration; one that never ended is discarded."""
        self._discard()
        self._iteration = self._job.iteration()
        self._iteration.__enter__()

    def end(self) -> None:
        """End the iteration."""
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.__exit__(None, None, None)

    def pause(self) -> None:
        """Suspend the job, as for an evaluation or a checkpoint."""
        self._discard()
        self._job.pause()

    def close(self) -> None:
        """Leave the job at the end of training."""
        self._discard()
        self._job.__exit__(None, None, None)

    def _discard(self) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.__exit__(RuntimeError, None, None)
