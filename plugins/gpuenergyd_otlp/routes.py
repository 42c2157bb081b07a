"""The route of the metrics: `GET /v1/metrics`."""

from collections.abc import Mapping

from aiohttp import web

from gpuenergyd.daemon.api.openapi import describe_routes
from gpuenergyd.daemon.api.plugin_routes import ApiPart, RouteServices
from gpuenergyd.daemon.api.routes import Route
from gpuenergyd.daemon.api.snapshots import SnapshotText
from gpuenergyd_otlp.prometheus import metrics_text

_METRICS = Route("/v1/metrics", "The status as Prometheus metrics.", content_type="text/plain")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsRoutes:
    """Answers with the status as metrics, encoded once for each status that is built."""

    def __init__(self, services: RouteServices) -> None:
        self._metrics = SnapshotText(services.status, metrics_text)

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        return describe_routes((_METRICS,), errors)

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(_METRICS.path, self._respond)

    async def _respond(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.value(), headers={"Content-Type": _METRICS_TYPE})
