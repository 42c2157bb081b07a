"""HTTP/1.1 with JSON on the daemon's Unix socket: handlers, access checks, rate limits, and one-line errors.

The routes are listed in `daemon/api/routes.py`; plugins add further ones (`daemon/api/plugin_routes.py`).

Longer than 400 lines, since all handlers share the ways to check a request's peer and to read its body.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aiohttp import web

from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.api import routes
from gpuenergyd.daemon.api.connection_guard import ConnectionCounts, ConnectionGuards
from gpuenergyd.daemon.api.fair_queue import FairQueue
from gpuenergyd.daemon.api.openapi import api_text
from gpuenergyd.daemon.api.plugin_routes import Handler, RouteServices, plugin_routes
from gpuenergyd.daemon.api.routes import ROUTES
from gpuenergyd.daemon.api.snapshots import Snapshot, SnapshotText
from gpuenergyd.daemon.gpus.access import MANUAL_CHANGES
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse
from gpuenergyd.daemon.host_services import HostService
from gpuenergyd.daemon.jobs.operators import JobFits, Operators
from gpuenergyd.daemon.jobs.past_jobs import PastJobStore
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.manual_leases.leases import ManualLeases
from gpuenergyd.daemon.manual_leases.releases import GpuReleases
from gpuenergyd.daemon.ports import WorkerPort
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, open_pidfd, require_alive
from gpuenergyd.daemon.runtime.shared_reads import SharedReads
from gpuenergyd.daemon.runtime.user_rates import UserRates
from gpuenergyd.errors import AccessError, GpuEnergyError, GpuNotFoundError, JobError, ProtocolError, UsageError
from gpuenergyd.gpu.link.messages import TakeSnapshot
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES, MAX_ITERATION_REPORT_BYTES, MAX_REPLY_BYTES
from gpuenergyd.wire.daemon_codec import decode, decode_one_or_several, encode
from gpuenergyd.wire.messages import IterationReport, PaceReport, RankRegistration, RankRelease
from gpuenergyd.wire.operator_messages import (
    FILE_FORMAT,
    CounterQuery,
    CounterReading,
    CounterReadings,
    GpuRelease,
    GpuReopen,
    PastJobFile,
    PastJobList,
    PastJobsChanged,
    PastJobsForget,
    decode_job_patch,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

FRAME_LIMIT_S = 2.0
"""Time limit of a request's header, and then of its body."""
_UNREAD_LIMIT_S = 5.0
"""Time after which a client that does not read its responses is disconnected, once they fill the socket."""
_UNSEEN_PATHS = frozenset(
    r.path for r in (routes.ENERGY, routes.ITERATIONS, routes.PACE, routes.PAST_JOB_IMPORT, routes.PAST_JOB_FORGET)
)
"""Paths whose requests leave the status snapshot valid: frequent ones, and those that change nothing in the status."""
_LINGER_LIMIT_S = 0.2
"""Time to keep reading after an early response, so that the sender can receive it."""
_SHUTDOWN_LIMIT_S = 1.0
_REFUSAL_PAUSE_S = 0.1
_REFUSALS_PER_USER_PER_S = 200
_UNKNOWN_TOKEN = "unknown rank token; register again"  # noqa: S105  an error message
_ERROR_STATUSES: tuple[tuple[type[GpuEnergyError], int], ...] = (
    (GpuNotFoundError, 404),
    (AccessError, 403),
    (JobError, 409),
    (ProtocolError, 400),
    (UsageError, 400),
    (GpuEnergyError, 503),
)
"""HTTP status by error class; the first match applies."""


@dataclass(frozen=True, slots=True)
class UserLimits:
    """Limits per user of the socket."""

    max_connections: int
    max_requests_per_s: float


@dataclass(frozen=True, slots=True)
class ManualChanges:
    """The services that change GPUs outside jobs."""

    worker: WorkerPort
    leases: ManualLeases
    releases: GpuReleases


class Server:
    """The HTTP server of the daemon."""

    def __init__(  # noqa: PLR0913  each service that has routes
        self,
        jobs: Jobs,
        changes: ManualChanges,
        operators: Operators,
        fits: JobFits,
        *,
        status: Callable[[], Mapping[str, Any]],
        job_detail: Callable[[str], Mapping[str, Any] | None],
        proof_of_use: ProofOfUse,
        host_services: Mapping[str, HostService],
        past_jobs: PastJobStore,
        limits: UserLimits,
    ) -> None:
        self._jobs = jobs
        self._changes = changes
        self._operators, self._past_jobs = operators, past_jobs
        self._fits = fits
        self._status = Snapshot(status)
        self._status_text = SnapshotText(self._status, encode)
        self._job_detail = job_detail
        self._energies = SharedReads(self._energy_counter_j)
        self._access = proof_of_use.rules
        self._proof_of_use = proof_of_use
        self._on_change: list[Callable[[], None]] = []
        services = RouteServices(
            jobs.services.gpus,
            changes.worker,
            changes.leases,
            proof_of_use,
            self._open_peer,
            self._require_administrator,
            self._raw_body,
            self._message_handler,
            host_services,
            self._status,
            self._on_change,
            is_observing=jobs.services.is_observing,
        )
        self._plugins = [plugin(services) for plugin in plugin_routes()]
        self._rates = UserRates(limits.max_requests_per_s, capacity=max(1.0, limits.max_requests_per_s))
        self._queue = FairQueue(num_ranks_of=jobs.sessions.num_of_user)
        self._guards = ConnectionGuards(ConnectionCounts(limits.max_connections), FRAME_LIMIT_S, _UNREAD_LIMIT_S)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve requests on a listening socket."""
        logging.getLogger("aiohttp.server").addFilter(_without_traceback)
        app = web.Application(middlewares=[self._handle_request], client_max_size=MAX_ITERATION_REPORT_BYTES)
        jobs, changes, handler = self._jobs, self._changes, self._message_handler
        handlers = {
            routes.RANKS: self._register,
            routes.ITERATIONS: self._report_iterations,
            routes.PACE: handler(PaceReport, jobs.handle_pace),
            routes.RELEASE: handler(RankRelease, jobs.release_finally),
            routes.GPU_RELEASE: handler(GpuRelease, changes.releases.release, right=MANUAL_CHANGES),
            routes.GPU_REOPEN: handler(GpuReopen, changes.releases.reopen, right=MANUAL_CHANGES),
            routes.ENERGY: self._read_energy,
            routes.PAST_JOBS: self._list_past_jobs,
            routes.ALL_PAST_JOBS: self._list_all_past_jobs,
            routes.PAST_JOB_IMPORT: self._import_past_jobs,
            routes.PAST_JOB_FORGET: self._forget_past_jobs,
            routes.STATUS: _text_handler(self._status_text.value, routes.JSON_TYPE),
            routes.JOB: self._get_job,
            routes.JOB_PATCH: self._change_job,
            routes.JOB_FIT: self._get_job_fit,
            routes.OPENAPI: _text_handler(api_text, routes.JSON_TYPE),
        }
        for route in ROUTES:
            if route.request is None:
                app.router.add_get(route.path, handlers[route])
            else:
                app.router.add_route(route.method, route.path, handlers[route])
        for plugin in self._plugins:
            plugin.add_to(app)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=_SHUTDOWN_LIMIT_S, lingering_time=_LINGER_LIMIT_S
        )
        await self._runner.setup()
        assert self._runner.server is not None
        factory = self._guards.factory(self._runner.server)
        self._server = await asyncio.get_running_loop().create_unix_server(factory, sock=listener)

    async def close(self) -> None:
        """Stop listening, then end the requests in progress."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        logging.getLogger("aiohttp.server").removeFilter(_without_traceback)

    # --- routes ---

    def _message_handler(
        self,
        message_type: type[T],
        handle: Callable[[T, PeerCredentials], object | Awaitable[object]],
        *,
        max_bytes: int = MAX_CONTROL_MESSAGE_BYTES,
        right: str | None = None,
        refused: Callable[[PeerCredentials, str], object] | None = None,
    ) -> Handler:
        """Return a handler as `MessageHandler` says."""

        async def respond(request: web.Request) -> web.Response:
            try:
                message = await self._body(request, message_type, max_bytes)
            except (web.HTTPException, ProtocolError) as error:
                if refused is not None:
                    text = _http_error_text(request, error) if isinstance(error, web.HTTPException) else str(error)
                    refused(self._peer(request), text)
                raise
            peer = self._peer(request) if right is None else self._require_administrator(request, right)
            reply = handle(message, peer)
            if isinstance(reply, Awaitable):
                reply = await reply
            return _error(404, _UNKNOWN_TOKEN) if reply is None else _json(reply)

        return respond

    async def _report_iterations(self, request: web.Request) -> web.Response:
        body = await self._raw_body(request, MAX_ITERATION_REPORT_BYTES)
        reports = decode_one_or_several(body, IterationReport, max_bytes=MAX_ITERATION_REPORT_BYTES)
        reply = await self._jobs.handle_reports(reports, self._peer(request))
        return _error(404, _UNKNOWN_TOKEN) if reply is None else _json(reply)

    async def _register(self, request: web.Request) -> web.Response:
        registration = await self._body(request, RankRegistration, MAX_CONTROL_MESSAGE_BYTES)
        with self._open_peer(request) as (peer, pidfd):
            self._access.require_control(peer)
            gpus = self._jobs.services.gpus
            if not registration.gpu_uuid:
                found = await self._proof_of_use.find_gpu(peer, [gpu.identity.gpu_uuid for gpu in gpus])
                registration = replace(registration, gpu_uuid=found)
            await self._proof_of_use.require(peer, gpus[registration.gpu_uuid].identity.gpu_uuid)
            require_alive(peer, pidfd)
            session_pidfd = os.dup(pidfd)
            try:
                return _json(self._jobs.register(registration, peer, session_pidfd))
            except BaseException:
                os.close(session_pidfd)
                raise

    async def _read_energy(self, request: web.Request) -> web.Response:
        wanted = await self._body(request, CounterQuery, MAX_CONTROL_MESSAGE_BYTES)
        gpus = self._jobs.services.gpus
        uuids = [gpu.identity.gpu_uuid for gpu in ([gpus[uuid] for uuid in wanted.gpu_uuids] or gpus)]
        read = await asyncio.gather(*(self._energies.value(gpu_uuid) for gpu_uuid in uuids))
        return _json(CounterReadings(tuple(map(CounterReading, uuids, read))))

    async def _energy_counter_j(self, gpu_uuid: str) -> float | None:
        try:
            return (await self._changes.worker.do(TakeSnapshot(gpu_uuid))).total_energy_j
        except GpuEnergyError:
            return None

    async def _list_past_jobs(self, request: web.Request) -> web.Response:
        return _json(PastJobList(await self._past_jobs.of_user(self._peer(request).uid)))

    async def _list_all_past_jobs(self, request: web.Request) -> web.Response:
        self._require_administrator(request, "see the past jobs of other users")
        return _json(PastJobList(await self._past_jobs.of_all_users()))

    async def _import_past_jobs(self, request: web.Request) -> web.Response:
        self._require_administrator(request, "import past jobs for all users")
        message = await self._body(request, PastJobFile, MAX_ITERATION_REPORT_BYTES)
        if message.format != FILE_FORMAT:
            raise UsageError(f"format {message.format[:40]!r}: {FILE_FORMAT!r} is valid")
        return _json(PastJobsChanged(self._past_jobs.import_for_all(message.past_jobs)))

    async def _forget_past_jobs(self, request: web.Request) -> web.Response:
        message = await self._body(request, PastJobsForget, MAX_CONTROL_MESSAGE_BYTES)
        if message.is_for_all_users:
            self._require_administrator(request, "forget the past jobs of other users")
        uid = None if message.is_for_all_users else self._peer(request).uid
        return _json(PastJobsChanged(await self._past_jobs.forget(uid)))

    async def _get_job(self, request: web.Request) -> web.Response:
        job_id = request.match_info["job_id"]
        detail = self._job_detail(job_id)
        if detail is None:
            running = ", ".join(runner.job_id for runner in self._jobs) or "none"
            return _error(404, f"no job {job_id[:100]!r}; running: {running}")
        return _json(detail)

    async def _get_job_fit(self, request: web.Request) -> web.Response:
        body = encode(await self._fits.fit(request.match_info["job_id"]))
        if len(body) > MAX_REPLY_BYTES:
            raise JobError(
                f"the profile and order of this job take {len(body)} bytes; at most {MAX_REPLY_BYTES} are sent"
            )
        return web.Response(body=body, headers={"Content-Type": routes.JSON_TYPE})

    async def _change_job(self, request: web.Request) -> web.Response:
        patch = decode_job_patch(await self._raw_body(request, MAX_CONTROL_MESSAGE_BYTES))
        with self._open_peer(request) as (peer, pidfd):
            require_alive(peer, pidfd)
            return _json(await self._operators.change(request.match_info["job_id"], patch, peer, self._access))

    @property
    def routes(self) -> frozenset[tuple[str, str]]:
        """Method and path of every route."""
        assert self._runner is not None
        found = (r for r in self._runner.app.router.routes() if r.resource is not None and r.method != "HEAD")
        return frozenset((route.method, route.resource.canonical) for route in found if route.resource is not None)

    # --- all requests ---

    @web.middleware
    async def _handle_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guard = self._guards.of(request.transport)
        if guard is None:
            return _error(400, "the client disconnected")
        guard.begin_request()
        is_refused = False
        try:
            uid = guard.peer.uid
            wait_s = self._rates.wait_s(uid)
            if wait_s > 0:
                is_refused = True
                return await self._refuse_flood(uid, wait_s)
            self._rates.count(uid)
            response = await self._queue.run(uid, lambda: _response(request, handler))
            is_refused = 400 <= response.status < 500
            return response
        finally:
            guard.end_request()
            if not is_refused and request.method != "GET" and request.path not in _UNSEEN_PATHS:
                self._status.invalidate()  # a client that has changed something can read it back
                for discard in self._on_change:
                    discard()

    async def _refuse_flood(self, uid: int, wait_s: float) -> web.Response:
        """Refuse a request above the user's rate, after a delay that grows with the user's connections.

        The delay and the queueing slow the flood down without delaying other users.
        """
        await asyncio.sleep(max(_REFUSAL_PAUSE_S, self._guards.counts.num_open(uid) / _REFUSALS_PER_USER_PER_S))
        return await self._queue.run(uid, lambda: self._flood_refusal(uid, wait_s))

    async def _flood_refusal(self, uid: int, wait_s: float) -> web.Response:
        refusal = _error(429, f"uid {uid} sends more than {count_text(self._rates.rate_per_s, 'request')} per second")
        refusal.headers["Retry-After"] = f"{max(wait_s, 0.001):.3f}"  # never 0
        return refusal

    def _require_administrator(self, request: web.Request, what: str) -> PeerCredentials:
        with self._open_peer(request) as (peer, pidfd):
            require_alive(peer, pidfd)
            self._access.require_administrator(peer, what)
            return peer

    @contextmanager
    def _open_peer(self, request: web.Request) -> Iterator[tuple[PeerCredentials, int]]:
        """Yield the credentials and a pidfd of the client process."""
        peer = self._peer(request)
        connection = request.transport.get_extra_info("socket") if request.transport is not None else None
        if connection is None:
            raise JobError("the client disconnected")
        pidfd = open_pidfd(connection, peer)
        try:
            yield peer, pidfd
        finally:
            os.close(pidfd)

    def _peer(self, request: web.Request) -> PeerCredentials:
        guard = self._guards.of(request.transport)
        if guard is None:
            raise JobError("the client disconnected")
        return guard.peer

    async def _body(self, request: web.Request, message_type: type[T], max_bytes: int) -> T:
        return decode(await self._raw_body(request, max_bytes), message_type, max_bytes=max_bytes)

    @staticmethod
    async def _raw_body(request: web.Request, max_bytes: int) -> bytes:
        if request.content_length is not None and request.content_length > max_bytes:
            raise web.HTTPRequestEntityTooLarge(max_bytes, request.content_length)
        async with asyncio.timeout(FRAME_LIMIT_S):
            return await request.read()


async def _response(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Call a handler and convert what it raises to a one-line error response."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(error.status, _http_error_text(request, error))
    except GpuEnergyError as error:
        status = next(status for error_type, status in _ERROR_STATUSES if isinstance(error, error_type))
        return _error(status, str(error))
    except TimeoutError:
        return _error(408, f"the body was not complete within {FRAME_LIMIT_S:g} s", is_last=True)
    except ConnectionError:
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error(500, "internal error; the daemon's log has the traceback")


def _text_handler(text: Callable[[], bytes], content_type: str) -> Handler:
    async def respond(request: web.Request) -> web.Response:
        del request
        return web.Response(body=text(), headers={"Content-Type": content_type})

    return respond


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, headers={"Content-Type": routes.JSON_TYPE})


def _error(status: int, message: str, *, is_last: bool = False) -> web.Response:
    response = _json({"error": " ".join(message.split())}, status)
    if is_last:
        response.force_close()
    return response


def _http_error_text(request: web.Request, error: web.HTTPException) -> str:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return f"{request.path}: the body is too large; {error.text or error.reason}"
        case web.HTTPMethodNotAllowed():
            return f"{request.path} allows {', '.join(sorted(error.allowed_methods))}, not {request.method[:20]}"
        case web.HTTPNotFound():
            return f"no resource {request.path[:100]!r}; GET /v1/openapi.json lists all"
        case _:
            return error.reason


def _without_traceback(record: logging.LogRecord) -> bool:
    """Logging filter: one line with the reason for a malformed request, none for a client that has disconnected."""
    error = record.exc_info[1] if record.exc_info else None
    record.exc_info = None
    if error is not None:
        record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}", ()
    return not isinstance(error, ConnectionError)
