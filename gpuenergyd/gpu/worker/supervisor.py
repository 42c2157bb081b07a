"""What the GPU worker's main thread does: it talks to the core, keeps the leases and watches over the two threads.

It never calls the driver. The actuator's thread makes all changes and writes the journal; the sampler's thread reads.
A call that does not return makes its GPU wedged, and successors of both threads go on with the other GPUs.
"""

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.errors import GpuEnergyError, JournalError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.link.messages import (
    LINK_VERSION,
    ClockSet,
    GpuHealth,
    GpuSample,
    clock_set_row,
    identity_row,
    sample_row,
)
from gpuenergyd.gpu.link.queries import QUESTIONS, answer
from gpuenergyd.gpu.restore.journal import Control, Journal
from gpuenergyd.gpu.restore.policy import RestorePolicy, RestoreRules
from gpuenergyd.gpu.worker.daemon_connection import CoreConnection, log
from gpuenergyd.gpu.worker.health import GpuStates
from gpuenergyd.gpu.worker.lease_handover import Claim, Keeping
from gpuenergyd.gpu.worker.leases import Leases
from gpuenergyd.gpu.worker.options import WorkerOptions
from gpuenergyd.gpu.worker.restore_service import GivingBack
from gpuenergyd.gpu.worker.threads.driver_threads import DriverThreads
from gpuenergyd.gpu.worker.threads.foreign_locks import ForeignLocks
from gpuenergyd.gpu.worker.threads.journalled_changes import JournalledChanges
from gpuenergyd.gpu.worker.threads.xid_watch import XidSource, watch_xids
from gpuenergyd.service_manager import Watchdog, notify

_SAMPLES_EVERY_NS = 100_000_000
_MAX_SAMPLES_PER_DATAGRAM = 256
_TICK_S = 0.25
_NS_PER_S = 1_000_000_000


class Worker:
    """What the main thread owns: the leases, the health of each GPU, and the two threads."""

    def __init__(self, controller: GpuController, options: WorkerOptions) -> None:
        self._controller = controller
        self._options = options
        self._journal = Journal(options.journal_path)
        self._parent_pid = os.getppid()
        self._identities = controller.identities()
        self._uuids = tuple(i.gpu_uuid for i in self._identities)
        self._foreign = ForeignLocks()
        self._samples: list[list[Any]] = []
        self._samples_sent_ns = 0
        self._is_stopping = False
        self._is_ending = False
        self._keeping = Keeping()
        self._core = CoreConnection(
            options.link_path,
            {0, os.geteuid() if options.core_uid is None else options.core_uid},
            on_message=self._handle,
            on_lost=self._on_core_lost,
            silence_limit_s=options.core_silence_limit_s,
        )
        self._leases = Leases(self._core, self._on_process_died)
        self._states = GpuStates(self._uuids, self._tell_state)
        self._threads = DriverThreads(
            controller,
            self._journal,
            options,
            self._states,
            on_samples=self._queue_samples,
            on_clock_set=self._queue_clock_set,
            on_counter_reset=self._note_driver_reload,
            on_wedged=self._let_go,
            on_returned=lambda uuid: self._giving_back.restore([uuid], "its driver call returned"),
        )
        self._changes = JournalledChanges(controller, self._journal, options.driver, options.world_path, RestoreRules())
        self._giving_back = GivingBack(
            controller,
            self._journal,
            options.driver,
            threads=self._threads,
            states=self._states,
            reply=self._reply,
        )
        for uuid, reason in controller.observe_only_reasons().items():
            self._states.note(uuid, GpuHealth.OBSERVE_ONLY, reason)
        if options.observes_only:
            for uuid in self._uuids:
                self._states.note(uuid, GpuHealth.OBSERVE_ONLY, "this worker was started to observe only")

    def run(self) -> None:
        """Serve until told to stop, then restore everything."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN if self._options.exits_with_core else lambda *_: self._stop())
        signal.set_wakeup_fd(self._core.wakeup_fd, warn_on_full_buffer=False)
        self._threads.start()
        if isinstance(self._controller, XidSource):
            watch_xids(self._controller, self._states.note)
        self._giving_back.restore(self._uuids, "what an earlier run left behind", is_leaving=True)
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
        self._threads.actuator.drop_requests(self._uuids)
        self._giving_back.restore(self._uuids, "the worker stops", is_leaving=True)
        self._is_ending = True
        self._threads.end_actuator()
        while self._threads.actuator.is_running:
            self._watch()
            self._core.serve(0.01)
        self._threads.sampler.close(timeout_s=1.0)
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
        self._threads.actuator.drop_requests(self._uuids)
        self._giving_back.restore(self._uuids, why, is_leaving=is_leaving)

    def _take_over(self, token: str) -> bool:
        """Return whether a new core goes on with the leases of the one before."""
        claim = self._keeping.claim(token)
        if claim is Claim.WRONG_TOKEN:
            self._give_all_back("another core came than the one that was waited for", is_leaving=False)
        return claim is Claim.TAKEN_OVER

    def _on_process_died(self, lease_id: str, uuids: Sequence[str]) -> None:
        """Give a dead job's GPUs back; the core will ask for the same, and is then told what became of them."""
        self._threads.actuator.drop_requests(uuids)
        self._giving_back.restore(uuids, f"a process of {lease_id} died", is_awaited=True)

    def _handle(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        if message["type"] == "lease":
            self._lease(message, fds)
            return
        _close_all(fds)
        match message["type"]:
            case "want":
                self._want(message)
            case "hello":
                self._changes.rules = RestoreRules.from_row(message["restore_rules"])
                self._giving_back.restore_kept("the next daemon measures its jobs un-tuned")
                self._reply(
                    message,
                    link_version=LINK_VERSION,
                    driver=self._options.driver,
                    pid=os.getpid(),
                    has_taken_over=self._take_over(str(message.get("token", ""))),
                    identities=[identity_row(i) for i in self._identities],
                    keeper_pid=self._options.keeper_pid,
                    health=self._states.rows(),
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
                    num_late_ticks=self._threads.sampler.num_late_ticks,
                    num_samples_dropped=self._core.num_dropped,
                    num_sets_skipped=self._threads.actuator.num_skipped,
                )
            case "limit":
                (uuid,) = self._states.known([message["gpu_uuid"]])
                refusal = self._states.refusal(uuid)
                if self._leases.of(uuid) != str(message["lease_id"]):
                    refusal = f"lease {message['lease_id']} does not cover {uuid}"
                if refusal is not None:
                    self._reply(message, error=refusal)
                else:
                    watts = float(message["power_limit_w"])
                    self._threads.actuator.order(uuid, partial(self._limit_and_reply, message, uuid, watts))
            case "restore":
                uuids = self._states.known(message["gpu_uuids"])
                self._leases.end(uuids)
                self._threads.actuator.drop_requests(uuids)
                self._giving_back.restore(
                    uuids, str(message["reason"]), message, is_leaving=bool(message.get("is_leaving"))
                )
            case question if question in QUESTIONS:
                (uuid,) = self._states.known([message["gpu_uuid"]])
                if self._states.is_wedged(uuid):
                    self._reply(message, error=self._states.refusal(uuid))
                else:
                    self._threads.actuator.order(uuid, partial(self._ask_and_reply, message))
            case other:
                self._reply(message, error=f"no message type {other!r}")

    def _want(self, message: dict[str, Any]) -> None:
        uuid, request = message["gpu_uuid"], ClockRequest(*map(int, message["request"]))
        refusal = self._states.refusal(uuid)
        if self._leases.of(uuid) is None:
            refusal = "refused: no lease on this GPU"
        if refusal is not None:
            clock_mhz = request.first_sm_clock_mhz
            self._queue_clock_set(ClockSet(uuid, clock_mhz, request.sent_mono_ns, 0, 0, None, None, refusal))
            return
        self._threads.actuator.request_clock(uuid, request)

    def _lease(self, message: dict[str, Any], pidfds: Sequence[int]) -> None:
        try:
            lease_id, uuids = str(message["lease_id"]), self._states.known(message["gpu_uuids"])
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
            self._foreign.forget(uuid)
            self._giving_back.forget_unasked(uuid)
        self._threads.actuator.order("", partial(self._journal_and_reply, message, uuids))

    def _lease_refusal(self, lease_id: str, uuids: Sequence[str]) -> str | None:
        """Return why these GPUs cannot be leased now, if so."""
        for uuid in uuids:
            holder = self._leases.of(uuid)
            if holder not in {None, lease_id}:
                return f"{uuid} is leased to {holder}"
            refusal = self._states.refusal(uuid)
            if refusal is not None:
                return refusal
        return None

    def _reply(self, message: dict[str, Any], **answer: Any) -> None:
        self._core.send({"type": "reply", "request_id": message.get("request_id"), **answer})

    def _watch(self) -> None:
        """Replace threads that do not return, take GPUs back whose call did, retry what could not be restored."""
        now_ns = time.monotonic_ns()
        if self._keeping.has_run_out(now_ns / _NS_PER_S):
            self._give_all_back("no core came back in time")
        self._threads.watch()
        if not self._is_ending:
            self._giving_back.end_keeping()
        self._giving_back.retry([uuid for uuid in self._uuids if self._leases.of(uuid) is None], now_ns)

    def _let_go(self, uuid: str) -> None:
        """Leave a GPU alone whose call does not return."""
        self._leases.end([uuid])
        self._giving_back.give_up(uuid)

    # Actuator's thread

    def _journal_and_reply(self, message: dict[str, Any], uuids: Sequence[str]) -> None:
        try:
            self._changes.open_lease(message, uuids)
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
        try:
            self._reply(message, power_limit_w=self._changes.set_power_limit(message, uuid, power_limit_w))
        except GpuEnergyError as error:
            self._reply(message, error=str(error))

    # Any thread

    def _queue_clock_set(self, change: ClockSet) -> None:
        self._core.send({"type": "clock_set", "row": clock_set_row(change)})

    def _tell_state(self, gpu_uuid: str, health: GpuHealth, detail: str) -> None:
        log(f"{gpu_uuid} is {health}: {detail}")
        self._core.send({"type": "gpu_state", "gpu_uuid": gpu_uuid, "health": health, "detail": detail})

    def _note_driver_reload(self, uuid: str) -> None:
        log(f"{uuid}: the energy counter began anew; the driver was reloaded and has forgotten the lock")
        self._threads.actuator.forget_lock(uuid)

    def _yield_to_others(self, uuid: str, sm_clock_mhz: int | None) -> None:
        """Give a GPU up that somebody else changed, and undo nothing of theirs; on the actuator's thread."""
        self._leases.drop([uuid])
        self._threads.actuator.drop_requests([uuid])
        if self._changes.rules.restore_policy is not RestorePolicy.RESTORE:
            try:
                self._journal.remove({(uuid, Control.SM_CLOCK_LOCK)})
            except JournalError as error:
                log(str(error))
        detail = (
            f"somebody else changed its clock lock: it runs at {sm_clock_mhz} MHz, above ours; the lease is dropped"
        )
        self._states.note(uuid, GpuHealth.DEGRADED, detail)

    def _queue_samples(self, samples: Sequence[GpuSample]) -> None:
        for sample in samples:
            if self._foreign.shows(sample, self._threads.actuator.lock_in_force(sample.gpu_uuid)):
                yielding = partial(self._yield_to_others, sample.gpu_uuid, sample.sm_clock_mhz)
                self._threads.actuator.order(sample.gpu_uuid, yielding)
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
