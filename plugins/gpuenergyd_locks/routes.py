"""The routes of administrators' leases: `POST /v1/leases` and `/v1/leases/release`."""

from collections.abc import Mapping

from aiohttp import web

from gpuenergyd.daemon.api.openapi import describe_routes
from gpuenergyd.daemon.api.plugin_routes import ApiPart, RouteServices
from gpuenergyd.daemon.api.routes import Route
from gpuenergyd.daemon.gpus.access import MANUAL_CHANGES
from gpuenergyd_locks.administrator import AdministratorLeases
from gpuenergyd_locks.messages import LeaseGranted, LeaseRelease, LeaseReleased, LeaseRequest

_GRANT = Route("/v1/leases", "Lock a GPU's clock or limit its power (administrators).", LeaseRequest, LeaseGranted)
_RELEASE = Route(
    "/v1/leases/release", "Release a GPU lease and restore the GPU (administrators).", LeaseRelease, LeaseReleased
)


class LockRoutes:
    """Grants and releases leases of administrators."""

    def __init__(self, services: RouteServices) -> None:
        self._handler = services.message_handler
        self._leases = AdministratorLeases(
            services.leases, services.gpus, services.worker, is_observing=services.is_observing
        )

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        return describe_routes((_GRANT, _RELEASE), errors)

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(_GRANT.path, self._handler(LeaseRequest, self._leases.grant, right=MANUAL_CHANGES))
        app.router.add_post(_RELEASE.path, self._handler(LeaseRelease, self._leases.release, right=MANUAL_CHANGES))
