"""Around each HTTP connection: who it is, how many that user has, and a time limit on a request that never ends.

aiohttp waits for the rest of a header for ever; here a request must be complete soon after its first byte, and its
answer must be read.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.daemon.api.limits import ConnectionCounts
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, peer_credentials

log = logging.getLogger(__name__)

_GRACE_S = 0.05


@dataclass(slots=True)
class Guards:
    """The open connections, found by their transport."""

    counts: ConnectionCounts
    header_limit_s: float
    unread_limit_s: float
    _open: dict[int, "GuardedProtocol"] = field(default_factory=dict)

    def factory(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], "GuardedProtocol"]:
        """Return a protocol factory for the event loop around the HTTP server's own."""
        return lambda: GuardedProtocol(self, make())

    def of(self, transport: asyncio.BaseTransport | None) -> "GuardedProtocol | None":
        """Return the guard of a connection, None when it is gone."""
        return self._open.get(id(transport))

    def add(self, transport: asyncio.BaseTransport, guard: "GuardedProtocol") -> None:
        """Note a connection."""
        self._open[id(transport)] = guard

    def remove(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection."""
        self._open.pop(id(transport), None)


class GuardedProtocol(asyncio.Protocol):
    """Passes everything on to the HTTP server's protocol, and keeps time."""

    def __init__(self, guards: Guards, inner: asyncio.Protocol) -> None:
        self._guards = guards
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._is_in_request = False
        self._is_counted = False
        self.peer = PeerCredentials(0, 0, 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Learn who connects, and refuse one too many."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = peer_credentials(transport.get_extra_info("socket"))
        self._is_counted = self._guards.counts.take(self.peer.uid)
        self._guards.add(transport, self)
        self._inner.connection_made(transport)
        if not self._is_counted:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Start the clock at the first byte of a request."""
        if self._deadline is None and not self._is_in_request:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._guards.header_limit_s, self._too_slow)
        self._inner.data_received(data)

    def request_begins(self) -> None:
        """Stop the clock: the header is complete."""
        self._is_in_request = True
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def request_ends(self) -> None:
        """Be ready for the next request."""
        self._is_in_request = False

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Take no further request from who does not read the answers, and hang up on who never does."""
        if self._transport is not None:
            self._transport.pause_reading()
        if self._unread is None:
            self._unread = asyncio.get_running_loop().call_later(self._guards.unread_limit_s, self._never_reads)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Go on: the answers are being read."""
        self._forget_unread()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.request_begins()
        self._forget_unread()
        if self._transport is not None:
            self._guards.remove(self._transport)
        if self._is_counted:
            self._is_counted = False
            self._guards.counts.give_back(self.peer.uid)
        self._inner.connection_lost(exc)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _never_reads(self) -> None:
        self._unread = None
        if self._transport is not None:
            log.warning("%s does not read its answers; its connection is closed", self.peer)
            self._transport.abort()

    def _too_slow(self) -> None:
        # Where this loop itself was held up, what has come meanwhile begins first, and stops the clock.
        self._deadline = asyncio.get_running_loop().call_later(_GRACE_S, self._hang_up)

    def _hang_up(self) -> None:
        self._deadline = None
        if self._transport is not None:
            self._transport.abort()
