"""Plan slices as a training thread follows them: one dictionary look-up per instruction, newest plan first."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpuenergyd.wire.messages import OrderRow, PlanSlice


class ClockWish(NamedTuple):
    """What to ask for when an instruction begins; 0 MHz asks for nothing."""

    sm_clock_mhz: int
    later_sm_clock_mhz: int
    later_delay_ns: int


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan slice, ready to follow; `token` signs its records. Without wishes it is un-tuned."""

    plan_epoch: int
    apply_at_iteration: int
    wishes: Mapping[OrderRow, ClockWish]
    token: bytes
    plan_id: str = ""
    full_speed_sm_clock_mhz: int = 0
    """Of a part of a pipeline: its GPU's maximum clock."""
    is_full_speed: bool = False
    """No plan is agreed for this iteration: ask for the maximum clock, whatever was asked for before."""

    @property
    def highest_sm_clock_mhz(self) -> int:
        """The fastest clock this plan asks for; 0 when it asks for none."""
        return max((max(w.sm_clock_mhz, w.later_sm_clock_mhz) for w in self.wishes.values()), default=0)


UNTUNED = PreparedPlan(plan_epoch=0, apply_at_iteration=0, wishes={}, token=b"")


def prepare(plan: PlanSlice, token: bytes) -> PreparedPlan:
    """Return a slice as look-ups.

    A record carries one wish for now and one for later. Of two delayed changes of one instruction the nearer is
    kept: the next instruction's own change heals the other.
    """
    wishes: dict[OrderRow, ClockWish] = {}
    for kind, microbatch_index, chunk_index, delay_ns, sm_clock_mhz in plan.changes:
        key = (kind, microbatch_index, chunk_index)
        wish = wishes.get(key, ClockWish(0, 0, 0))
        if delay_ns <= 0:
            wishes[key] = wish._replace(sm_clock_mhz=sm_clock_mhz)
        elif wish.later_sm_clock_mhz == 0 or delay_ns < wish.later_delay_ns:
            wishes[key] = wish._replace(later_sm_clock_mhz=sm_clock_mhz, later_delay_ns=delay_ns)
    return PreparedPlan(
        plan.plan_epoch, plan.apply_at_iteration, wishes, token, plan.plan_id, plan.full_speed_sm_clock_mhz
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
