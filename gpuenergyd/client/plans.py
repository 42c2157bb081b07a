"""One rank's part of a plan, prepared for the training thread: one dictionary lookup per instruction."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpuenergyd.core.clock_request import MAX_LATER_CLOCKS
from gpuenergyd.core.pipeline.timetable import PlannedChange
from gpuenergyd.wire.messages import OrderRow, PlanSlice


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
        changes = later.setdefault(key, [])
        if delay_ns <= 0:
            now[key] = sm_clock_mhz
        else:
            changes.append((delay_ns, sm_clock_mhz))
    clocks: dict[OrderRow, PlannedClocks] = {}
    for key, changes in later.items():
        changes.sort()
        (first_delay_ns, first_mhz), *others = changes[:MAX_LATER_CLOCKS] or [(0, 0)]
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
