"""Main thread of the GPU worker: serves the daemon, grants leases and supervises the threads that call the driver.

It never calls the driver itself. Each GPU has a thread, its actuator, that makes all changes and writes the journal;
samplers read. A call that does not return makes its GPU wedged, and the threads of the other GPUs go on.

Longer than 400 lines, since each command needs the same leases, journal and threads, which the supervisor owns.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuenergyd.errors import GpuEnergyError, GpuError, JournalError, ProtocolError
from gpuenergyd.gpu.device import (
    MIG_ENABLED,
    GpuDriver,
    GpuIdentity,
    HasClocks,
    HasErrorEvents,
    HasRelease,
    missing_capabilities,
    require_capability,
)
from gpuenergyd.gpu.link.messages import (
    CEILING_LEASE,
    AcquireLease,
    ClockChangeReport,
    Done,
    Failed,
    GpuHealth,
    GpuHealthChange,
    GpuSample,
    GpuSettingsRead,
    HandOver,
    Hello,
    ListProcesses,
    LowerPowerLimit,
    Message,
    Ping,
    ReleaseGpus,
    ReopenGpus,
    Reply,
    RequestClock,
    Restore,
    Samples,
    SetPowerLimit,
    SetPowerProfile,
    TakeSnapshot,
    Welcome,
    WorkerCounters,
)
from gpuenergyd.gpu.plausible import plausible
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.restore.policy import RestoreRules
from gpuenergyd.gpu.restore.repair import RepairingHost, repair_journal
from gpuenergyd.gpu.worker.daemon_connection import DaemonConnection, close_all, log
from gpuenergyd.gpu.worker.driver_requests import DriverRequests
from gpuenergyd.gpu.worker.foreign_changes import FOREIGN_CHANGE, ForeignChanges
from gpuenergyd.gpu.worker.health import HealthTable
from gpuenergyd.gpu.worker.joint_request import submit_jointly
from gpuenergyd.gpu.worker.leases import HandoverResult, LeaseHandover, Leases
from gpuenergyd.gpu.worker.maintenance import OBSERVES_ONLY, Maintenance
from gpuenergyd.gpu.worker.reading_gate import ReadingGate
from gpuenergyd.gpu.worker.restore_service import RestoreRequest, RestoreService
from gpuenergyd.gpu.worker.threads.driver_threads import CallState, DriverThreads
from gpuenergyd.gpu.worker.threads.sample_stream import SampleBatch
from gpuenergyd.gpu.worker.threads.sampler import Sampler
from gpuenergyd.gpu.worker.threads.settings_watch import SettingsWatch
from gpuenergyd.gpu.worker.threads.xid_watch import watch_xids
from gpuenergyd.service_manager import Watchdog, notify

_TICK_S = 0.25
_PREDECESSOR_LIMIT_S = 10.0
"""The worker of a killed daemon restores its GPUs, and then ends, while the next daemon starts its own worker."""
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The worker's command line."""

    link: Path
    journal: Path
    driver: str
    world: Path | None
    sample_period_s: float
    daemon_uid: int | None
    exits_with_daemon: bool
    parent_pid: int
    """Process id of the parent; if it has changed, this process is an orphan."""
    observes_only: bool
    read_deadline_s: float
    set_deadline_s: float
    daemon_silence_limit_s: float


class Supervisor:
    """The main thread's state: the leases, the health of each GPU, and the driver threads."""

    def __init__(self, controller: GpuDriver, options: WorkerOptions, sentinel_pid: int) -> None:
        self._controller = controller
        self._options = options
        self._sentinel_pid = sentinel_pid
        self._journal = Journal(options.journal)
        self._identities = tuple(map(plausible, controller.identities()))
        self._uuids = tuple(i.gpu_uuid for i in self._identities)
        self._batch = SampleBatch()
        self._is_stopping = False
        self._is_ending = False
        self._handover = LeaseHandover()
        self._daemon = DaemonConnection(
            options.link,
            {0, os.geteuid() if options.daemon_uid is None else options.daemon_uid},
            on_message=self._handle,
            on_lost=self._handle_daemon_lost,
            silence_limit_s=options.daemon_silence_limit_s,
            predecessor_limit_s=_PREDECESSOR_LIMIT_S if options.exits_with_daemon else 0.0,
        )
        self._leases = Leases(self._daemon, self._handle_process_end)
        self._health = HealthTable(self._uuids, self._report_health)
        self._gate = ReadingGate(controller, self._identities)
        sampler = Sampler(
            self._gate,
            self._uuids,
            period_s=options.sample_period_s,
            on_samples=self._handle_samples,
            on_settled=self._daemon.send,
            on_health=self._health.record_reading,
            on_counter_reset=self._handle_counter_reset,
        )
        self._threads = DriverThreads(
            controller,
            sampler,
            self._journal,
            self._health,
            on_clock_change=self._daemon.send,
            read_deadline_s=options.read_deadline_s,
            set_deadline_s=options.set_deadline_s,
        )
        self._driver = DriverRequests(controller, self._journal, options.driver, options.world, RestoreRules())
        self._driver.reader = self._gate
        self._foreign = ForeignChanges(
            controller,
            self._journal,
            self._threads,
            self._leases,
            self._health,
            identities=lambda: self._identities,
            restore_policy=lambda: self._driver.rules.restore_policy,
            on_found=self._report_foreign_lock,
        )
        self._driver.foreign_clock_mhz = self._foreign.clock_mhz
        self._restores = RestoreService(
            controller,
            self._journal,
            repair=self._repair_journal,
            threads=self._threads,
            health=self._health,
            reply=self._reply,
        )
        self._maintenance = Maintenance(
            controller,
            self._threads,
            self._health,
            self._journal,
            self._handle_reopened,
            observes_only=options.observes_only,
        )
        self._settings = SettingsWatch(
            self._gate,
            self._journal,
            self._uuids,
            is_readable=lambda uuid: not (self._health.is_released(uuid) or self._health.is_wedged(uuid)),
            foreign_clock_mhz=self._foreign.clock_mhz,
            on_change=self._handle_settings,
        )
        if options.observes_only:
            for uuid in self._uuids:
                self._health.record(uuid, GpuHealth.OBSERVE_ONLY, OBSERVES_ONLY)
        for uuid, reason in controller.observe_only_reasons().items():
            self._health.record(uuid, GpuHealth.OBSERVE_ONLY, reason)

    def run(self) -> None:
        """Serve until a signal stops the worker, then restore everything."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN if self._options.exits_with_daemon else lambda *_: self._stop())
        signal.set_wakeup_fd(self._daemon.wakeup_fd, warn_on_full_buffer=False)
        try:
            self._repair_journal()
        except JournalError as error:  # restores try again
            log(str(error))
        self._foreign.load()
        self._threads.start()
        self._settings.start()
        if isinstance(self._controller, HasErrorEvents):
            watch_xids(self._controller, self._health.record)
        self._restores.restore(RestoreRequest("left by an earlier run", self._uuids, is_daemon_ending=True))
        watchdog = Watchdog()
        notify("READY=1")
        while not self._is_stopping:
            self._daemon.serve(min(_TICK_S, watchdog.period_s or _TICK_S))
            self._watch()
            # The watchdog is for a main thread that hangs: a driver call that hangs is reported, not killed.
            watchdog.feed()
            is_orphaned = not self._daemon.is_connected and os.getppid() != self._options.parent_pid
            if self._options.exits_with_daemon and is_orphaned:
                break
        notify("STOPPING=1")
        self._settings.close()
        self._drop_requests(self._uuids)
        self._restores.restore(RestoreRequest("the worker stops", self._uuids, is_daemon_ending=True))
        self._is_ending = True
        self._threads.end_actuators()
        while self._threads.is_changing():  # what does not return is left to the sentinel
            self._watch()
            self._daemon.serve(0.01)
        self._watch()
        self._threads.close_samplers(timeout_s=1.0)
        self._daemon.close()

    # Main thread

    def _stop(self) -> None:
        self._is_stopping = True

    def _watch(self) -> None:
        """Supervise the driver threads, and start the restores that are due."""
        now_ns = time.monotonic_ns()
        if self._handover.has_expired(now_ns / _NS_PER_S):
            self._restore_all("no daemon claimed the leases in time")
        for uuid, state in self._threads.watch():
            match state:
                case CallState.LONG:  # the other GPUs of its restore do not wait for it
                    self._restores.fail_unreachable(uuid)
                case CallState.HANGING:
                    self._leases.end([uuid])
                case CallState.RETURNED:
                    self._restores.restore(RestoreRequest("its driver call returned", (uuid,)))
        if not self._is_ending:
            self._restores.restore_orphaned()
        self._restores.retry([uuid for uuid in self._uuids if self._leases.of(uuid) is None], now_ns)

    def _handle_daemon_lost(self) -> None:
        """Restore everything at once, unless the daemon handed its leases over to a successor."""
        # An observing worker has no lease to keep; the next one reads whether the mode has changed.
        ends = self._options.exits_with_daemon or self._options.observes_only
        if not ends and self._handover.begin(time.monotonic()):
            log("the daemon restarts; keeping its leases for the next one")
            return
        self._restore_all("the daemon is gone")
        if ends:
            self._stop()

    def _restore_all(self, reason: str, *, is_daemon_ending: bool = True) -> None:
        self._leases.end_all()
        self._drop_requests(self._uuids)
        self._restores.restore(RestoreRequest(reason, self._uuids, is_daemon_ending=is_daemon_ending))

    def _drop_requests(self, uuids: Sequence[str]) -> None:
        for uuid in uuids:
            self._threads.actuator(uuid).drop_requests()

    def _handle_process_end(self, lease_id: str, uuids: Sequence[str]) -> None:
        """Restore the GPUs of a process that has ended; the daemon will request the same and then gets the outcomes."""
        self._drop_requests(uuids)
        reason = f"a process of {lease_id} has ended"
        self._restores.restore(RestoreRequest(reason, tuple(uuids), is_ahead_of_daemon=True))

    def _handle(self, request_id: int | None, message: Message, fds: Sequence[int]) -> None:
        """Execute a command of the daemon: reply at once, or submit it to the actuator's thread."""
        reply: Reply | None = None
        try:
            if isinstance(message, AcquireLease):
                self._lease(request_id, message, fds)
                fds = ()
            else:
                reply = self._execute(request_id, message)
        except GpuEnergyError as error:
            if request_id is None:
                log(f"ignored {type(message).__name__}: {error}")
            reply = Failed(str(error))
        finally:
            close_all(fds)
        if reply is not None:
            self._reply(request_id, reply)

    def _execute(self, request_id: int | None, command: Message) -> Reply | None:  # noqa: C901  one case per command
        """Return the reply to a command, None where it follows later or there is none.

        Raises:
            GpuEnergyError: the command is refused.
        """
        match command:
            case RequestClock():
                self._request_clock(command)
            case Hello():
                return self._greet(command)
            case HandOver():
                self._handover.offer(command.token, command.keep_s)
                return Done()
            case Ping():
                return WorkerCounters(
                    num_late_ticks=self._threads.num_late_ticks,
                    num_samples_dropped=self._daemon.num_dropped,
                    num_sets_skipped=self._threads.num_skipped,
                )
            case SetPowerLimit() | LowerPowerLimit() | SetPowerProfile():
                if self._leases.of(command.gpu_uuid) != command.lease_id:
                    raise GpuError(f"lease {command.lease_id} does not cover {command.gpu_uuid}")
                self._health.require_changeable([command.gpu_uuid])
                self._submit(request_id, [command.gpu_uuid], partial(self._driver.execute, command))
            case ListProcesses() | TakeSnapshot():
                self._require_readable(command.gpu_uuid)
                self._submit(request_id, [command.gpu_uuid], partial(self._driver.execute, command))
            case Restore():
                self._restore(request_id, command)
            case ReleaseGpus():
                self._release(request_id, command)
            case ReopenGpus():
                self._health.require_known(command.gpu_uuids)
                self._submit(request_id, command.gpu_uuids, partial(self._maintenance.reopen, command.gpu_uuids))
            case _:
                raise ProtocolError(f"{type(command).__name__} is not a request")
        return None

    def _greet(self, request: Hello) -> Welcome:
        self._driver.rules = request.restore_rules
        self._settings.repeat()
        self._restores.restore_kept("the next daemon measures its jobs at full speed")
        result = self._handover.claim(request.token)
        if result is HandoverResult.WRONG_TOKEN:
            self._restore_all("a daemon without the handover's token connected", is_daemon_ending=False)
        return Welcome(
            pid=os.getpid(),
            sentinel_pid=self._sentinel_pid,
            has_taken_over=result is HandoverResult.TAKEN_OVER,
            identities=tuple(self._identities),
            health=self._health.current(),
            missing_capabilities=missing_capabilities(self._controller),
        )

    def _request_clock(self, message: RequestClock) -> None:
        uuid, request = message.gpu_uuid, message.request
        self._health.require_known([uuid])
        refusal = self._health.refusal(uuid)
        if self._leases.of(uuid) is None:
            refusal = "refused: no lease on this GPU"
        if refusal is None:
            self._threads.actuator(uuid).request_clock(request)
            return
        clock_mhz = request.first_sm_clock_mhz
        self._daemon.send(ClockChangeReport(uuid, clock_mhz, request.sent_mono_ns, 0, 0, None, None, refusal))

    def _lease(self, request_id: int | None, request: AcquireLease, pidfds: Sequence[int]) -> None:
        self._health.require_changeable(request.gpu_uuids)
        if request.sets_clocks:
            require_capability(self._controller, HasClocks)
        for uuid in request.gpu_uuids:
            holder = self._leases.of(uuid)
            if holder not in {None, request.lease_id, CEILING_LEASE}:
                raise GpuError(f"{uuid} is leased to {holder}")
        self._leases.grant(request.lease_id, request.gpu_uuids, pidfds)
        for uuid in request.gpu_uuids:
            self._restores.forget_early_outcomes(uuid)
        announce, open_each = partial(self._announce_lease, request), partial(self._open_lease, request)
        self._submit(request_id, request.gpu_uuids, announce, each=open_each)

    def _restore(self, request_id: int | None, request: Restore) -> None:
        self._health.require_known(request.gpu_uuids)
        self._leases.end(request.gpu_uuids)
        self._drop_requests(request.gpu_uuids)
        self._restores.restore(
            RestoreRequest(request.reason, request.gpu_uuids, request_id, is_daemon_ending=request.is_daemon_ending)
        )

    def _release(self, request_id: int | None, request: ReleaseGpus) -> None:
        self._health.require_known(request.gpu_uuids)
        require_capability(self._controller, HasRelease)
        for uuid in request.gpu_uuids:
            if self._health.is_wedged(uuid):
                raise GpuError(f"{self._health.refusal(uuid)}; only a restart of the GPU worker lets go of it")
        self._leases.end(request.gpu_uuids)
        self._drop_requests(request.gpu_uuids)
        held = tuple(uuid for uuid in request.gpu_uuids if not self._health.is_released(uuid))
        if held:
            self._restores.restore(RestoreRequest(request.reason, held))
        self._submit(request_id, request.gpu_uuids, partial(self._maintenance.release, request))

    def _require_readable(self, uuid: str) -> None:
        """Check that the driver can be asked about a GPU now, or raise GpuEnergyError."""
        self._health.require_known([uuid])
        if self._health.is_wedged(uuid):
            raise GpuError(str(self._health.refusal(uuid)))
        if self._threads.takes_long(uuid):
            raise GpuError(f"refused: a driver call of {uuid} takes long")

    def _submit(
        self,
        request_id: int | None,
        gpu_uuids: Sequence[str],
        last: Callable[[], Reply],
        *,
        each: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Have the actuators of these GPUs execute a command, and the last one reply."""
        actuators = {uuid: self._threads.actuator(uuid) for uuid in gpu_uuids}
        submit_jointly(actuators, each=each, last=last, reply=partial(self._reply, request_id))

    # Actuators' threads

    def _open_lease(self, request: AcquireLease, gpu_uuid: str) -> None:
        """Journal the state of one GPU; without a journal there is no lease."""
        try:
            try:
                self._driver.open_lease(request, gpu_uuid)
            except JournalError:
                self._repair_journal()
                self._driver.open_lease(request, gpu_uuid)
        except JournalError:
            self._leases.drop(request.gpu_uuids)
            raise

    def _announce_lease(self, request: AcquireLease) -> Done:
        for uuid in request.gpu_uuids:
            self._health.resolve(uuid, FOREIGN_CHANGE, "leased again after another program's change")
        return Done()

    def _handle_reopened(self, identities: Sequence[GpuIdentity]) -> None:
        """Use what the driver says of GPUs now."""
        found = {identity.gpu_uuid: plausible(identity) for identity in identities}
        for identity in found.values():
            self._gate.refresh(identity)
        self._identities = tuple(found.get(identity.gpu_uuid, identity) for identity in self._identities)

    # Any thread

    def _repair_journal(self) -> None:
        """Repair a damaged journal: have each GPU reset that it may have listed; raise JournalError if that fails."""
        world_path = None if self._options.world is None else str(self._options.world)
        what = repair_journal(self._journal, RepairingHost(self._uuids, self._options.driver, world_path))
        if what is not None:
            log(what)

    def _handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Send samples to the daemon in batches; check them for foreign clock changes and for the effect of resets."""
        for sample in samples:
            lock = self._threads.actuator(sample.gpu_uuid).lock_in_force()
            self._foreign.check(sample, lock)
            self._restores.check_reset(sample, lock)
        batch = self._batch.add(samples)
        if batch:
            self._daemon.send(Samples(batch))

    def _handle_settings(self, read: GpuSettingsRead) -> None:
        """Report settings; observe a GPU only while it is divided into instances, as some can be at any time."""
        self._daemon.send(read)
        uuid = read.gpu_uuid
        if read.details.is_mig_enabled is False:
            self._health.resolve(uuid, MIG_ENABLED, "MIG is disabled")
        elif read.details.is_mig_enabled and self._health.refusal(uuid) is None:
            self._health.record(uuid, GpuHealth.OBSERVE_ONLY, MIG_ENABLED)
            self._leases.drop([uuid])
            self._drop_requests([uuid])
            self._restores.restore(RestoreRequest(MIG_ENABLED, (uuid,)))

    def _handle_counter_reset(self, gpu_uuid: str) -> None:
        """Doubt our clock lock: a driver reload drops it and restarts the counter, but a counter may also be wrong."""
        if self._threads.actuator(gpu_uuid).doubt_lock():
            log(f"{gpu_uuid}: its energy counter fell; the next clock request is set even if it is the same")

    def _report_foreign_lock(self) -> None:
        """Have the settings reported at once, which name the locks of other programs."""
        self._settings.read_soon()

    def _report_health(self, change: GpuHealthChange) -> None:
        log(f"{change.gpu_uuid} is {change.health}: {change.detail}")
        self._daemon.send(change)

    def _reply(self, request_id: int | None, reply: Reply) -> None:
        """Send the reply to a request; a message without an id, such as a clock request, has none."""
        if request_id is not None:
            self._daemon.send(reply, request_id)
