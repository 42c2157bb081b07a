"""Plans of a rank of a pipeline across hosts: followed in the windows that the pipeline leader grants."""

import threading
from collections import deque
from collections.abc import Iterable

from gpuenergyd.client.plans import NO_PLAN, PlanQueue, PreparedPlan, at_full_speed
from gpuenergyd_across_hosts.rules.plan_windows import PlanWindow, PlanWindowFollower

_MAX_INSTALLED = 8


class AgreedPlans(PlanQueue):
    """Plans of a pipeline across hosts: followed in the windows that the pipeline leader grants, else full speed.

    Three threads use it, and the training thread never waits: the reporter adds slices, the thread that talks to the
    job's store adds slices and windows and reads `installed`, and the training thread calls `plan_for`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_news = True  # always, since windows begin and end at any iteration
        self._events: deque[PreparedPlan | tuple[PlanWindow, ...] | str | None] = deque()
        self._adding = threading.Lock()  # the training thread acquires it only when the number of microbatches changes
        self._installed: dict[str, PreparedPlan] = {}
        self._follower = PlanWindowFollower()
        self._by_plan_id: dict[str, PreparedPlan] = {}
        self._last: PreparedPlan | None = None

    @property
    def installed(self) -> frozenset[str]:
        """Ids of the plans whose slices this rank's daemon has validated, sent, and not withdrawn."""
        return frozenset(self._installed)

    def add(self, plans: Iterable[PreparedPlan]) -> None:
        """Add slices from the daemon; a slice without clocks withdraws all earlier ones."""
        with self._adding:
            for plan in plans:
                if plan.plan_id in self._installed:  # replies may be repeated
                    continue
                kept = list(self._installed.items())[1 - _MAX_INSTALLED :] if plan.clocks else []
                self._installed = {**dict(kept), plan.plan_id: plan}
                self._events.append(plan)

    def add_windows(self, windows: Iterable[PlanWindow]) -> None:
        """Add plan windows from the pipeline leader."""
        self._events.append(tuple(windows))

    def drop(self, plan_id: str) -> None:
        """Stop following a plan from the next iteration on, even inside its window."""
        self._events.append(plan_id)

    def clear(self) -> None:
        """Drop all plans at the next iteration boundary, because their daemon is gone or they no longer fit."""
        with self._adding:
            self._installed = {}
            self._events.append(None)

    def plan_for(self, iteration_index: int) -> PreparedPlan:
        """Return the agreed plan of this iteration; full speed if there is none, or it is not installed here."""
        while self._events:
            self._apply(self._events.popleft())
        plan_id = self._follower.plan_for(iteration_index)
        plan = self._by_plan_id.get(plan_id) if plan_id is not None else None
        if plan is not None:
            self._last = plan if plan.clocks else None
            return plan
        return NO_PLAN if self._last is None else at_full_speed(self._last)

    def _apply(self, event: PreparedPlan | tuple[PlanWindow, ...] | str | None) -> None:
        if event is None:
            self._by_plan_id.clear()
            self._follower.clear()
            self._last = None
        elif isinstance(event, str):
            self._follower.drop(event)
        elif isinstance(event, tuple):
            self._follower.update(event)
        else:
            if not event.clocks:  # the daemon has restored the GPU
                self._by_plan_id.clear()
                self._last = None
            self._by_plan_id[event.plan_id] = event
            for plan_id in list(self._by_plan_id)[:-_MAX_INSTALLED]:
                del self._by_plan_id[plan_id]
