"""The core's side of the policy host: ask for a plan, wait a bounded time, and replace a host that misbehaves."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.core.plan import ClockPlan
from gpuenergyd.core.policy import JobView
from gpuenergyd.daemon.policy_host import MAX_LINE_BYTES, PlanAnswer, PlanRequest
from gpuenergyd.daemon.view_difference import ViewSender
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.daemon_codec import decode, encode

log = logging.getLogger(__name__)

HOST_COMMAND = (sys.executable, "-I", "-m", "gpuenergyd.daemon.policy_host")


@dataclass(frozen=True, slots=True)
class PolicyFailure:
    """Why a policy gave no plan, in one line."""

    reason: str


class PolicyLink:
    """One request at a time, so that a time limit blames the job whose policy is running."""

    def __init__(
        self,
        *,
        time_limit_s: float,
        first_time_limit_s: float,
        memory_limit_bytes: int | None = None,
        command: Sequence[str] = HOST_COMMAND,
    ) -> None:
        self._time_limit_s = time_limit_s
        self._first_time_limit_s = first_time_limit_s
        self._command = (*command, str(memory_limit_bytes or 0))
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._next_request_id = 1
        self._has_answered = False
        self._sent: dict[str, ViewSender] = {}
        self._is_closed = False
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """The host's process id, None when there is none."""
        return self._process.pid if self.is_alive and self._process is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether a host process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self, policy: str) -> None:
        """Start the host and have it load a policy, so that the imports are done by the time it is asked."""
        await self._ask("", policy, None)

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        """Return the policy's plan, or why there is none; never raises for what a policy does."""
        answer = await self._ask(job_id, policy, view)
        if isinstance(answer, PolicyFailure):
            return answer
        if answer.plan is None:
            return PolicyFailure(answer.error or "no plan")
        return answer.plan

    async def forget(self, job_id: str) -> None:
        """Drop the policy instance of a job that has ended."""
        if self.is_alive:
            await self._ask(job_id, "", None)

    async def close(self) -> None:
        """End the host."""
        self._is_closed = True
        await self._kill()

    async def _ask(self, job_id: str, policy: str, view: JobView | None) -> PlanAnswer | PolicyFailure:
        async with self._turn:
            if self._is_closed:
                return PolicyFailure("the daemon is stopping")
            limit_s = self._first_time_limit_s
            try:
                process = await self._ensure_process()
                limit_s = self._time_limit_s if self._has_answered else self._first_time_limit_s
                answer = await asyncio.wait_for(self._exchange(process, job_id, policy, view), limit_s)
            except TimeoutError:
                return await self._give_up(f"policy {policy!r} did not answer within {limit_s:g} s")
            except (ProtocolError, ValueError) as error:
                return await self._give_up(f"policy {policy!r} sent something that is no plan: {error}")
            except (OSError, EOFError) as error:
                return await self._give_up(f"the policy host died while running {policy!r} ({error})")
            except asyncio.CancelledError:
                await self._kill()
                raise
            self._has_answered = self._has_answered or view is not None
            return answer

    async def _exchange(
        self, process: asyncio.subprocess.Process, job_id: str, policy: str, view: JobView | None
    ) -> PlanAnswer:
        assert process.stdin is not None
        assert process.stdout is not None
        request_id, self._next_request_id = self._next_request_id, self._next_request_id + 1
        difference = None
        if view is None:
            self._sent.pop(job_id, None)
        else:
            difference = self._sent.setdefault(job_id, ViewSender()).difference(view)
        process.stdin.write(encode(PlanRequest(request_id, job_id, policy, difference)) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError(f"exit status {await process.wait()}")
        answer = decode(line, PlanAnswer, max_bytes=MAX_LINE_BYTES)
        if answer.request_id != request_id:
            raise ProtocolError(f"answer to request {answer.request_id} instead of {request_id}")
        return answer

    async def _ensure_process(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            if self._process is not None:
                self.num_restarts += 1
            self._has_answered = False
            self._sent.clear()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                # Its own session: Ctrl-C in a terminal reaches the core alone, which then ends its children in order.
                start_new_session=True,
            )
        return self._process

    async def _give_up(self, reason: str) -> PolicyFailure:
        log.warning("%s; the policy host is replaced", reason)
        await self._kill()
        return PolicyFailure(reason)

    async def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()
