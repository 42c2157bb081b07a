"""Client of one rank of a job: marks iterations and instructions and follows plans; never raises into training.

Longer than 400 lines, since the calls inside a step share one state, which a second object would have to expose.
"""

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic_ns, perf_counter_ns
from typing import TypeAlias, TypeVar

from gpuenergyd.client.clock_sender import ClockSender, PlannedClockRequest
from gpuenergyd.client.environment import find_allow_reorder, find_job_length, find_job_options, missing_gpu_reason
from gpuenergyd.client.lookout import DaemonLookout
from gpuenergyd.client.plans import NO_PLAN, PlannedClocks, PlanQueue, PreparedPlan, at_full_speed
from gpuenergyd.client.reporter import FinishedIteration, Reporter
from gpuenergyd.client.run_mark import delete_mark, record_obstacle
from gpuenergyd.client.tags import MAX_TAGS, find_tags
from gpuenergyd.client.thinning import TimedIterations
from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.clock_probe import TrueClock
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import (
    NOT_RECORDED,
    UNTIL_NEXT_BEGIN,
    HostRecorder,
    InstructionTimer,
    IterationTimes,
    Marks,
    RecordedIteration,
)
from gpuenergyd.client.timing.replays import CapturedInstructions
from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.core.pipeline.timetable import ONE_CLOCK, TIMETABLE
from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire import PROTOCOL_VERSION
from gpuenergyd.wire.messages import JobFigures, OrderRow, RankRegistration

logger = safe_logger("gpuenergyd.client")
_RELEASE_LIMIT_NS = 1_000_000_000
_REPEAT_AFTER_NS = 50_000_000
"""A clock that is in force from one iteration to the next is requested again after this time: well before the daemon,
which raises the clock of a program that it believes to pause, has waited long enough for reports of short iterations
(`daemon/jobs/sessions.py`)."""
T = TypeVar("T")
_FEWEST_TOGETHER = 3
"""Least number of iterations that are recorded as one."""
_SPANS: tuple[OrderRow, ...] = tuple(("F", number, 0) for number in range(15))
"""Marks of iterations that are recorded as one with the times of each: so many at most, all between two timed ones."""
_SPANS_LIMIT_S = 0.15
"""Time that they may take together, so that the daemon learns of a slow one little later than without."""
_NO_REQUESTS: Mapping[OrderRow, PlannedClockRequest] = {}
_Ended: TypeAlias = tuple[
    RecordedIteration, int, int, str, bool | None, int, int, tuple[TrueClock, ...], int | None, int
]
"""A plain tuple, since it is made in each iteration: records, index, plan epoch, how it was captured, whether it ran in
order if its instructions were not timed, requests that were not sent, exceptions, clocks that the GPU counted, tokens,
and the number of iterations that were recorded together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDescription:
    """One rank of a job as its trainer adapter describes it to the daemon."""

    job_name: str | None = None
    """Name of the job in reports; None for GPUENERGYD_JOB, else the program's name."""
    run_key: str = ""
    """A key that differs between runs with the same name; equal on all ranks of a run."""
    gpu_uuid: str | None = None
    """This rank's GPU; None leaves the rank unmanaged."""
    schedule_name: str = LOOP_SCHEDULE
    num_microbatches: int = 1
    num_chunks: int = 1
    pp_rank: int = 0
    num_pp_ranks: int = 1
    dp_rank: int = 0
    num_dp_ranks: int = 1
    """Processes of a plain loop that end each iteration together; pipelines leave it at 1."""
    stage_rank: int = 0
    """Index of this rank among the tensor-, context- and expert-parallel ranks of its pipeline stage."""
    num_stage_ranks: int = 1
    framework: str = ""
    policy: str | None = None
    """Clock policy; None for GPUENERGYD_JOB_POLICY, else the daemon's default."""
    max_slowdown_ratio: float | None = None
    """Permitted slowdown against full speed; None for GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO, else the daemon's default."""
    tokens_per_iteration: int | None = None
    """Tokens (or samples) that the job processes per iteration; None if unknown or different each time."""
    num_iterations: int | None = None
    """Length of the run; None if unknown or given by the GPUENERGYD_JOB_* variables."""
    tags: tuple[tuple[str, str], ...] = ()
    """Tags in addition to those from the environment."""
    allow_reorder: bool | None = None
    """Whether plans may reorder instructions; None for GPUENERGYD_JOB_ALLOW_REORDER, else False."""
    reorder_refusal: str = "the order of this schedule cannot be changed from outside"
    """Why the rank cannot run another order, even if the user allows it; empty if it can."""
    is_first: bool = True
    """Whether this is the first rank of the training, which prints for the user when the job joins and ends."""
    is_replayed: bool = False
    """Whether each iteration replays a captured graph as a whole, with one clock."""


class RankClient:
    """Client of one rank: joins its job and marks its iterations and instructions.

    With an `order` it registers at once, else when `register` is called with the learned order. Without a GPU UUID, all
    methods do nothing. The methods called inside a step write to preallocated memory, look up the plan, and at the few
    instructions where the clock changes send one datagram without waiting; the reporter thread does the rest.
    """

    num_tokens: int | None
    """Tokens that the job processes in the current iteration, and in the next ones until changed; None if unknown."""
    _num_together: int
    """Iterations that are being recorded as one; 0 while each is recorded by itself."""
    num_left: int
    """Iterations of that group that have not begun: while more than `num_in_full` are left, an adapter may call
    `begin_next` and `end_next` instead of `begin_iteration` and `end_iteration`."""
    num_in_full: int
    """1 if the last of them must be marked in full: it ends the others, or the cost of its calls is measured."""
    has_spans: bool
    """Whether each of them is marked; if not, they are only counted."""
    _is_in_span: bool
    """Whether a grouped iteration has begun and not ended."""
    _begins: Marks
    _ends: Marks
    """Functions that mark the start and end of a grouped iteration."""
    _requests: Mapping[OrderRow, PlannedClockRequest]
    """The current plan's clock requests, by instruction."""
    due: Mapping[OrderRow, PlannedClockRequest]
    """Clock requests still to be made in the current iteration."""
    _due_next: Mapping[OrderRow, PlannedClockRequest]
    """Clock requests of the next iteration, while several are recorded as one."""
    _repeated: PlannedClockRequest | None
    """The request of a clock that stays in force in them, made in one of every so many."""
    _repeats_after: int
    can_leave_out: bool
    """Whether none of them requests a clock, so that nothing within them matters."""
    _plain_until: int
    """Index before which no iteration is timed, and no cost of the client's calls is measured."""
    _is_raised: bool
    """Whether a pause has requested full speed since the last iteration."""
    _has_waits: bool
    """Whether waits for data have times."""

    def __init__(
        self,
        rank: RankDescription,
        *,
        order: Sequence[OrderRow] = (),
        socket_path: str | None = None,
        timer: InstructionTimer | None = None,
        agreed_plans: PlanQueue | None = None,
        learn_times: Callable[[IterationTimes], None] | None = None,
        give_way: Callable[[], None] | None = None,
    ) -> None:
        """Describe the rank.

        `agreed_plans` are those of a member of a pipeline across hosts. `learn_times` gets the times of iterations, of
        timed ones only after the registration, on any thread. `give_way` makes this rank leave its job when another
        part of the process joins on the same GPU; without it, the other is ignored.
        """
        length = find_job_length()
        options = find_job_options(rank.job_name, rank.policy, rank.max_slowdown_ratio)
        self._registration = RankRegistration(
            protocol_version=PROTOCOL_VERSION,
            job_name=options.job_name,
            run_key=rank.run_key,
            pp_rank=rank.pp_rank,
            num_pp_ranks=rank.num_pp_ranks,
            dp_rank=rank.dp_rank,
            schedule_name=rank.schedule_name,
            num_microbatches=rank.num_microbatches,
            num_chunks=rank.num_chunks,
            order=(),
            gpu_uuid=rank.gpu_uuid or "",
            framework=rank.framework,
            policy=options.policy,
            max_slowdown_ratio=options.max_slowdown_ratio,
            tags=(*rank.tags, *find_tags())[:MAX_TAGS],
            job_iterations=rank.num_iterations or length.iterations,
            job_hours=length.hours,
            job_deadline=length.deadline,
            is_pipeline_member=agreed_plans is not None,
            from_environment=options.from_environment,
            num_dp_ranks=rank.num_dp_ranks,
            stage_rank=rank.stage_rank,
            num_stage_ranks=rank.num_stage_ranks,
            allow_reorder=find_allow_reorder(rank.allow_reorder),
            reorder_refusal=rank.reorder_refusal,
        )
        self._socket_path, self._is_first = socket_path, rank.is_first
        self._learn_times, self._give_way = learn_times, give_way
        self._timer: InstructionTimer = timer if timer is not None else HostRecorder()
        self._recorder = self._timer if isinstance(self._timer, DeviceRecorder) else None
        self._captured_always = self._captured = ONE_CLOCK if rank.is_replayed else ""
        self._begin, self._end = self._timer.begin, self._timer.end  # bound once: these run at every instruction
        self._plans = PlanQueue() if agreed_plans is None else agreed_plans
        self._plan: PreparedPlan = NO_PLAN
        self._requests = self.due = self._due_next = _NO_REQUESTS
        self._begins = self._ends = []
        self._span = NOT_RECORDED
        self._reporter: Reporter | None = None
        self._sender = ClockSender()
        self._lookout = DaemonLookout(socket_path)
        self._order: tuple[OrderRow, ...] = ()
        self._is_inert = rank.gpu_uuid is None
        self._is_in_iteration = self._is_in_capture = self._is_raised = self._has_waits = False
        self.has_spans = self._is_in_span = self.can_leave_out = False
        self._repeated, self._repeats_after, self.num_in_full = None, 1, 1
        self._iteration_index, self._plan_epoch, self._in_force_until_ns = -1, 0, 0
        self._ended: _Ended | None = None
        """The newest iteration, until the next one begins."""
        self._unqueued: _Ended | None = None
        """The previous iteration, until the first instruction of this one has begun."""
        self._num_errors = self._num_registrations = 0
        self._timed = TimedIterations()
        self._begun: list[OrderRow] | None = None
        """The instructions begun in an iteration of which only their order counts; None in any other."""
        self._is_cost_sampled, self._cost_ns = False, 0
        self.num_tokens = self._usual_num_tokens = rank.tokens_per_iteration
        self._num_together = self.num_left = self._plain_until = 0
        self.memory_bytes: tuple[int, ...] = ()
        """Memory to report with the next iterations, measured by the adapter; see `IterationReport`."""
        self.reorder_refusal = rank.reorder_refusal
        """Why this rank cannot run another order of instructions; empty if it can."""
        self.total_errors = 0
        """Number of this client's suppressed exceptions."""
        if not self._takes_gpu(rank):
            self._is_inert = True
        elif not order:
            record_obstacle("the training ended before the instructions of its iterations were known")
        _live_clients.add(self)
        _release_at_end_of_child()
        if order:
            self.register(order)

    def _takes_gpu(self, rank: RankDescription) -> bool:
        """Return whether the rank has a GPU that no other client of this process uses; if not, warn the user."""
        if rank.gpu_uuid is None:
            logger.warning(
                "gpuenergyd: job %s, rank %d: no GPU UUID (%s); training continues unmanaged",
                self.job_name,
                rank.dp_rank if rank.num_dp_ranks > 1 else rank.pp_rank,
                missing_gpu_reason(),
            )
            delete_mark()
            return False
        other = _client_on(rank.gpu_uuid)
        if other is not None and other._give_way is not None:  # noqa: SLF001  of this class
            other._give_way()  # noqa: SLF001  as above
        elif other is not None:
            logger.log(
                logging.WARNING if rank.is_first else logging.INFO,
                "gpuenergyd: job %s: this process is a rank of job %s on the same GPU already, which goes on; this one"
                " is ignored",
                self.job_name,
                other.job_name,
            )
            return False
        return True

    @property
    def pp_rank(self) -> int:
        """Position in the pipeline."""
        return self._registration.pp_rank

    @property
    def job_name(self) -> str:
        return self._registration.job_name

    @property
    def gpu_uuid(self) -> str:
        """UUID of this rank's GPU; empty if it has none, or if the daemon finds it."""
        return self._registration.gpu_uuid

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the training, which prints messages for the user."""
        return self._is_first

    @property
    def is_managed(self) -> bool:
        """Whether the rank follows plans for a GPU and has not left its job."""
        return not self._is_inert

    @property
    def plan_epoch(self) -> int:
        """Epoch of the plan of the current iteration; 0 without a plan."""
        return self._plan_epoch

    @property
    def energy_per_gpu_j(self) -> float | None:
        """Energy per GPU of the job's newest measured iteration, in J; None before the first."""
        return self._reporter.energy_per_gpu_j if self._reporter is not None else None

    @property
    def power_per_gpu_w(self) -> float | None:
        """Mean power per GPU in the job's newest measured iteration, in W; None before the first."""
        return self._reporter.power_per_gpu_w if self._reporter is not None else None

    @property
    def figures(self) -> JobFigures | None:
        """The job's measured figures as the daemon last sent them; None before the first."""
        return self._reporter.figures if self._reporter is not None else None

    @property
    def may_reorder(self) -> bool:
        """Whether the user allows plans to reorder instructions and the program can do so while it runs."""
        return self._registration.allow_reorder and not self.reorder_refusal

    def refuse_orders(self, reason: str) -> None:
        """Run the registered order from now on, and send the reason with the next report."""
        self.reorder_refusal, self._plain_until = self.reorder_refusal or reason, 0
        if self._reporter is not None:
            self._reporter.reorder_refusal = self.reorder_refusal

    @property
    def planned_order(self) -> tuple[OrderRow, ...]:
        """The instructions of the current iteration by its plan; empty for the registered order.

        All ranks run them, even those whose clocks cannot be set at present.
        """
        return self._plan.order

    @property
    def iteration_index(self) -> int:
        """Index of the current or last iteration; -1 before the first."""
        return self._iteration_index - self.num_left

    @property
    def graphs(self) -> CapturedGraphs | None:
        """The CUDA graphs that this process captures and replays; None if its device has none."""
        return self._recorder.graphs if self._recorder is not None else None

    @property
    def rank_token(self) -> str | None:
        """Token that identifies this rank to the daemon; None while it is not registered."""
        return self._reporter.rank_token if self._reporter is not None else None

    @property
    def is_unheard(self) -> bool:
        """Whether no daemon has listened on the socket since this rank began to join."""
        return self._reporter is not None and self._reporter.is_stranded

    def _finds_daemon(self) -> bool:
        """Return whether a daemon was running at the last look; without one, nothing is marked.

        Starts the reporter if a daemon has appeared.
        """
        if self._reporter is not None:
            if not self._reporter.is_stranded:
                return True
            self._lookout.record_refusal()
            self._reporter = self._sender.reporter = None
        if not self._lookout.sees_daemon():
            return False
        if self._order:
            self._start_reporter()
        return True

    def register(self, order: Sequence[OrderRow]) -> None:
        """Join the job with this order of instructions once a daemon runs; returns at once."""
        if self._is_inert or self._order:
            return
        try:
            self._set_order(order)
            num_microbatches = max([self._registration.num_microbatches, *(1 + row[1] for row in order)])
            self._registration = replace(self._registration, order=self._order, num_microbatches=num_microbatches)
            self._finds_daemon()
        except Exception:  # noqa: BLE001  for instance no thread available: must not reach training
            self._count_error()

    def _set_order(self, order: Sequence[OrderRow]) -> None:
        self._order = tuple(order)
        self._timer.reserve(len(_SPANS))
        self._has_waits = any(row[0] == UNTIL_NEXT_BEGIN for row in order)

    def _start_reporter(self) -> None:
        self._reporter = Reporter(
            self._registration, self._plans, socket_path=self._socket_path, is_first=self._is_first, timer=self._timer
        )
        self._sender.reporter = self._reporter

    def change_order(self, order: Sequence[OrderRow], *, num_microbatches: int) -> None:
        """Register again, with another number of microbatches, between two iterations; returns at once.

        Plans for the earlier order are dropped, and the daemon sends one for the new order. Call `pause` first.
        """
        if self._is_inert:
            return
        try:
            self._set_order(order)
            self._registration = replace(self._registration, num_microbatches=num_microbatches, order=self._order)
            self._timer.reserve(2 * len(order) + 1)
            self._plans.clear()
            self._plan, self._requests, self._plain_until = NO_PLAN, {}, 0
            self._timed.restart(self._iteration_index + 1)
            if self._reporter is not None:
                self._reporter.register_again(self._registration)
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()

    def begin_iteration(self) -> bool:
        """Mark the start of an iteration and switch to its plan; return False if the iteration is not recorded.

        The previous iteration's report is queued only after the first instruction has begun. Otherwise the reporter
        thread would process it while this thread waits for the interpreter lock to request the clock.
        """
        if self._is_inert:
            return False
        try:
            if (self._reporter is None or self._reporter.is_stranded) and not self._finds_daemon():
                return False
            self._is_cost_sampled = False
            begun_ns = perf_counter_ns()
            if self._num_together and self._goes_on_together(begun_ns):
                return True
            ended, self._ended = self._ended, None
            if self._begin_spans(ended, begun_ns):
                return True
            self._begin_iteration(ended, begun_ns)
            if self._timed.is_measured and not self._num_together:
                self._is_cost_sampled = True
                self._cost_ns = perf_counter_ns() - begun_ns
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()
        return True

    def _begin_spans(self, ended: _Ended | None, begun_ns: int) -> bool:
        """Begin iterations that are recorded as one with the times of each; return False if there are too few of them.

        A clock that stays in force is requested in one of every so many.
        """
        reporter, times_s = self._reporter, self._timed.times_s
        num_plain = self._plain_until - self._iteration_index - 1
        if num_plain < _FEWEST_TOGETHER or not times_s or reporter is None or not reporter.takes_spans:
            return False
        can_signal = self._recorder is None or self._recorder.has_requests or self._in_force_until_ns > 0
        if (
            (self._requests and not (can_signal and reporter.clock_socket is not None))
            or reporter.num_untimed_registrations != self._num_registrations
            or (reporter.takes_together and self._plan is NO_PLAN)
            or (ended is None or {self.num_tokens, ended[8]} != {self._usual_num_tokens})  # known at the end only
            or self._plans.has_news
            or self._plan.order
        ):
            return False
        time_s = max(times_s[-1], 1e-6)
        num_together = min(num_plain, len(_SPANS), int(_SPANS_LIMIT_S / time_s))
        if num_together < _FEWEST_TOGETHER:
            return False
        self._queue_unqueued()
        self._iteration_index += num_together
        self._num_together, self.num_left, self.has_spans = num_together, num_together, True
        self._timer.begin_iteration(ended[0])
        self._queue_report(ended)
        self._begun = None
        self._begins, self._ends = self._timer.open_marks(_SPANS[:num_together])
        self._timed.begin_group(self._iteration_index)
        self._due_next, self._repeated, num_times = self._requests, None, num_together
        if self._in_force_until_ns:
            self._in_force_until_ns = begun_ns + _REPEAT_AFTER_NS
            self._repeats_after = max(1, int(_REPEAT_AFTER_NS / 1e9 / time_s))
            self._due_next, (self._repeated,) = _NO_REQUESTS, self._requests.values()
            num_times = -(-num_together // self._repeats_after)
        self.can_leave_out = not self._due_next
        if self._requests and self._recorder is not None:
            self._recorder.prepare([*self._requests.values()] * num_times)
        self.begin_next(is_first=True)
        self.num_in_full = 1 if self._timed.is_measured else 0
        self._cost_ns = (perf_counter_ns() - begun_ns) // num_together
        return True

    def _goes_on_together(self, begun_ns: int) -> bool:
        """Begin the next iteration of several that are recorded as one; end them and return False if there is none."""
        if not self.num_left or not self.begin_next():
            self._end_together()
            return False
        if self.has_spans and not self.num_left and self.num_in_full:
            self._is_cost_sampled = True
            self._cost_ns += perf_counter_ns() - begun_ns
        return True

    def begin_next(self, *, is_first: bool = False) -> bool:
        """Begin an iteration of those that are recorded as one; False if `begin_iteration` has to end them."""
        if self.num_tokens != self._usual_num_tokens or (self.has_spans and self._plans.has_news and not is_first):
            return False
        if not self.has_spans:
            self.num_left -= 1
            return True
        self._span = number = self._num_together - self.num_left
        self.num_left -= 1
        self.due, self._is_in_span = self._due_next, True
        try:
            self._begins[number]()
            if self._repeated is not None and number % self._repeats_after == 0:
                self._timer.call_at_begin(number, self._repeated)
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()
        return True

    def end_next(self) -> None:
        """End an iteration of those that are recorded as one."""
        if self._is_in_span:
            try:
                self._is_in_span, self.due = False, _NO_REQUESTS
                self._ends[self._span]()
            except Exception:  # noqa: BLE001  must not reach training
                self._count_error()

    def _begin_together(self) -> None:
        """Record the iterations from this one to the next that is timed as one, if there are a few of them."""
        num_together = self._plain_until - self._iteration_index
        if num_together >= _FEWEST_TOGETHER and self.num_tokens == self._usual_num_tokens:
            self._num_together, self.num_left, self.num_in_full = num_together, num_together - 1, 1
            self.has_spans = False
            self._iteration_index += self.num_left
            self._is_in_iteration, self._begun, self.can_leave_out = False, None, True
            self._queue_unqueued()

    def _end_together(self) -> None:
        """End a group of iterations, with those that have begun, or that have ended if each has its times."""
        num_together, self._num_together = self._num_together - self.num_left - self._is_in_span, 0
        self._iteration_index -= self.num_left
        last_index = self._iteration_index - self._is_in_span
        if self.has_spans:
            self._timer.close_marks(num_together + self._is_in_span, num_together)
        self.num_left, self._is_in_span, self.due = 0, False, _NO_REQUESTS
        recorded = self._timer.end_iteration()
        num_dropped = self._pop_num_dropped() if self.has_spans and self._requests else 0
        if recorded is None or num_dropped or last_index < self._iteration_index:
            self._in_force_until_ns = 0
        if recorded is not None and num_together:
            num_errors, self._num_errors = self._num_errors, 0
            epoch, tokens = self._plan_epoch if self.has_spans else 0, self._usual_num_tokens
            self._ended = recorded, last_index, epoch, "", True, num_dropped, num_errors, (), tokens, num_together
        elif recorded is not None:
            self._timer.call_when_known(recorded, recorded.free)

    def _begin_iteration(self, ended: _Ended | None, begun_ns: int) -> None:
        self._iteration_index = iteration_index = self._iteration_index + 1
        plan = self._plans.plan_for(iteration_index)
        if plan.order and not self.may_reorder:
            plan = at_full_speed(plan)
        # All instructions are timed as long as the daemon needs them: under what is new, and where they show waits.
        num_registrations = self._reporter.num_untimed_registrations if self._reporter is not None else 0
        if (
            plan is not self._plan
            or num_registrations != self._num_registrations
            or not num_registrations
            or self._has_waits
        ):
            self._num_registrations = num_registrations
            self._timed.restart(iteration_index)
        is_timed = self._timed.begin(iteration_index)
        self._begun = None if is_timed else []
        self._timer.begin_iteration(None if ended is None else ended[0], is_timed=is_timed)
        self._captured = self._captured_always
        if self._unqueued is not None:
            self._queue_report(self._unqueued)
        self._unqueued = ended
        if self._reporter is None and ended is not None:  # its times may decide how this iteration is marked
            self._queue_ended()
        if plan is not self._plan:
            in_order = [key for key in dict.fromkeys((*plan.order, *self._order, *plan.clocks)) if key in plan.clocks]
            self._requests = {key: PlannedClockRequest(self._sender, plan, plan.clocks[key]) for key in in_order}
            self._plan, self._in_force_until_ns = plan, 0
        self.due = self._requests
        if len(plan.changes) == 1:  # the clock is still in force from the iteration before
            if begun_ns < self._in_force_until_ns and not self._is_raised:
                self.due = _NO_REQUESTS
            else:
                self._in_force_until_ns = begun_ns + _REPEAT_AFTER_NS if self._sender.can_send else 0
        is_followed = (not plan.clocks or self._sender.can_send) and not plan.is_full_speed
        self._plan_epoch = plan.plan_epoch if is_followed else 0
        if plan.is_full_speed:
            self._request(plan, plan.full_speed_sm_clock_mhz)
        elif self._is_raised and plan.changes:  # the clock that the previous iteration would have left in force
            self._request(plan, plan.changes[-1].sm_clock_mhz)
        self._is_raised = False
        self._is_in_iteration = True
        self._find_plain_until(is_timed=is_timed)

    def _find_plain_until(self, *, is_timed: bool) -> None:
        is_plain = not is_timed and self._iteration_index < self._plain_until
        is_special = self._plan.is_full_speed or self._captured_always
        are_together = self._reporter is not None and self._reporter.takes_together and self._plan is NO_PLAN
        self._plain_until = 0 if is_special else self._timed.next_timed(are_together=are_together)
        if are_together and is_plain:
            self._begin_together()
        elif self.due and not is_timed and self._recorder is not None:
            self._recorder.prepare(self.due.values())

    @property
    def needs_marks(self) -> bool:
        """Whether the instructions of the current iteration must be marked: they are timed, or in another order."""
        return not self._num_together and (self._begun is None or bool(self._plan.order))

    def assume_order(self) -> None:
        """Assume that the instructions of the current iteration run in the registered order, without marks.

        The adapter then calls `request_clock` where a request is due.
        """
        if self._begun is not None:
            self._begun = list(self._order)

    def request_clock(self, kind: str, microbatch_index: int, chunk_index: int = 0) -> None:
        """Request the planned clock of an instruction that begins and needs no mark."""
        request = self.due.get((kind, microbatch_index, chunk_index))
        if request is None or not (self._is_in_span or self._is_in_iteration):
            return
        if self._is_cost_sampled:
            self._sample(partial(self.request_clock, kind, microbatch_index, chunk_index))
            return
        try:
            key = kind, microbatch_index, chunk_index
            self._timer.call_at_begin(self._span if self._is_in_span else self._order.index(key), request)
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()

    def begin_capture(self) -> bool:
        """Mark instructions in the graph that the program captures; return False if it captures none."""
        if self._is_inert or self._recorder is None:
            return False
        try:
            self._is_in_capture = self._recorder.begin_capture()
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()
        return self._is_in_capture

    def end_capture(self) -> CapturedInstructions | None:
        """Return the instructions marked since `begin_capture`."""
        self._is_in_capture = False
        return None if self._recorder is None else self._recorder.end_capture()

    def follow_replay(self, captured: CapturedInstructions) -> None:
        """Take the current iteration's instructions from the graph that is replayed next.

        When the device begins the replay, one request sends all of the plan's clocks with their instants.
        """
        if not self._is_in_iteration or self._recorder is None:
            return
        try:
            self._captured, self._plain_until = TIMETABLE, 0
            self._timed.is_timed, self._begun = True, None
            self._recorder.replay(captured)
            if self._plan.changes:
                self._recorder.call_with_instant(partial(self._sender.request_timetable, self._plan))
            self._queue_ended()
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()

    def end_iteration(self) -> tuple[OrderRow, ...]:
        """Mark the end of an iteration; return its instructions in the order in which they began."""
        if self._num_together:
            return self._end_one_of_several()
        if self._is_inert or not self._is_in_iteration:
            return ()
        begun_ns = perf_counter_ns() if self._is_cost_sampled else 0
        try:
            self._is_in_iteration = False
            if self._unqueued is not None:
                self._queue_unqueued()
            begun, self._begun = self._begun, None
            order = self._timer.order() if begun is None else tuple(begun)
            recorded = self._timer.end_iteration()
            num_dropped = self._pop_num_dropped() if self.due else 0
            if num_dropped or recorded is None:  # a request may not have been sent
                self._in_force_until_ns = 0
            if recorded is not None:
                expected = self._plan.order if self._plan_epoch and self._plan.order else self._order
                is_in_order = None if begun is None else order == expected
                num_errors, self._num_errors = self._num_errors, 0
                self._ended = (
                    recorded,
                    self._iteration_index,
                    self._plan_epoch,
                    self._captured,
                    is_in_order,
                    num_dropped,
                    num_errors,
                    self._recorder.pop_true_clocks() if self._recorder is not None and begun is None else (),
                    self.num_tokens,
                    1,
                )
            if self._is_cost_sampled:
                self._is_cost_sampled = False
                self._timed.add_cost((self._cost_ns + perf_counter_ns() - begun_ns) / 1e9)
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()
            return ()
        return order

    def _end_one_of_several(self) -> tuple[OrderRow, ...]:
        begun_ns, num_together = perf_counter_ns(), self._num_together
        self.end_next()
        ended_ns = perf_counter_ns()
        try:
            if not self.num_left:
                self._end_together()
            if self._is_cost_sampled:
                self._is_cost_sampled = False
                own_ns = self._cost_ns + ended_ns - begun_ns
                self._timed.add_cost((own_ns + (perf_counter_ns() - ended_ns) // num_together) / 1e9)
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()
        return self._order

    def abandon_iteration(self) -> None:
        """Discard the current iteration without a report, for instance after an exception.

        Of several that are recorded together, it counts if its time is known only with theirs.
        """
        if self._is_inert or not (self._is_in_iteration or self._num_together):
            return
        try:
            if self._num_together:
                self._queue_ended()
                return
            self._is_in_iteration, self._in_force_until_ns = False, 0
            self._queue_ended()
            recorded = self._timer.end_iteration()
            if recorded is not None:
                self._timer.call_when_known(recorded, recorded.free)
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()

    def pause(self) -> None:
        """Mark a pause after an iteration (evaluation, checkpoint), which runs at full speed under any plan."""
        if self._is_inert:
            return
        try:
            self._queue_ended()
            if self._requests and self._plan.full_speed_sm_clock_mhz:
                self._request(self._plan, self._plan.full_speed_sm_clock_mhz)
                self._is_raised, self._plain_until = True, 0
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()

    def begin_instruction(self, kind: str, microbatch_index: int, chunk_index: int = 0) -> int:
        """Mark the start of an instruction and request its planned clock; return the slot for its end, if any."""
        if not self._is_in_iteration and not self._is_in_capture:
            if self._is_in_span:
                self.request_clock(kind, microbatch_index, chunk_index)
            return NOT_RECORDED
        if self._is_cost_sampled:
            return self._sample(partial(self.begin_instruction, kind, microbatch_index, chunk_index))
        try:
            key = (kind, microbatch_index, chunk_index)
            begun = self._begun
            if begun is None or self._is_in_capture:
                slot = self._begin(key)
                if key in self.due and not self._is_in_capture:
                    self._timer.call_at_begin(slot, self.due[key])
                    if slot == NOT_RECORDED:  # without a mark, the request may not have been sent
                        self._in_force_until_ns = 0
            else:
                begun.append(key)
                slot = NOT_RECORDED
                if key in self.due:
                    self._timer.call_at_begin(len(begun) - 1, self.due[key])
            if self._unqueued is not None:
                self._queue_unqueued()
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()
            return NOT_RECORDED
        return slot

    def end_instruction(self, slot: int) -> None:
        """Mark the end of an instruction; a later call with the same slot overwrites it."""
        if slot == NOT_RECORDED:
            return
        if self._is_cost_sampled:
            self._sample(partial(self.end_instruction, slot))
            return
        try:
            self._end(slot)
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()

    def _sample(self, call: Callable[[], T]) -> T:
        """Add the time of a call to the cost of this iteration."""
        self._is_cost_sampled = False
        begun_ns = perf_counter_ns()
        result = call()
        self._cost_ns += perf_counter_ns() - begun_ns
        self._is_cost_sampled = True
        return result

    def release(self, *, shall_wait: bool = True) -> None:
        """Report the last iteration and leave the job; waits at most one second with `shall_wait`."""
        if self._is_inert:
            return
        try:
            give_up_mono_ns = monotonic_ns() + (_RELEASE_LIMIT_NS if shall_wait else 0)
            self._queue_ended()
            self._is_inert = True
            self._is_in_iteration = False
            self._plan, self._requests = NO_PLAN, {}
            try:
                self._timer.close(_seconds_until(give_up_mono_ns) / 2)
            finally:
                if self._reporter is not None:
                    self._reporter.stop(limit_s=_seconds_until(give_up_mono_ns))
        except Exception:  # noqa: BLE001  must not reach training
            self._count_error()

    def disable_in_child(self) -> None:
        """Disable the copy in a forked child, such as a data-loader worker, which is not this rank."""
        self._is_inert = True
        self._is_in_iteration = False
        self.num_left = self._num_together = 0
        self._is_in_span = False
        self._unqueued = self._ended = None
        self._plan, self._requests = NO_PLAN, {}
        if self._reporter is not None:
            self._reporter.close_in_child()

    def _pop_num_dropped(self) -> int:
        num_dropped, self._sender.num_dropped = self._sender.num_dropped, 0
        return num_dropped + (self._recorder.pop_num_dropped() if self._recorder is not None else 0)

    def _queue_unqueued(self) -> None:
        unqueued, self._unqueued = self._unqueued, None
        if unqueued is not None:
            self._queue_report(unqueued)

    def _queue_ended(self) -> None:
        """Have the iterations that have ended reported once their times are known."""
        if self._num_together:
            self._end_together()
        self._queue_unqueued()
        ended, self._ended = self._ended, None
        if ended is not None:
            self._queue_report(ended)

    def _queue_report(self, ended: _Ended) -> None:
        recorded = ended[0]
        if self._reporter is not None:
            self._timer.call_when_known(recorded, partial(self._report, ended))
        elif self._learn_times is not None:
            self._timer.call_when_known(recorded, partial(self._learn, recorded, self._learn_times))
        else:
            recorded.free()

    @staticmethod
    def _learn(recorded: RecordedIteration, learn_times: Callable[[IterationTimes], None]) -> None:
        try:
            learn_times(recorded.times())
        finally:
            recorded.free()

    def _report(self, ended: _Ended) -> None:
        recorded, iteration_index, plan_epoch, captured, is_in_order, num_dropped, num_errors = ended[:7]
        true_clocks, num_tokens, num_together = ended[7:]
        times = recorded.times()
        recorded.free()
        if self._reporter is None:  # its daemon has gone by now
            return
        spans = times.instructions if is_in_order else ()
        if num_together > 1 and len(spans) != num_together and (spans or plan_epoch):
            return  # some could not be marked, while a graph was captured
        if num_together == 1 and spans:
            times = times._replace(instructions=(), end_mono_ns=spans[0][4])
        if captured == TIMETABLE:
            self._sender.timetables.add_replay(plan_epoch, times)
        if times.next_begin_mono_ns and is_in_order is None:
            self._timed.add_time((times.next_begin_mono_ns - times.begin_mono_ns) / 1e9)
            if self._learn_times is not None:
                self._learn_times(times)
        finished = FinishedIteration(
            iteration_index,
            plan_epoch,
            num_dropped,
            num_errors,
            captured,
            self.memory_bytes,
            "" if self._registration.reorder_refusal else self.reorder_refusal,
            self._timed.cost_s(is_timed=is_in_order is None),
            is_in_order,
            true_clocks,
            num_tokens,
            num_together,
        )
        self._reporter.put(finished, times, launched_iteration_index=self.iteration_index)

    def _request(self, plan: PreparedPlan, sm_clock_mhz: int) -> None:
        """Request a clock for when the device reaches the newest iteration mark."""
        clocks = PlannedClocks(sm_clock_mhz, 0, 0)
        self._timer.call_when_reached(PlannedClockRequest(self._sender, plan, clocks))

    def _count_error(self) -> None:
        self._num_errors += 1
        self.total_errors += 1


_live_clients: "weakref.WeakSet[RankClient]" = weakref.WeakSet()
_pid_with_end = 0


def has_clients() -> bool:
    """Return whether any part of this process has joined a job."""
    return bool(_live_clients)


def _client_on(gpu_uuid: str) -> RankClient | None:
    """Return this process's client for a GPU; None if there is none."""
    return next((client for client in list(_live_clients) if client.is_managed and client.gpu_uuid == gpu_uuid), None)


def _seconds_until(mono_ns: int) -> float:
    return max(0.0, (mono_ns - monotonic_ns()) / 1e9)


def _release_all() -> None:
    for client in list(_live_clients):
        client.release()


def _release_at_end_of_child() -> None:
    """Make a `multiprocessing` child leave its job at its end, where `atexit` functions are not called."""
    global _pid_with_end  # noqa: PLW0603  once per process, like the registrations below
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None or _pid_with_end == os.getpid():
        return
    from multiprocessing.util import Finalize  # noqa: PLC0415  loaded in such a process only

    _pid_with_end = os.getpid()
    Finalize(None, _release_all, exitpriority=0)


def _disable_all_in_child() -> None:
    for client in list(_live_clients):
        client.disable_in_child()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_disable_all_in_child)
