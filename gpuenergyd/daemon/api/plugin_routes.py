"""Routes that plugins add to the daemon's API, found by entry point in the group `gpuenergyd.routes`.

The server treats them like its own: rate limits, fair queueing, time limits and one-line errors apply.
Handlers run on the daemon's event loop, so a handler that blocks delays every training program.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from aiohttp import web

from gpuenergyd.daemon.api.snapshots import Snapshot
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse
from gpuenergyd.daemon.host_services import HostService
from gpuenergyd.daemon.manual_leases.leases import ManualLeases
from gpuenergyd.daemon.ports import WorkerPort
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES

log = logging.getLogger(__name__)

ROUTES_GROUP = "gpuenergyd.routes"
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OpenPeer = Callable[[web.Request], AbstractContextManager[tuple[PeerCredentials, int]]]
"""Returns a context manager that yields the credentials and a pidfd of a request's client process."""


class MessageHandler(Protocol):
    """Makes handlers of messages."""

    def __call__(
        self,
        message_type: type[T],
        handle: Callable[[T, PeerCredentials], object | Awaitable[object]],
        *,
        max_bytes: int = MAX_CONTROL_MESSAGE_BYTES,
        right: str | None = None,
        refused: Callable[[PeerCredentials, str], object] | None = None,
    ) -> Handler:
        """Return a handler that passes on a message with the client's credentials, and sends the reply.

        A reply of None means an unknown rank token. Only administrators may do what `right` says. `refused` gets the
        error of a message that cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class RouteServices:
    """The parts of the daemon that a plugin's routes may use."""

    gpus: Gpus
    worker: WorkerPort
    """Reads the present settings of a GPU."""
    leases: ManualLeases
    """Changes GPUs: journaled, recorded, and restored when the process that holds the lease ends."""
    proof_of_use: ProofOfUse
    """Decides whether a process may change a GPU."""
    open_peer: OpenPeer
    require_administrator: Callable[[web.Request, str], PeerCredentials]
    """Returns the client process of a request, or raises AccessError unless it may do what the text says."""
    read_body: Callable[[web.Request, int], Awaitable[bytes]]
    """Returns the body of a request, within the server's time limit and a limit in bytes."""
    message_handler: MessageHandler
    host_services: Mapping[str, HostService]
    """The services of plugins by name, for routes of the same plugin."""
    status: Snapshot[Mapping[str, Any]]
    """What `GET /v1/status` returns."""
    on_change: list[Callable[[], None]]
    """Called after a request that may have changed settings, for routes that cache some."""
    is_observing: bool


@dataclass(frozen=True, slots=True)
class ApiPart:
    """A part of the OpenAPI document: `paths` and `components/schemas`."""

    paths: Mapping[str, Any]
    schemas: Mapping[str, Any]


class PluginRoutes(Protocol):
    """The routes of one plugin; an entry point names the class. An exception in it keeps the daemon from starting."""

    def __init__(self, services: RouteServices) -> None: ...

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        """Return the description of every route; `errors` are the meanings of the error statuses."""
        ...

    def add_to(self, app: web.Application) -> None:
        """Add the routes to the application of the server, before it starts."""
        ...


@cache
def plugin_routes() -> tuple[type[PluginRoutes], ...]:
    """Return the routes of installed plugins, by name; those that cannot be loaded are logged and left out."""
    found: list[type[PluginRoutes]] = []
    for point in sorted(entry_points(group=ROUTES_GROUP), key=lambda point: point.name):
        try:
            found.append(point.load())
        except Exception as error:  # noqa: BLE001  a plugin's import may fail in any way, and the daemon must serve
            log.error("the API of plugin %s is not served: %s: %s", point.name, type(error).__name__, error)  # noqa: TRY400  one line
    return tuple(found)
