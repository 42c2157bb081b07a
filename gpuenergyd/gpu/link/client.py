"""The daemon's connection to the GPU worker: sends commands, and delivers samples and other notices."""

import asyncio
import itertools
import os
import socket
import sys
from asyncio.trsock import TransportSocket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.errors import DriverError, GpuError, ProtocolError
from gpuenergyd.gpu.link.codec import MAX_DATAGRAM_BYTES, MAX_PIDFDS, decode, encode
from gpuenergyd.gpu.link.messages import (
    ClockChangeReport,
    Command,
    Failed,
    GpuHealth,
    GpuHealthChange,
    GpuSettingsRead,
    Hello,
    Message,
    Notice,
    ReplyT,
    RequestClock,
    Restore,
    Samples,
    Welcome,
)
from gpuenergyd.gpu.link.peer_credentials import peer_pid, peer_uid
from gpuenergyd.gpu.restore.policy import RestoreRules
from gpuenergyd.silence import Silence

_CONNECT_PAUSE_S = 0.01
_SHORTEST_WAIT_S = 0.05
_ELSEWHERE = "a process in another pid namespace"
_DATAGRAMS_PER_TURN = 4
"""Most datagrams handled per event loop turn: after a pause many are queued, and other tasks must run, too."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The link has ended, and no clock can be set until there is another worker."""

    reason: str


LinkEvent = Notice | WorkerLost


class WorkerLink:
    """A connection to the GPU worker."""

    welcome: Welcome
    """The worker's state when the connection began."""

    def __init__(self, connection: socket.socket, on_event: Callable[[LinkEvent], None]) -> None:
        """Take over a connection; `on_event` is called on the event loop, with `WorkerLost` once."""
        self._socket = connection
        self._worker_pid = peer_pid(connection)
        self._on_event = on_event
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
        on_event: Callable[[LinkEvent], None],
        *,
        rules: RestoreRules | None = None,
        timeout_s: float = 5.0,
        token: str = "",
        worker_pid: int | None = None,
    ) -> Self:
        """Connect to the worker, waiting until it listens.

        With the hand-over token of an earlier daemon, this one takes over its leases if the worker still keeps them.
        With `worker_pid`, wait until any other process that still listens has ended.

        Raises:
            DriverError: no worker listens in time.
            GpuError: the worker refuses or does not reply.
        """
        link = cls(await _connect(path, timeout_s, worker_pid), on_event)
        try:
            link.welcome = await link.do(Hello(token, rules or RestoreRules()))
            link._worker_pid = link.welcome.pid
        except BaseException:
            await link.close()
            raise
        for change in link.welcome.health:
            if change.health is not GpuHealth.OK:
                on_event(change)
        return link

    @property
    def is_open(self) -> bool:
        """Whether the worker can be reached."""
        return self._is_open

    async def do(self, command: Command[ReplyT], pidfds: Sequence[int] = ()) -> ReplyT:
        """Send a command and return the worker's reply; a restore drops pending clock requests for its GPUs.

        `pidfds` are those of a lease's processes: when one ends, the worker restores the GPUs on its own.

        Raises:
            GpuError: the worker refuses, does not reply in time, or is gone; it restores when the link is cut.
        """
        if not self._is_open:
            raise GpuError("the GPU worker is gone")
        wanted: Command[Any] = command
        if isinstance(wanted, Restore):
            for uuid in wanted.gpu_uuids:
                self._unsent_clock_requests.pop(uuid, None)
        name = type(command).__name__
        request_id = next(self._request_ids)
        self._replies[request_id] = self._loop.create_future()
        # Copied, because the caller may close its pidfds before a full socket accepts the datagram.
        self._unsent.append(_Unsent(encode(command, request_id), [os.dup(fd) for fd in pidfds[:MAX_PIDFDS]]))
        self._write()
        try:
            reply = await self._reply_within(command.limit_s, self._replies[request_id])
        except TimeoutError:
            raise GpuError(f"the GPU worker did not reply to {name} within {command.limit_s:g} s") from None
        finally:
            self._replies.pop(request_id, None)
        if isinstance(reply, Failed):
            raise GpuError(f"the GPU worker refused {name}: {reply.error}")
        if not isinstance(reply, command.reply_type()):
            raise GpuError(f"the GPU worker replied to {name} with {type(reply).__name__}")
        return reply

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request a clock, replacing an unsent request for that GPU; returns at once."""
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

    async def close(self) -> None:
        """Cut the link; the worker then restores every GPU, unless the leases were handed over."""
        if self._is_open:
            self._is_open = False
            self._release("the link to the GPU worker is closed")

    async def _reply_within(self, limit_s: float, reply: asyncio.Future[Message]) -> Message:
        """Return a reply, or raise TimeoutError after `limit_s` without one, not counting the worker's CPU waits."""
        silence = Silence(self._worker_pid)
        while not reply.done():
            left_s = silence.left_s(limit_s)
            if left_s <= 0:
                self._read()  # a reply may have arrived while this process was busy
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
            case Samples() | ClockChangeReport() | GpuHealthChange() | GpuSettingsRead():
                self._on_event(message)
            case Failed() if request_id is None:
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
            self._on_event(WorkerLost(reason))

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
    """A datagram that waits for the socket, and the pidfds sent with it."""

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
                # The worker of a killed daemon, which restores its GPUs and then ends.
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
    """Wait until a process has ended; only briefly if it is in another pid namespace, so that its pid reads as 0."""
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
