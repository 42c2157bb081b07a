"""The GPU worker: the one process that may change GPUs. It obeys one core, and restores when that core is gone.

    python -I -m gpuenergyd.gpu.worker --link PATH --journal PATH --driver simulated|nvml [--world PATH]

Standard library and the driver only. The main thread talks to the core and never calls the driver; the actuator's
thread makes all changes and writes the journal; the sampler's thread reads.
"""

import argparse
import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuenergyd.errors import GpuEnergyError, JournalError, ProtocolError, UsageError
from gpuenergyd.gpu.actuator import Actuator
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.drivers import DRIVERS, open_driver
from gpuenergyd.gpu.journal import Control, DamagedJournalError, Journal, JournalEntry, KnownBy
from gpuenergyd.gpu.link_messages import (
    LINK_VERSION,
    MAX_DATAGRAM_BYTES,
    ClockSet,
    GpuHealth,
    GpuSample,
    LeaseOwner,
    clock_set_row,
    decode,
    encode,
    identity_row,
    sample_row,
)
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.gpu.restoring import RestoreOutcome, RestoreResult, reset_every_gpu, restore_from_journal
from gpuenergyd.gpu.sampling import Sampler

_SAMPLES_EVERY_NS = 100_000_000
_MAX_SAMPLES_PER_DATAGRAM = 256
_MAX_WAITING_DATAGRAMS = 2_000
_TICK_S = 0.25
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0
_PEERCRED = struct.Struct("3i")


class Worker:
    """What the main thread owns: the socket, the leases, and what is to be told to the core."""

    def __init__(
        self,
        *,
        controller: GpuController,
        journal: Journal,
        driver: str,
        world_path: Path | None,
        link_path: Path,
        sample_period_s: float,
        core_uid: int | None,
        exits_with_core: bool,
        baseline_sm_clock_mhz: int | None,
    ) -> None:
        self._controller = controller
        self._journal = journal
        self._driver = driver
        self._world_path = world_path
        self._core_uids = {0, os.geteuid()} if core_uid is None else {0, core_uid}
        self._exits_with_core = exits_with_core
        self._baseline_sm_clock_mhz = baseline_sm_clock_mhz
        self._parent_pid = os.getppid()
        self._identities = controller.identities()
        self._uuids = tuple(i.gpu_uuid for i in self._identities)
        self._leases: dict[str, str] = {}
        self._health = dict.fromkeys(self._uuids, (GpuHealth.OK, ""))
        self._waiting: deque[bytes] = deque()
        self._samples: list[list[Any]] = []
        self._samples_sent_ns = 0
        self._num_dropped = 0
        self._is_stopping = False
        self._retry_pause_s = _FIRST_RETRY_S
        self._retry_at_ns = 0
        self._guard = threading.Lock()
        self._link_path = link_path
        self._listener = _listen(link_path)
        self._core: socket.socket | None = None
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakeups)
        self._sampler = Sampler(
            controller, self._uuids, sample_period_s, self._queue_samples, self._queue_clock_set, self._set_health
        )
        self._actuator = Actuator(controller, journal, self._identities, self._clock_was_set, self._set_health)

    def run(self) -> None:
        """Serve until told to stop, then restore everything."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN if self._exits_with_core else lambda *_: self._stop())
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        self._sampler.start()
        self._actuator.start()
        self._actuator.command(lambda: self._report(self._restore(None), "what an earlier run left behind"))
        while not self._is_stopping:
            for key, events in self._selector.select(_TICK_S):
                key.data(events)
            self._flush()
            self._retry_restores()
            if self._exits_with_core and self._core is None and os.getppid() != self._parent_pid:
                break
        self._actuator.drop_wishes(self._uuids)
        self._actuator.command(lambda: self._report(self._restore(None), "the worker stops"))
        self._actuator.close(timeout_s=30.0)
        self._sampler.close(timeout_s=1.0)
        with contextlib.suppress(OSError):
            self._link_path.unlink()

    # Main thread: the core's socket

    def _stop(self) -> None:
        self._is_stopping = True

    def _drain_wakeups(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _accept(self, _events: int) -> None:
        connection, _ = self._listener.accept()
        _, uid, _ = _PEERCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        refusal = None
        if uid not in self._core_uids:
            refusal = f"uid {uid} may not command this worker; uids {sorted(self._core_uids)} may"
        elif self._core is not None:
            refusal = "another core is connected"
        connection.setblocking(False)
        if refusal is not None:
            _log(f"refused a connection: {refusal}")
            with contextlib.suppress(OSError):
                connection.send(encode({"type": "refused", "error": refusal}))
            connection.close()
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._core = connection
        self._selector.register(connection, selectors.EVENT_READ, self._on_core)

    def _on_core(self, events: int) -> None:
        connection = self._core
        if connection is None or not events & selectors.EVENT_READ:
            return
        while True:
            try:
                datagram = connection.recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:
                datagram = b""
            if not datagram:
                self._lose_core()
                return
            try:
                self._handle(decode(datagram))
            except (ProtocolError, KeyError, TypeError, ValueError) as error:
                _log(f"ignored a malformed message: {error!r}")

    def _lose_core(self) -> None:
        """Put everything back at once: nobody is left who could."""
        if self._core is None:
            return
        self._selector.unregister(self._core)
        self._core.close()
        self._core = None
        self._leases.clear()
        with self._guard:
            self._waiting.clear()
        self._actuator.drop_wishes(self._uuids)
        self._actuator.command(lambda: self._report(self._restore(None), "the core is gone"))
        if self._exits_with_core:
            self._stop()

    def _flush(self) -> None:
        """Send what waits; keep what the socket does not take now."""
        while self._core is not None:
            with self._guard:
                if not self._waiting:
                    break
                datagram = self._waiting.popleft()
            try:
                self._core.send(datagram)
            except BlockingIOError:
                with self._guard:
                    self._waiting.appendleft(datagram)
                self._selector.modify(self._core, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_core)
                return
            except OSError:
                self._lose_core()
                return
        if self._core is not None:
            self._selector.modify(self._core, selectors.EVENT_READ, self._on_core)

    def _handle(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "want":
                self._want(message)
            case "hello":
                self._reply(
                    message,
                    link_version=LINK_VERSION,
                    driver=self._driver,
                    identities=[identity_row(i) for i in self._identities],
                    health=[[uuid, health, detail] for uuid, (health, detail) in self._health.items()],
                )
            case "ping":
                self._reply(
                    message,
                    num_late_ticks=self._sampler.num_late_ticks,
                    num_samples_dropped=self._num_dropped,
                    num_sets_skipped=self._actuator.num_skipped,
                )
            case "lease":
                self._lease(message)
            case "restore":
                uuids = self._known(message["gpu_uuids"])
                for uuid in uuids:
                    self._leases.pop(uuid, None)
                self._actuator.drop_wishes(uuids)
                self._actuator.command(lambda: self._restore_and_reply(message, uuids))
            case other:
                self._reply(message, error=f"no message type {other!r}")

    def _want(self, message: dict[str, Any]) -> None:
        uuid = message["gpu_uuid"]
        clock_mhz, later_mhz = int(message["sm_clock_mhz"]), int(message["later_sm_clock_mhz"])
        asked_ns, later_ns = int(message["asked_mono_ns"]), int(message["later_at_mono_ns"])
        if uuid not in self._leases:
            self._queue_clock_set(
                ClockSet(uuid, clock_mhz or later_mhz, asked_ns, 0, 0, None, None, "refused: no lease on this GPU")
            )
            return
        self._actuator.wish(
            uuid, clock_mhz, later_sm_clock_mhz=later_mhz, later_at_mono_ns=later_ns, asked_mono_ns=asked_ns
        )

    def _lease(self, message: dict[str, Any]) -> None:
        lease_id, uuids = str(message["lease_id"]), self._known(message["gpu_uuids"])
        owner = LeaseOwner(str(message["job_id"]), int(message["pid"]), int(message["uid"]))
        for uuid in uuids:
            if self._leases.get(uuid, lease_id) != lease_id:
                self._reply(message, error=f"{uuid} is leased to {self._leases[uuid]}")
                return
        for uuid in uuids:
            self._leases[uuid] = lease_id
        self._actuator.command(lambda: self._journal_and_reply(message, lease_id, uuids, owner))

    def _known(self, uuids: Sequence[str]) -> tuple[str, ...]:
        unknown = [u for u in uuids if u not in self._health]
        if unknown:
            raise ProtocolError(f"no GPU {unknown[0]!r}; there are: {', '.join(self._uuids)}")
        return tuple(uuids)

    def _reply(self, message: dict[str, Any], **answer: Any) -> None:
        self._queue({"type": "reply", "request_id": message.get("request_id"), **answer})

    # Actuator's thread

    def _journal_and_reply(
        self, message: dict[str, Any], lease_id: str, uuids: Sequence[str], owner: LeaseOwner
    ) -> None:
        baseline = self._baseline_sm_clock_mhz
        entries = [
            JournalEntry(
                gpu_uuid=uuid,
                control=Control.SM_CLOCK_LOCK,
                saved_value=baseline,
                known_by=KnownBy.ASSUMED_DEFAULT if baseline is None else KnownBy.CONFIGURED,
                lease_id=lease_id,
                job_id=owner.job_id,
                owner_pid=owner.pid,
                owner_uid=owner.uid,
                owner_start_ticks=process_start_ticks(owner.pid),
                driver=self._driver,
                world_path=None if self._world_path is None else str(self._world_path),
                recorded_boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            )
            for uuid in uuids
        ]
        try:
            self._journal.add(entries)
        except JournalError as error:
            for uuid in uuids:
                self._leases.pop(uuid, None)
            self._reply(message, error=str(error))
            return
        self._reply(message)

    def _restore_and_reply(self, message: dict[str, Any], uuids: Sequence[str]) -> None:
        outcomes = self._restore(uuids)
        self._reply(message, outcomes=[[o.gpu_uuid, o.control, o.result, o.detail] for o in outcomes])

    def _restore(self, uuids: Sequence[str] | None) -> tuple[RestoreOutcome, ...]:
        try:
            outcomes = restore_from_journal(self._journal, self._controller, driver=self._driver, gpu_uuids=uuids)
        except DamagedJournalError as error:
            _log(f"{error}; it is now {self._journal.set_aside()}, and every GPU is reset")
            outcomes = reset_every_gpu(self._controller)
        except JournalError as error:
            _log(f"cannot restore: {error}")
            return tuple(
                RestoreOutcome(u, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, str(error)) for u in uuids or self._uuids
            )
        for outcome in outcomes:
            if outcome.result is RestoreResult.FAILED:
                self._set_health(outcome.gpu_uuid, GpuHealth.UNRESTORED, outcome.detail)
            elif self._health[outcome.gpu_uuid][0] is GpuHealth.UNRESTORED:
                self._set_health(outcome.gpu_uuid, GpuHealth.OK, "restored at last")
        return outcomes

    def _retry_restores(self) -> None:
        """Try again, less and less often, what could not be restored."""
        left = [u for u in self._uuids if self._health[u][0] is GpuHealth.UNRESTORED and u not in self._leases]
        now_ns = time.monotonic_ns()
        if not left:
            self._retry_pause_s = _FIRST_RETRY_S
            self._retry_at_ns = now_ns + round(self._retry_pause_s * 1e9)
        elif now_ns >= self._retry_at_ns:
            self._retry_pause_s = min(2 * self._retry_pause_s, _LAST_RETRY_S)
            self._retry_at_ns = now_ns + round(self._retry_pause_s * 1e9)
            self._actuator.command(lambda: self._report(self._restore(left), "tried again"))

    @staticmethod
    def _report(outcomes: Sequence[RestoreOutcome], why: str) -> None:
        for outcome in outcomes:
            _log(f"{why}: {outcome.gpu_uuid} {outcome.control} {outcome.result}: {outcome.detail}")

    def _clock_was_set(self, change: ClockSet) -> None:
        if change.error is None:
            self._sampler.await_effect(change)
        else:
            self._queue_clock_set(change)

    # Any thread

    def _queue_clock_set(self, change: ClockSet) -> None:
        self._queue({"type": "clock_set", "row": clock_set_row(change)})

    def _set_health(self, gpu_uuid: str, health: GpuHealth, detail: str) -> None:
        if self._health.get(gpu_uuid, (None,))[0] is health:
            return
        self._health[gpu_uuid] = (health, detail)
        _log(f"{gpu_uuid} is {health}: {detail}")
        self._queue({"type": "gpu_state", "gpu_uuid": gpu_uuid, "health": health, "detail": detail})

    def _queue_samples(self, samples: Sequence[GpuSample]) -> None:
        self._samples += [sample_row(s) for s in samples]
        now_ns = time.monotonic_ns()
        is_due = now_ns - self._samples_sent_ns >= _SAMPLES_EVERY_NS
        if is_due or len(self._samples) >= _MAX_SAMPLES_PER_DATAGRAM:
            rows, self._samples = self._samples, []
            self._samples_sent_ns = now_ns
            self._queue({"type": "samples", "rows": rows})

    def _queue(self, message: dict[str, Any]) -> None:
        if self._core is None:
            return
        with self._guard:
            if len(self._waiting) >= _MAX_WAITING_DATAGRAMS and message["type"] == "samples":
                self._num_dropped += len(message["rows"])
                return
            self._waiting.append(encode(message))
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"\0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker."""
    parser = argparse.ArgumentParser(prog="gpuenergyd-worker", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--link", type=Path, required=True, help="Unix socket the core connects to")
    parser.add_argument("--journal", type=Path, required=True, help="restore journal, in a folder of our own")
    parser.add_argument("--driver", choices=DRIVERS, required=True)
    parser.add_argument("--world", type=Path, help="file with the simulated GPUs")
    parser.add_argument("--sample-period-s", type=float, default=0.02)
    parser.add_argument("--core-uid", type=int, help="uid of the core where it is not our own")
    parser.add_argument("--exit-with-core", action="store_true", help="end when the core or the parent is gone")
    parser.add_argument("--baseline-sm-clock-mhz", type=int, help="lock to put back instead of none")
    options = parser.parse_args(arguments)
    try:
        if not 0.001 <= options.sample_period_s <= 10.0:
            raise UsageError(f"--sample-period-s {options.sample_period_s} must be between 0.001 and 10")
        Worker(
            controller=open_driver(options.driver, options.world),
            journal=Journal(options.journal),
            driver=options.driver,
            world_path=options.world,
            link_path=options.link,
            sample_period_s=options.sample_period_s,
            core_uid=options.core_uid,
            exits_with_core=options.exit_with_core,
            baseline_sm_clock_mhz=options.baseline_sm_clock_mhz,
        ).run()
    except GpuEnergyError as error:
        _log(str(error))
        return error.exit_code
    return 0


def _listen(path: Path) -> socket.socket:
    """Return the listening socket; a socket file nobody answers on is removed, anything else is left alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    if os.path.lexists(path):
        if path.is_symlink() or not path.is_socket():
            raise UsageError(f"{path} exists and is no socket; choose another --link path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise UsageError(f"a worker already listens on {path}")
    mask = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise UsageError(f"cannot listen on {path}: {error.strerror}") from None
    finally:
        os.umask(mask)
    listener.listen(4)
    return listener


def _log(line: str) -> None:
    sys.stderr.write(f"gpuenergyd-worker: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
