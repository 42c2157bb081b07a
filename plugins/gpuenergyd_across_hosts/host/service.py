"""The service `across-hosts` of the daemon: pipelines across hosts, and the routes of their ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from gpuenergyd.daemon.api.openapi import describe_routes
from gpuenergyd.daemon.api.plugin_routes import ApiPart, RouteServices
from gpuenergyd.daemon.api.routes import Route
from gpuenergyd.daemon.host_services import HostParts
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.wire import MAX_ITERATION_REPORT_BYTES
from gpuenergyd.wire.messages import IterationReply
from gpuenergyd_across_hosts.host.pipeline_member import PipelineMembers
from gpuenergyd_across_hosts.messages.pipeline_messages import (
    MemberPlan,
    MemberQuery,
    MemberReply,
    PipelineReply,
    PipelineReport,
)

_MEMBERS = Route(
    "/v1/members",
    "Exchange a pipeline member's state; the reply may hold its stage's report.",
    MemberQuery,
    MemberReply,
)
_MEMBER_PLAN = Route("/v1/members/plan", "Install the plan slice of a pipeline member.", MemberPlan, IterationReply)
_PIPELINES = Route(
    "/v1/pipelines",
    "Report a pipeline across hosts as its leader; the reply may contain a plan.",
    PipelineReport,
    PipelineReply,
)


class AcrossHosts:
    """Lets ranks of this host be members of pipelines across hosts, and lead them."""

    def __init__(self, parts: HostParts) -> None:
        self.members = parts.jobs.pipelines = PipelineMembers(parts.jobs)

    @staticmethod
    def check(settings: Settings) -> None:
        if settings.service_options.get("across-hosts") is not None:
            raise UsageError("[across-hosts]: no such table")

    async def start(self) -> None:
        """Do nothing: ranks begin all exchanges."""

    async def close(self) -> None:
        """Do nothing: leaders end with the jobs of their ranks."""

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Ignore readings of GPUs, which are those of the members' jobs."""

    @property
    def trouble(self) -> None:
        """No trouble: refused messages are in the status of their jobs."""

    def status(self) -> Mapping[str, Any]:
        """Return nothing: pipelines are in the status of the jobs that lead them."""
        return {}


class AcrossHostsRoutes:
    """The routes of members and leaders; a refusal is shown in status and history, since no user sees the replies."""

    def __init__(self, services: RouteServices) -> None:
        service = services.host_services["across-hosts"]
        assert isinstance(service, AcrossHosts)
        self._members, self._handler = service.members, services.message_handler

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        return describe_routes((_MEMBERS, _MEMBER_PLAN, _PIPELINES), errors)

    def add_to(self, app: web.Application) -> None:
        members, large, refused = self._members, MAX_ITERATION_REPORT_BYTES, self._members.refuse
        add, handler = app.router.add_post, self._handler
        add(_MEMBERS.path, handler(MemberQuery, members.state, refused=refused))
        add(_MEMBER_PLAN.path, handler(MemberPlan, members.post_plan, max_bytes=large, refused=refused))
        add(_PIPELINES.path, handler(PipelineReport, members.plan_pipeline, max_bytes=large, refused=refused))
