"""Restore service of a running worker: restores GPU by GPU, replies to the daemon, and retries what failed."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gpuenergyd.errors import JournalError
from gpuenergyd.gpu.device import GpuDriver
from gpuenergyd.gpu.link.messages import GpuHealth, GpuSample, Restored
from gpuenergyd.gpu.restore.executor import (
    RestoreOutcome,
    RestoreResult,
    confirm_reset,
    reason_to_keep,
    repeat_unproven_reset,
    restore_from_journal,
)
from gpuenergyd.gpu.restore.journal import Control, Journal
from gpuenergyd.gpu.worker.daemon_connection import log
from gpuenergyd.gpu.worker.health import UNPROVEN, HealthTable
from gpuenergyd.gpu.worker.reset_watch import ResetEvidence, ResetWatch
from gpuenergyd.gpu.worker.threads.actuator import ClockLock
from gpuenergyd.gpu.worker.threads.driver_threads import DriverThreads

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0
_NS_PER_S = 1_000_000_000


@dataclass(slots=True, eq=False)
class RestoreRequest:
    """One request to restore GPUs."""

    reason: str
    gpu_uuids: tuple[str, ...]
    request_id: int | None = None
    """Id of the daemon's request to reply to; None if the worker restores on its own."""
    is_ahead_of_daemon: bool = False
    """Whether the daemon is expected to request the same soon, and then needs the outcomes."""
    is_daemon_ending: bool = False
    """Whether the daemon ends, rather than a job."""
    pending: set[str] = field(init=False)
    outcomes: list[RestoreOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = set(self.gpu_uuids)


class RestoreService:
    """Restores each GPU on its actuator's thread; `reply` sends the outcomes of a restore that the daemon requested.

    A request is complete when its last GPU is done or unreachable. `repair` mends the journal, or raises JournalError.
    """

    def __init__(
        self,
        controller: GpuDriver,
        journal: Journal,
        *,
        repair: Callable[[], None],
        threads: DriverThreads,
        health: HealthTable,
        reply: Callable[[int, Restored], None],
    ) -> None:
        self._controller = controller
        self._journal = journal
        self._threads = threads
        self._health = health
        self._repair = repair
        self._reply = reply
        self._open: list[RestoreRequest] = []
        self._guard = threading.Lock()
        self._resets = ResetWatch()
        self._kept: set[str] = set()
        self._early_outcomes: dict[str, tuple[RestoreOutcome, ...]] = {}
        self._retry_pause_s = _FIRST_RETRY_S
        self._retry_at_ns = 0

    def restore(self, request: RestoreRequest) -> None:
        """Submit a restore GPU by GPU, so that one that hangs delays no other."""
        if not request.pending:
            self._report(request)
            return
        with self._guard:
            self._open.append(request)
        for uuid in request.gpu_uuids:
            if self._health.is_wedged(uuid):
                self._fail_in_open_requests(uuid)
            else:
                execute = partial(self._execute, request, uuid)
                self._threads.actuator(uuid).submit(execute, lambda _, uuid=uuid: self.fail_unreachable(uuid))  # type: ignore[misc]  # mypy: default of uuid

    def fail_unreachable(self, uuid: str) -> None:
        """Fail a GPU in every open request: a driver call for it takes long or does not return."""
        if self._fail_in_open_requests(uuid):
            self._health.record(uuid, GpuHealth.UNRESTORED, "a driver call takes long; to be restored when it returns")

    def forget_early_outcomes(self, uuid: str) -> None:
        """Drop outcomes that the daemon has not requested: they belong to an earlier lease."""
        self._early_outcomes.pop(uuid, None)

    def restore_kept(self, reason: str) -> None:
        """Restore GPUs whose clocks were kept when an earlier daemon ended."""
        kept = tuple(self._kept)
        self._kept.difference_update(kept)
        if kept:
            self.restore(RestoreRequest(reason, kept))

    def restore_orphaned(self) -> None:
        """Restore GPUs whose clocks were kept for a process that has ended."""
        if not self._kept:
            return
        try:
            entries = self._journal.read().entries
        except JournalError:
            return  # the restore itself reports it
        orphaned = {e.gpu_uuid for e in entries if e.gpu_uuid in self._kept and reason_to_keep(e) is None}
        if orphaned:
            self._kept -= orphaned
            self.restore(RestoreRequest("its process has ended", tuple(orphaned)))

    def retry(self, uuids: Sequence[str], now_ns: int) -> None:
        """Retry failed restores of these GPUs, at growing intervals."""
        unrestored = tuple(uuid for uuid in uuids if self._health.is_unrestored(uuid))
        if not unrestored:
            self._retry_pause_s = _FIRST_RETRY_S
        elif now_ns < self._retry_at_ns:
            return
        else:
            self._retry_pause_s = min(2 * self._retry_pause_s, _LAST_RETRY_S)
            self.restore(RestoreRequest("retry", unrestored))
        self._retry_at_ns = now_ns + round(self._retry_pause_s * _NS_PER_S)

    # Any thread

    def _execute(self, request: RestoreRequest, uuid: str) -> None:
        """Restore one GPU; blocks as long as the driver does."""
        restore = partial(
            restore_from_journal,
            self._journal,
            self._controller,
            gpu_uuids=[uuid],
            is_daemon_ending=request.is_daemon_ending,
        )
        try:
            outcomes = restore()
        except JournalError:
            try:
                self._repair()
                outcomes = restore()
            except JournalError as error:
                outcomes = (RestoreOutcome(uuid, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, str(error)),)
        self._record_outcomes(uuid, outcomes)
        self._complete_gpu(request, uuid, outcomes)

    def _fail_in_open_requests(self, uuid: str) -> bool:
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
        self._report(request)

    def check_reset(self, sample: GpuSample, lock: ClockLock | None) -> None:
        """Confirm a reset that this sample proves, or repeat one that it shows to be without effect."""
        uuid = sample.gpu_uuid
        if self._resets.is_replaced(uuid, None if lock is None else lock.returned_mono_ns):
            self._health.record_restored(uuid, "another lock has replaced the one whose reset was not confirmed")
            return
        match self._resets.evidence(sample):
            case ResetEvidence.CONFIRMED:
                self._threads.actuator(uuid).submit(partial(self._confirm, uuid))
            case ResetEvidence.WITHOUT_EFFECT:
                self._threads.actuator(uuid).submit(partial(self._repeat, uuid))

    def _confirm(self, uuid: str) -> None:
        """Drop what the journal holds of a lock that is gone; on the actuator's thread, which sets all locks."""
        try:
            with self._journal.gpu_lock(uuid):
                entry = self._journal.read().entry(uuid, Control.SM_CLOCK_LOCK)
                if not self._resets.is_watched(uuid) or self._threads.actuator(uuid).lock_in_force() is not None:
                    return
                if entry is not None and entry.locked_sm_clock_mhz is not None and entry.is_lock_settled:
                    confirm_reset(self._journal, entry)
        except JournalError as error:
            log(str(error))
            return  # the next sample tries again
        self._resets.forget(uuid)
        self._health.record_restored(uuid, "its reset is confirmed")

    def _repeat(self, uuid: str) -> None:
        """Run a reset again that an earlier command did not carry out; on the actuator's thread."""
        if not self._resets.is_watched(uuid) or self._threads.actuator(uuid).lock_in_force() is not None:
            return
        log(f"{uuid} computes at the lock that its reset should have removed; resetting it again")
        try:
            outcome = repeat_unproven_reset(self._journal, self._controller, uuid)
        except JournalError as error:
            log(str(error))
            return
        if outcome is None:
            self._resets.forget(uuid)
        else:
            self._record_outcomes(uuid, (outcome,))

    def _record_outcomes(self, uuid: str, outcomes: Sequence[RestoreOutcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.result is RestoreResult.FAILED]
        for outcome in outcomes:  # of every GPU, where the journal was damaged
            if outcome.result is RestoreResult.RESTORED and outcome.control is Control.SM_CLOCK_LOCK:
                self._threads.actuator(outcome.gpu_uuid).forget_lock()
                self._resets.forget(outcome.gpu_uuid)
            elif outcome.above_sm_clock_mhz is not None:
                self._threads.actuator(outcome.gpu_uuid).forget_lock()
                self._resets.expect(outcome.gpu_uuid, outcome.above_sm_clock_mhz, time.monotonic_ns())
                if self._health.health(outcome.gpu_uuid) in {GpuHealth.OK, *UNPROVEN}:
                    self._health.record(outcome.gpu_uuid, GpuHealth.UNCONFIRMED, outcome.detail)
        for outcome in failed:
            self._health.record(outcome.gpu_uuid, GpuHealth.UNRESTORED, outcome.detail)
        if any(o.result is RestoreResult.KEPT for o in outcomes):
            self._kept.add(uuid)
        else:
            self._kept.discard(uuid)
        if not failed and not any(o.result is RestoreResult.UNCONFIRMED for o in outcomes):
            self._health.record_restored(uuid, "restored after a retry")

    def _report(self, request: RestoreRequest) -> None:
        """Reply to the daemon, or log, the outcome of every GPU."""
        outcomes = list(request.outcomes)
        if request.request_id is not None:
            done = {o.gpu_uuid for o in outcomes}
            for uuid in request.gpu_uuids:
                early = self._early_outcomes.pop(uuid, ())
                outcomes += early if uuid not in done else ()
            self._reply(request.request_id, Restored(tuple(outcomes)))
            return
        if request.is_ahead_of_daemon:
            for uuid in request.gpu_uuids:
                self._early_outcomes[uuid] = tuple(o for o in outcomes if o.gpu_uuid == uuid)
        for outcome in outcomes:
            log(f"{request.reason}: {outcome.gpu_uuid} {outcome.control} {outcome.result}: {outcome.detail}")
