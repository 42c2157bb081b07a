"""Clock requests that are sent when the GPU reaches an instruction: the Protocols of a request and of its sender."""

import socket
from collections.abc import Iterable
from typing import Protocol, TypeAlias

Datagram: TypeAlias = tuple[bytes, int, int, socket.socket]
"""A clock request whose number and instants are filled in: its bytes, its number, the delay in ns of the later clock
after the sent instant (0 without one), and the socket to send it on. A plain tuple, made at each request."""


class PlannedRequest(Protocol):
    """A request that is due when the device reaches a point of its stream."""

    def __call__(self) -> None:
        """Send it now."""
        ...

    def datagram(self) -> Datagram | None:
        """Return the datagram for another thread or process to send; None, and counted, if nothing can be sent."""
        ...

    def give_up_socket(self) -> None:
        """Reconnect for later requests: the socket is broken."""
        ...


class StreamRequests(Protocol):
    """Sends requests when a device's stream reaches them, without the interpreter of the training."""

    def put(self, request: PlannedRequest) -> bool:
        """Have a request sent when the stream reaches what has been launched so far; on the training thread.

        Returns False if that is not possible, now or later.
        """
        ...

    def prepare(self, requests: Iterable[PlannedRequest]) -> None:
        """Prepare the requests that are put next, so that putting them in this order takes less time."""
        ...

    def pop_num_dropped(self) -> int:
        """Return how many requests could not be sent since the last call."""
        ...

    def close(self) -> None:
        """Send no more requests."""
        ...
