"""Phases of a job and their transitions, found by running the state machine on random events."""

import ast
import inspect
import random
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from docs.site.markdown import table
from gpuenergyd.core.job import messages
from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.guard import GuardRules
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    ControlLost,
    Event,
    JobPhase,
    MergedIterationObserved,
    OperatorOrdered,
    PlanDecided,
    PolicyFailed,
    RankChangedMicrobatches,
    RankJoined,
    RankLost,
    RankReleased,
    SendPlan,
    StragglerChanged,
    TrialPermissionChanged,
)
from gpuenergyd.core.job.operator_orders import OperatorOrders
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import JobError

_NUM_RUNS, _NUM_EVENTS = 120, 120
_CLOCKS_MHZ = (1410, 900)
_SCHEDULE = one_forward_one_backward(1, 1)
_RULES = JobRules(
    warmup_iterations=1,
    baseline_iterations=2,
    fallback_iterations=2,
    refused_trial_iterations=4,
    proof_iterations=0,
    guard=GuardRules(windows=(4,)),
)
_RARE_RATIO = 0.05
_RARE_EVENTS: tuple[Event, ...] = (
    RankReleased(0),
    RankLost(0, "killed"),
    RankChangedMicrobatches(0, _SCHEDULE.orders[0], 2),
    ControlLost("no GPU worker"),
    TrialPermissionChanged("too expensive"),
    TrialPermissionChanged(None),
    StragglerChanged(1.3, "a straggler"),
    StragglerChanged(None, "no straggler"),
    OperatorOrdered(OperatorOrders(is_paused=True), "paused"),
    OperatorOrdered(OperatorOrders(is_paused=False), "resumed"),
    OperatorOrdered(OperatorOrders(policy="other"), "another policy"),
)
_JOINED = RankJoined(0, _SCHEDULE.orders[0], GpuView("GPU-0", "A100", _CLOCKS_MHZ, 0.01))
_EXPLANATIONS = {
    ("RankJoined", JobPhase.WARMUP): "the last rank joined",
    ("MergedIterationObserved", JobPhase.BASELINE): "the warm-up iterations are over",
    ("PlanDecided", JobPhase.TRIAL): "the policy returned a trial",
    ("PlanDecided", JobPhase.TUNED): "the policy returned a tuned plan, or full speed",
    ("PlanDecided", JobPhase.FALLBACK): "the policy returned an invalid plan, or a trial that is not permitted",
    ("PolicyFailed", JobPhase.FALLBACK): "the policy failed",
    ("ControlLost", JobPhase.FALLBACK): "clocks cannot be set",
    ("TrialPermissionChanged", JobPhase.FALLBACK): "trials are no longer permitted",
    ("RankChangedMicrobatches", JobPhase.BASELINE): "the number of microbatches has changed",
    ("MergedIterationObserved", JobPhase.PAUSED): "the baseline of a paused job is complete",
    ("ControlLost", JobPhase.PAUSED): "clocks cannot be set, and the job is paused",
    ("OperatorOrdered", JobPhase.PAUSED): "an operator paused the job",
    ("OperatorOrdered", JobPhase.FALLBACK): "an operator resumed the job",
    ("OperatorOrdered", JobPhase.TRIAL): "an operator ordered another policy",
    ("RankReleased", JobPhase.ENDED): "a rank was released, or its process ended",
    ("RankLost", JobPhase.ENDED): "a rank's process failed",
}

_AFTER_ITERATION = {
    JobPhase.TRIAL: "trials exceeded their limit of iterations",
    JobPhase.TUNED: "the plan is too slow, or the job has become faster",
}


@cache
def transitions() -> Mapping[tuple[JobPhase, JobPhase], frozenset[str]]:
    """Return the events that take a job from one phase to another, by the two phases."""
    found: dict[tuple[JobPhase, JobPhase], set[str]] = defaultdict(set)
    rng = random.Random(0)  # noqa: S311  no secret
    for _ in range(_NUM_RUNS):
        walk = _Walk(rng)
        for _ in range(_NUM_EVENTS):
            event, before = walk.next_event(), walk.job.phase
            if before is not JobPhase.ENDED:
                for rare in _RARE_EVENTS if rng.random() < _RARE_RATIO else ():
                    found[before, _phase_after(walk.job, rare)].add(type(rare).__name__)
            walk.handle(event)
            found[before, walk.job.phase].add(type(event).__name__)
    return {phases: frozenset(events) for phases, events in found.items() if phases[0] is not phases[1]}


def phases_and_transitions() -> str:
    """Return the tables of phases and transitions."""
    order = {phase: number for number, phase in enumerate(JobPhase)}
    phases = [(f"`{phase}`", _meanings()[phase.name]) for phase in JobPhase]
    rows = [
        (f"`{before}`", f"`{after}`", "; ".join(sorted(_explanation(event, before, after) for event in events)))
        for (before, after), events in sorted(transitions().items(), key=lambda t: (order[t[0][0]], order[t[0][1]]))
    ]
    return f"{table(('phase', 'meaning'), phases)}\n{table(('from', 'to', 'when'), rows)}"


def _explanation(event: str, before: JobPhase, after: JobPhase) -> str:
    return _EXPLANATIONS.get((event, after)) or _AFTER_ITERATION[before]


def _phase_after(job: Job, event: Event) -> JobPhase:
    """Return the phase of a copy of a job after an event."""
    copy = Job(job.description, job.rules)
    copy.restore(job.snapshot())
    with suppress(JobError):  # no rank has joined
        copy.handle(event)
    return copy.phase


class _Walk:
    """A job of one rank that receives random events, in an order that a daemon could pass on."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.job = Job(JobDescription("job", "job", 1, "1f1b", 1, 1, "policy", PerformanceTarget()), _RULES)
        self.index = 0
        self.time_s = 1.0
        self.sent: list[SendPlan] = []

    def handle(self, event: Event) -> None:
        """Pass an event to the job, and remember the plans that it sends."""
        with suppress(JobError):  # as above
            self.sent += [command for command in self.job.handle(event) if isinstance(command, SendPlan)]

    def next_event(self) -> Event:
        """Return an event that may come next."""
        if self.job.control.question.is_open and self.rng.random() < 0.5:
            return PolicyFailed("failed") if self.rng.random() < 0.1 else PlanDecided(self._plan())
        if self.rng.random() < 0.97:
            return self._iteration()
        return self.rng.choice(_RARE_EVENTS)

    def _iteration(self) -> Event:
        if self.job.phase is JobPhase.JOINING:
            return _JOINED
        if self.rng.random() < 0.05:
            self.time_s = self.rng.choice((0.8, 1.0, 1.0, 1.2))
        epoch = max((c.plan_epoch for c in self.sent if c.apply_at_iteration <= self.index), default=0)
        observation = IterationObservation(self.index, None, self.time_s, (), ())
        self.index += 1
        return MergedIterationObserved(observation, epoch)

    def _plan(self) -> ClockPlan:
        purpose = self.rng.choice((PlanPurpose.TRIAL, PlanPurpose.TUNED, PlanPurpose.TUNED, PlanPurpose.BASELINE))
        mhz = 1 if self.rng.random() < 0.05 else _CLOCKS_MHZ[-1]
        ranks = (RankClocks(0, (mhz,) * len(_SCHEDULE.orders[0])),) if purpose is not PlanPurpose.BASELINE else ()
        return ClockPlan(f"plan-{self.index}", purpose, ranks)


def _meanings() -> dict[str, str]:
    """Return the docstrings of the phases by name."""
    tree = ast.parse(inspect.getsource(messages))
    phase = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "JobPhase")
    meanings: dict[str, str] = {}
    for statement, text in zip(phase.body, phase.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            target = statement.targets[0]
            assert isinstance(target, ast.Name)
            meanings[target.id] = str(text.value.value).rstrip(".")
    return meanings
