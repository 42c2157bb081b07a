"""Joins a plain training loop to the daemon in one line: `for batch in iterations(loader, job="resnet"):`."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import gpuenergyd

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
