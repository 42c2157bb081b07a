"""The routes of zeusd, the daemon of the Zeus project, so that programs written for it work with ZEUSD_SOCK_PATH.

Paths, parameters, status codes and bodies are those of zeusd in Zeus 0.16. Access control is this daemon's: clients are
identified by kernel credentials, and a change needs the same rights and proof of use as one for a job. A change is
leased to the requesting process, journaled, recorded, and restored when the process ends. GPU indices are the host's
NVML indices.

A clock lock limits the SM clock to `max_clock_mhz`; the minimum is validated but not enforced. Memory clock locks and
persistence mode are accepted and recorded, but not applied.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web

from gpuenergyd.daemon.api.plugin_routes import ApiPart, RouteServices
from gpuenergyd.daemon.gpus.inventory import ClaimKind, Gpu
from gpuenergyd.daemon.manual_leases.leases import LeaseHolder
from gpuenergyd.daemon.runtime.peer_credentials import require_alive
from gpuenergyd.daemon.runtime.shared_reads import SharedReads
from gpuenergyd.daemon.settings import REFUSED_IN_OBSERVE
from gpuenergyd.errors import AccessError, GpuEnergyError, GpuNotFoundError, GpuUnsupportedError, JobError, UsageError
from gpuenergyd.gpu.link.messages import GpuSnapshot, TakeSnapshot
from gpuenergyd.wire.daemon_codec import encode
from gpuenergyd_zeusd.cpus import Cpu, Cpus, mean_power_mw
from gpuenergyd_zeusd.openapi import SCHEMAS, zeusd_paths
from gpuenergyd_zeusd.parameters import BadParameterError, Parameters
from gpuenergyd_zeusd.requests import ZeusdChange, ZeusdChanges

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SETTINGS_AGE_S = 0.2
"""Readings of settings up to this age are used again, as in a status under load."""
_POLL_S = 0.05
_NO_CPUS = "API group cpu-read is not enabled: the daemon can read no energy counters of processors"
_KEEP_ALIVE_S = 10.0
_WRITE_LIMIT_S = 5.0
_MJ_PER_J = _MW_PER_W = 1000.0


class ZeusdRoutes:
    """Handlers of /discover, /time, /auth, /gpu and /cpu."""

    def __init__(self, services: RouteServices) -> None:
        self._services, self._gpus = services, services.gpus
        self._changes = ZeusdChanges(services.leases, services.worker)
        self._snapshots = SharedReads(lambda gpu_uuid: services.worker.do(TakeSnapshot(gpu_uuid)))
        services.on_change.append(self._snapshots.declare_change)
        self._pci_addresses: dict[str, str] = {}
        self._cpus = Cpus()
        self._streams: set[asyncio.Task[Any]] = set()

    @staticmethod
    def describe(errors: Mapping[str, str]) -> ApiPart:
        return ApiPart(zeusd_paths(errors), SCHEMAS)

    def add_to(self, app: web.Application) -> None:
        get, post = app.router.add_get, app.router.add_post
        get("/discover", self._discover)
        get("/time", self._time)
        get("/auth/whoami", _refusing("authentication is disabled: clients are identified by kernel credentials"))
        post("/gpu/set_power_limit", self._changing(_power_limit))
        post("/gpu/set_persistence_mode", self._changing(_persistence_mode))
        post("/gpu/set_gpu_locked_clocks", self._changing(_sm_clock))
        post("/gpu/set_mem_locked_clocks", self._changing(_memory_clock))
        post("/gpu/reset_gpu_locked_clocks", self._changing(lambda _: ZeusdChange(is_clock_reset=True)))
        post("/gpu/reset_mem_locked_clocks", self._changing(lambda _: ZeusdChange(ignored="memory clock reset")))
        post("/gpu/reset_locked_clocks", self._changing(lambda _: ZeusdChange(is_clock_reset=True)))
        get("/gpu/get_cumulative_energy", self._reading(_energy))
        get("/gpu/get_power", self._reading(_power, lambda found: {"timestamp_ms": _now_ms(), "power_mw": found}))
        get("/gpu/get_power_limit", self._reading(_power_limit_reading, max_age_s=_SETTINGS_AGE_S))
        get("/gpu/get_power_limit_constraints", self._reading(_power_limit_range, max_age_s=_SETTINGS_AGE_S))
        get("/gpu/get_persistence_mode", self._reading(_persistence_reading, max_age_s=_SETTINGS_AGE_S))
        get("/gpu/stream_power", self._stream_power, allow_head=False)
        for name, answer in (
            ("get_cumulative_energy", self._cpu_energy),
            ("get_power", self._cpu_power),
            ("stream_power", self._stream_cpu_power),
        ):
            get(f"/cpu/{name}", answer if self._cpus.by_index else _refusing(_NO_CPUS), allow_head=False)
        app.cleanup_ctx.append(self._watch_wraps)
        app.on_shutdown.append(self._end_streams)

    # --- about the daemon ---

    async def _discover(self, request: web.Request) -> web.Response:
        Parameters(request.query).done()
        gpus = [
            {
                "id": gpu.identity.index,
                "name": gpu.identity.model_name,
                "pci_address": await self._pci_address(gpu),
                "cumulative_energy_available": gpu.sample is None or gpu.sample.total_energy_j is not None,
            }
            for gpu in self._gpus
        ]
        cpus = [{"id": k, "dram_available": cpu.dram is not None} for k, cpu in self._cpus.by_index.items()]
        groups = ["gpu-read"] if self._services.is_observing else ["gpu-control", "gpu-read"]
        groups += ["cpu-read"] if cpus else []
        return _json({"gpus": gpus, "cpus": cpus, "enabled_api_groups": groups, "auth_required": False})

    async def _pci_address(self, gpu: Gpu) -> str | None:
        gpu_uuid = gpu.identity.gpu_uuid
        if gpu_uuid not in self._pci_addresses:
            try:
                found = (await self._snapshots.value(gpu_uuid)).details.pci_address
            except GpuEnergyError:
                return None
            if found is None:
                return None
            self._pci_addresses[gpu_uuid] = found
        return self._pci_addresses[gpu_uuid]

    async def _time(self, request: web.Request) -> web.Response:
        Parameters(request.query).done()
        return _json({"timestamp_ms": _now_ms()})

    # --- changes ---

    def _changing(self, parse: Callable[[Parameters], ZeusdChange]) -> Handler:
        """Return a handler that applies a change to each GPU; with `block=false` it does not wait for the effect."""

        async def respond(request: web.Request) -> web.Response:
            parameters = Parameters(request.query)
            change, shall_wait = parse(parameters), parameters.boolean("block")
            indices = parameters.indices(is_required=True)
            parameters.done()
            gpus = {index: self._gpu(index) for index in indices}
            if self._services.is_observing:
                return _not_found(f"API group gpu-control is not enabled: {REFUSED_IN_OBSERVE}")
            with self._services.open_peer(request) as (peer, pidfd):
                self._services.proof_of_use.rules.require_control(peer)
                holder = LeaseHolder(ClaimKind.ZEUSD_CLIENT, peer.uid, peer.pid)

                async def apply(gpu: Gpu) -> None:
                    await self._services.proof_of_use.require(peer, gpu.identity.gpu_uuid)
                    require_alive(peer, pidfd)
                    await self._changes.apply(gpu, holder, pidfd, change, shall_wait=shall_wait)

                _, problem = await _for_each(gpus, apply)
            return web.Response() if problem is None else problem

        return respond

    # --- readings ---

    def _reading(
        self,
        value: Callable[[GpuSnapshot], object],
        wrap: Callable[[Mapping[str, object]], object] = lambda found: found,
        *,
        max_age_s: float = 0.0,
    ) -> Handler:
        """Return a handler that reads each GPU and returns the values by GPU index, all read after the request.

        With `max_age_s`, values that were read up to this long before the request may be used.
        """

        async def respond(request: web.Request) -> web.Response:
            async def read(gpu: Gpu) -> object:
                uuid, reads = gpu.identity.gpu_uuid, self._snapshots
                return value(await (reads.recent_value(uuid, max_age_s) if max_age_s else reads.value(uuid)))

            found, problem = await _for_each(self._selected_gpus(Parameters(request.query)), read)
            return _json(wrap({str(index): each for index, each in found.items()})) if problem is None else problem

        return respond

    async def _stream_power(self, request: web.Request) -> web.StreamResponse:
        """Send the power of each GPU now and at each change."""
        return await self._stream(request, _power_events(self._selected_gpus(Parameters(request.query))))

    async def _stream(self, request: web.Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
        """Send server-sent events until the client disconnects."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            async for event in events:
                async with asyncio.timeout(_WRITE_LIMIT_S):
                    await response.write(event)
        except (TimeoutError, ConnectionError):  # the client does not read or has disconnected
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams.discard(task)
        return response

    # --- processors ---

    async def _cpu_energy(self, request: web.Request) -> web.Response:
        parameters = Parameters(request.query)
        wants_cpu, wants_dram = parameters.boolean("cpu"), parameters.boolean("dram")
        found = {}
        for index, cpu in self._selected_cpus(parameters).items():
            cpu_uj, dram_uj = cpu.energies_uj()
            found[str(index)] = {
                "cpu_energy_uj": cpu_uj if wants_cpu else None,
                "dram_energy_uj": dram_uj if wants_dram else None,
            }
        return _json(found)

    async def _cpu_power(self, request: web.Request) -> web.Response:
        power_mw = await mean_power_mw(self._selected_cpus(Parameters(request.query)))
        return _json({"timestamp_ms": _now_ms(), "power_mw": {str(index): mw for index, mw in power_mw.items()}})

    async def _stream_cpu_power(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, _cpu_power_events(self._selected_cpus(Parameters(request.query))))

    def _selected_cpus(self, parameters: Parameters) -> dict[int, Cpu]:
        indices = parameters.indices("cpu_ids", is_required=False)
        parameters.done()
        return self._cpus.selected(indices)

    async def _watch_wraps(self, app: web.Application) -> AsyncIterator[None]:
        del app
        task = asyncio.create_task(self._cpus.watch_wraps())
        yield
        task.cancel()

    async def _end_streams(self, app: web.Application) -> None:
        del app
        for task in self._streams:
            task.cancel()

    def _selected_gpus(self, parameters: Parameters) -> dict[int, Gpu]:
        """Return the GPUs in `gpu_ids`, or all GPUs without that parameter."""
        indices = parameters.indices(is_required=False)
        parameters.done()
        return {index: self._gpu(index) for index in indices or [gpu.identity.index for gpu in self._gpus]}

    def _gpu(self, index: int) -> Gpu:
        for gpu in self._gpus:
            if gpu.identity.index == index:
                return gpu
        known = ", ".join(str(gpu.identity.index) for gpu in self._gpus) or "none"
        raise BadParameterError(f"gpu_ids: no GPU {index}; GPUs: {known}")


async def _for_each(
    gpus: Mapping[int, Gpu], act: Callable[[Gpu], Awaitable[T]]
) -> tuple[dict[int, T], web.Response | None]:
    """Call `act` for each GPU; return the results, and an error response with all failures if any."""
    found: dict[int, T] = {}
    errors: dict[str, str] = {}
    statuses: list[int] = []
    for index, gpu in gpus.items():
        try:
            found[index] = await act(gpu)
        except GpuEnergyError as error:
            errors[str(index)] = " ".join(str(error).split())
            statuses.append(_status_of(error))
    return found, _json({"errors": errors}, max(statuses)) if errors else None


def _status_of(error: GpuEnergyError) -> int:
    match error:
        case AccessError():
            return 403
        case JobError():
            return 409
        case GpuUnsupportedError() | UsageError() | GpuNotFoundError():
            return 400
        case _:
            return 500


async def _power_events(gpus: Mapping[int, Gpu]) -> AsyncIterator[bytes]:
    """Yield changed power readings as server-sent events, and a comment after 10 s without any; endless."""
    sent: dict[int, float] = {}
    sent_at_s = time.monotonic()
    while True:
        lines = []
        for index, gpu in gpus.items():
            power_w = gpu.sample.power_w if gpu.sample is not None else None
            if power_w is not None and sent.get(index) != power_w:
                sent[index] = power_w
                event = {"timestamp_ms": _now_ms(), "gpu_id": index, "power_mw": round(power_w * _MW_PER_W)}
                lines.append(b"data: " + encode(event) + b"\n\n")
        if not lines and time.monotonic() - sent_at_s > _KEEP_ALIVE_S:
            lines.append(b": keep-alive\n\n")
        if lines:
            sent_at_s = time.monotonic()
            yield b"".join(lines)
        await asyncio.sleep(_POLL_S)


async def _cpu_power_events(cpus: Mapping[int, Cpu]) -> AsyncIterator[bytes]:
    """Yield the power of processors as server-sent events; endless."""
    while True:
        power_mw = await mean_power_mw(cpus)
        events = [{"timestamp_ms": _now_ms(), "cpu_id": index, **powers} for index, powers in power_mw.items()]
        yield b"".join(b"data: " + encode(event) + b"\n\n" for event in events)


def _power_limit(parameters: Parameters) -> ZeusdChange:
    return ZeusdChange(power_limit_w=parameters.unsigned("power_limit_mw") / _MW_PER_W)


def _sm_clock(parameters: Parameters) -> ZeusdChange:
    return ZeusdChange(sm_clock_mhz=parameters.clock_range()[1])


def _memory_clock(parameters: Parameters) -> ZeusdChange:
    low_mhz, high_mhz = parameters.clock_range()
    return ZeusdChange(ignored=f"memory clock of {low_mhz} to {high_mhz} MHz")


def _persistence_mode(parameters: Parameters) -> ZeusdChange:
    return ZeusdChange(ignored=f"persistence mode {'on' if parameters.boolean('enabled') else 'off'}")


def _energy(snapshot: GpuSnapshot) -> object:
    return {"energy_mj": _scaled(snapshot.total_energy_j, _MJ_PER_J, "an energy counter")}


def _power(snapshot: GpuSnapshot) -> object:
    return _scaled(snapshot.power_w, _MW_PER_W, "its power")


def _power_limit_reading(snapshot: GpuSnapshot) -> object:
    return {"power_limit_mw": _scaled(snapshot.details.power_limit_w, _MW_PER_W, "a power limit")}


def _power_limit_range(snapshot: GpuSnapshot) -> object:
    details = snapshot.details
    return {
        "min_power_limit_mw": _scaled(details.min_power_limit_w, _MW_PER_W, "a lowest power limit"),
        "max_power_limit_mw": _scaled(details.max_power_limit_w, _MW_PER_W, "a highest power limit"),
    }


def _persistence_reading(snapshot: GpuSnapshot) -> object:
    if snapshot.details.is_persistent is None:
        raise GpuUnsupportedError("the driver does not report persistence mode")
    return {"enabled": snapshot.details.is_persistent}


def _scaled(value: float | None, factor: float, quantity: str) -> int:
    if value is None:
        raise GpuUnsupportedError(f"the driver does not report {quantity}")
    return round(value * factor)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type="application/json")


def _not_found(message: str) -> web.Response:
    return _json({"error": message}, 404)


def _refusing(message: str) -> Handler:
    """Return a handler for a route that is never available."""

    async def respond(request: web.Request) -> web.Response:
        del request
        return _not_found(message)

    return respond
