"""The policy host process: runs policies, reads requests and writes answers as JSON lines; may be killed at any time.

It has no socket, no driver handle and no database connection, so a faulty plugin can only waste the time and memory
granted to this process.
"""

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO

import gpuenergyd
from gpuenergyd.core.pipeline.fitted import FittedPipeline
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd.core.policy_api.power import PowerDecision, PowerTargetPolicy
from gpuenergyd.core.policy_api.target_policy import TargetPolicy
from gpuenergyd.daemon.processes.plugins import load_policy, load_power_target, load_target_policy, load_task
from gpuenergyd.daemon.processes.power_queries import PowerQuery, answer_power
from gpuenergyd.daemon.processes.target_queries import TargetQuery, TargetReply, answer_target
from gpuenergyd.daemon.processes.view_delta import ViewDifference, ViewReceiver
from gpuenergyd.log_lines import configure_logging
from gpuenergyd.wire import MAX_STRING_CHARS
from gpuenergyd.wire.daemon_codec import decode, encode

MAX_LINE_BYTES = 512 * 2**20
THREAD_COUNT_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
"""Each is set to 1, since policies share the CPUs with the training and may use one core."""
_PR_SET_PDEATHSIG = 1
_OWN_FOLDER = os.path.dirname(gpuenergyd.__file__) + os.sep  # noqa: PTH120  compared with the names in tracebacks
_LIBRARIES = ("importlib", "numpy", "scipy", "numba", "sklearn")
"""Folders of libraries that policies call; an exception in them is reported at the policy's line."""


@dataclass(frozen=True, slots=True)
class ServiceTask:
    """A function that a service has the policy host run: its entry point in `gpuenergyd.tasks`, and its argument."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What the function of a task returned."""

    text: str


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a job's next plan or fitted profile, a target, a task or power shares, or to discard a job.

    With `target`, `task` or `power`: answer that query, without changing the job's policy. With `view`: return the
    next plan. With none of them: discard the job's policy, and import `policy` if it is named.
    """

    request_id: int
    job_id: str
    policy: str
    view: ViewDifference | None = None
    target: TargetQuery | None = None
    task: ServiceTask | None = None
    power: PowerQuery | None = None
    is_fit: bool = False
    """Whether the request is for the policy's fitted profile instead of a plan."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The answer to one request: the plan, target, result or shares, or an error message."""

    request_id: int
    plan: ClockPlan | None = None
    error: str | None = None
    target: TargetReply | None = None
    result: TaskResult | None = None
    host_pid: int | None = None
    power: PowerDecision | None = None
    fitted: FittedPipeline | None = None
    activity: str | None = None
    """What delays the answer, for instance compiling; the answer itself follows."""
    trouble: str | None = None
    """A lasting problem of the host that makes plans late; None if there is none."""


class PolicyHost:
    """Holds one policy instance per job and answers requests."""

    def __init__(self, announce: Callable[[str], None] = lambda _activity: None) -> None:
        """`announce` is called with what delays an answer."""
        self._announce = announce
        self.trouble: str | None = None
        """A lasting problem that a policy found when it prepared this process."""
        self._policies: dict[str, tuple[str, ClockPolicy]] = {}
        """Name and instance of each job's policy, which operators may replace while the job runs."""
        self._targets: dict[tuple[str, str], TargetPolicy] = {}
        self._power_targets: dict[str, PowerTargetPolicy] = {}
        self._received: dict[str, ViewReceiver] = {}
        self._views: dict[str, JobView] = {}

    def answer(self, request: PlanRequest) -> PlanAnswer:  # noqa: PLR0911  one per kind of request and failure
        """Return the requested result, or the error in one line."""
        if request.target is not None or request.task is not None or request.power is not None:
            try:
                return self._answer_query(request)
            except Exception as error:  # noqa: BLE001  see below
                return PlanAnswer(request.request_id, error=_in_one_line(error))
        if request.view is None:
            self._policies.pop(request.job_id, None)
            self._received.pop(request.job_id, None)
            self._views.pop(request.job_id, None)
            self._targets = {key: kept for key, kept in self._targets.items() if key[0] != request.job_id}
            return PlanAnswer(request.request_id, error=self._load_error(request.policy) if request.policy else None)
        view = self._received.setdefault(request.job_id, ViewReceiver()).view(request.view)
        self._views[request.job_id] = view
        try:
            if request.is_fit:
                return self._answer_fit(request, view)
            plan: object = self._policy_of(request).next_plan(view)
        except Exception as error:  # noqa: BLE001  a plugin may raise anything; the daemon handles the error
            return PlanAnswer(request.request_id, error=_in_one_line(error))
        if not isinstance(plan, ClockPlan):
            return PlanAnswer(request.request_id, error=f"next_plan returned {type(plan).__name__}, not a ClockPlan")
        return PlanAnswer(request.request_id, plan=plan)

    def _answer_fit(self, request: PlanRequest, view: JobView) -> PlanAnswer:
        fit = getattr(self._policy_of(request), "fitted", None)
        if fit is None:
            return PlanAnswer(request.request_id, error=f"policy {request.policy} shows no fitted profile")
        fitted: object = fit(view)
        if fitted is None:
            error = f"policy {request.policy} has fitted no profile yet: the job has no plan yet"
            return PlanAnswer(request.request_id, error=error)
        if not isinstance(fitted, FittedPipeline):
            return PlanAnswer(request.request_id, error=f"fitted() returned {type(fitted).__name__}")
        return PlanAnswer(request.request_id, fitted=fitted)

    def _policy_of(self, request: PlanRequest) -> ClockPolicy:
        name, policy = self._policies.get(request.job_id, ("", None))
        if policy is None or name != request.policy:
            policy = self._prepared(request.policy)
            self._policies[request.job_id] = request.policy, policy
        return policy

    def _load_error(self, policy: str) -> str | None:
        """Import and prepare a policy, so that no job's first plan waits for it; return why that failed."""
        try:
            self._prepared(policy)
        except Exception as error:  # noqa: BLE001  a plugin may raise anything
            return _in_one_line(error)
        return None

    def _prepared(self, name: str) -> ClockPolicy:
        policy = load_policy(name)
        prepare: Callable[[Callable[[str], None]], str | None] | None = getattr(policy, "prepare", None)
        if prepare is not None:
            trouble = prepare(self._announce)
            self.trouble = self.trouble if trouble is None else _shortened(trouble)
            if not gc.get_freeze_count():  # once, before there are jobs: full collections then skip what numba loaded
                gc.freeze()
        return policy

    def _answer_query(self, request: PlanRequest) -> PlanAnswer:
        if (power := request.power) is not None:
            if power.power_target not in self._power_targets:
                self._power_targets[power.power_target] = load_power_target(power.power_target)
            divider = self._power_targets[power.power_target]
            policies = {job_id: policy for job_id, (_, policy) in self._policies.items()}
            shares = answer_power(divider, power, policies, self._views)
            return PlanAnswer(request.request_id, power=shares)
        if request.task is not None:
            result = TaskResult(load_task(request.task.name)(request.task.argument))
            return PlanAnswer(request.request_id, result=result)
        assert request.target is not None
        key = (request.job_id, request.target.target_policy)
        if key not in self._targets:
            self._targets[key] = load_target_policy(request.target.target_policy)
        _, policy = self._policies.get(request.job_id, ("", None))
        view = self._views.get(request.job_id)
        reply = answer_target(self._targets[key], request.target, policy, view)
        return PlanAnswer(request.request_id, target=reply)


def _in_one_line(error: Exception) -> str:
    """Return type and message of an exception, with the file and line of the policy that raised it."""
    first_line = (str(error).splitlines() or [""])[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_in_library(frame.filename)]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames[-1:])
    return _shortened(f"{type(error).__name__}: {first_line}{where}")


def _shortened(text: str) -> str:
    """Return a text cut to the length that the daemon accepts; a longer one would end this process."""
    return text if len(text) <= MAX_STRING_CHARS else f"{text[: MAX_STRING_CHARS - 3]}..."


def _is_in_library(path: str) -> bool:
    """Return whether a file belongs to Python, to this package, or to a library that policies use."""
    return path.startswith(("<frozen", _OWN_FOLDER)) or any(f"{os.sep}{name}{os.sep}" in path for name in _LIBRARIES)


def run(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the daemon closes the channel."""
    request = PlanRequest(0, "", "")

    def announce(activity: str) -> None:
        answers.write(
            encode(PlanAnswer(request.request_id, activity=_shortened(activity), host_pid=os.getpid())) + b"\n"
        )
        answers.flush()

    host = PolicyHost(announce)
    while line := requests.readline(MAX_LINE_BYTES):
        request = decode(line, PlanRequest, max_bytes=MAX_LINE_BYTES)
        answer = replace(host.answer(request), host_pid=os.getpid(), trouble=host.trouble)
        try:
            encoded = encode(answer)
        except (TypeError, ValueError, RecursionError) as error:
            encoded = encode(PlanAnswer(answer.request_id, error=f"the result cannot be encoded: {error}"))
        answers.write(encoded + b"\n")
        answers.flush()


def main() -> None:
    """Keep standard input and output for requests only, and answer requests."""
    _die_with_parent()
    for variable in THREAD_COUNT_VARIABLES:
        os.environ.setdefault(variable, "1")  # set before a policy imports a library that reads them
    if len(sys.argv) > 1 and (limit_bytes := int(sys.argv[1])) > 0:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    configure_logging("gpuenergyd-policy", logging.WARNING)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # A policy must not use the channel, so its prints go to standard error and its standard input is empty.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    with contextlib.suppress(BrokenPipeError):
        run(requests, answers)


def _die_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main()
