"""Plans of which some have an order: in an iteration all ranks of a training follow such a plan, or none does."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from gpuenergyd.client.order_agreement import OpenRegister, OrderAgreement, Pause, pause_briefly
from gpuenergyd.client.plans import NO_PLAN, AgreedPlans, PlanQueue, PreparedPlan
from gpuenergyd.core.distributed.order_consent import PlannedOrder, Turn, turns_of, turns_within
from gpuenergyd.core.distributed.plan_windows import PlanWindow, PlanWindowFollower

_KEPT = 8
"""Plans that may still be due: blocks at full speed are sent with the plan that follows them."""


class OrderedPlans(PlanQueue):
    """Plans of a rank whose order of instructions may change, of a pipeline on one host."""

    agreement: OrderAgreement

    def __init__(self, open_register: OpenRegister, pause: Pause = pause_briefly) -> None:
        super().__init__()
        self.agreement = OrderAgreement(open_register, self._turns, pause)
        self._known: deque[PlannedOrder] = deque(maxlen=_KEPT)
        self._plain = self._ordered = NO_PLAN
        """The newest plans that were due, without an order and with one."""

    def add(self, plans: Iterable[PreparedPlan]) -> None:
        """Queue plans from the daemon, and state for which iterations there is one with an order."""
        new = list(plans)
        super().add(new)  # first: what is stated can be followed
        with self.agreement.lock:
            for plan in new:
                planned = PlannedOrder(plan.plan_epoch, plan.apply_at_iteration, bool(plan.order))
                if planned not in self._known:
                    self._known.append(planned)
                if plan.order:
                    self.agreement.join(plan.training_id)
            self.agreement.state()

    def clear(self) -> None:
        """Drop all plans at the next iteration boundary: the daemon that made them is gone."""
        super().clear()
        with self.agreement.lock:
            self._known.clear()
            self.agreement.state()

    @property
    def bound_until(self) -> int:
        """The iteration after the last one for which this host has promised orders to others; plans before it wait."""
        return self.agreement.bound_until

    def close(self) -> None:
        """Leave the register: without this rank no order is run."""
        self.agreement.close()

    def plan_for(self, iteration_index: int) -> PreparedPlan:
        """Return the plan of this iteration: one with an order if all ranks of the training have one."""
        is_agreed = self.agreement.is_agreed(iteration_index)
        super().plan_for(iteration_index)  # after the decision: the plan that it rests on has come before
        return self._ordered if is_agreed else self._plain

    def _turns(self, first_iteration: int) -> tuple[Turn, ...]:
        return turns_of(self._known, first_iteration)

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


class AgreedOrderedPlans(AgreedPlans):
    """Plans of a pipeline across hosts whose order of instructions may change.

    A rank has an order in the windows that the pipeline's leader has granted to a plan with one, as far as it knows
    them and has that plan installed. An iteration for which its host has promised orders, so that all hosts run them,
    is run under that plan even if it is withdrawn meanwhile. In all others a plan with an order counts as none: full
    speed, in 1F1B.
    """

    agreement: OrderAgreement

    def __init__(self, open_register: OpenRegister, pause: Pause = pause_briefly) -> None:
        super().__init__()
        self.agreement = OrderAgreement(open_register, self._turns, pause)
        self._known = PlanWindowFollower()
        """The windows as the thread that adds them sees them; the training thread has its own."""
        self._stated: dict[tuple[str, int], tuple[PlanWindow, PreparedPlan]] = {}
        """Windows in which this rank has stated that it has an order, with the plan; by plan and begin."""

    def add(self, plans: Iterable[PreparedPlan]) -> None:
        """Add slices from the daemon; one without clocks withdraws all before it."""
        new = list(plans)
        before = self.installed
        super().add(new)
        with self.agreement.lock:
            for plan in new:
                if plan.order:
                    self.agreement.join(plan.training_id)
                if plan.plan_id not in before and not plan.clocks:  # the GPU was restored: it has no clocks to set
                    self._stated = {
                        key: (window, replace(own, plan_epoch=0, clocks={}, changes=()))
                        for key, (window, own) in self._stated.items()
                    }
            self.agreement.state()

    def add_windows(self, windows: Iterable[PlanWindow]) -> None:
        """Add plan windows from the pipeline leader."""
        new = tuple(windows)
        super().add_windows(new)  # first: what is stated can be followed
        with self.agreement.lock:
            self._known.update(new)
            self.agreement.state()

    def drop(self, plan_id: str) -> None:
        """Stop following a plan from the next iteration on that is not promised to other hosts."""
        super().drop(plan_id)
        with self.agreement.lock:
            self._known.drop(plan_id)
            self.agreement.state()

    def clear(self) -> None:
        """Drop all plans at the next iteration boundary: the daemon that installed them is gone, or they do not fit."""
        super().clear()
        with self.agreement.lock:
            self._known.clear()
            self._stated = {key: (window, replace(own, plan_epoch=0)) for key, (window, own) in self._stated.items()}
            self.agreement.state()

    def close(self) -> None:
        """Leave the register: without this rank no order is run."""
        self.agreement.close()

    def plan_for(self, iteration_index: int) -> PreparedPlan:
        """Return the agreed plan of this iteration; one with an order only if all ranks of the training run theirs."""
        is_agreed = self.agreement.is_agreed(iteration_index)
        plan = super().plan_for(iteration_index)
        if not is_agreed:
            return self._at_full_speed(plan) if plan.order else plan
        return plan if plan.order else self._stated_plan(iteration_index) or plan

    def _stated_plan(self, iteration_index: int) -> PreparedPlan | None:
        """Return the plan with the order that this rank has promised to run, although it was withdrawn."""
        with self.agreement.lock:
            found = [own for window, own in self._stated.values() if window.covers(iteration_index)]
        return found[-1] if found else None

    def _turns(self, first_iteration: int) -> tuple[Turn, ...]:
        installed = self._installed
        ordered = [
            (window, installed[window.plan_id])
            for window in self._known.windows_after(first_iteration)
            if window.plan_id in installed and installed[window.plan_id].order
        ]
        self._stated = {key: own for key, own in self._stated.items() if own[0].end_iteration > first_iteration - 1}
        for window, plan in ordered:
            key = window.plan_id, window.begin_iteration
            self._stated.pop(key, None)  # the newest is the last one
            self._stated[key] = window, plan
        return turns_within([(w.begin_iteration, w.end_iteration) for w, _ in ordered], first_iteration)
