"""Connection of the daemon to the GPU worker: sends requests, delivers samples, clock changes and health changes."""

import asyncio
import itertools
import os
import socket
import sys
from asyncio.trsock import TransportSocket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.errors import DriverError, GpuError, ProtocolError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.codec import MAX_DATAGRAM_BYTES, MAX_PIDFDS, decode, encode
from gpuenergyd.gpu.link.messages import (
    AcquireLease,
    ClockChangeReport,
    Done,
    Failed,
    GpuHealth,
    GpuHealthChange,
    GpuProcesses,
    GpuSample,
    GpuSettingsRead,
    GpuSnapshot,
    HandOver,
    Hello,
    LeaseOwner,
    ListProcesses,
    LowerPowerLimit,
    Message,
    Ping,
    PowerLimit,
    PowerProfiles,
    Refused,
    ReleaseGpus,
    Reopened,
    ReopenGpus,
    Reply,
    Request,
    RequestClock,
    Restore,
    Restored,
    Samples,
    SetPowerLimit,
    SetPowerProfile,
    TakeSnapshot,
    Welcome,
    WorkerCounters,
)
from gpuenergyd.gpu.link.peer_credentials import peer_pid, peer_uid
from gpuenergyd.gpu.restore.executor import RestoreOutcome
from gpuenergyd.gpu.restore.policy import RestoreRules
from gpuenergyd.silence import Silence

_REPLY_LIMIT_S = 5.0
_RESTORE_LIMIT_S = 35.0
_CONNECT_PAUSE_S = 0.01
_SHORTEST_WAIT_S = 0.05
_ELSEWHERE = "a process in another pid namespace"
_DATAGRAMS_PER_TURN = 4
"""After a pause many are queued, and other tasks need the event loop too."""

_ReplyT = TypeVar("_ReplyT", bound=Reply)


class GpuListener(Protocol):
    """Receiver of the worker's observations; called on the event loop."""

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Process readings."""
        ...

    def handle_clock_change(self, change: ClockChangeReport) -> None:
        """Process a clock change."""
        ...

    def handle_gpu_health(self, change: GpuHealthChange) -> None:
        """Process a GPU's new health."""
        ...

    def handle_gpu_settings(self, read: GpuSettingsRead) -> None:
        """Process what is set on a GPU now."""
        ...


class LinkListener(GpuListener, Protocol):
    """Receiver of all events of a link; called on the event loop."""

    def handle_link_lost(self, reason: str) -> None:
        """React to the loss of the worker; called once."""
        ...


class WorkerLink:
    """A connection to the GPU worker."""

    welcome: Welcome
    """The worker's state when the connection began."""

    def __init__(self, connection: socket.socket, listener: LinkListener) -> None:
        self._socket = connection
        self._worker_pid = peer_pid(connection)
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._request_ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._unsent: deque[_Unsent] = deque()
        self._unsent_clock_requests: dict[str, bytes] = {}
        self._is_open = True
        self._loop.add_reader(connection, self._read, _DATAGRAMS_PER_TURN)

    @classmethod
    async def connect(
        cls,
        path: Path,
        listener: LinkListener,
        *,
        rules: RestoreRules | None = None,
        timeout_s: float = 5.0,
        token: str = "",
        worker_pid: int | None = None,
    ) -> Self:
        """Connect to the worker, waiting until it listens.

        With the token of a daemon that handed over, its leases go to this one if the worker still keeps them. With the
        pid of the worker, another process that still listens is waited for until it has ended.

        Raises:
            DriverError: no worker listens in time.
            GpuError: the worker refuses or does not reply.
        """
        link = cls(await _connect(path, timeout_s, worker_pid), listener)
        try:
            link.welcome = await link._ask(Hello(token, rules or RestoreRules()), Welcome)
            link._worker_pid = link.welcome.pid
        except BaseException:
            await link.close()
            raise
        for change in link.welcome.health:
            if change.health is not GpuHealth.OK:
                listener.handle_gpu_health(change)
        return link

    @property
    def is_open(self) -> bool:
        """Whether the worker can be reached."""
        return self._is_open

    async def lease(
        self,
        lease_id: str,
        gpu_uuids: Sequence[str],
        owner: LeaseOwner,
        pidfds: Sequence[int] = (),
        *,
        sets_clocks: bool = True,
    ) -> None:
        """Acquire a lease on GPUs; once it returns, the journal has their state.

        When a process behind one of the pidfds ends, the worker restores the GPUs on its own.

        Raises:
            GpuError: refused, or the worker is gone.
        """
        await self._ask(AcquireLease(lease_id, tuple(gpu_uuids), owner, sets_clocks), Done, pidfds=pidfds)

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request a clock; returns at once. It replaces an unsent request for that GPU."""
        if not self._is_open:
            return
        datagram = encode(RequestClock(gpu_uuid, request))
        if self._unsent_clock_requests or self._unsent:
            self._delay(gpu_uuid, datagram)
            return
        try:
            self._socket.send(datagram)
        except BlockingIOError:
            self._delay(gpu_uuid, datagram)
        except OSError as error:
            self._lose(f"lost the GPU worker: {error.strerror}")

    async def set_power_limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        """Set a power limit under a lease, and return the limit that was read back.

        Raises:
            GpuError: refused, or the worker is gone.
        """
        request = SetPowerLimit(lease_id, gpu_uuid, power_limit_w, owner)
        return (await self._ask(request, PowerLimit, limit_s=_RESTORE_LIMIT_S)).power_limit_w

    async def lower_power_limit(
        self, lease_id: str, gpu_uuid: str, power_limit_w: float | None, owner: LeaseOwner
    ) -> float:
        """Lower a power limit under a lease, or return to the one before it (None); return the limit read back.

        Raises:
            GpuError: refused, or the worker is gone.
        """
        request = LowerPowerLimit(lease_id, gpu_uuid, power_limit_w, owner)
        return (await self._ask(request, PowerLimit, limit_s=_RESTORE_LIMIT_S)).power_limit_w

    async def set_power_profile(
        self, lease_id: str, gpu_uuid: str, power_profile: int | None, owner: LeaseOwner
    ) -> tuple[int, ...]:
        """Add a workload power profile under a lease, or remove ours (None); return the requested ones read back.

        Raises:
            GpuError: refused, or the worker is gone.
        """
        request = SetPowerProfile(lease_id, gpu_uuid, power_profile, owner)
        return (await self._ask(request, PowerProfiles, limit_s=_RESTORE_LIMIT_S)).requested

    async def restore(
        self, gpu_uuids: Sequence[str], reason: str, *, is_daemon_ending: bool = False
    ) -> tuple[RestoreOutcome, ...]:
        """Restore GPUs and end their leases; pending clock requests are dropped.

        When the daemon ends, clocks that the restore rules keep stay as they are.

        Raises:
            GpuError: the worker is gone or does not reply; it restores on its own when the link is cut.
        """
        for uuid in gpu_uuids:
            self._unsent_clock_requests.pop(uuid, None)
        request = Restore(tuple(gpu_uuids), reason, is_daemon_ending)
        return (await self._ask(request, Restored, limit_s=_RESTORE_LIMIT_S)).outcomes

    async def release_gpus(self, gpu_uuids: Sequence[str], reason: str) -> None:
        """Restore GPUs, end their leases and let go of their driver handles.

        Raises:
            GpuError: a driver call for one of them does not return, or the worker is gone.
        """
        await self._ask(ReleaseGpus(tuple(gpu_uuids), reason), Done, limit_s=_RESTORE_LIMIT_S)

    async def reopen_gpus(self, gpu_uuids: Sequence[str]) -> tuple[GpuIdentity, ...]:
        """Open released GPUs again; return their identities, which may have changed.

        Raises:
            GpuError: the driver or a GPU is not there, or the worker is gone; missing GPUs stay released.
        """
        return (await self._ask(ReopenGpus(tuple(gpu_uuids)), Reopened, limit_s=_RESTORE_LIMIT_S)).identities

    async def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of the processes that compute on a GPU.

        Raises:
            GpuError: the driver does not report them, or the worker is gone.
        """
        return (await self._ask(ListProcesses(gpu_uuid), GpuProcesses)).pids

    async def snapshot(self, gpu_uuid: str) -> GpuSnapshot:
        """Read a GPU and its settings now.

        Raises:
            GpuError: the driver does not report them, or the worker is gone.
        """
        return await self._ask(TakeSnapshot(gpu_uuid), GpuSnapshot)

    async def ping(self) -> WorkerCounters:
        """Return the worker's counters; its main thread replies without calling the driver.

        Raises:
            GpuError: no reply in time.
        """
        return await self._ask(Ping(), WorkerCounters)

    async def hand_over(self, token: str, keep_s: float) -> None:
        """Have the worker keep all leases for `keep_s` after this link ends, for the daemon with the token.

        Raises:
            GpuError: refused; the worker then restores at once when the link ends.
        """
        await self._ask(HandOver(token, keep_s), Done)

    async def close(self) -> None:
        """Cut the link; the worker then restores every GPU, unless the leases were handed over."""
        if self._is_open:
            self._is_open = False
            self._release("the link to the GPU worker is closed")

    async def _ask(
        self,
        request: Request,
        reply_type: type[_ReplyT],
        *,
        limit_s: float = _REPLY_LIMIT_S,
        pidfds: Sequence[int] = (),
    ) -> _ReplyT:
        """Send a request and return its reply."""
        if not self._is_open:
            raise GpuError("the GPU worker is gone")
        name = type(request).__name__
        request_id = next(self._request_ids)
        self._replies[request_id] = self._loop.create_future()
        # Own copies: the caller may close its pidfds before a full socket accepts the datagram.
        self._unsent.append(_Unsent(encode(request, request_id), [os.dup(fd) for fd in pidfds[:MAX_PIDFDS]]))
        self._write()
        try:
            reply = await self._reply_within(limit_s, self._replies[request_id])
        except TimeoutError:
            raise GpuError(f"the GPU worker did not reply to {name} within {limit_s:g} s") from None
        finally:
            self._replies.pop(request_id, None)
        if isinstance(reply, Failed):
            raise GpuError(f"the GPU worker refused {name}: {reply.error}")
        if not isinstance(reply, reply_type):
            raise GpuError(f"the GPU worker replied to {name} with {type(reply).__name__}")
        return reply

    async def _reply_within(self, limit_s: float, reply: asyncio.Future[Message]) -> Message:
        """Return a reply, or raise TimeoutError after a silence, without the time it waits for a CPU."""
        silence = Silence(self._worker_pid)
        while not reply.done():
            left_s = silence.left_s(limit_s)
            if left_s <= 0:
                self._read()  # what arrived while this process had no time for it
                if not reply.done():
                    raise TimeoutError
            else:
                await asyncio.wait({reply}, timeout=max(left_s, _SHORTEST_WAIT_S))
        return reply.result()

    def _delay(self, gpu_uuid: str, datagram: bytes) -> None:
        self._unsent_clock_requests[gpu_uuid] = datagram
        self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        try:
            while self._unsent:
                unsent = self._unsent[0]
                socket.send_fds(self._socket, [unsent.datagram], unsent.pidfds)
                self._unsent.popleft().close_pidfds()
            while self._unsent_clock_requests:
                uuid = next(iter(self._unsent_clock_requests))
                self._socket.send(self._unsent_clock_requests[uuid])
                del self._unsent_clock_requests[uuid]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError as error:
            self._read()
            self._lose(f"lost the GPU worker: {error.strerror}")
            return
        self._loop.remove_writer(self._socket)

    def _read(self, num_datagrams: int = sys.maxsize) -> None:
        was_reset = False
        for _ in range(num_datagrams):
            if not self._is_open:
                return
            try:
                datagram = self._socket.recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if isinstance(error, ConnectionResetError) and not was_reset:
                    was_reset = True  # what the worker sent before it closed can still be read
                    continue
                self._lose(f"lost the GPU worker: {error.strerror}")
                return
            if not datagram:
                self._lose("the GPU worker closed the link")
                return
            try:
                self._dispatch(*decode(datagram))
            except ProtocolError as error:
                self._lose(f"invalid message from the GPU worker: {error}")

    def _dispatch(self, request_id: int | None, message: Message) -> None:
        match message:
            case Samples():
                self._listener.handle_samples(message.samples)
            case ClockChangeReport():
                self._listener.handle_clock_change(message)
            case GpuHealthChange():
                self._listener.handle_gpu_health(message)
            case GpuSettingsRead():
                self._listener.handle_gpu_settings(message)
            case Refused():
                self._lose(f"the GPU worker refused the connection: {message.error}")
            case _ if request_id is not None:
                reply = self._replies.get(request_id)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} without a request id")

    def _lose(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            self._release(reason)
            self._listener.handle_link_lost(reason)

    def _release(self, reason: str) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        while self._unsent:
            self._unsent.popleft().close_pidfds()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(GpuError(reason))


def require_trusted_listener(connection: socket.socket | TransportSocket, path: Path) -> None:
    """Check that the peer is the service manager or a process of our own user.

    Raises:
        DriverError: a process of another user listens.
    """
    uid = peer_uid(connection)
    if uid not in {0, os.geteuid()}:
        raise DriverError(f"{path} is served by uid {uid}; expected root or uid {os.geteuid()}")


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A datagram that waits for the socket, and the pidfds that travel with it."""

    datagram: bytes
    pidfds: Sequence[int]

    def close_pidfds(self) -> None:
        for fd in self.pidfds:
            os.close(fd)


async def _connect(path: Path, timeout_s: float, worker_pid: int | None) -> socket.socket:
    failure = "it does not exist"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    connection = _connected(path)
                except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
                    failure = str(error.strerror)
                    await asyncio.sleep(_CONNECT_PAUSE_S)
                    continue
                except OSError as error:
                    raise DriverError(f"cannot reach the GPU worker at {path}: {error.strerror}") from None
                listener_pid = peer_pid(connection)
                if worker_pid in {None, listener_pid}:
                    return connection
                # The worker of a daemon that was killed: it restores its GPUs, then ends.
                connection.close()
                which = f"process {listener_pid} of an earlier daemon" if listener_pid else _ELSEWHERE
                failure = f"{which} still listens"
                await _ended(listener_pid)
    except TimeoutError:
        raise DriverError(f"no GPU worker at {path} within {timeout_s:g} s: {failure}") from None


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.connect(str(path))
        require_trusted_listener(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


async def _ended(pid: int) -> None:
    """Wait until a process has ended; only a moment if it is in another pid namespace, where its pid is 0 here."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:
        await asyncio.sleep(_CONNECT_PAUSE_S)
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
