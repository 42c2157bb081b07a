"""Restore requests: each restores several GPUs one by one, and is complete when the last is done or unreachable."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpuenergyd.errors import JournalError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.restore.executor import RestoreOutcome, RestoreResult, restore_from_journal
from gpuenergyd.gpu.restore.journal import Control, Journal


@dataclass(slots=True, eq=False)
class RestoreRequest:
    """One request to restore GPUs."""

    reason: str
    gpu_uuids: tuple[str, ...]
    request_id: int | None = None
    """Of the daemon's request to reply to; None where the worker restores on its own."""
    is_ahead_of_daemon: bool = False
    """Whether the daemon is expected to request the same soon, and then needs the outcomes."""
    is_daemon_ending: bool = False
    """Whether the daemon ends, rather than a job."""
    pending: set[str] = field(init=False)
    outcomes: list[RestoreOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = set(self.gpu_uuids)


class RestoreRequests:
    """The restore requests that are not complete.

    `repair` repairs the journal, or raises JournalError. `on_restored` gets the outcomes of one GPU on the thread that
    restored it, `on_complete` a request whose last GPU is done, on the thread on which that happened.
    """

    def __init__(
        self,
        controller: GpuController,
        journal: Journal,
        *,
        repair: Callable[[], None],
        on_restored: Callable[[str, Sequence[RestoreOutcome]], None],
        on_complete: Callable[[RestoreRequest], None],
    ) -> None:
        self._controller = controller
        self._journal = journal
        self._repair = repair
        self._on_restored = on_restored
        self._on_complete = on_complete
        self._open: list[RestoreRequest] = []
        self._guard = threading.Lock()

    def open(self, request: RestoreRequest) -> None:
        """Add a request; one without GPUs is complete at once."""
        if request.pending:
            with self._guard:
                self._open.append(request)
        else:
            self._on_complete(request)

    def execute(self, request: RestoreRequest, uuid: str) -> None:
        """Restore one GPU; blocks as long as the driver does."""
        try:
            outcomes = self._restore(request, uuid)
        except JournalError:
            try:
                self._repair()
                outcomes = self._restore(request, uuid)
            except JournalError as error:
                outcomes = (RestoreOutcome(uuid, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, str(error)),)
        self._on_restored(uuid, outcomes)
        self._complete_gpu(request, uuid, outcomes)

    def _restore(self, request: RestoreRequest, uuid: str) -> tuple[RestoreOutcome, ...]:
        return restore_from_journal(
            self._journal, self._controller, gpu_uuids=[uuid], is_daemon_ending=request.is_daemon_ending
        )

    def fail_unreachable(self, uuid: str) -> bool:
        """Fail a GPU in every open request: a driver call for it does not return. Return whether there was one."""
        with self._guard:
            waiting = [r for r in self._open if uuid in r.pending]
        outcome = RestoreOutcome(uuid, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, "a driver call does not return")
        for request in waiting:
            self._complete_gpu(request, uuid, [outcome])
        return bool(waiting)

    def _complete_gpu(self, request: RestoreRequest, uuid: str, outcomes: Sequence[RestoreOutcome]) -> None:
        with self._guard:
            if request not in self._open or uuid not in request.pending:
                return
            request.pending.discard(uuid)
            request.outcomes += outcomes
            if request.pending:
                return
            self._open.remove(request)
        self._on_complete(request)
