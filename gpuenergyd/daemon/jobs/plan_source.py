"""Sources of a job's plans: the policy host, predictions if nothing may be set, or a pipeline leader."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.core.job.messages import Event, PlanDecided, PolicyFailed
from gpuenergyd.core.pipeline.plan import TRIALS, ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.ports import HistoryPort, PolicyPort
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.store.records import PlanRecord

_PREDICTION_EPOCH = -1
"""The epoch of predictions, which no rank follows; each prediction of a job replaces the previous one."""


HELD_ITERATIONS = 4
"""Most iterations that the job's other plan requests wait until a suspected straggler is confirmed or ruled out."""
_MARGIN_RATIO = 0.005
"""How much shorter than the suspected pace the prepared one is, since the next reading may be shorter."""
_USABLE_RATIOS = (0.985, 1.005)
"""Range of prepared over confirmed pace in which the prepared plan is used; confirmed: the shorter of two readings."""


@dataclass(slots=True)
class SuspectedPacePlan:
    """A plan prepared for a suspected straggler's pace, requested at the first reading that looks like a straggler.

    The second reading confirms the straggler or rules it out. A plan that is never sent does no harm; one that is ready
    saves the policy's computing time, often as long as an iteration.
    """

    job_id: str
    policy: Callable[[], str]
    """Returns the job's present policy, which operators may replace."""
    host: PolicyPort
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    _view: JobView | None = None
    _answer: ClockPlan | PolicyFailure | None = None
    _is_answered: asyncio.Event = field(default_factory=asyncio.Event)
    _is_dropped: bool = False
    """Whether the present suspicion has lasted too long."""

    @property
    def is_pending(self) -> bool:
        """Whether a plan was requested and neither used nor dropped yet; other requests would delay it."""
        return self._view is not None

    def prepare(self, view_of: Callable[[], JobView | None], suspected_time_s: float | None) -> None:
        """Request a plan for a suspected pace, unless one was requested; None: the suspicion is over.

        `view_of` returns the present view of the job.
        """
        if suspected_time_s is None:
            self._view, self._is_dropped = None, False
        elif self._view is None and not self._is_dropped and (view := view_of()) is not None:
            target = replace(view.target, straggler_time_s=suspected_time_s * (1 - _MARGIN_RATIO))
            self._view, self._answer, self._is_answered = replace(view, target=target), None, asyncio.Event()
            self.spawn(self._ask(self._view, self._is_answered))

    def drop(self) -> None:
        """Prepare nothing more for the present suspicion, because other requests have waited long enough."""
        self._view, self._is_dropped = None, True

    def usable_time_s(self, straggler_time_s: float | None) -> float | None:
        """Return the pace to follow for a confirmed straggler: the prepared one if it is close."""
        prepared_s = self._view.target.straggler_time_s if self._view is not None else None
        if straggler_time_s is None or prepared_s is None:
            return straggler_time_s
        at_least, at_most = _USABLE_RATIOS
        if at_least <= prepared_s / straggler_time_s <= at_most:
            return prepared_s
        self._view = None
        return straggler_time_s

    async def plan_for(self, view: JobView) -> ClockPlan | None:
        """Return the prepared plan, once, if it fits this request; wait if the policy is still computing it."""
        asked, answered = self._view, self._is_answered
        if asked is None or asked.target != view.target:
            return None
        await answered.wait()
        answer, self._view = self._answer, None
        # A plan issued in the meantime may have the same number as the prepared one.
        is_current = asked.issued_plans[-1:] == view.issued_plans[-1:] and asked.generation == view.generation
        if isinstance(answer, ClockPlan) and answer.purpose is PlanPurpose.TUNED and is_current:
            return answer
        return None

    async def _ask(self, view: JobView, answered: asyncio.Event) -> None:
        answer: ClockPlan | PolicyFailure | None = None
        try:
            answer = await self.host.next_plan(self.job_id, self.policy(), view)
        finally:
            if view is self._view:
                self._answer = answer
            answered.set()


@dataclass(slots=True)
class PolicyHostPlans:
    """Plans of the job's policy in the policy host."""

    job_id: str
    policy: Callable[[], str]
    """Returns the job's present policy, which operators may replace."""
    host: PolicyPort
    handle: Callable[[Event], None]
    on_prediction: Callable[[ClockPlan], None] = lambda _: None
    """Receives the prediction of a policy that cannot plan with the settings that may be changed."""
    prepared: SuspectedPacePlan = field(init=False)
    _task: asyncio.Task[None] | None = None
    _preparing: asyncio.Task[None] | None = None
    _held: JobView | None = None
    """A request that waits until a suspected straggler is confirmed or ruled out, while its plan is prepared."""
    _held_since_s: float = 0.0

    def __post_init__(self) -> None:
        self.prepared = SuspectedPacePlan(self.job_id, self.policy, self.host, self._prepare)

    def ask(self, view: JobView) -> None:
        """Request a plan in a separate task."""
        if self.prepared.is_pending and not view.target.is_forced:
            self._held, self._held_since_s = view, time.monotonic()
            return
        self._task = asyncio.create_task(self._answer(view), name=f"plan of job {self.job_id}")

    def release_in_time(self) -> None:
        """Send the held request if the suspicion is over, or if it was held for too long."""
        view = self._held
        if view is None:
            return
        held_s = time.monotonic() - self._held_since_s
        if held_s > HELD_ITERATIONS * view.baseline.iteration_time_s:
            self.prepared.drop()
        if not self.prepared.is_pending:
            self.release()

    def release(self, current: ClockPlan | None = None) -> None:
        """Send the held request, or answer it with the plan in force so that the job asks about its present pace."""
        view, self._held = self._held, None
        if view is not None and current is not None:
            self.handle(PlanDecided(current))
        elif view is not None:
            self.ask(view)

    async def close(self) -> None:
        """Stop waiting for answers."""
        await _cancel(self._task)
        await _cancel(self._preparing)

    def _prepare(self, asking: Coroutine[Any, Any, None]) -> None:
        self._preparing = asyncio.create_task(asking, name=f"prepared plan of job {self.job_id}")

    async def _answer(self, view: JobView) -> None:
        answer = await self.prepared.plan_for(view) or await self.host.next_plan(self.job_id, self.policy(), view)
        if isinstance(answer, PolicyFailure):
            self.handle(PolicyFailed(answer.reason))
        elif answer.purpose is PlanPurpose.PREDICTED and not view.can_set_clocks:
            self.on_prediction(answer)
        else:
            self.handle(PlanDecided(answer))


@dataclass(slots=True)
class PredictionOnly:
    """Savings predicted by the policy for a job for which nothing may be set; no plan is put in force."""

    job_id: str
    policy: Callable[[], str]
    """Returns the job's present policy, which operators may replace."""
    host: PolicyPort
    history: HistoryPort
    num_iterations: Callable[[], int]
    plan: ClockPlan | None = None
    """The last prediction; if there is none, a full-speed plan that gives the reason."""
    _asked_at: int = 0
    """Iterations of the job at the last request to the policy."""
    _task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the policy is computing a prediction."""
        return self._task is not None and not self._task.done()

    @property
    def is_due(self) -> bool:
        """Whether the job has run twice as long as at the last prediction, which takes a second of CPU time."""
        return self.num_iterations() >= 2 * self._asked_at

    def ask(self, view: JobView) -> None:
        """Request a prediction in a separate task; the job's plan request stays open."""
        self._asked_at = self.num_iterations()
        self._task = asyncio.create_task(self._predict(view), name=f"prediction of job {self.job_id}")

    async def close(self) -> None:
        """Stop waiting for a prediction."""
        await _cancel(self._task)

    async def _predict(self, view: JobView) -> None:
        answer = await self.host.next_plan(self.job_id, self.policy(), replace(view, can_set_clocks=False))
        self.show(answer)

    def show(self, answer: ClockPlan | PolicyFailure) -> None:
        if isinstance(answer, PolicyFailure):
            self.plan = baseline_plan("predicted", reason=f"policy {self.policy()} failed: {answer.reason}")
        elif answer.purpose in TRIALS:
            self.plan = baseline_plan(
                "predicted", reason=f"policy {self.policy()} cannot predict without trying clocks"
            )
        else:
            self.plan = answer if answer.predicted is None else replace(answer, purpose=PlanPurpose.PREDICTED)
        if self.plan.purpose is PlanPurpose.PREDICTED:
            now = utc_at(time.monotonic_ns())
            self.history.write(PlanRecord(self.job_id, _PREDICTION_EPOCH, self.plan, now, self.num_iterations()))


@dataclass(slots=True)
class PermittedPlans:
    """Plans of the policy host while something may be set, and predictions while nothing may."""

    tuning: PolicyHostPlans
    prediction: PredictionOnly
    levers: Callable[[], frozenset[Lever]]
    """What the job's plans may set now."""
    _is_unanswered: bool = False

    def __post_init__(self) -> None:
        self.tuning.on_prediction = self._show

    def ask(self, view: JobView) -> None:
        """Request a plan if something may be set, otherwise a prediction, which leaves the job's request open."""
        permitted = self._permitted(view)
        self._is_unanswered = permitted is None
        if permitted is None:
            self.prediction.ask(view)
        else:
            self.tuning.ask(permitted)

    def prepare(self, view_of: Callable[[], JobView | None], suspected_time_s: float | None) -> None:
        """Prepare a plan for a suspected pace, with what may be set now; None: the suspicion is over."""

        def permitted_view() -> JobView | None:
            view = view_of()
            return None if view is None else self._permitted(view)

        self.tuning.prepared.prepare(permitted_view, suspected_time_s)
        self.tuning.release_in_time()

    @property
    def is_predicting(self) -> bool:
        """Whether the policy only predicts, because nothing may be set that it could plan with."""
        return self._is_unanswered

    def ask_again(self, view: JobView | None) -> None:
        """Repeat an open request, since the prediction may be better by now, or clocks may be set."""
        if not self._is_unanswered or self.prediction.is_busy or view is None:
            return
        if self.prediction.is_due or self._permitted(view) is not None:
            self.ask(view)

    def resume(self, _current: ClockPlan) -> None:
        """Continue the job of an earlier daemon, whose state machine requests a plan itself."""

    def _permitted(self, view: JobView) -> JobView | None:
        """Return the view with flags for what may be set; None if nothing may."""
        levers = self.levers()
        if not levers:
            return None
        return replace(
            view,
            can_set_clocks=Lever.CLOCKS in levers,
            can_set_power_limits=Lever.POWER_LIMITS in levers,
            can_set_power_profiles=Lever.POWER_PROFILES in levers,
        )

    def _show(self, prediction: ClockPlan) -> None:
        self._is_unanswered = True
        self.prediction.show(prediction)

    async def close(self) -> None:
        """Stop waiting for answers."""
        await self.tuning.close()
        await self.prediction.close()


@dataclass(slots=True)
class PostedPlans:
    """The plan that the leader of a pipeline across hosts posted last, for one of its members."""

    can_set_clocks: Callable[[], bool]
    handle: Callable[[Event], None]
    posted: ClockPlan | None = None

    def ask(self, view: JobView) -> None:  # noqa: ARG002  the plan has been posted already
        """Answer at once with the posted plan, or with full speed."""
        self._answer()

    def post(self, plan: ClockPlan, *, is_followed: bool) -> None:
        """Replace the posted plan; with `is_followed`, the job changes to it at once, without a request."""
        self.posted = plan
        if is_followed:
            self._answer()

    def drop(self) -> None:
        """Forget the posted plan, which was for another order of instructions."""
        self.posted = None

    def ask_again(self, view: JobView | None) -> None:
        """Do nothing: every request is answered at once, so none is open."""

    def resume(self, current: ClockPlan) -> None:
        """Continue the job of an earlier daemon with its plan, until the leader posts another."""
        self.posted = current

    async def close(self) -> None:
        """Do nothing: no task runs in the background."""

    def _answer(self) -> None:
        waiting = baseline_plan("waiting", reason="waiting for the plan of the whole pipeline")
        self.handle(PlanDecided(self.posted if self.posted is not None and self.can_set_clocks() else waiting))


JobPlans = PermittedPlans | PostedPlans


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
