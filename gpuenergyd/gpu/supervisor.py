"""What the GPU worker's main thread does: it talks to the core, keeps the leases and watches over the two threads.

It never calls the driver. The actuator's thread makes all changes and writes the journal; the sampler's thread reads.
A call that does not return makes its GPU wedged, and successors of both threads go on with the other GPUs.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuenergyd.errors import GpuEnergyError, JournalError, ProtocolError
from gpuenergyd.gpu.actuator import Actuator
from gpuenergyd.gpu.core_connection import CoreConnection, log
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.journal import Control, Journal, JournalEntry, KnownBy
from gpuenergyd.gpu.keeping import Claim, Keeping
from gpuenergyd.gpu.leases import Leases
from gpuenergyd.gpu.link_messages import (
    LINK_VERSION,
    ClockSet,
    GpuHealth,
    GpuSample,
    clock_set_row,
    identity_row,
    sample_row,
)
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.gpu.questions import QUESTIONS, answer
from gpuenergyd.gpu.restore_orders import RestoreOrders, Restoring
from gpuenergyd.gpu.restore_rules import RestorePolicy, RestoreRules
from gpuenergyd.gpu.restoring import RestoreOutcome, RestoreResult, why_kept
from gpuenergyd.gpu.sampling import Sampler
from gpuenergyd.gpu.xid_watch import XidSource, watch_xids
from gpuenergyd.service_manager import Watchdog, notify

_SAMPLES_EVERY_NS = 100_000_000
_MAX_SAMPLES_PER_DATAGRAM = 256
_TICK_S = 0.25
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0
_NS_PER_S = 1_000_000_000
_CLOCK_TOLERANCE_MHZ = 16
_SETTLED_AFTER_NS = 200_000_000
_NUM_ABOVE_IS_FOREIGN = 10
"""Samples in a row: 0.2 s at the usual period."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the command line says."""

    driver: str
    world_path: Path | None
    link_path: Path
    journal_path: Path
    sample_period_s: float
    core_uid: int | None
    exits_with_core: bool
    observes_only: bool
    read_deadline_s: float
    set_deadline_s: float
    core_silence_limit_s: float
    keeper_pid: int


class Worker:
    """What the main thread owns: the leases, the health of each GPU, and the two threads."""

    def __init__(self, controller: GpuController, options: WorkerOptions) -> None:
        self._controller = controller
        self._options = options
        self._journal = Journal(options.journal_path)
        self._parent_pid = os.getppid()
        self._identities = controller.identities()
        self._uuids = tuple(i.gpu_uuid for i in self._identities)
        self._health: dict[str, tuple[GpuHealth, str]] = dict.fromkeys(self._uuids, (GpuHealth.OK, ""))
        self._wedged: set[str] = set()
        self._returned: deque[str] = deque()
        self._guard = threading.RLock()
        self._rules = RestoreRules()
        self._kept: set[str] = set()
        self._num_above: dict[str, int] = {}
        self._samples: list[list[Any]] = []
        self._samples_sent_ns = 0
        self._is_stopping = False
        self._is_ending = False
        self._retry_pause_s = _FIRST_RETRY_S
        self._retry_at_ns = 0
        self._keeping = Keeping()
        self._core = CoreConnection(
            options.link_path,
            {0, os.geteuid() if options.core_uid is None else options.core_uid},
            on_message=self._handle,
            on_lost=self._on_core_lost,
            silence_limit_s=options.core_silence_limit_s,
        )
        self._leases = Leases(self._core, self._on_process_died)
        self._restored_unasked: dict[str, tuple[RestoreOutcome, ...]] = {}
        self._sampler = Sampler(
            controller,
            self._uuids,
            period_s=options.sample_period_s,
            on_samples=self._queue_samples,
            on_settled=self._queue_clock_set,
            on_health=self._set_health,
            on_counter_reset=self._note_driver_reload,
            on_returned=self._returned.append,
        )
        self._actuator = Actuator(
            controller,
            self._journal,
            self._identities,
            on_set=self._clock_was_set,
            on_health=self._set_health,
            on_returned=self._returned.append,
        )
        self._restores = RestoreOrders(
            controller,
            self._journal,
            options.driver,
            on_restored=self._note_restored,
            on_complete=self._answer_restore,
        )
        for uuid, reason in controller.observe_only_reasons().items():
            self._set_health(uuid, GpuHealth.OBSERVE_ONLY, reason)
        if options.observes_only:
            for uuid in self._uuids:
                self._set_health(uuid, GpuHealth.OBSERVE_ONLY, "this worker was started to observe only")

    def run(self) -> None:
        """Serve until told to stop, then restore everything."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN if self._options.exits_with_core else lambda *_: self._stop())
        signal.set_wakeup_fd(self._core.wakeup_fd, warn_on_full_buffer=False)
        self._sampler.start()
        self._actuator.start()
        if isinstance(self._controller, XidSource):
            watch_xids(self._controller, self._set_health)
        self._restore(self._uuids, "what an earlier run left behind", is_leaving=True)
        watchdog = Watchdog()
        notify("READY=1")
        while not self._is_stopping:
            self._core.serve(min(_TICK_S, watchdog.period_s or _TICK_S))
            self._watch()
            # A driver that hangs is the threads' trouble and ours to report: only our own hang is to be killed.
            watchdog.feed()
            if self._options.exits_with_core and not self._core.is_connected and os.getppid() != self._parent_pid:
                break
        notify("STOPPING=1")
        self._actuator.drop_wishes(self._uuids)
        self._restore(self._uuids, "the worker stops", is_leaving=True)
        self._is_ending = True
        self._actuator.close(timeout_s=0.0)
        while self._actuator.is_running:
            self._watch()
            self._core.serve(0.01)
        self._sampler.close(timeout_s=1.0)
        self._core.close()

    # Main thread

    def _stop(self) -> None:
        self._is_stopping = True

    def _on_core_lost(self) -> None:
        """Put everything back at once: nobody is left who could; a core that handed over is waited for."""
        if not self._options.exits_with_core and self._keeping.begin(time.monotonic()):
            log("the core is being restarted; leases are kept for the next one")
            return
        self._give_all_back("the core is gone")
        if self._options.exits_with_core:
            self._stop()

    def _give_all_back(self, why: str, *, is_leaving: bool = True) -> None:
        self._leases.end_all()
        self._actuator.drop_wishes(self._uuids)
        self._restore(self._uuids, why, is_leaving=is_leaving)

    def _take_over(self, token: str) -> bool:
        """Return whether a new core goes on with the leases of the one before."""
        claim = self._keeping.claim(token)
        if claim is Claim.WRONG_TOKEN:
            self._give_all_back("another core came than the one that was waited for", is_leaving=False)
        return claim is Claim.TAKEN_OVER

    def _on_process_died(self, lease_id: str, uuids: Sequence[str]) -> None:
        """Give a dead job's GPUs back; the core will ask for the same, and is then told what became of them."""
        self._actuator.drop_wishes(uuids)
        self._restore(uuids, f"a process of {lease_id} died", is_awaited=True)

    def _handle(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        if message["type"] == "lease":
            self._lease(message, fds)
            return
        _close_all(fds)
        match message["type"]:
            case "want":
                self._want(message)
            case "hello":
                self._rules = RestoreRules.from_row(message["restore_rules"])
                kept, self._kept = tuple(self._kept), set()
                if kept:
                    self._restore(kept, "the next daemon measures its jobs un-tuned")
                self._reply(
                    message,
                    link_version=LINK_VERSION,
                    driver=self._options.driver,
                    pid=os.getpid(),
                    has_taken_over=self._take_over(str(message.get("token", ""))),
                    identities=[identity_row(i) for i in self._identities],
                    keeper_pid=self._options.keeper_pid,
                    health=[[uuid, health, detail] for uuid, (health, detail) in self._health.items()],
                )
            case "hand_over":
                try:
                    self._keeping.promise(str(message["token"]), float(message["keep_s"]))
                    self._reply(message)
                except ValueError as error:
                    self._reply(message, error=str(error))
            case "ping":
                self._reply(
                    message,
                    num_late_ticks=self._sampler.num_late_ticks,
                    num_samples_dropped=self._core.num_dropped,
                    num_sets_skipped=self._actuator.num_skipped,
                )
            case "limit":
                (uuid,) = self._known([message["gpu_uuid"]])
                refusal = self._refusal(uuid)
                if self._leases.of(uuid) != str(message["lease_id"]):
                    refusal = f"lease {message['lease_id']} does not cover {uuid}"
                if refusal is not None:
                    self._reply(message, error=refusal)
                else:
                    watts = float(message["power_limit_w"])
                    self._actuator.order(uuid, partial(self._limit_and_reply, message, uuid, watts))
            case "restore":
                uuids = self._known(message["gpu_uuids"])
                self._leases.end(uuids)
                self._actuator.drop_wishes(uuids)
                self._restore(uuids, str(message["reason"]), message, is_leaving=bool(message.get("is_leaving")))
            case question if question in QUESTIONS:
                (uuid,) = self._known([message["gpu_uuid"]])
                if uuid in self._wedged:
                    self._reply(message, error=self._refusal(uuid))
                else:
                    self._actuator.order(uuid, partial(self._ask_and_reply, message))
            case other:
                self._reply(message, error=f"no message type {other!r}")

    def _want(self, message: dict[str, Any]) -> None:
        uuid = message["gpu_uuid"]
        clock_mhz, later_mhz = int(message["sm_clock_mhz"]), int(message["later_sm_clock_mhz"])
        asked_ns, later_ns = int(message["asked_mono_ns"]), int(message["later_at_mono_ns"])
        refusal = self._refusal(uuid)
        if self._leases.of(uuid) is None:
            refusal = "refused: no lease on this GPU"
        if refusal is not None:
            self._queue_clock_set(ClockSet(uuid, clock_mhz or later_mhz, asked_ns, 0, 0, None, None, refusal))
            return
        self._actuator.wish(
            uuid, clock_mhz, later_sm_clock_mhz=later_mhz, later_at_mono_ns=later_ns, asked_mono_ns=asked_ns
        )

    def _lease(self, message: dict[str, Any], pidfds: Sequence[int]) -> None:
        try:
            lease_id, uuids = str(message["lease_id"]), self._known(message["gpu_uuids"])
            _ = str(message["job_id"]), int(message["pid"]), int(message["uid"])  # malformed ones end here
            refusal = self._lease_refusal(lease_id, uuids)
        except BaseException:
            _close_all(pidfds)
            raise
        if refusal is not None:
            _close_all(pidfds)
            self._reply(message, error=refusal)
            return
        self._leases.grant(lease_id, uuids, pidfds)
        for uuid in uuids:
            self._num_above[uuid] = 0
            self._restored_unasked.pop(uuid, None)
        self._actuator.order("", partial(self._journal_and_reply, message, uuids))

    def _lease_refusal(self, lease_id: str, uuids: Sequence[str]) -> str | None:
        """Return why these GPUs cannot be leased now, if so."""
        for uuid in uuids:
            holder = self._leases.of(uuid)
            if holder not in {None, lease_id}:
                return f"{uuid} is leased to {holder}"
            refusal = self._refusal(uuid)
            if refusal is not None:
                return refusal
        return None

    def _refusal(self, uuid: str) -> str | None:
        """Return why this GPU cannot be changed now, if so."""
        health, detail = self._health.get(uuid, (GpuHealth.OK, ""))
        if health in {GpuHealth.OBSERVE_ONLY, GpuHealth.WEDGED, GpuHealth.LOST}:
            return f"refused: {uuid} is {health}: {detail}"
        return None

    def _known(self, uuids: Sequence[str]) -> tuple[str, ...]:
        unknown = [u for u in uuids if u not in self._health]
        if unknown:
            raise ProtocolError(f"no GPU {unknown[0]!r}; there are: {', '.join(self._uuids)}")
        return tuple(uuids)

    def _reply(self, message: dict[str, Any], **answer: Any) -> None:
        self._core.send({"type": "reply", "request_id": message.get("request_id"), **answer})

    def _restore(
        self,
        uuids: Sequence[str],
        why: str,
        message: dict[str, Any] | None = None,
        *,
        is_awaited: bool = False,
        is_leaving: bool = False,
    ) -> None:
        """Order GPU by GPU, so that one that hangs holds up no other."""
        restoring = self._restores.open(why, uuids, message, is_awaited=is_awaited, is_leaving=is_leaving)
        for uuid in uuids:
            if uuid in self._wedged:
                self._restores.note_unreachable(uuid)
            else:
                self._actuator.order(uuid, partial(self._restores.carry_out, restoring, uuid))

    def _watch(self) -> None:
        """Replace threads that do not return, take GPUs back whose call did, retry what could not be restored."""
        now_ns = time.monotonic_ns()
        if self._keeping.has_run_out(now_ns / _NS_PER_S):
            self._give_all_back("no core came back in time")
        for thread, deadline_s in (
            (self._sampler, self._options.read_deadline_s),
            (self._actuator, self._options.set_deadline_s),
        ):
            stuck, since_ns = thread.call.gpu_uuid, thread.call.since_mono_ns
            if stuck and now_ns - since_ns > deadline_s * _NS_PER_S:
                self._give_up_on(stuck, thread, deadline_s)
        while self._returned:
            self._take_back(self._returned.popleft())
        if self._kept and not self._is_ending:
            self._end_keeping()
        unrestored = [
            u for u, (health, _) in self._health.items() if health is GpuHealth.UNRESTORED and not self._leases.of(u)
        ]
        if not unrestored:
            self._retry_pause_s = _FIRST_RETRY_S
            self._retry_at_ns = now_ns + round(self._retry_pause_s * _NS_PER_S)
        elif now_ns >= self._retry_at_ns:
            self._retry_pause_s = min(2 * self._retry_pause_s, _LAST_RETRY_S)
            self._retry_at_ns = now_ns + round(self._retry_pause_s * _NS_PER_S)
            self._restore(unrestored, "tried again")

    def _end_keeping(self) -> None:
        """Restore what was kept for a process that is gone by now."""
        try:
            entries = self._journal.read().entries
        except JournalError:
            return  # whoever restores says so
        over = {e.gpu_uuid for e in entries if e.gpu_uuid in self._kept and why_kept(e) is None}
        if over:
            self._kept -= over
            self._restore(tuple(over), "its process has ended")

    def _give_up_on(self, uuid: str, thread: Sampler | Actuator, deadline_s: float) -> None:
        """Leave a GPU alone whose call does not return; the other GPUs get new threads."""
        self._wedged.add(uuid)
        self._set_health(uuid, GpuHealth.WEDGED, f"a driver call has not returned for {deadline_s:g} s")
        self._leases.end([uuid])
        if isinstance(thread, Sampler):
            self._sampler = thread.succeed(uuid)
            self._sampler.start()
            self._actuator.drop_wishes([uuid])
        else:
            self._sampler.leave_out(uuid)
            self._actuator = thread.succeed(uuid)
            self._actuator.start()
            if self._is_ending:
                self._actuator.close(timeout_s=0.0)
        self._restores.note_unreachable(uuid)

    def _take_back(self, uuid: str) -> None:
        """A call came back after all: look at the GPU again and restore it, whatever that call did."""
        if uuid in self._wedged:
            self._wedged.discard(uuid)
            self._set_health(uuid, GpuHealth.UNRESTORED, "its driver call returned; it has to be restored")
            self._sampler.leave_out(uuid)
            self._sampler.take_in(uuid)
            self._restore([uuid], "its driver call returned")

    # Actuator's thread

    def _entry(self, message: dict[str, Any], uuid: str, control: Control) -> JournalEntry:
        """Return what the journal must know before this control of this GPU is changed."""
        baseline = None
        if control is Control.SM_CLOCK_LOCK:
            baseline = next(self._rules.baseline_of(i) for i in self._identities if i.gpu_uuid == uuid)
        world = self._options.world_path
        return JournalEntry(
            gpu_uuid=uuid,
            control=control,
            saved_value=baseline,
            known_by=KnownBy.ASSUMED_DEFAULT if baseline is None else KnownBy.CONFIGURED,
            lease_id=str(message["lease_id"]),
            job_id=str(message["job_id"]),
            owner_pid=int(message["pid"]),
            owner_uid=int(message["uid"]),
            owner_start_ticks=process_start_ticks(int(message["pid"])),
            driver=self._options.driver,
            world_path=None if world is None else str(world),
            recorded_boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            restore_policy=self._rules.restore_policy,
        )

    def _journal_and_reply(self, message: dict[str, Any], uuids: Sequence[str]) -> None:
        entries = [self._entry(message, uuid, Control.SM_CLOCK_LOCK) for uuid in uuids]
        try:
            self._journal.add(entries)
        except JournalError as error:
            self._leases.drop(uuids)
            self._reply(message, error=str(error))
            return
        self._reply(message)

    def _ask_and_reply(self, message: dict[str, Any]) -> None:
        try:
            self._reply(message, **answer(self._controller, message))
        except GpuEnergyError as error:
            self._reply(message, error=str(error))

    def _limit_and_reply(self, message: dict[str, Any], uuid: str, power_limit_w: float) -> None:
        """Set a power limit under a lease; what was there before is journalled first."""
        try:
            entry = replace(
                self._entry(message, uuid, Control.POWER_LIMIT),
                saved_value=self._controller.power_limit_w(uuid),
                known_by=KnownBy.READ,
            )
            self._journal.add([replace(entry, intended_value=power_limit_w)])
            with self._journal.gpu_lock(uuid):
                try:
                    self._controller.set_power_limit(uuid, power_limit_w)
                finally:  # what is there now is ours, set or refused
                    actual_w = self._controller.power_limit_w(uuid)
                    self._journal.add([replace(entry, intended_value=actual_w)])
            self._reply(message, power_limit_w=actual_w)
        except GpuEnergyError as error:
            self._reply(message, error=str(error))

    def _clock_was_set(self, change: ClockSet) -> None:
        if change.error is None:
            self._sampler.await_effect(change)
        else:
            self._queue_clock_set(change)

    # Any thread

    def _answer_restore(self, restoring: Restoring) -> None:
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

    def _note_restored(self, uuid: str, outcomes: Sequence[RestoreOutcome]) -> None:
        for outcome in outcomes:
            if outcome.result is RestoreResult.FAILED:
                self._set_health(outcome.gpu_uuid, GpuHealth.UNRESTORED, outcome.detail)
        if any(o.result is RestoreResult.KEPT for o in outcomes):
            self._kept.add(uuid)
        else:
            self._kept.discard(uuid)
        has_failed = any(o.result is RestoreResult.FAILED for o in outcomes)
        if self._health[uuid][0] is GpuHealth.UNRESTORED and not has_failed:
            self._set_health(uuid, GpuHealth.OK, "restored at last")

    def _queue_clock_set(self, change: ClockSet) -> None:
        self._core.send({"type": "clock_set", "row": clock_set_row(change)})

    def _set_health(self, gpu_uuid: str, health: GpuHealth, detail: str) -> None:
        with self._guard:
            before = self._health.get(gpu_uuid)
            is_settled = gpu_uuid in self._wedged and health is not GpuHealth.WEDGED
            if before is None or before[0] is health or is_settled:
                return
            self._health[gpu_uuid] = (health, detail)
        log(f"{gpu_uuid} is {health}: {detail}")
        self._core.send({"type": "gpu_state", "gpu_uuid": gpu_uuid, "health": health, "detail": detail})

    def _note_driver_reload(self, uuid: str) -> None:
        log(f"{uuid}: the energy counter began anew; the driver was reloaded and has forgotten the lock")
        self._actuator.forget_lock(uuid)

    def _check_for_others(self, sample: GpuSample) -> None:
        """A clock that stays above our lock was unlocked by somebody else: do not fight, and undo nothing of theirs."""
        uuid, lock = sample.gpu_uuid, self._actuator.lock_in_force(sample.gpu_uuid)
        is_above = (
            lock is not None
            and sample.sm_clock_mhz is not None
            and sample.sm_clock_mhz > lock[0] + _CLOCK_TOLERANCE_MHZ
            and sample.read_mono_ns > lock[1] + _SETTLED_AFTER_NS
        )
        self._num_above[uuid] = self._num_above.get(uuid, 0) + 1 if is_above else 0
        if self._num_above[uuid] == _NUM_ABOVE_IS_FOREIGN:
            self._actuator.order(uuid, partial(self._yield_to_others, uuid, sample.sm_clock_mhz))

    def _yield_to_others(self, uuid: str, sm_clock_mhz: int | None) -> None:
        """Give a GPU up that somebody else changed; on the actuator's thread."""
        self._leases.drop([uuid])
        self._actuator.drop_wishes([uuid])
        if self._rules.restore_policy is not RestorePolicy.RESTORE:
            try:
                self._journal.remove({(uuid, Control.SM_CLOCK_LOCK)})
            except JournalError as error:
                log(str(error))
        detail = (
            f"somebody else changed its clock lock: it runs at {sm_clock_mhz} MHz, above ours; the lease is dropped"
        )
        self._set_health(uuid, GpuHealth.DEGRADED, detail)

    def _queue_samples(self, samples: Sequence[GpuSample]) -> None:
        for sample in samples:
            self._check_for_others(sample)
        self._samples += [sample_row(s) for s in samples]
        now_ns = time.monotonic_ns()
        is_due = now_ns - self._samples_sent_ns >= _SAMPLES_EVERY_NS
        if is_due or len(self._samples) >= _MAX_SAMPLES_PER_DATAGRAM:
            rows, self._samples = self._samples, []
            self._samples_sent_ns = now_ns
            self._core.send({"type": "samples", "rows": rows})


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
