"""Plan slices as a training thread follows them: one dictionary look-up per instruction, newest plan first."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpuenergyd.wire.messages import OrderRow, PlanSlice


class PlannedClocks(NamedTuple):
    """The clocks to request when an instruction begins; 0 MHz requests no change."""

    sm_clock_mhz: int
    later_sm_clock_mhz: int
    later_delay_ns: int


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan slice, ready to follow; `token` signs its clock requests. Without clocks the GPU runs at full speed."""

    plan_epoch: int
    apply_at_iteration: int
    clocks: Mapping[OrderRow, PlannedClocks]
    token: bytes
    plan_id: str = ""
    full_speed_sm_clock_mhz: int = 0
    """Of a part of a pipeline: its GPU's maximum clock."""
    is_full_speed: bool = False
    """No plan is agreed for this iteration: ask for the maximum clock, whatever was asked for before."""

    @property
    def highest_sm_clock_mhz(self) -> int:
        """The fastest clock this plan asks for; 0 when it asks for none."""
        return max((max(c.sm_clock_mhz, c.later_sm_clock_mhz) for c in self.clocks.values()), default=0)


UNTUNED = PreparedPlan(plan_epoch=0, apply_at_iteration=0, clocks={}, token=b"")


def prepare(plan: PlanSlice, token: bytes) -> PreparedPlan:
    """Return a slice as look-ups.

    A clock request carries one clock for now and one for later. Of two delayed changes of one instruction the
    earlier is kept: the next instruction's own change makes up for the other.
    """
    clocks: dict[OrderRow, PlannedClocks] = {}
    for kind, microbatch_index, chunk_index, delay_ns, sm_clock_mhz in plan.changes:
        key = (kind, microbatch_index, chunk_index)
        planned = clocks.get(key, PlannedClocks(0, 0, 0))
        if delay_ns <= 0:
            clocks[key] = planned._replace(sm_clock_mhz=sm_clock_mhz)
        elif planned.later_sm_clock_mhz == 0 or delay_ns < planned.later_delay_ns:
            clocks[key] = planned._replace(later_sm_clock_mhz=sm_clock_mhz, later_delay_ns=delay_ns)
    return PreparedPlan(
        plan.plan_epoch, plan.apply_at_iteration, clocks, token, plan.plan_id, plan.full_speed_sm_clock_mhz
    )


class PlanQueue:
    """Plans that wait for their iteration; the reporter adds, the training thread takes.

    `deque.append` and `popleft` are atomic, so neither thread waits for the other.
    """

    def __init__(self) -> None:
        self._inbox: deque[PreparedPlan | None] = deque()
        self._future: list[PreparedPlan] = []
        self._current = UNTUNED

    def add(self, plans: Iterable[PreparedPlan]) -> None:
        """Queue plans from the daemon."""
        self._inbox.extend(plans)

    def void(self) -> None:
        """Drop every plan at the next boundary: the daemon that made them is gone."""
        self._inbox.append(None)

    def plan_for(self, iteration_index: int) -> PreparedPlan:
        """Return the plan to follow in this iteration: of those whose time has come, the newest."""
        while self._inbox:
            plan = self._inbox.popleft()
            if plan is None:
                self._future.clear()
                self._current = UNTUNED
            else:
                self._future.append(plan)
        if self._future:
            due = [plan for plan in self._future if plan.apply_at_iteration <= iteration_index]
            if due:
                self._future = [plan for plan in self._future if plan.apply_at_iteration > iteration_index]
                self._current = max([self._current, *due], key=lambda plan: plan.plan_epoch)
        return self._current
