"""Orders to restore several GPUs, carried out GPU by GPU and answered when the last is done or given up."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuenergyd.errors import JournalError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.restore.executor import RestoreOutcome, RestoreResult, reset_every_gpu, restore_from_journal
from gpuenergyd.gpu.restore.journal import Control, DamagedJournalError, Journal
from gpuenergyd.gpu.worker.daemon_connection import log


@dataclass(slots=True, eq=False)
class Restoring:
    """One order; `message` is whom to answer, None is nobody. `is_awaited`: nobody asked yet, but somebody will.

    `is_leaving`: the daemon ends, not the job.
    """

    why: str
    message: dict[str, Any] | None
    gpu_uuids: tuple[str, ...]
    is_awaited: bool
    is_leaving: bool
    left: set[str]
    outcomes: list[RestoreOutcome] = field(default_factory=list)


class RestoreOrders:
    """The orders not yet complete.

    `on_restored` gets the outcomes of one GPU on the thread that carried it out, `on_complete` an order whose last
    GPU is done, on whichever thread that happened.
    """

    def __init__(
        self,
        controller: GpuController,
        journal: Journal,
        driver: str,
        *,
        on_restored: Callable[[str, Sequence[RestoreOutcome]], None],
        on_complete: Callable[[Restoring], None],
    ) -> None:
        self._controller = controller
        self._journal = journal
        self._driver = driver
        self._on_restored = on_restored
        self._on_complete = on_complete
        self._open: list[Restoring] = []
        self._guard = threading.Lock()

    def open(
        self,
        why: str,
        uuids: Sequence[str],
        message: dict[str, Any] | None,
        *,
        is_awaited: bool = False,
        is_leaving: bool = False,
    ) -> Restoring:
        """Return a new order; one without GPUs is complete at once."""
        restoring = Restoring(why, message, tuple(uuids), is_awaited, is_leaving, set(uuids))
        if restoring.left:
            with self._guard:
                self._open.append(restoring)
        else:
            self._on_complete(restoring)
        return restoring

    def carry_out(self, restoring: Restoring, uuid: str) -> None:
        """Restore one GPU; blocks as long as the driver does."""
        outcomes: Sequence[RestoreOutcome]
        try:
            outcomes = restore_from_journal(
                self._journal,
                self._controller,
                driver=self._driver,
                gpu_uuids=[uuid],
                is_leaving=restoring.is_leaving,
            )
        except DamagedJournalError as error:
            log(f"{error}; it is now {self._journal.set_aside()}, and every GPU is reset")
            outcomes = reset_every_gpu(self._controller)
        except JournalError as error:
            outcomes = [RestoreOutcome(uuid, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, str(error))]
        self._on_restored(uuid, outcomes)
        self._note(restoring, uuid, outcomes)

    def note_unreachable(self, uuid: str) -> None:
        """Give a GPU up in every order: a driver call does not return."""
        with self._guard:
            waiting = [r for r in self._open if uuid in r.left]
        outcome = RestoreOutcome(uuid, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, "a driver call does not return")
        for restoring in waiting:
            self._note(restoring, uuid, [outcome])

    def _note(self, restoring: Restoring, uuid: str, outcomes: Sequence[RestoreOutcome]) -> None:
        with self._guard:
            if restoring not in self._open or uuid not in restoring.left:
                return
            restoring.left.discard(uuid)
            restoring.outcomes += outcomes
            if restoring.left:
                return
            self._open.remove(restoring)
        self._on_complete(restoring)
