"""Plans of which some have an order: in an iteration all ranks of a training follow such a plan, or none does."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpuenergyd.client.order_register import OrderRegister
from gpuenergyd.client.plans import NO_PLAN, PlanQueue, PreparedPlan
from gpuenergyd.core.distributed.order_consent import PlannedOrder, turns_of
from gpuenergyd.core.distributed.order_windows import HostOffer, OrderWindow

logger = logging.getLogger("gpuenergyd.client")
_KEPT = 8
"""Plans that may still be due: blocks at full speed are sent with the plan that follows them."""
_PAUSE_S = 0.002
DOUBT_LIMIT_S = 5.0
"""The longest time that the begin of an iteration waits for other hosts' verdict: once in a run."""


def _paused(num_pauses: int) -> bool:
    """Wait a little for a verdict; return False if that has taken too long."""
    time.sleep(_PAUSE_S)
    return num_pauses * _PAUSE_S < DOUBT_LIMIT_S


class OrderedPlans(PlanQueue):
    """Plans of a rank whose order of instructions may change.

    `open_register` opens the register of a training by its id. The reporter thread adds plans, the training thread
    follows them, and of one rank per host another thread agrees with other hosts; a lock orders them, held for
    microseconds. `pause` waits a little while this host is in doubt about other hosts, and is told how often it has
    waited; it returns False to give up.
    """

    def __init__(self, open_register: Callable[[str], OrderRegister], pause: Callable[[int], bool] = _paused) -> None:
        super().__init__()
        self._open_register = open_register
        self._pause = pause
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

    @property
    def bound_until(self) -> int:
        """The iteration after the last one for which this host has promised orders to others; plans before it wait."""
        register = self._register
        return 0 if register is None else register.bound_until

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
        is_agreed, num_pauses = self._decided(iteration_index), 0
        while is_agreed is None:
            num_pauses += 1
            is_agreed = self._decided(iteration_index, gives_up=not self._pause(num_pauses))
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

    # --- between hosts, by another thread ---

    def offer(self) -> HostOffer | None:
        """Return what this host publishes for the others; None before there is a plan with an order."""
        with self._lock:
            return None if self._register is None else self._register.offer()

    def promise(self, window: OrderWindow) -> bool:
        """Promise a window for this host; return whether it could."""
        with self._lock:
            return self._register is not None and self._register.promise(window)

    def open_window(self) -> tuple[OrderWindow, bool] | None:
        """Return the window whose verdict this host does not know, and whether a rank waits for it."""
        with self._lock:
            return None if self._register is None else self._register.open_window()

    def settle(self, number: int, *, is_granted: bool) -> None:
        """Record the verdict on a window for all ranks of this host."""
        with self._lock:
            if self._register is not None:
                self._register.settle(number, is_granted=is_granted)

    def _decided(self, iteration_index: int, *, gives_up: bool = False) -> bool | None:
        """Return whether the ranks run their orders in an iteration; None while this host is in doubt about that."""
        with self._lock:
            is_agreed = self._is_agreed(iteration_index)
            if is_agreed is None and gives_up:
                assert self._register is not None
                is_agreed = self._register.give_up(iteration_index)
                logger.warning("gpuenergyd: other hosts are out of reach; the order of instructions changes no more")
            if is_agreed is not None:
                self._first_iteration = iteration_index + 1
        return is_agreed

    def _is_agreed(self, iteration_index: int) -> bool | None:
        is_agreed = self._decide(iteration_index)
        if is_agreed is not False or not self._next_training_id:
            return is_agreed
        if self._register is not None and self._register.is_bound(iteration_index):
            return False  # other ranks of this host may still follow what it has promised
        self._open_next()
        # Nothing is stated in the next register yet, so that the answer is no, and promises begin later.
        is_agreed = self._decide(iteration_index)
        self._state()
        return is_agreed

    def _decide(self, iteration_index: int) -> bool | None:
        return False if self._register is None else self._register.decide(iteration_index)

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
