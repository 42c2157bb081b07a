"""A plan for a straggler's pace, asked for at the first reading that looks like a straggler.

The second reading confirms the straggler or not. Policies decide from the view of a job alone, so that a plan that is
never sent has no effect; one that is ready saves the time that the policy takes, often that of an iteration.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.ports import PolicyPort
from gpuenergyd.daemon.processes.policy_client import PolicyFailure

HELD_ITERATIONS = 4
"""Iterations for which other questions of the job wait at most until a suspected straggler is confirmed, or is none."""
_MARGIN_RATIO = 0.005
"""The pace that is prepared for is shorter than the suspected one by this: the next reading may be shorter."""
_USABLE_RATIOS = (0.985, 1.005)
"""A prepared pace in this range of the confirmed one, which is the shorter of two readings, is used in its place."""


@dataclass(slots=True)
class SuspectedPacePlan:
    """At most one plan of a job's policy for a suspected pace."""

    job_id: str
    policy: Callable[[], str]
    """Returns the job's present policy, which operators may replace."""
    host: PolicyPort
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    _view: JobView | None = None
    _answer: ClockPlan | PolicyFailure | None = None
    _is_answered: asyncio.Event = field(default_factory=asyncio.Event)
    _is_dropped: bool = False
    """Whether the present suspicion has lasted for too long."""

    @property
    def is_pending(self) -> bool:
        """Whether a plan was asked for and neither used nor dropped: other questions would delay it."""
        return self._view is not None

    def prepare(self, view_of: Callable[[], JobView | None], suspected_time_s: float | None) -> None:
        """Ask the policy for a plan for a suspected pace, unless it was asked; None: nothing is suspected any more.

        `view_of` returns the present view of the job.
        """
        if suspected_time_s is None:
            self._view, self._is_dropped = None, False
        elif self._view is None and not self._is_dropped and (view := view_of()) is not None:
            target = replace(view.target, straggler_time_s=suspected_time_s * (1 - _MARGIN_RATIO))
            self._view, self._answer, self._is_answered = replace(view, target=target), None, asyncio.Event()
            self.spawn(self._ask(self._view, self._is_answered))

    def drop(self) -> None:
        """Prepare nothing more for the present suspicion: other questions have waited for long enough."""
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
        """Return the prepared plan if it answers this question, once; waits for the policy if it was asked."""
        asked, answered = self._view, self._is_answered
        if asked is None or asked.target != view.target:
            return None
        await answered.wait()
        answer, self._view = self._answer, None
        # A plan that was issued in between may have the number of the prepared one.
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
