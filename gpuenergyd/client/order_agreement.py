"""A rank's side of its training's agreement to run other orders of instructions: in an iteration all ranks do, or none.

The reporter thread states for which iterations the rank has a plan with an order, the training thread asks at each
begin of an iteration, and of one rank per host another thread agrees with other hosts; a lock orders them, held for
microseconds.
"""

import logging
import threading
import time
from collections.abc import Callable

from gpuenergyd.client.order_register import OrderRegister
from gpuenergyd.core.distributed.order_consent import Turn
from gpuenergyd.core.distributed.order_windows import HostOffer, OrderWindow

logger = logging.getLogger("gpuenergyd.client")
_PAUSE_S = 0.002
DOUBT_LIMIT_S = 5.0
"""The longest time that the begin of an iteration waits for other hosts' verdict: once in a run."""

OpenRegister = Callable[[str], OrderRegister]
"""Opens the register of a training by its id."""
Pause = Callable[[int], bool]
"""Waits a little while this host is in doubt about others, told how often it has; returns False to give up."""


def pause_briefly(num_pauses: int) -> bool:
    """Wait a little for a verdict; return False if that has taken too long."""
    time.sleep(_PAUSE_S)
    return num_pauses * _PAUSE_S < DOUBT_LIMIT_S


class OrderAgreement:
    """Access to the register of the training, once a plan with an order has named it.

    `turns` returns for which iterations, from a given one on, the rank has a plan with an order. It is called with
    `lock` held, and so are `join` and `state`: the owner changes its plans under the lock, and states them then.
    """

    def __init__(self, open_register: OpenRegister, turns: Callable[[int], tuple[Turn, ...]], pause: Pause) -> None:
        self._open_register = open_register
        self._turns = turns
        self._pause = pause
        self.lock = threading.Lock()
        self._register: OrderRegister | None = None
        self._training_id = ""
        self._next_training_id = ""
        """The training whose register comes next, once the present one has decided against orders."""
        self._is_barred = False
        self._first_iteration = 0
        """The next iteration that this rank begins: what it has begun without a register cannot be decided any more."""

    def join(self, training_id: str) -> None:
        """Use the register of a training, at once if no other one is in use; `lock` is held."""
        if training_id != self._training_id:
            self._next_training_id = training_id
        if self._register is None and self._next_training_id:
            self._open_next()

    def state(self) -> None:
        """State for which iterations this rank has a plan with an order; `lock` is held."""
        if self._register is not None:
            is_stated = not self._is_barred and not self._next_training_id
            self._register.state(self._turns(self._first_iteration) if is_stated else ())

    def bar(self) -> None:
        """Run no order of a plan any more, from the next undecided iteration on."""
        with self.lock:
            self._is_barred = True
            self.state()

    def close(self) -> None:
        """Leave the register: without this rank no order is run."""
        with self.lock:
            self._is_barred = True
            register, self._register = self._register, None
            if register is not None:
                register.close()

    def is_agreed(self, iteration_index: int) -> bool:
        """Return whether all ranks of the training run their orders in an iteration, which this rank begins now."""
        decided, num_pauses = self._decided(iteration_index), 0
        while decided is None:
            num_pauses += 1
            decided = self._decided(iteration_index, gives_up=not self._pause(num_pauses))
        return decided

    @property
    def bound_until(self) -> int:
        """The iteration after the last one for which this host has promised orders to others."""
        register = self._register
        return 0 if register is None else register.bound_until

    # --- between hosts, by another thread ---

    def offer(self) -> HostOffer | None:
        """Return what this host publishes for the others; None before there is a plan with an order."""
        with self.lock:
            return None if self._register is None else self._register.offer()

    def promise(self, window: OrderWindow) -> bool:
        """Promise a window for this host; return whether it could."""
        with self.lock:
            return self._register is not None and self._register.promise(window)

    def open_window(self) -> tuple[OrderWindow, bool] | None:
        """Return the window whose verdict this host does not know, and whether a rank waits for it."""
        with self.lock:
            return None if self._register is None else self._register.open_window()

    def settle(self, number: int, *, is_granted: bool) -> None:
        """Record the verdict on a window for all ranks of this host."""
        with self.lock:
            if self._register is not None:
                self._register.settle(number, is_granted=is_granted)

    # --- inside ---

    def _decided(self, iteration_index: int, *, gives_up: bool = False) -> bool | None:
        """Return whether the ranks run their orders in an iteration; None while this host is in doubt about that."""
        with self.lock:
            is_agreed = self._agreed(iteration_index)
            if is_agreed is None and gives_up:
                assert self._register is not None
                is_agreed = self._register.give_up(iteration_index)
                logger.warning("gpuenergyd: other hosts are out of reach; the order of instructions changes no more")
            if is_agreed is not None:
                self._first_iteration = iteration_index + 1
        return is_agreed

    def _agreed(self, iteration_index: int) -> bool | None:
        is_agreed = self._decide(iteration_index)
        if is_agreed is not False or not self._next_training_id:
            return is_agreed
        if self._register is not None and self._register.is_bound(iteration_index):
            return False  # other ranks of this host may still follow what it has promised
        self._open_next()
        # Nothing is stated in the next register yet, so that the answer is no, and promises begin later.
        is_agreed = self._decide(iteration_index)
        self.state()
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
