"""One rank's part of a plan, prepared for the training thread: one dictionary lookup per instruction."""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpuenergyd.core.clock_request import MAX_LATER_CLOCKS
from gpuenergyd.core.distributed.plan_windows import PlanWindow, PlanWindowFollower
from gpuenergyd.core.pipeline.timetable import PlannedChange
from gpuenergyd.wire.messages import OrderRow, PlanSlice

_MAX_INSTALLED = 8


class PlannedClocks(NamedTuple):
    """The clocks to request when an instruction begins; 0 MHz requests no change."""

    sm_clock_mhz: int
    later_sm_clock_mhz: int
    later_delay_ns: int
    further: tuple[tuple[int, int], ...] = ()
    """Clocks after the later one, in order, each with its delay in ns; for a wait, the clock at its end."""


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan slice, ready to follow; `token` authenticates its requests. Without clocks, the GPU runs at full speed."""

    plan_epoch: int
    apply_at_iteration: int
    clocks: Mapping[OrderRow, PlannedClocks]
    token: bytes
    plan_id: str = ""
    full_speed_sm_clock_mhz: int = 0
    """Maximum clock of the GPU, for pauses, and for iterations without an agreed plan in pipelines across hosts."""
    order: tuple[OrderRow, ...] = ()
    """The rank's instructions under this plan; empty for the registered order."""
    is_full_speed: bool = False
    """Whether to request the maximum clock because no plan is agreed for this iteration."""
    changes: tuple[PlannedChange, ...] = ()
    """All changes of `clocks` in order, for the timetable of a captured graph."""


NO_PLAN = PreparedPlan(plan_epoch=0, apply_at_iteration=0, clocks={}, token=b"")


def prepare(plan: PlanSlice, token: bytes) -> PreparedPlan:
    """Return a slice with its clocks by instruction, without changes that exceed the size of a request."""
    now: dict[OrderRow, int] = {}
    later: dict[OrderRow, list[tuple[int, int]]] = {}
    for kind, microbatch_index, chunk_index, delay_ns, sm_clock_mhz in plan.changes:
        key = (kind, microbatch_index, chunk_index)
        own = later.setdefault(key, [])
        if delay_ns <= 0:
            now[key] = sm_clock_mhz
        else:
            own.append((delay_ns, sm_clock_mhz))
    clocks: dict[OrderRow, PlannedClocks] = {}
    for key, own in later.items():
        own.sort()
        (first_delay_ns, first_mhz), *others = own[:MAX_LATER_CLOCKS] or [(0, 0)]
        further = tuple((mhz, delay_ns) for delay_ns, mhz in others)
        clocks[key] = PlannedClocks(now.get(key, 0), first_mhz, first_delay_ns, further)
    return PreparedPlan(
        plan_epoch=plan.plan_epoch,
        apply_at_iteration=plan.apply_at_iteration,
        clocks=clocks,
        token=token,
        plan_id=plan.plan_id,
        full_speed_sm_clock_mhz=plan.full_speed_sm_clock_mhz,
        order=plan.order,
        changes=tuple(PlannedChange((kind, m, chunk), delay_ns, mhz) for kind, m, chunk, delay_ns, mhz in plan.changes),
    )


def at_full_speed(plan: PreparedPlan) -> PreparedPlan:
    """Return a plan for iterations without an agreed plan: the highest clock, in the registered order."""
    return replace(plan, clocks={}, changes=(), order=(), is_full_speed=True)


class PlanQueue:
    """Plans of a pipeline on one host; the reporter thread adds them, the training thread follows them.

    `deque.append` and `popleft` are atomic, so neither thread waits for the other.
    """

    def __init__(self) -> None:
        self._inbox: deque[PreparedPlan | None] = deque()
        self._future: list[PreparedPlan] = []
        self._current = NO_PLAN
        self.has_news = False
        """Whether the next iteration may have another plan than this one."""

    def add(self, plans: Iterable[PreparedPlan]) -> None:
        self._inbox.extend(plans)
        self.has_news = True

    def clear(self) -> None:
        """Drop all plans at the next iteration boundary, because the daemon that made them is gone."""
        self._inbox.append(None)
        self.has_news = True

    def plan_for(self, iteration_index: int) -> PreparedPlan:
        """Return the newest plan that applies from this iteration or an earlier one."""
        if not self.has_news:
            return self._current
        self.has_news = False  # first, as the other thread sets it after it has added something
        while self._inbox:
            plan = self._inbox.popleft()
            if plan is None:
                self._future.clear()
                self._current = NO_PLAN
            else:
                self._future.append(plan)
        due = [plan for plan in self._future if plan.apply_at_iteration <= iteration_index]
        if due:
            self._future = [plan for plan in self._future if plan.apply_at_iteration > iteration_index]
            # A late plan must not replace a newer one.
            self._current = max([self._current, *due], key=lambda plan: plan.plan_epoch)
        if self._future:
            self.has_news = True
        return self._current


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
