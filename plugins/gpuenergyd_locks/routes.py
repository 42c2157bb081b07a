"""The routes of administrators' leases: `POST /v1/leases` and `/v1/leases/release`."""

from collections.abc import Mapping
from typing import TypeVar

from aiohttp import web

from gpuenergyd.daemon.api.openapi import describe_routes
from gpuenergyd.daemon.api.plugin_routes import ApiPart, RouteServices
from gpuenergyd.daemon.api.routes import JSON_TYPE, Route
from gpuenergyd.daemon.gpus.access import MANUAL_CHANGES
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_locks.administrator import AdministratorLeases
from gpuenergyd_locks.messages import LeaseGranted, LeaseRelease, LeaseReleased, LeaseRequest

_GRANT = Route("/v1/leases", "Lock a GPU's clock or limit its power (administrators).", LeaseRequest, LeaseGranted)
_RELEASE = Route(
    "/v1/leases/release", "Release a GPU lease and restore the GPU (administrators).", LeaseRelease, LeaseReleased
)

T = TypeVar("T")


class LockRoutes:
    """Grants and releases leases of administrators."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services
        self._leases = AdministratorLeases(
            services.leases, services.gpus, services.worker, is_observing=services.is_observing
        )

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        return describe_routes((_GRANT, _RELEASE), errors)

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(_GRANT.path, self._grant)
        app.router.add_post(_RELEASE.path, self._release)

    async def _grant(self, request: web.Request) -> web.Response:
        message, peer = await self._asked(request, LeaseRequest)
        return _json(await self._leases.grant(message, peer))

    async def _release(self, request: web.Request) -> web.Response:
        message, peer = await self._asked(request, LeaseRelease)
        return _json(await self._leases.release(message, peer))

    async def _asked(self, request: web.Request, message_type: type[T]) -> tuple[T, PeerCredentials]:
        body = await self._services.read_body(request, MAX_CONTROL_MESSAGE_BYTES)
        message = decode(body, message_type, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
        return message, self._services.require_administrator(request, MANUAL_CHANGES)


def _json(reply: LeaseGranted | LeaseReleased) -> web.Response:
    return web.Response(body=encode(reply), headers={"Content-Type": JSON_TYPE})
