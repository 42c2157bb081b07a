"""Plans of a pipeline across hosts: followed in the iterations that all its ranks have agreed on, else full speed."""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from gpuenergyd.client.following import UNTUNED, PlanQueue, PreparedPlan
from gpuenergyd.core.distributed.plan_windows import PlanWindow, PlanWindowFollower

_MAX_INSTALLED = 8


class AgreedPlans(PlanQueue):
    """Slices from this rank's own daemon, followed for the terms that its pipeline's leader gives.

    Three threads meet here, and the training thread never waits: the reporter adds slices, the one that talks to the
    job's store adds slices and terms and asks what is installed, and the training thread takes an iteration's plan.
    """

    def __init__(self) -> None:
        super().__init__()
        self._news: deque[PreparedPlan | tuple[PlanWindow, ...] | str | None] = deque()
        self._adding = threading.Lock()  # the reporter and the pipeline's thread; the training thread never takes it
        self._installed: dict[str, PreparedPlan] = {}
        self._keeper = PlanWindowFollower()
        self._by_plan_id: dict[str, PreparedPlan] = {}
        self._last: PreparedPlan | None = None

    @property
    def installed(self) -> frozenset[str]:
        """The plans whose slices this rank's daemon has checked and handed out, without having taken them back."""
        return frozenset(self._installed)

    def add(self, plans: Iterable[PreparedPlan]) -> None:
        """Take slices from the daemon; an un-tuned one takes back all before it."""
        with self._adding:
            for plan in plans:
                if plan.plan_id in self._installed:  # replies may be repeated
                    continue
                kept = list(self._installed.items())[1 - _MAX_INSTALLED :] if plan.clocks else []
                self._installed = {**dict(kept), plan.plan_id: plan}
                self._news.append(plan)

    def hear(self, terms: Iterable[PlanWindow]) -> None:
        """Take what the leader says is agreed."""
        self._news.append(tuple(terms))

    def release(self, plan_id: str) -> None:
        """Follow a plan no more from the next iteration on, whatever was agreed."""
        self._news.append(plan_id)

    def void(self) -> None:
        """Drop every plan at the next boundary: the daemon that installed them is gone."""
        with self._adding:
            self._installed = {}
            self._news.append(None)

    def plan_for(self, iteration_index: int) -> PreparedPlan:
        """Return the plan agreed for this iteration; where none is, or it is not installed here, full speed."""
        while self._news:
            self._take(self._news.popleft())
        plan_id = self._keeper.plan_for(iteration_index)
        plan = self._by_plan_id.get(plan_id) if plan_id is not None else None
        if plan is not None:
            self._last = plan if plan.clocks else None
            return plan
        if self._last is None:
            return UNTUNED
        return replace(self._last, clocks={}, is_full_speed=True)

    def _take(self, news: PreparedPlan | tuple[PlanWindow, ...] | str | None) -> None:
        if news is None:
            self._by_plan_id.clear()
            self._keeper.forget()
            self._last = None
        elif isinstance(news, str):
            self._keeper.drop(news)
        elif isinstance(news, tuple):
            self._keeper.hear(news)
        else:
            if not news.clocks:  # the daemon has given the GPU back
                self._by_plan_id.clear()
                self._last = None
            self._by_plan_id[news.plan_id] = news
            for plan_id in list(self._by_plan_id)[:-_MAX_INSTALLED]:
                del self._by_plan_id[plan_id]
