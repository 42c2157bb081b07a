"""HTTP/1.1 with JSON on the daemon's Unix socket: what is asked for, who asks, and one clear line for what is wrong.

POST /v1/ranks, /v1/iterations, /v1/pace, /v1/release  training processes, see wire/messages.py
POST /v1/leases, /v1/leases/release            an administrator's clock locks and power limits
GET  /v1/status                                the whole daemon, see daemon/api/status.py
GET  /v1/jobs/{job_id}                         one job: plan, predictions, last measured timeline
/discover, /time, /auth, /gpu, /cpu            what programs written for zeusd ask, see daemon/zeusd/routes.py
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from aiohttp import web

from gpuenergyd.daemon.across_hosts.pipeline_member import Parts
from gpuenergyd.daemon.api.connection_guard import GuardedProtocol, Guards
from gpuenergyd.daemon.api.fair_queue import FairQueue
from gpuenergyd.daemon.api.limits import ConnectionCounts, RequestRates
from gpuenergyd.daemon.api.metrics import metrics_text
from gpuenergyd.daemon.api.openapi import api_description
from gpuenergyd.daemon.api.snapshots import Snapshot, SnapshotText
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.manual_leases.administrator import AdministratorLeases
from gpuenergyd.daemon.ports import AskableWorker
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, open_pidfd, require_alive
from gpuenergyd.daemon.zeusd.requests import ZeusdChanges
from gpuenergyd.daemon.zeusd.routes import ZeusdRoutes
from gpuenergyd.errors import AccessError, GpuEnergyError, GpuNotFoundError, JobError, ProtocolError, UsageError
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES, MAX_ITERATION_REPORT_BYTES
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd.wire.messages import (
    IterationReport,
    LeaseRelease,
    LeaseRequest,
    PaceReport,
    RankRegistration,
    RankRelease,
)
from gpuenergyd.wire.part_messages import PartPlan, PartQuestion, PipelineReport

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

FRAME_LIMIT_S = 2.0
"""A header, and then a body, must be complete this soon."""
_UNREAD_LIMIT_S = 5.0
"""How long a client may leave its answers unread once they fill the socket."""
_REPORT_PATH, _PACE_PATH = "/v1/iterations", "/v1/pace"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LINGER_LIMIT_S = 0.2
"""After an early answer, how long to read on so that the sender gets to see it."""
_SHUTDOWN_LIMIT_S = 1.0
_REFUSAL_PAUSE_S = 0.1
_REFUSALS_PER_USER_PER_S = 200
_JSON_TYPE = "application/json"


class Server:
    """Serves the jobs on a listening socket."""

    def __init__(
        self,
        jobs: Jobs,
        leases: AdministratorLeases,
        parts: Parts,
        *,
        status: Callable[[], Mapping[str, Any]],
        job_detail: Callable[[str], Mapping[str, Any] | None],
        access: AccessRules,
        worker: AskableWorker,
        zeusd_changes: ZeusdChanges,
        max_connections_per_user: int,
        max_requests_per_user_per_s: float,
    ) -> None:
        self._jobs = jobs
        self._leases = leases
        self._parts = parts
        self._status = Snapshot(status)
        self._status_text = SnapshotText(self._status, encode)
        self._metrics = SnapshotText(self._status, metrics_text)
        self._job_detail = job_detail
        self._access = access
        self._proof_of_use = ProofOfUse(access, worker.process_ids)
        self._zeusd = ZeusdRoutes(
            jobs.services.gpus,
            worker,
            zeusd_changes,
            access,
            self._proof_of_use,
            self._living_peer,
            is_observing=jobs.services.is_observing,
        )
        self._rates = RequestRates(max_requests_per_user_per_s)
        self._turns = FairQueue()
        self._guards = Guards(ConnectionCounts(max_connections_per_user), FRAME_LIMIT_S, _UNREAD_LIMIT_S)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Begin to serve."""
        logging.getLogger("aiohttp.server").addFilter(_without_traceback)
        app = web.Application(middlewares=[self._around_each_request], client_max_size=MAX_ITERATION_REPORT_BYTES)
        app.router.add_post("/v1/ranks", self._register)
        app.router.add_post(_REPORT_PATH, self._report)
        app.router.add_post(_PACE_PATH, self._take_pace)
        app.router.add_post("/v1/release", self._release)
        app.router.add_post("/v1/parts", self._part_state)
        app.router.add_post("/v1/parts/plan", self._post_part_plan)
        app.router.add_post("/v1/pipelines", self._plan_pipeline)
        app.router.add_post("/v1/leases", self._grant_lease)
        app.router.add_post("/v1/leases/release", self._release_lease)
        app.router.add_get("/v1/status", self._get_status)
        app.router.add_get("/v1/jobs/{job_id}", self._get_job)
        app.router.add_get("/v1/metrics", self._get_metrics)
        app.router.add_get("/v1/openapi.json", self._get_description)
        self._zeusd.add_to(app)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=_SHUTDOWN_LIMIT_S, lingering_time=_LINGER_LIMIT_S
        )
        await self._runner.setup()
        assert self._runner.server is not None
        factory = self._guards.factory(self._runner.server)
        self._server = await asyncio.get_running_loop().create_unix_server(factory, sock=listener)

    async def close(self) -> None:
        """Stop listening, then end what is being answered."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        logging.getLogger("aiohttp.server").removeFilter(_without_traceback)

    # --- routes ---

    async def _register(self, request: web.Request) -> web.Response:
        registration = await self._body(request, RankRegistration, MAX_CONTROL_MESSAGE_BYTES)
        with self._living_peer(request) as (peer, pidfd):
            self._access.require_control(peer)
            await self._proof_of_use.require(peer, self._jobs.services.gpus[registration.gpu_uuid].identity.gpu_uuid)
            require_alive(peer, pidfd)
            kept = os.dup(pidfd)
            try:
                return _json(self._jobs.register(registration, peer, kept))
            except BaseException:
                os.close(kept)
                raise

    async def _report(self, request: web.Request) -> web.Response:
        report = await self._body(request, IterationReport, MAX_ITERATION_REPORT_BYTES)
        reply = self._jobs.report(report, self._peer(request))
        return _error(404, "unknown rank token; register again") if reply is None else _json(reply)

    async def _take_pace(self, request: web.Request) -> web.Response:
        message = await self._body(request, PaceReport, MAX_CONTROL_MESSAGE_BYTES)
        reply = self._jobs.take_pace(message, self._peer(request))
        return _error(404, "unknown rank token; register again") if reply is None else _json(reply)

    async def _release(self, request: web.Request) -> web.Response:
        message = await self._body(request, RankRelease, MAX_CONTROL_MESSAGE_BYTES)
        is_known = self._jobs.release(message.rank_token, self._peer(request))
        return _json({}) if is_known else _error(404, "unknown rank token")

    async def _part_state(self, request: web.Request) -> web.Response:
        message = await self._body(request, PartQuestion, MAX_CONTROL_MESSAGE_BYTES)
        state = self._parts.state(message, self._peer(request))
        return _error(404, "unknown rank token; register again") if state is None else _json(state)

    async def _post_part_plan(self, request: web.Request) -> web.Response:
        message = await self._body(request, PartPlan, MAX_ITERATION_REPORT_BYTES)
        reply = await self._parts.post(message, self._peer(request))
        return _error(404, "unknown rank token; register again") if reply is None else _json(reply)

    async def _plan_pipeline(self, request: web.Request) -> web.Response:
        message = await self._body(request, PipelineReport, MAX_ITERATION_REPORT_BYTES)
        reply = self._parts.plan(message, self._peer(request))
        return _error(404, "unknown rank token; register again") if reply is None else _json(reply)

    async def _grant_lease(self, request: web.Request) -> web.Response:
        message = await self._body(request, LeaseRequest, MAX_CONTROL_MESSAGE_BYTES)
        return _json(await self._leases.grant(message, self._administrator(request)))

    async def _release_lease(self, request: web.Request) -> web.Response:
        message = await self._body(request, LeaseRelease, MAX_CONTROL_MESSAGE_BYTES)
        return _json(await self._leases.release(message, self._administrator(request)))

    async def _get_status(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=self._status_text.value(), headers={"Content-Type": _JSON_TYPE})

    async def _get_job(self, request: web.Request) -> web.Response:
        job_id = request.match_info["job_id"]
        detail = self._job_detail(job_id)
        if detail is None:
            running = ", ".join(runner.job_id for runner in self._jobs) or "none"
            return _error(404, f"no job {job_id[:100]!r}; running: {running}")
        return _json(detail)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=self._metrics.value(), headers={"Content-Type": _METRICS_TYPE})

    async def _get_description(self, request: web.Request) -> web.Response:
        del request
        return _json(api_description())

    @property
    def routes(self) -> frozenset[tuple[str, str]]:
        """Method and path of everything that is served."""
        assert self._runner is not None
        found = (r for r in self._runner.app.router.routes() if r.resource is not None and r.method != "HEAD")
        return frozenset((route.method, route.resource.canonical) for route in found if route.resource is not None)

    # --- around them ---

    @web.middleware
    async def _around_each_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guard = self._guards.of(request.transport)
        if guard is None:
            return _error(400, "the client left")
        guard.request_begins()
        try:
            return await self._answer(request, handler, guard)
        finally:
            guard.request_ends()
            if request.method != "GET" and request.path not in {_REPORT_PATH, _PACE_PATH}:
                self._status.forget()  # who has changed something reads it back

    async def _answer(self, request: web.Request, handler: Handler, guard: GuardedProtocol) -> web.StreamResponse:
        wait_s = self._rates.wait_s(guard.peer.uid)
        if wait_s > 0:
            # Each connection waits for its refusal, the longer the more of them there are, and a turn for it: so a
            # flood slows itself down and nobody else.
            num_open = self._guards.counts.num_open(guard.peer.uid)
            await asyncio.sleep(max(_REFUSAL_PAUSE_S, num_open / _REFUSALS_PER_USER_PER_S))
            await self._turns.take(guard.peer.uid)
            refusal = _error(429, f"more than {self._rates.rate_per_s:g} requests per second from uid {guard.peer.uid}")
            refusal.headers["Retry-After"] = f"{max(wait_s, 0.001):.3f}"  # never "no time"
            return refusal
        await self._turns.take(guard.peer.uid)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, _what_is_wrong(request, error))
        except GpuNotFoundError as error:
            return _error(404, str(error))
        except AccessError as error:
            return _error(403, str(error))
        except JobError as error:
            return _error(409, str(error))
        except (ProtocolError, UsageError) as error:
            return _error(400, str(error))
        except GpuEnergyError as error:
            return _error(503, str(error))
        except TimeoutError:
            return _error(408, f"the body was not complete within {FRAME_LIMIT_S:g} s", is_last=True)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return _error(500, "the daemon failed to answer; its log says why")

    def _administrator(self, request: web.Request) -> PeerCredentials:
        with self._living_peer(request) as (peer, pidfd):
            self._access.require_administrator(peer)
            require_alive(peer, pidfd)
            return peer

    @contextmanager
    def _living_peer(self, request: web.Request) -> Iterator[tuple[PeerCredentials, int]]:
        """Yield who asks and a pidfd of that process."""
        peer = self._peer(request)
        connection = request.transport.get_extra_info("socket") if request.transport is not None else None
        if connection is None:
            raise JobError("the client left")
        pidfd = open_pidfd(connection, peer)
        try:
            yield peer, pidfd
        finally:
            os.close(pidfd)

    def _peer(self, request: web.Request) -> PeerCredentials:
        guard = self._guards.of(request.transport)
        if guard is None:
            raise JobError("the client left")
        return guard.peer

    @staticmethod
    async def _body(request: web.Request, message_type: type[T], max_bytes: int) -> T:
        if request.content_length is not None and request.content_length > max_bytes:
            raise web.HTTPRequestEntityTooLarge(max_bytes, request.content_length)
        async with asyncio.timeout(FRAME_LIMIT_S):
            body = await request.read()
        return decode(body, message_type, max_bytes=max_bytes)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, headers={"Content-Type": _JSON_TYPE})


def _error(status: int, message: str, *, is_last: bool = False) -> web.Response:
    response = _json({"error": " ".join(message.split())}, status)
    if is_last:
        response.force_close()
    return response


def _what_is_wrong(request: web.Request, error: web.HTTPException) -> str:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return f"{request.path}: the body is too large; {error.text or error.reason}"
        case web.HTTPMethodNotAllowed():
            return f"{request.path} takes {', '.join(sorted(error.allowed_methods))}, not {request.method[:20]}"
        case web.HTTPNotFound():
            return f"no resource {request.path[:100]!r}; see /v1/status"
        case _:
            return error.reason


def _without_traceback(record: logging.LogRecord) -> bool:
    """Keep what a malformed request logs to one line."""
    record.exc_info = None
    return True
