"""Restores several GPUs in parallel, each on its own thread, so that a hanging driver call delays no other GPU."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.restore.executor import RestoreOutcome, RestoreResult
from gpuenergyd.gpu.restore.journal import Control

CALL_LIMIT_S = 15.0
"""Time limit per GPU; a restore takes a fraction of a second."""


def restore_each(
    gpu_uuids: Iterable[str], restore_one: Callable[[str], Sequence[RestoreOutcome]], *, limit_s: float | None
) -> tuple[tuple[RestoreOutcome, ...], bool]:
    """Return the outcomes in the order of the GPUs, and whether a call has not returned within `limit_s`.

    Raises:
        GpuEnergyError: restoring a GPU raised it; raised once all GPUs are done.
    """
    uuids = tuple(dict.fromkeys(gpu_uuids))
    done: queue.SimpleQueue[tuple[str, Sequence[RestoreOutcome] | GpuEnergyError]] = queue.SimpleQueue()

    def run(uuid: str) -> None:
        try:
            done.put((uuid, restore_one(uuid)))
        except GpuEnergyError as error:
            done.put((uuid, error))
        except Exception as error:  # noqa: BLE001 - whatever went wrong with one GPU, the others are waited for
            done.put((uuid, [_failed(uuid, f"unexpected {error!r}")]))

    for uuid in uuids:
        threading.Thread(target=run, args=(uuid,), name=f"restore {uuid}", daemon=True).start()
    found: dict[str, Sequence[RestoreOutcome] | GpuEnergyError] = {}
    until_mono_s = None if limit_s is None else time.monotonic() + limit_s
    while len(found) < len(uuids):
        left_s = None if until_mono_s is None else max(0.0, until_mono_s - time.monotonic())
        try:
            uuid, outcome = done.get(timeout=left_s)
        except queue.Empty:
            break
        found[uuid] = outcome
    outcomes: list[RestoreOutcome] = []
    for uuid in uuids:
        outcome = (
            found[uuid] if uuid in found else [_failed(uuid, f"a driver call has not returned for {limit_s or 0:g} s")]
        )
        if isinstance(outcome, GpuEnergyError):
            raise outcome
        outcomes += outcome
    return tuple(outcomes), len(found) < len(uuids)


def _failed(gpu_uuid: str, detail: str) -> RestoreOutcome:
    return RestoreOutcome(gpu_uuid, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, detail)
