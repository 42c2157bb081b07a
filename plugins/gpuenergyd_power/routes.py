"""The routes of the power budget: `GET` and `PUT /v1/power-budget`."""

from collections.abc import Mapping

from aiohttp import web

from gpuenergyd.daemon.api.openapi import describe_routes
from gpuenergyd.daemon.api.plugin_routes import ApiPart, RouteServices
from gpuenergyd.daemon.api.routes import JSON_TYPE, Route
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_power.messages import PowerBudgetRequest, PowerBudgetState
from gpuenergyd_power.service import PowerService

_SHOW = Route(
    "/v1/power-budget", "The host's power budget, what it draws and how it is divided.", reply=PowerBudgetState
)
_CHANGE = Route(
    "/v1/power-budget",
    "Set the host's power budget, or withdraw the last request (administrators).",
    PowerBudgetRequest,
    PowerBudgetState,
    is_put=True,
)


class PowerRoutes:
    """Shows and sets the budget of the service `power`."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services
        power = services.host_services["power"]
        assert isinstance(power, PowerService)
        self._power = power

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        return describe_routes((_SHOW, _CHANGE), errors)

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(_SHOW.path, self._show)
        app.router.add_put(_CHANGE.path, self._change)

    async def _show(self, request: web.Request) -> web.Response:
        del request
        return _json(self._power.state())

    async def _change(self, request: web.Request) -> web.Response:
        peer = self._services.require_administrator(request, "set the power budget of this host")
        body = await self._services.read_body(request, MAX_CONTROL_MESSAGE_BYTES)
        message = decode(body, PowerBudgetRequest, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
        return _json(self._power.put(message, f"administrator {peer}"))


def _json(state: PowerBudgetState) -> web.Response:
    return web.Response(body=encode(state), headers={"Content-Type": JSON_TYPE})
