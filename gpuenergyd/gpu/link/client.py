"""The core's side of the GPU worker: leases, wishes, restores out; samples and clock changes in."""

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
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import (
    LINK_VERSION,
    MAX_DATAGRAM_BYTES,
    MAX_PIDFDS,
    PEERCRED,
    ClockSet,
    GpuHealth,
    GpuSample,
    GpuStateChange,
    LeaseOwner,
    clock_request_row,
    decode,
    encode,
    identity_from_row,
)
from gpuenergyd.gpu.link.queries import GpuLook, look_from_answer
from gpuenergyd.gpu.restore.executor import RestoreOutcome, RestoreResult
from gpuenergyd.gpu.restore.journal import Control
from gpuenergyd.gpu.restore.policy import RestoreRules

__all__ = [
    "ClockSet",
    "GpuHealth",
    "GpuLook",
    "GpuSample",
    "GpuStateChange",
    "LeaseOwner",
    "RestoreOutcome",
    "RestoreResult",
    "WorkerLink",
]

_REPLY_LIMIT_S = 5.0
_RESTORE_LIMIT_S = 35.0
_CONNECT_PAUSE_S = 0.01
_DATAGRAMS_PER_TURN = 4


class WorkerLink:
    """A connection to the worker. Callbacks run on the event loop; `on_lost` gets the reason, once."""

    identities: tuple[GpuIdentity, ...]
    worker_pid: int | None
    keeper_pid: int | None
    """The process that restores when the worker is killed."""
    has_taken_over: bool
    """Whether the leases of an earlier core are ours."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_samples: Callable[[Sequence[GpuSample]], None],
        on_clock_set: Callable[[ClockSet], None],
        on_gpu_state: Callable[[GpuStateChange], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.identities = ()
        self.worker_pid = None
        self.keeper_pid = None
        self.has_taken_over = False
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._on_samples = on_samples
        self._on_clock_set = on_clock_set
        self._on_gpu_state = on_gpu_state
        self._on_lost = on_lost
        self._request_ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._requests: deque[_Request] = deque()
        self._wants: dict[str, bytes] = {}
        self._is_open = True
        self._loop.add_reader(connection, self._read_some)

    @classmethod
    async def connect(
        cls,
        path: Path,
        *,
        on_samples: Callable[[Sequence[GpuSample]], None],
        on_clock_set: Callable[[ClockSet], None],
        on_gpu_state: Callable[[GpuStateChange], None],
        on_lost: Callable[[str], None],
        rules: RestoreRules | None = None,
        timeout_s: float = 5.0,
        token: str = "",
    ) -> Self:
        """Connect to the worker, waiting for it to begin to listen, and learn which GPUs there are.

        With the token of a core that handed over, its leases are ours, if the worker has kept them.

        Raises:
            DriverError: nobody answers in time, or the worker refuses.
        """
        connection = await _connect(path, timeout_s)
        link = cls(
            connection, on_samples=on_samples, on_clock_set=on_clock_set, on_gpu_state=on_gpu_state, on_lost=on_lost
        )
        try:
            reply = await link._request(
                "hello",
                _REPLY_LIMIT_S,
                link_version=LINK_VERSION,
                token=token,
                restore_rules=(rules or RestoreRules()).as_row(),
            )
        except BaseException:
            await link.close()
            raise
        if reply["link_version"] != LINK_VERSION:
            await link.close()
            raise DriverError(f"the GPU worker speaks version {reply['link_version']}; {LINK_VERSION} is expected")
        link.has_taken_over = bool(reply["has_taken_over"])
        link.worker_pid = int(reply["pid"])
        link.keeper_pid = int(reply["keeper_pid"])
        link.identities = tuple(identity_from_row(row) for row in reply["identities"])
        for uuid, health, detail in reply["health"]:
            if health != GpuHealth.OK:
                on_gpu_state(GpuStateChange(uuid, GpuHealth(health), detail))
        return link

    @property
    def is_open(self) -> bool:
        """Whether the worker can be reached."""
        return self._is_open

    async def lease(self, lease_id: str, gpu_uuids: Sequence[str], owner: LeaseOwner) -> None:
        """Get the right to change GPUs; when this returns, the journal knows them.

        Raises:
            GpuError: refused, or the worker is gone.
        """
        await self._request(
            "lease",
            _REPLY_LIMIT_S,
            pidfds=owner.pidfds,
            lease_id=lease_id,
            gpu_uuids=list(gpu_uuids),
            job_id=owner.job_id,
            pid=owner.pid,
            uid=owner.uid,
        )

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request a clock; returns at once. It replaces earlier requests for that GPU."""
        if not self._is_open:
            return
        datagram = encode({"type": "want", "gpu_uuid": gpu_uuid, "request": clock_request_row(request)})
        if self._wants or self._requests:
            self._delay(gpu_uuid, datagram)
            return
        try:
            self._socket.send(datagram)
        except BlockingIOError:
            self._delay(gpu_uuid, datagram)
        except OSError as error:
            self._lose(f"the GPU worker went away: {error.strerror}")

    async def limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        """Set a power limit under a lease, and return the limit that was read back.

        Raises:
            GpuError: refused, or the worker is gone.
        """
        reply = await self._request(
            "limit",
            _RESTORE_LIMIT_S,
            lease_id=lease_id,
            gpu_uuid=gpu_uuid,
            power_limit_w=power_limit_w,
            job_id=owner.job_id,
            pid=owner.pid,
            uid=owner.uid,
        )
        return float(reply["power_limit_w"])

    async def restore(
        self, gpu_uuids: Sequence[str], reason: str, *, is_leaving: bool = False
    ) -> tuple[RestoreOutcome, ...]:
        """Put GPUs back and end their leases; wishes not yet carried out are dropped.

        `is_leaving`: not the job ends but the daemon, so what the rules keep is kept.

        Raises:
            GpuError: the worker is gone or does not answer; it restores by itself when the link is cut.
        """
        for uuid in gpu_uuids:
            self._wants.pop(uuid, None)
        reply = await self._request(
            "restore", _RESTORE_LIMIT_S, gpu_uuids=list(gpu_uuids), reason=reason, is_leaving=is_leaving
        )
        return tuple(
            RestoreOutcome(uuid, Control(control), RestoreResult(result), detail)
            for uuid, control, result, detail in reply["outcomes"]
        )

    async def users(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of the processes that compute on a GPU.

        Raises:
            GpuError: the driver does not tell, or the worker is gone.
        """
        reply = await self._request("users", _REPLY_LIMIT_S, gpu_uuid=gpu_uuid)
        return tuple(int(pid) for pid in reply["pids"])

    async def look(self, gpu_uuid: str) -> GpuLook:
        """Return how a GPU is set and what it reads right now.

        Raises:
            GpuError: the driver does not tell, or the worker is gone.
        """
        return look_from_answer(await self._request("look", _REPLY_LIMIT_S, gpu_uuid=gpu_uuid))

    async def ping(self) -> dict[str, int]:
        """Return the worker's counters; its main thread answers without touching the driver.

        Raises:
            GpuError: it does not.
        """
        reply = await self._request("ping", _REPLY_LIMIT_S)
        return {name: value for name, value in reply.items() if name.startswith("num_")}

    async def hand_over(self, token: str, keep_s: float) -> None:
        """Have the worker keep all leases for so long when this link ends, for the core that shows the token.

        Raises:
            GpuError: it does not; it restores at once then.
        """
        await self._request("hand_over", _REPLY_LIMIT_S, token=token, keep_s=keep_s)

    async def close(self) -> None:
        """Cut the link; the worker then restores every GPU, unless they were handed over."""
        if self._is_open:
            self._is_open = False
            self._release("the link is closed")

    async def _request(
        self, message_type: str, limit_s: float, *, pidfds: Sequence[int] = (), **content: Any
    ) -> dict[str, Any]:
        if not self._is_open:
            raise GpuError("the GPU worker is gone")
        request_id = next(self._request_ids)
        reply: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._replies[request_id] = reply
        datagram = encode({"type": message_type, "request_id": request_id, **content})
        # Our own copies: the process may be forgotten, and its pidfd closed, before a full socket takes the datagram.
        self._requests.append(_Request(datagram, [os.dup(fd) for fd in pidfds[:MAX_PIDFDS]]))
        self._write()
        try:
            async with asyncio.timeout(limit_s):
                answer = await reply
        except TimeoutError:
            raise GpuError(f"the GPU worker did not answer {message_type!r} within {limit_s:g} s") from None
        finally:
            self._replies.pop(request_id, None)
        if "error" in answer:
            raise GpuError(f"the GPU worker refused {message_type!r}: {answer['error']}")
        return answer

    def _delay(self, gpu_uuid: str, datagram: bytes) -> None:
        self._wants[gpu_uuid] = datagram
        self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        try:
            while self._requests:
                request = self._requests[0]
                socket.send_fds(self._socket, [request.datagram], request.pidfds)
                self._requests.popleft().close_pidfds()
            while self._wants:
                uuid = next(iter(self._wants))
                self._socket.send(self._wants[uuid])
                del self._wants[uuid]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError as error:
            self._read()
            self._lose(f"the GPU worker went away: {error.strerror}")
            return
        self._loop.remove_writer(self._socket)

    def _read_some(self) -> None:
        """Read a few datagrams; after a pause many wait, and others wait too."""
        self._read(_DATAGRAMS_PER_TURN)

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
                    was_reset = True  # what the worker said before it closed can still be read
                    continue
                self._lose(f"the GPU worker went away: {error.strerror}")
                return
            if not datagram:
                self._lose("the GPU worker went away")
                return
            try:
                self._dispatch(decode(datagram))
            except (ProtocolError, KeyError, TypeError, ValueError) as error:
                self._lose(f"the GPU worker sent something malformed: {error!r}")

    def _dispatch(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "samples":
                self._on_samples(tuple(GpuSample(*row) for row in message["rows"]))
            case "clock_set":
                self._on_clock_set(ClockSet(*message["row"]))
            case "gpu_state":
                self._on_gpu_state(GpuStateChange(message["gpu_uuid"], GpuHealth(message["health"]), message["detail"]))
            case "reply":
                reply = self._replies.get(message["request_id"])
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case "refused":
                self._lose(f"the GPU worker refused the connection: {message['error']}")
            case other:
                raise ProtocolError(f"no message type {other!r}")

    def _lose(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            self._release(reason)
            self._on_lost(reason)

    def _release(self, reason: str) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        while self._requests:
            self._requests.popleft().close_pidfds()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(GpuError(reason))


def require_trusted_listener(connection: socket.socket | TransportSocket, path: Path) -> None:
    """Check that who listens is the service manager or a process of our own user.

    Raises:
        DriverError: somebody else has put a socket there.
    """
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size)
    _, uid, _ = PEERCRED.unpack(peer)
    if uid not in {0, os.geteuid()}:
        raise DriverError(f"uid {uid} listens on {path}; root or uid {os.geteuid()} must")


@dataclass(frozen=True, slots=True)
class _Request:
    """A datagram that waits to be sent, and the pidfds that go with it."""

    datagram: bytes
    pidfds: Sequence[int]

    def close_pidfds(self) -> None:
        for fd in self.pidfds:
            os.close(fd)


async def _connect(path: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    failure = "it does not exist"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    connection.connect(str(path))
                except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
                    failure = str(error.strerror)
                    await asyncio.sleep(_CONNECT_PAUSE_S)
                except OSError as error:
                    raise DriverError(f"cannot reach the GPU worker at {path}: {error.strerror}") from None
                else:
                    break
        require_trusted_listener(connection, path)
    except TimeoutError:
        connection.close()
        raise DriverError(f"no GPU worker at {path} within {timeout_s:g} s: {failure}") from None
    except BaseException:
        connection.close()
        raise
    return connection
