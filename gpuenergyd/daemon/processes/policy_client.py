"""Client of the policy host: sends a request, waits for a limited time, and restarts a host that fails."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, replace

from gpuenergyd.core.pipeline.fitted import FittedPipeline
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.power import PowerDecision
from gpuenergyd.daemon.processes.launch import PolicyChannel, StartPolicyHost
from gpuenergyd.daemon.processes.plugins import policy_options
from gpuenergyd.daemon.processes.policy_host import MAX_LINE_BYTES, PlanAnswer, PlanRequest, ServiceTask
from gpuenergyd.daemon.processes.power_queries import PowerQuery
from gpuenergyd.daemon.processes.target_queries import TargetQuery, TargetReply
from gpuenergyd.daemon.processes.view_delta import ViewSender
from gpuenergyd.errors import GpuError, ProtocolError
from gpuenergyd.silence import Silence
from gpuenergyd.wire.daemon_codec import decode, encode

log = logging.getLogger(__name__)

_MAX_WAIT_RATIO = 40.0
"""Longest wait for an answer, however busy the host is, as a multiple of the time limit."""
_SHORTEST_WAIT_S = 0.05

_TIME_LIMIT_S = 30.0
"""Time limit of a request, after which the policy host is restarted and the job runs at full speed. Time that the
process waits for a CPU is not included: on a busy host the plan comes late, and until then the job runs at full speed.
"""
_TIME_LIMIT_PER_INSTRUCTION_S = 0.004
"""Added to both time limits per instruction: a plan of 64 stages x 512 microbatches may take minutes of CPU time."""
_FIRST_TIME_LIMIT_S = 120.0
"""Time limit of the first request to a host, which includes imports and compilation."""


@dataclass(frozen=True, slots=True)
class PolicyFailure:
    """The reason why a policy returned no result, in one line."""

    reason: str


class PolicyClient:
    """Sends one request at a time, so that a timeout can be attributed to the job whose policy runs."""

    def __init__(
        self,
        start_host: StartPolicyHost,
        *,
        time_limit_s: float = _TIME_LIMIT_S,
        first_time_limit_s: float = _FIRST_TIME_LIMIT_S,
    ) -> None:
        self._start_host = start_host
        self._time_limit_s = time_limit_s
        self._first_time_limit_s = first_time_limit_s
        self._host: PolicyChannel | None = None
        self._lock = asyncio.Lock()
        self._next_request_id = 1
        self._has_answered = False
        self._unit_pid: int | None = None
        """Process id of the host from its last answer, the only source if the host is a systemd unit."""
        self._sent: dict[str, ViewSender] = {}
        self._loaded: set[str] = set()
        self._is_closed = False
        self.num_restarts = 0
        self.activity: str | None = None
        """What delays the host's answer, such as compiling; None if nothing does."""
        self.trouble: str | None = None
        """A lasting problem of the present host that makes plans late."""

    @property
    def pid(self) -> int | None:
        """Process id of the host, None if no host runs or it runs as a systemd unit."""
        return self._host.pid if self.is_alive and self._host is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether a host process runs."""
        return self._host is not None and self._host.is_alive()

    async def start(self) -> None:
        await self._send(PlanRequest(0, "", ""))

    async def preload(self, policy: str) -> str | None:
        """Have the host import a policy before its first request, once per host; return why that failed."""
        plain, _ = policy_options(policy)  # without options: users can choose any, but installed names are few
        if plain in self._loaded:
            return None
        self._loaded.add(plain)
        return (await self._send(PlanRequest(0, "", policy))).error

    async def check(self, policy: str) -> str | None:
        """Have the host create a policy with its options; return why that failed, or None."""
        return (await self._send(PlanRequest(0, "", policy))).error

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        """Return the policy's plan, or a failure, for example after an exception in the policy."""
        answer = await self._send(PlanRequest(0, job_id, policy), view)
        return answer.plan or PolicyFailure(answer.error or "the policy returned no plan")

    async def fitted(self, job_id: str, policy: str, view: JobView) -> FittedPipeline | PolicyFailure:
        answer = await self._send(PlanRequest(0, job_id, policy, is_fit=True), view)
        return answer.fitted or PolicyFailure(answer.error or "the policy returned no profile")

    async def next_target(self, job_id: str, query: TargetQuery) -> TargetReply | PolicyFailure:
        """Return a target policy's decision for a job, or a failure."""
        answer = await self._send(PlanRequest(0, job_id, query.target_policy, target=query))
        return answer.target or PolicyFailure(answer.error or "the policy returned no target")

    async def run_task(self, task: ServiceTask) -> str | PolicyFailure:
        """Return the result of a service's function, or a failure."""
        answer = await self._send(PlanRequest(0, "", task.name, task=task))
        return answer.result.text if answer.result else PolicyFailure(answer.error or f"{task.name} returned nothing")

    async def divide_power(self, query: PowerQuery) -> PowerDecision | PolicyFailure:
        """Return a budget divided among jobs, or a failure."""
        answer = await self._send(PlanRequest(0, "", query.power_target, power=query))
        return answer.power or PolicyFailure(answer.error or "the power target policy returned no shares")

    async def drop_job(self, job_id: str) -> None:
        """Discard the policy instance of a job that has ended."""
        if self.is_alive:
            await self._send(PlanRequest(0, job_id, ""))

    async def close(self) -> None:
        """End the policy host."""
        self._is_closed = True
        await self._kill()

    async def _send(self, request: PlanRequest, view: JobView | None = None) -> PlanAnswer:
        """Send a request with its id and encoded view; return the answer, which holds an error after a failure."""
        policy = request.policy
        async with self._lock:
            if self._is_closed:
                return PlanAnswer(0, error="the daemon is stopping")
            limit_s = self._first_time_limit_s
            try:
                host = await self._ensure_host()
                limit_s = self._time_limit_s if self._has_answered else self._first_time_limit_s
                if view is not None:
                    limit_s += sum(map(len, view.schedule.orders)) * _TIME_LIMIT_PER_INSTRUCTION_S
                answer = await self._answer_within(limit_s, host, self._exchange(host, request, view))
            except TimeoutError:
                return await self._fail(f"policy {policy!r} did not answer within {limit_s:g} s")
            except (ProtocolError, ValueError) as error:
                return await self._fail(f"policy {policy!r} returned an invalid result: {error}")
            except (OSError, EOFError, GpuError) as error:
                return await self._fail(f"the policy host died while running {policy!r} ({error})")
            except asyncio.CancelledError:
                await self._kill()
                raise
            self._has_answered = self._has_answered or view is not None or request.task is not None
            return answer

    async def _answer_within(
        self, limit_s: float, host: PolicyChannel, exchange: Coroutine[None, None, PlanAnswer]
    ) -> PlanAnswer:
        """Return the answer, or raise TimeoutError if the host process has run, or slept, for too long without it."""
        task = asyncio.ensure_future(exchange)
        silence = Silence(host.pid or self._unit_pid, _MAX_WAIT_RATIO)
        try:
            while True:
                left_s = silence.left_s(limit_s)
                if left_s <= 0:
                    raise TimeoutError
                done, _ = await asyncio.wait({task}, timeout=max(left_s, _SHORTEST_WAIT_S))
                if done:
                    return task.result()
        finally:
            task.cancel()

    async def _exchange(self, host: PolicyChannel, request: PlanRequest, view: JobView | None) -> PlanAnswer:
        request_id, self._next_request_id = self._next_request_id, self._next_request_id + 1
        difference = None
        if view is not None:
            difference = self._sent.setdefault(request.job_id, ViewSender()).difference(view)
        elif request.target is None and request.task is None and request.power is None:
            self._sent.pop(request.job_id, None)
        host.writer.write(encode(replace(request, request_id=request_id, view=difference)) + b"\n")
        await host.writer.drain()
        try:
            while True:
                answer = await self._read_answer(host)
                if answer.request_id != request_id:
                    raise ProtocolError(f"received the answer to request {answer.request_id}, expected {request_id}")
                if answer.activity is None:
                    return answer
                self.activity = answer.activity
                log.info("policy host: %s", answer.activity)
        finally:
            self.activity = None

    async def _read_answer(self, host: PolicyChannel) -> PlanAnswer:
        line = await host.reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError(await host.exit_reason())
        answer = decode(line, PlanAnswer, max_bytes=MAX_LINE_BYTES)
        self._unit_pid = answer.host_pid
        if answer.trouble is not None and answer.trouble != self.trouble:
            log.warning("policy host: %s", answer.trouble)
            self.trouble = answer.trouble
        return answer

    async def _ensure_host(self) -> PolicyChannel:
        if self._host is None or not self._host.is_alive():
            if self._host is not None:
                await self._kill()
                self.num_restarts += 1
            self._has_answered, self._unit_pid = False, None
            self._sent.clear()
            self._loaded.clear()
            self.trouble = None
            self._host = await self._start_host()
        return self._host

    async def _fail(self, reason: str) -> PlanAnswer:
        log.warning("%s; restarting the policy host", reason)
        await self._kill()
        return PlanAnswer(0, error=reason)

    async def _kill(self) -> None:
        if self._host is not None:
            await self._host.kill()
