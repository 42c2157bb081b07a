"""Giving GPUs back in a running worker: ordered GPU by GPU, told to whoever asks, tried again until it is done."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpuenergyd.errors import JournalError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.link.messages import GpuHealth
from gpuenergyd.gpu.restore.executor import RestoreOutcome, RestoreResult, why_kept
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.worker.daemon_connection import log
from gpuenergyd.gpu.worker.health import GpuStates
from gpuenergyd.gpu.worker.restore_requests import RestoreOrders, Restoring
from gpuenergyd.gpu.worker.threads.driver_threads import DriverThreads

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0
_NS_PER_S = 1_000_000_000


class GivingBack:
    """What is to be restored and was; `reply` answers a message of the core, with these values."""

    def __init__(
        self,
        controller: GpuController,
        journal: Journal,
        driver: str,
        *,
        threads: DriverThreads,
        states: GpuStates,
        reply: Callable[..., None],
    ) -> None:
        self._journal = journal
        self._threads = threads
        self._states = states
        self._reply = reply
        self._orders = RestoreOrders(
            controller, journal, driver, on_restored=self._note_restored, on_complete=self._answer
        )
        self._kept: set[str] = set()
        self._restored_unasked: dict[str, tuple[RestoreOutcome, ...]] = {}
        self._retry_pause_s = _FIRST_RETRY_S
        self._retry_at_ns = 0

    def restore(
        self,
        uuids: Sequence[str],
        why: str,
        message: dict[str, Any] | None = None,
        *,
        is_awaited: bool = False,
        is_leaving: bool = False,
    ) -> None:
        """Order GPU by GPU, so that one that hangs holds up no other."""
        restoring = self._orders.open(why, uuids, message, is_awaited=is_awaited, is_leaving=is_leaving)
        for uuid in uuids:
            if self._states.is_wedged(uuid):
                self._orders.note_unreachable(uuid)
            else:
                self._threads.actuator.order(uuid, partial(self._orders.carry_out, restoring, uuid))

    def give_up(self, uuid: str) -> None:
        """Answer whoever waits for this GPU: its driver call does not return."""
        self._orders.note_unreachable(uuid)

    def forget_unasked(self, uuid: str) -> None:
        """Drop what would be told of an earlier lease."""
        self._restored_unasked.pop(uuid, None)

    def restore_kept(self, why: str) -> None:
        """Restore what an earlier daemon left as it was on purpose."""
        kept, self._kept = tuple(self._kept), set()
        if kept:
            self.restore(kept, why)

    def end_keeping(self) -> None:
        """Restore what was kept for a process that is gone by now."""
        if not self._kept:
            return
        try:
            entries = self._journal.read().entries
        except JournalError:
            return  # whoever restores says so
        over = {e.gpu_uuid for e in entries if e.gpu_uuid in self._kept and why_kept(e) is None}
        if over:
            self._kept -= over
            self.restore(tuple(over), "its process has ended")

    def retry(self, uuids: Sequence[str], now_ns: int) -> None:
        """Restore those not leased whose restore failed, at growing intervals."""
        unrestored = [uuid for uuid in uuids if self._states.health(uuid) is GpuHealth.UNRESTORED]
        if not unrestored:
            self._retry_pause_s = _FIRST_RETRY_S
        elif now_ns < self._retry_at_ns:
            return
        else:
            self._retry_pause_s = min(2 * self._retry_pause_s, _LAST_RETRY_S)
            self.restore(unrestored, "tried again")
        self._retry_at_ns = now_ns + round(self._retry_pause_s * _NS_PER_S)

    # Any thread

    def _note_restored(self, uuid: str, outcomes: Sequence[RestoreOutcome]) -> None:
        for outcome in outcomes:
            if outcome.result is RestoreResult.FAILED:
                self._states.note(outcome.gpu_uuid, GpuHealth.UNRESTORED, outcome.detail)
        if any(o.result is RestoreResult.KEPT for o in outcomes):
            self._kept.add(uuid)
        else:
            self._kept.discard(uuid)
        has_failed = any(o.result is RestoreResult.FAILED for o in outcomes)
        if self._states.health(uuid) is GpuHealth.UNRESTORED and not has_failed:
            self._states.note(uuid, GpuHealth.OK, "restored at last")

    def _answer(self, restoring: Restoring) -> None:
        """Tell who asked, or the log, what became of every GPU."""
        outcomes = list(restoring.outcomes)
        if restoring.message is not None:
            done = {o.gpu_uuid for o in outcomes}
            for uuid in restoring.gpu_uuids:
                earlier = self._restored_unasked.pop(uuid, ())
                outcomes += earlier if uuid not in done else ()
            rows = [[o.gpu_uuid, o.control, o.result, o.detail] for o in outcomes]
            self._reply(restoring.message, outcomes=rows)
            return
        if restoring.is_awaited:
            for uuid in restoring.gpu_uuids:
                self._restored_unasked[uuid] = tuple(o for o in outcomes if o.gpu_uuid == uuid)
        for outcome in outcomes:
            log(f"{restoring.why}: {outcome.gpu_uuid} {outcome.control} {outcome.result}: {outcome.detail}")
