"""Guard around each HTTP connection: client credentials, connection count per user, and time limits.

aiohttp lets a client take any time to complete a header. Here a header must be complete soon after its first byte, and
the client must read its responses.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, peer_credentials

log = logging.getLogger(__name__)

_GRACE_S = 0.05


@dataclass(slots=True)
class ConnectionCounts:
    """Open connections per uid, and their limit."""

    max_per_user: int
    _open: Counter[int] = field(default_factory=Counter)

    def add(self, uid: int) -> bool:
        """Count a new connection unless it exceeds the limit; return whether it was counted."""
        if self._open[uid] >= self.max_per_user:
            return False
        self._open[uid] += 1
        return True

    def num_open(self, uid: int) -> int:
        """Return the number of open connections of a user."""
        return self._open.get(uid, 0)

    def remove(self, uid: int) -> None:
        self._open[uid] -= 1
        if self._open[uid] <= 0:
            del self._open[uid]


@dataclass(slots=True)
class ConnectionGuards:
    """The guards of all open connections, by transport."""

    counts: ConnectionCounts
    header_limit_s: float
    unread_limit_s: float
    _open: dict[int, "GuardedProtocol"] = field(default_factory=dict)

    def factory(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], "GuardedProtocol"]:
        """Return a protocol factory that wraps the HTTP server's protocols in guards."""
        return lambda: GuardedProtocol(self, make())

    def of(self, transport: asyncio.BaseTransport | None) -> "GuardedProtocol | None":
        return self._open.get(id(transport))

    def add(self, transport: asyncio.BaseTransport, guard: "GuardedProtocol") -> None:
        self._open[id(transport)] = guard

    def remove(self, transport: asyncio.BaseTransport) -> None:
        self._open.pop(id(transport), None)


class GuardedProtocol(asyncio.Protocol):
    """Wraps the HTTP server's protocol of one connection and enforces the time limits."""

    def __init__(self, guards: ConnectionGuards, inner: asyncio.Protocol) -> None:
        self._guards = guards
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._is_in_request = False
        self._is_counted = False
        self.peer = PeerCredentials(0, 0, 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read the client's credentials, and refuse a connection above the user's limit."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = peer_credentials(transport.get_extra_info("socket"))
        self._is_counted = self._guards.counts.add(self.peer.uid)
        self._guards.add(transport, self)
        self._inner.connection_made(transport)
        if not self._is_counted:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Start the header time limit at the first byte of a request."""
        if self._deadline is None and not self._is_in_request:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._guards.header_limit_s, self._check_again_soon)
        self._inner.data_received(data)

    def begin_request(self) -> None:
        """Stop the header time limit: the header is complete."""
        self._is_in_request = True
        self._cancel_deadline()

    def end_request(self) -> None:
        """Allow the header time limit of the next request to start."""
        self._is_in_request = False

    def eof_received(self) -> bool | None:
        """Pass the event on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read its responses, and start the time limit for it."""
        if self._transport is not None:
            self._transport.pause_reading()
        if self._unread_deadline is None:
            self._unread_deadline = asyncio.get_running_loop().call_later(
                self._guards.unread_limit_s, self._abort_unread
            )
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Read from the client again, since it reads its responses again."""
        self._cancel_unread_deadline()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limits and remove the connection."""
        self._cancel_deadline()
        self._cancel_unread_deadline()
        if self._transport is not None:
            self._guards.remove(self._transport)
        if self._is_counted:
            self._is_counted = False
            self._guards.counts.remove(self.peer.uid)
        self._inner.connection_lost(exc)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_unread_deadline(self) -> None:
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None

    def _abort_unread(self) -> None:
        self._unread_deadline = None
        if self._transport is not None:
            log.warning("%s does not read its responses; closing its connection", self.peer)
            self._transport.abort()

    def _check_again_soon(self) -> None:
        # If the event loop itself was late, requests that have arrived since then start first and cancel the deadline.
        self._deadline = asyncio.get_running_loop().call_later(_GRACE_S, self._abort)

    def _abort(self) -> None:
        self._deadline = None
        if self._transport is not None:
            self._transport.abort()
