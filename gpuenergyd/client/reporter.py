"""Reporter thread of a rank: registers the rank, reports iterations and receives plans over HTTP.

The training thread only puts values on a non-blocking queue and reads attributes; this thread handles failures of the
daemon. Its computing can delay a training thread that needs the interpreter all the time. So after a report it sleeps
for a while, and then reports together all iterations that have ended since.

Longer than 400 lines, since registration, reports and warnings share one connection, which one thread owns.
"""

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from gpuenergyd.client.connection import CONNECT_LIMIT_S, HttpConnection, close_descriptor, refusal_reason
from gpuenergyd.client.daemon_answers import CircuitBreaker, DaemonSilence
from gpuenergyd.client.environment import can_see, find_num_tokens, find_socket_path
from gpuenergyd.client.plans import PlanQueue, prepare
from gpuenergyd.client.run_mark import delete_mark
from gpuenergyd.client.timing.recorder import InstructionTimer, IterationTimes
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError, ProtocolError
from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire import MAX_ITERATION_REPORT_BYTES, MAX_REPORTS
from gpuenergyd.wire.client_codec import (
    decode_iteration_reply,
    decode_registered,
    decode_released,
    encode,
    encode_iteration,
)
from gpuenergyd.wire.clock_request import TOKEN_BYTES
from gpuenergyd.wire.messages import (
    IterationReport,
    JobFigures,
    RankRegistered,
    RankRegistration,
    RankRelease,
    TrueClockRow,
)

REGISTRATION_LIMIT_S = 2.0
REPORT_LIMIT_S = 1.0
"""Long, because only the reporter thread waits, a busy host may reply late, and a lost reply loses a plan."""
_RELEASE_LIMIT_S = 0.7
"""Time limit of the last request; the daemon evaluates the last iterations before it replies."""
REPORT_PERIOD_S = 0.1
"""Iterations shorter than this are reported together."""
_STEADY_PERIOD_S, _UNPLANNED_PERIOD_S = 0.2, 0.5
"""The limit for a pipeline of one rank whose iterations show nothing new, so that their instructions are not timed:
under a plan and without one. Each report makes the training thread wait for the interpreter several times."""
_LATE_AFTER_S = 0.25
_LATE_AFTER_ITERATIONS = 2.0
"""If no iteration begins for this time, and this many times the last iteration's, its times are read anyway."""
_LONGEST_WAIT_S = 30.0
"""Longest pause between attempts to read the last iteration's times; each attempt doubles the pause."""
_MAX_RETIRED_SOCKETS = 4

logger = safe_logger("gpuenergyd.client")


class _RefusedError(ProtocolError):
    """The daemon refused the registration; the message is its reason."""


class _ClockSocketError(GpuEnergyError):
    """The daemon answers, but its clock socket cannot be reached."""


class FinishedIteration(NamedTuple):
    """A finished iteration in the reporter's queue."""

    iteration_index: int
    plan_epoch: int
    num_records_dropped: int
    num_client_errors: int
    captured: str
    memory_bytes: tuple[int, ...] = ()
    reorder_refusal: str = ""
    client_cost_s: float | None = None
    is_in_order: bool | None = None
    true_clocks: tuple[TrueClockRow, ...] = ()
    num_tokens: int | None = None
    num_together: int = 1


_Reportable: TypeAlias = tuple[FinishedIteration, IterationTimes]
_Queued: TypeAlias = _Reportable | RankRegistration | None


class Reporter:
    """Background thread that keeps one rank registered and reports its iterations."""

    def __init__(
        self,
        registration: RankRegistration,
        plans: PlanQueue,
        *,
        socket_path: str | None = None,
        is_first: bool = True,
        timer: InstructionTimer | None = None,
        mono_s: Callable[[], float] = monotonic,
    ) -> None:
        self._registration = registration
        self._timer = timer
        self._is_first = is_first
        self._mono_s = mono_s
        self._plans = plans
        self._socket_path_wanted = socket_path
        self._connection: HttpConnection | None = None
        self._breaker = CircuitBreaker()
        self._registered: RankRegistered | None = None
        self._queue: queue.SimpleQueue[_Queued] = queue.SimpleQueue()
        self._launched_iteration_index = -1
        self._silence = DaemonSilence()
        self._reported: set[str] = set()
        self._is_reachable = False
        self._joined_job_id: str | None = None
        self._is_stopping = self._has_wrong_tokens = False
        self._stopping = threading.Event()
        self._period_s = 0.0
        """Pause before the next report; 0 where iterations are so long that each is reported by itself."""
        self._late_after_s = _LATE_AFTER_S
        self._known_reply = b""
        """The newest reply if it contained no plans, to skip decoding equal ones."""
        self._retired_sockets: deque[socket.socket] = deque()
        self._pid = os.getpid()
        self.is_stranded = False
        """Whether the thread has ended because nobody listened on the socket before it registered."""
        self.num_registrations = 0
        """How often a daemon has accepted this rank; a new daemon knows no earlier measurements."""
        self.num_untimed_registrations = 0
        """`num_registrations` while the daemon needs the times of instructions in few iterations only, else 0."""
        self._takes_several = False
        self.takes_together = False
        """Whether the daemon can do without the times of single iterations that follow no plan."""
        self.takes_spans = False
        """Whether a report may be on several iterations, with the times of each."""
        self.energy_per_gpu_j: float | None = None
        self.power_per_gpu_w: float | None = None
        self.figures: JobFigures | None = None
        """The newest figures of the job that the daemon has sent."""
        self.reorder_refusal = ""
        """Why the rank no longer accepts other orders; sent when it leaves, since a failed program reports no more."""
        self.clock_socket: socket.socket | None = None
        """Non-blocking SEQPACKET socket to the daemon, used by the training thread; None while not connected."""
        self._thread = threading.Thread(target=self._run, name="gpuenergyd-reporter", daemon=True)
        self._thread.start()

    @property
    def rank_token(self) -> str | None:
        """Token that identifies this rank to the daemon; None while it is not registered."""
        registered = self._registered
        return registered.rank_token if registered is not None else None

    def put(self, iteration: FinishedIteration, times: IterationTimes, *, launched_iteration_index: int) -> None:
        """Queue a report and name the newest iteration that the program has launched; never blocks."""
        self._launched_iteration_index = launched_iteration_index
        self._queue.put((iteration, times))

    def register_again(self, registration: RankRegistration) -> None:
        """Queue another registration of this rank, after the reports queued so far; never blocks."""
        self._queue.put(registration)

    def stop(self, *, limit_s: float) -> None:
        """Report queued iterations and leave the job; wait up to `limit_s` for that."""
        if self._pid == os.getpid():
            self._is_stopping = True
            self._stopping.set()
            self._queue.put(None)
            if limit_s > 0:
                self._thread.join(limit_s)

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets; the parent's sockets stay open."""
        with contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.close_in_child()
            if self.clock_socket is not None:
                close_descriptor(self.clock_socket)

    def retire_clock_socket(self) -> None:
        """Stop using the clock socket; never blocks.

        It is closed much later, because a thread may be about to send on it, and a closed descriptor's number may be
        reused for another file.
        """
        clock_socket, self.clock_socket = self.clock_socket, None
        if clock_socket is not None:
            self._retired_sockets.append(clock_socket)

    def _run(self) -> None:
        self._attempt(self._register)
        is_open = True
        while is_open and not self.is_stranded:
            if self._period_s:  # sleep without waking up at each iteration
                self._stopping.wait(self._period_s)
            is_open = self._handle(self._wait_for_first())
        self._attempt(self._leave)
        self._attempt(self._close)

    def _wait_for_first(self) -> _Queued:
        timer, wait_s = self._timer, self._late_after_s
        while True:
            try:
                return self._queue.get(timeout=wait_s if timer is not None and timer.reads_late else None)
            except queue.Empty:
                if timer is not None:
                    self._attempt(timer.read_late)
                wait_s = min(2.0 * wait_s, max(_LONGEST_WAIT_S, wait_s))

    def _handle(self, first: _Queued) -> bool:
        """Handle the queue in order; return False after its last item."""
        queued = first
        iterations: list[_Reportable] = []
        while queued is not None:
            if isinstance(queued, tuple):
                iterations.append(queued)
            if iterations and (not isinstance(queued, tuple) or len(iterations) == MAX_REPORTS):
                self._report_all(iterations)
                iterations = []
            if isinstance(queued, RankRegistration):
                self._registration = queued
                self._attempt(self._discard_registration)
                self._attempt(self._register)
            try:
                queued = self._queue.get_nowait()
            except queue.Empty:
                break
        if iterations:
            self._report_all(iterations)
        self._report_silence()
        return queued is not None

    def _report_all(self, iterations: list[_Reportable]) -> None:
        if self._registered is None:
            self._attempt(self._register)
        self._attempt(partial(self._report, iterations))

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  must not end the thread
            self._record_failure(error)

    def _report(self, iterations: list[_Reportable]) -> None:
        _, newest = iterations[-1]
        newest_s = (newest.end_mono_ns - newest.begin_mono_ns) / 1e9
        self._period_s = self._period_after(iterations)
        self._late_after_s = max(_LATE_AFTER_S, _LATE_AFTER_ITERATIONS * newest_s)
        registered = self._registered
        if registered is None:
            return
        # A daemon that has been started since does not know the job well enough for others.
        takes_all = self.takes_together or self.takes_spans
        known = [one for one in iterations if takes_all or one[0].num_together == 1]
        bodies = [self._encoded(registered, *one) for one in known]
        if not bodies:
            return
        if self._takes_several:
            bodies = joined(bodies)
        replies = self._post_all("/v1/iterations", bodies, REPORT_LIMIT_S)
        if not replies:
            return
        for status, body in replies:
            if status == 404:
                logger.info("gpuenergyd: the daemon does not know this rank; registering again")
                self._discard_registration()
                self._register()
                return
            if status != 200:
                raise ProtocolError(f"HTTP {status}: {refusal_reason(body)}")
            self._apply_reply(registered, body)
        if self.clock_socket is None:
            self.clock_socket = self._connect_clock_socket(registered)
        self._record_success()

    def _period_after(self, iterations: list[_Reportable]) -> float:
        """Return the pause after a report."""
        rank, (newest, times) = self._registration, iterations[-1]
        if times.end_mono_ns - times.begin_mono_ns >= 1e9 * REPORT_PERIOD_S * newest.num_together:
            return 0.0
        is_steady = 2 * sum(finished.is_in_order is not None for finished, _ in iterations) >= len(iterations)
        if not is_steady or rank.num_pp_ranks * rank.num_stage_ranks > 1:  # ranks are waited for only a few iterations
            return REPORT_PERIOD_S
        return _STEADY_PERIOD_S if newest.plan_epoch else _UNPLANNED_PERIOD_S

    def _encoded(self, registered: RankRegistered, iteration: FinishedIteration, times: IterationTimes) -> bytes:
        return encode_iteration(
            IterationReport(
                rank_token=registered.rank_token,
                iteration_index=iteration.iteration_index,
                plan_epoch=iteration.plan_epoch,
                begin_mono_ns=times.begin_mono_ns,
                end_mono_ns=times.end_mono_ns,
                next_begin_mono_ns=times.next_begin_mono_ns,
                instructions=times.instructions,
                num_records_dropped=iteration.num_records_dropped,
                num_client_errors=iteration.num_client_errors,
                launched_iteration_index=max(self._launched_iteration_index, iteration.iteration_index),
                captured=iteration.captured,
                memory_bytes=iteration.memory_bytes,
                reorder_refusal=iteration.reorder_refusal,
                client_cost_s=iteration.client_cost_s,
                is_in_order=iteration.is_in_order,
                true_clocks=iteration.true_clocks,
                num_tokens=self._known_tokens(iteration.num_tokens),
                num_together=iteration.num_together,
            )
        )

    def _apply_reply(self, registered: RankRegistered, body: bytes) -> None:
        if body == self._known_reply:
            return
        decoded = decode_iteration_reply(body)
        self._known_reply = b"" if decoded.plans else body
        plans = [prepare(plan, bytes.fromhex(registered.rank_token)) for plan in decoded.plans]
        if self._timer is not None and any(plan.clocks or plan.full_speed_sm_clock_mhz for plan in plans):
            self._timer.prepare_requests()
        self._plans.add(plans)
        self._takes_several, self.takes_together = decoded.takes_several, decoded.takes_together
        self.takes_spans = decoded.takes_spans
        self.num_untimed_registrations = self.num_registrations if decoded.takes_untimed else 0
        if decoded.energy_per_gpu_j is not None:
            self.energy_per_gpu_j, self.power_per_gpu_w = decoded.energy_per_gpu_j, decoded.power_per_gpu_w
        self.figures = decoded.figures or self.figures

    def _known_tokens(self, given: Any) -> int | None:
        known = find_num_tokens(given)
        if known is None and given is not None and not self._has_wrong_tokens:
            self._has_wrong_tokens = True
            shown = given if isinstance(given, int | float | str) else f"of type {type(given).__name__}"
            logger.warning(
                "gpuenergyd: number of tokens %s is ignored: must be a whole number from 1, e.g. 8192", shown
            )
        return known

    def _register(self) -> None:
        socket_path = find_socket_path(self._socket_path_wanted)
        if self._connection is None or self._connection.socket_path != socket_path:
            self._connection = HttpConnection(socket_path)
        reply = self._post("/v1/ranks", encode(self._registration), REGISTRATION_LIMIT_S)
        if reply is None:
            return
        status, body = reply
        if status != 200:
            raise _RefusedError(refusal_reason(body))
        registered = decode_registered(body)
        if len(bytes.fromhex(registered.rank_token)) != TOKEN_BYTES:
            raise ProtocolError(
                f"rank token of {count_text(len(registered.rank_token), 'character')}; expected {2 * TOKEN_BYTES}"
            )
        self._registered = registered
        self.num_registrations += 1
        self.clock_socket = self._connect_clock_socket(registered)
        self._record_success()

    def _connect_clock_socket(self, registered: RankRegistered) -> socket.socket:
        """Connect to the daemon's path; in a container with another mount point, to the folder of the API socket."""
        path = Path(registered.clock_socket_path)
        if self._connection is not None and not can_see(path):
            beside = Path(self._connection.socket_path).with_name(path.name)
            path = beside if can_see(beside) else path
        clock_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            clock_socket.settimeout(CONNECT_LIMIT_S)
            clock_socket.connect(str(path))
            clock_socket.setblocking(False)
        except OSError as error:
            clock_socket.close()
            who = f" for uid {os.geteuid()}" if isinstance(error, PermissionError) else ""
            raise _ClockSocketError(f"clock socket {path}: {error.strerror or error}{who}") from None
        return clock_socket

    def _post(self, path: str, body: bytes, limit_s: float) -> tuple[int, bytes] | None:
        replies = self._post_all(path, (body,), limit_s)
        return replies[0] if replies else None

    def _post_all(self, path: str, bodies: Sequence[bytes], limit_s: float) -> list[tuple[int, bytes]]:
        if self._connection is None or not self._breaker.may_try(self._mono_s()):
            return []
        limit_s = _RELEASE_LIMIT_S if self._is_stopping else limit_s
        return self._connection.request_all("POST", path, bodies, limit_s=limit_s)

    def _discard_registration(self) -> None:
        self._registered = None
        self._takes_several = self.takes_together = self.takes_spans = False
        self.num_untimed_registrations = 0
        self._known_reply = b""
        self._plans.clear()
        self.retire_clock_socket()
        while len(self._retired_sockets) > _MAX_RETIRED_SOCKETS:
            self._retired_sockets.popleft().close()

    def _record_success(self) -> None:
        self._breaker.record_success()
        path = self._socket_path
        if not self._is_reachable:
            logger.info("gpuenergyd: rank %d registered with the daemon at %s", self._registration.pp_rank, path)
        self._is_reachable = True
        self._record_answer()
        registered = self._registered
        if registered is not None and registered.job_id != self._joined_job_id:
            self._joined_job_id = registered.job_id
            what = f"job {self._registration.job_name} ({registered.job_id}) joined the daemon at {path}"
            self._inform(f"{what}: {registered.message}" if registered.message else what)
            delete_mark()

    def _record_failure(self, error: Exception) -> None:
        self._breaker.record_failure(self._mono_s())
        is_unheard = isinstance(error, ConnectionRefusedError | FileNotFoundError)
        self.is_stranded = self.is_stranded or (is_unheard and self._joined_job_id is None)
        if self._connection is not None:
            self._connection.close()
        self._is_reachable = False
        if isinstance(error, ProtocolError | _ClockSocketError):
            self._record_answer()
            self._report_refusal(error)
            return
        self._silence.record_failure(error, self._mono_s(), datetime.now(UTC))
        if self._joined_job_id is None and isinstance(error, FileNotFoundError | ConnectionRefusedError):
            self._warn_once(f"no daemon at {self._socket_path} ({error.strerror}); training continues at full speed")
            self._silence.is_reported = True

    def _report_silence(self) -> None:
        silence = self._silence
        lasted_s = silence.report(self._mono_s())
        if lasted_s is not None and silence.began_at is not None:
            self._warn(
                f"the daemon at {self._socket_path} has not answered for {lasted_s:.0f} s, since"
                f" {silence.began_at:%H:%M:%S} UTC ({silence.error}); training continues"
            )

    def _record_answer(self) -> None:
        silent_s = self._silence.end(self._mono_s())
        if silent_s is not None:
            self._warn(f"the daemon at {self._socket_path} answers again, after {silent_s:.0f} s")

    def _report_refusal(self, error: Exception) -> None:
        """Log why the daemon refused this rank: each reason for a refused registration, but only the first for reports.

        Reasons for refused reports contain instants, so no two are the same.
        """
        if isinstance(error, _RefusedError):
            self._warn_once(
                f"the daemon at {self._socket_path} refused this rank: {error}; training continues at full speed"
            )
        elif isinstance(error, _ClockSocketError):
            self._warn_once(f"clocks cannot be requested ({error}); training continues at full speed")
        else:
            what = f"the daemon at {self._socket_path} refused a report: {error}; training continues"
            self._warn_once(what, known_as="report")

    def _warn_once(self, text: str, *, known_as: str = "") -> None:
        if (known_as or text) not in self._reported:
            self._reported.add(known_as or text)
            self._warn(text)

    def _warn(self, text: str) -> None:
        delete_mark()
        logger.warning("gpuenergyd: job %s, %s: %s", self._registration.job_name, self._rank_name, text)

    @property
    def _socket_path(self) -> str:
        return self._connection.socket_path if self._connection else find_socket_path(self._socket_path_wanted)

    @property
    def _rank_name(self) -> str:
        """This rank's name in messages: of a plain loop the process, of a pipeline the stage."""
        rank = self._registration
        return f"rank {rank.dp_rank if rank.num_dp_ranks > 1 else rank.pp_rank}"

    def _inform(self, text: str) -> None:
        """Log a line for the user, once per training; print it on stderr if the program does not log at INFO level."""
        if not self._is_first:
            return
        if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
            logger.info("gpuenergyd: %s", text)
        else:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr closed or absent
                sys.stderr.write(f"gpuenergyd: {text}\n")

    def _leave(self) -> None:
        if self._registered is not None and self._connection is not None:
            body = encode(RankRelease(self._registered.rank_token, self.reorder_refusal))
            with contextlib.suppress(OSError, ProtocolError):
                status, reply = self._connection.request("POST", "/v1/release", body, limit_s=_RELEASE_LIMIT_S)
                if status == 200 and (message := decode_released(reply).message):
                    what = f"job {self._registration.job_name} ({self._registered.job_id})"
                    self._inform(f"{what} {'' if message.startswith('ended ') else 'ended: '}{message}")

    def _close(self) -> None:
        self._registered = None
        self.retire_clock_socket()
        for retired in self._retired_sockets:
            retired.close()
        if self._connection is not None:
            self._connection.close()


def joined(reports: Sequence[bytes]) -> list[bytes]:
    """Join JSON reports into as few arrays as fit into messages of limited size."""
    arrays: list[bytes] = []
    fitting: list[bytes] = []
    size = 1
    for report in reports:
        if fitting and size + len(report) + 1 > MAX_ITERATION_REPORT_BYTES:
            arrays.append(b"[" + b",".join(fitting) + b"]")
            fitting, size = [], 1
        fitting.append(report)
        size += len(report) + 1
    return [*arrays, b"[" + b",".join(fitting) + b"]"]
