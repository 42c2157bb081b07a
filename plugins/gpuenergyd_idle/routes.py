"""The route of idle GPUs: `PUT /v1/idle/lift`."""

from collections.abc import Mapping

from aiohttp import web

from gpuenergyd.daemon.api.openapi import describe_routes
from gpuenergyd.daemon.api.plugin_routes import ApiPart, RouteServices
from gpuenergyd.daemon.api.routes import JSON_TYPE, Route
from gpuenergyd.errors import UsageError
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_idle.messages import LIFT_PATH, PROGRAM_HOLD_S, IdleLiftReply, IdleLiftRequest
from gpuenergyd_idle.service import IdleService

_MOST_HOLD_S = 86_400.0
_LIFT = Route(
    LIFT_PATH,
    f"Lift the clocks of idle GPUs, and leave them so for a time (over {PROGRAM_HOLD_S:g} s: administrators).",
    IdleLiftRequest,
    IdleLiftReply,
    is_put=True,
)


class IdleRoutes:
    """Lifts GPUs of the service `idle`."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services
        idle = services.host_services["idle"]
        assert isinstance(idle, IdleService)
        self._idle = idle

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        """Return the OpenAPI description of the route."""
        return describe_routes((_LIFT,), errors)

    def add_to(self, app: web.Application) -> None:
        app.router.add_put(_LIFT.path, self._lift)

    async def _lift(self, request: web.Request) -> web.Response:
        body = await self._services.read_body(request, MAX_CONTROL_MESSAGE_BYTES)
        message = decode(body, IdleLiftRequest, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
        if not 0 <= message.hold_s <= _MOST_HOLD_S:
            raise UsageError(f"hold_s = {message.hold_s!r}: must be from 0 to {_MOST_HOLD_S:g}")
        if message.hold_s > PROGRAM_HOLD_S:  # for a moment any kernel lifts a GPU, too
            self._services.require_administrator(request, f"lift idle GPUs for more than {PROGRAM_HOLD_S:g} s")
        lifted = IdleLiftReply(self._idle.lift(message.gpu_uuids, message.hold_s))
        return web.Response(body=encode(lifted), headers={"Content-Type": JSON_TYPE})
