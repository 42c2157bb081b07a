"""Plans of which some have an order: in an iteration all ranks of a training follow such a plan, or none does."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpuenergyd.client.order_register import OrderRegister
from gpuenergyd.client.plans import NO_PLAN, PlanQueue, PreparedPlan
from gpuenergyd.core.distributed.order_consent import PlannedOrder, turns_of

logger = logging.getLogger("gpuenergyd.client")
_KEPT = 8
"""Plans that may still be due: blocks at full speed are sent with the plan that follows them."""


class OrderedPlans(PlanQueue):
    """Plans of a rank whose order of instructions may change.

    `open_register` opens the register of a training by its id. The reporter thread adds plans, the training thread
    follows them; a lock orders both, held for microseconds.
    """

    def __init__(self, open_register: Callable[[str], OrderRegister]) -> None:
        super().__init__()
        self._open_register = open_register
        self._lock = threading.Lock()
        self._known: deque[PlannedOrder] = deque(maxlen=_KEPT)
        self._register: OrderRegister | None = None
        self._training_id = ""
        self._next_training_id = ""
        """The training whose register comes next, once the present one has decided against orders."""
        self._is_barred = False
        self._first_iteration = 0
        """The next iteration that this rank begins: what it has begun without a register cannot be decided any more."""
        self._plain = self._ordered = NO_PLAN
        """The newest plans that were due, without an order and with one."""

    def add(self, plans: Iterable[PreparedPlan]) -> None:
        """Queue plans from the daemon, and state for which iterations there is one with an order."""
        new = list(plans)
        super().add(new)  # first: what is stated can be followed
        with self._lock:
            for plan in new:
                planned = PlannedOrder(plan.plan_epoch, plan.apply_at_iteration, bool(plan.order))
                if planned not in self._known:
                    self._known.append(planned)
                if plan.order and plan.training_id != self._training_id:
                    self._next_training_id = plan.training_id
            if self._register is None and self._next_training_id:
                self._open_next()
            self._state()

    def clear(self) -> None:
        """Drop all plans at the next iteration boundary: the daemon that made them is gone."""
        super().clear()
        with self._lock:
            self._known.clear()
            self._state()

    def bar_orders(self) -> None:
        """Follow no plan with an order any more, from the next undecided iteration on."""
        with self._lock:
            self._is_barred = True
            self._state()

    def close(self) -> None:
        """Leave the register: without this rank no order is run."""
        with self._lock:
            self._is_barred = True
            register, self._register = self._register, None
            if register is not None:
                register.close()

    def plan_for(self, iteration_index: int) -> PreparedPlan:
        """Return the plan of this iteration: one with an order if all ranks of the training have one."""
        with self._lock:
            is_agreed = self._is_agreed(iteration_index)
            self._first_iteration = iteration_index + 1
        super().plan_for(iteration_index)  # after the decision: the plan that it rests on has come before
        return self._ordered if is_agreed else self._plain

    def _follow(self, due: list[PreparedPlan]) -> None:
        for plan in sorted(due, key=lambda plan: plan.plan_epoch):
            if plan.order and plan.plan_epoch > self._ordered.plan_epoch:
                self._ordered = plan
            elif not plan.order and plan.plan_epoch > self._plain.plan_epoch:
                self._plain = plan

    def _forget(self) -> None:
        self._plain = NO_PLAN
        # Orders that were agreed on for this iteration are still run: that needs no daemon. Later epochs begin anew.
        self._ordered = replace(self._ordered, plan_epoch=0)

    def _is_agreed(self, iteration_index: int) -> bool:
        if self._decide(iteration_index):
            return True
        if not self._next_training_id:
            return False
        self._open_next()
        self._state()
        return self._decide(iteration_index)

    def _decide(self, iteration_index: int) -> bool:
        return self._register is not None and self._register.decide(iteration_index)

    def _open_next(self) -> None:
        """Leave the present register for the next one; without one, no order is run."""
        register, self._register = self._register, None
        self._training_id, self._next_training_id = self._next_training_id, ""
        if register is not None:
            register.close()
        if self._is_barred:
            return
        try:
            self._register = self._open_register(self._training_id)
        except (OSError, ValueError) as error:
            logger.warning("gpuenergyd: the order of instructions stays as it is: %s", error)

    def _state(self) -> None:
        if self._register is not None:
            is_stated = not self._is_barred and not self._next_training_id
            self._register.state(turns_of(self._known, self._first_iteration) if is_stated else ())
