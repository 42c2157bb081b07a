"""The routes of calibrations and measured GPUs, all for administrators: `/v1/calibrations` and `/v1/measured-gpus`."""

from collections.abc import Mapping

from aiohttp import web

from gpuenergyd.daemon.api.openapi import describe_routes
from gpuenergyd.daemon.api.plugin_routes import ApiPart, RouteServices
from gpuenergyd.daemon.api.routes import JSON_TYPE, Route
from gpuenergyd.daemon.runtime.peer_credentials import require_alive
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_doctor.calibrations import Calibrations
from gpuenergyd_doctor.messages import (
    CalibrationRequest,
    CalibrationStarted,
    CalibrationState,
    MeasuredGpus,
    MeasuredGpusKept,
)

_START = Route(
    "/v1/calibrations",
    "Measure switch latencies on idle GPUs while the client computes on them (administrators).",
    CalibrationRequest,
    CalibrationStarted,
)
_STATE = Route("/v1/calibrations/{calibration_id}", "Progress and result of a calibration.", reply=CalibrationState)
_KEEP = Route(
    "/v1/measured-gpus",
    "Keep what `gpuenergyd doctor --measure` has found, by GPU model and driver version (administrators).",
    MeasuredGpus,
    MeasuredGpusKept,
)


class DoctorRoutes:
    """Starts calibrations, shows their state, and keeps what was measured of GPUs."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services
        self._calibrations = Calibrations(
            services.leases, services.gpus, services.worker, is_observing=services.is_observing
        )

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        """Return the OpenAPI description of the routes."""
        return describe_routes((_START, _STATE, _KEEP), errors)

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(_START.path, self._start)
        app.router.add_get(_STATE.path, self._state)
        keep, right = self._calibrations.keep_measured, "keep measurements of this host"
        app.router.add_post(_KEEP.path, self._services.message_handler(MeasuredGpus, keep, right=right))

    async def _start(self, request: web.Request) -> web.Response:
        body = await self._services.read_body(request, MAX_CONTROL_MESSAGE_BYTES)
        message = decode(body, CalibrationRequest, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
        with self._services.open_peer(request) as (peer, pidfd):
            self._services.proof_of_use.rules.require_administrator(peer)
            require_alive(peer, pidfd)
            return _json(await self._calibrations.start(message, peer, pidfd))

    async def _state(self, request: web.Request) -> web.Response:
        calibration_id = request.match_info["calibration_id"]
        state = self._calibrations.state(calibration_id)
        if state is None:
            return _json({"error": f"no calibration {calibration_id[:100]!r}"}, status=404)
        return _json(state)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, headers={"Content-Type": JSON_TYPE})
