"""A rank whose order of instructions is checked after every iteration, as a plan for another order would slow it."""

from collections.abc import Callable, Sequence
from typing import Any

from gpuenergyd.client.rank import RankClient
from gpuenergyd.client.run_mark import delete_mark
from gpuenergyd.client.timing.cuda import CudaDevice
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import HostRecorder, InstructionTimer
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.pipeline.plan import instruction_key
from gpuenergyd.core.pipeline.reorder import check_order
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError
from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire.messages import OrderRow
from gpuenergyd_trainers.joining.captured_steps import CapturedSteps

logger = safe_logger("gpuenergyd.trainers")
_STEPS_WITHOUT_INSTRUCTIONS = 3
_MAX_LEARNED = 24
"""Within so many iterations, an order must occur twice in a row."""
_MAX_INSTRUCTIONS_PER_MICROBATCH = 4  # F, then B or I and W: three at most, and one more so that excess is detected


def order_rows(schedule: Schedule, pp_rank: int) -> tuple[OrderRow, ...]:
    """Return the instructions of a rank in one iteration of a schedule, in the form in which ranks register them."""
    keys = (instruction_key(instruction) for instruction in schedule.orders[pp_rank])
    return tuple((str(kind), microbatch_index, chunk_index) for kind, microbatch_index, chunk_index in keys)


def can_replace(order: Sequence[OrderRow], registered: Sequence[OrderRow]) -> bool:
    """Return whether a rank of a 1F1B pipeline can run this order instead of the registered one."""
    try:
        own, before = (
            [Instruction(0, InstructionKind(kind), microbatch, chunk) for kind, microbatch, chunk in rows]
            for rows in (order, registered)
        )
        check_order(own, before, where="rank")
    except (ScheduleError, ValueError):
        return False
    return True


def timer_for(device: Any, num_microbatches: int, num_chunks: int = 1) -> InstructionTimer:
    """Return a timer for instructions on a torch device, with room for any order of this many microbatches."""
    capacity = _MAX_INSTRUCTIONS_PER_MICROBATCH * num_microbatches * num_chunks + 1
    if getattr(device, "type", None) == "cuda":
        import torch  # noqa: PLC0415  loaded already by the caller, whose device this is

        return DeviceRecorder(CudaDevice(torch, device), capacity)
    return HostRecorder(capacity)


class OrderedRank:
    """Follows plans while the rank runs its instructions in the registered order.

    Without an `expected_order`, an order is registered once it occurs in two consecutive iterations. `order_of` returns
    the order for another number of microbatches, for trainings in which that number changes. The first step after a
    start or a pause does not count as an iteration, since frameworks do setup work in it; nor does a step in which a
    graph was captured. A step that is itself captured counts when its graph is replayed, see `captured_steps`.
    """

    def __init__(
        self,
        client: RankClient,
        *,
        expected_order: Sequence[OrderRow] | None,
        log_name: str,
        order_of: Callable[[int], tuple[OrderRow, ...]] | None = None,
    ) -> None:
        self.client = client
        self._order_of = order_of
        self._expected = tuple(expected_order) if expected_order is not None else None
        self._candidate: tuple[OrderRow, ...] = ()
        self._checked: tuple[OrderRow, ...] = ()
        self._can_run_checked = False
        self._log_name = log_name
        self._is_warm = False
        self._is_step_an_iteration = False
        self._num_captures = 0
        self._num_steps = self._num_learned = 0
        self._captured_steps = CapturedSteps(self, client, log_name)
        self.is_in_step = False
        """Whether a step has begun and has not ended."""
        self.is_active = client.is_managed
        """False without a GPU, after the rank deviated from the registered order, and after `leave`."""
        if self._expected is not None:
            client.register(self._expected)

    @property
    def order(self) -> tuple[OrderRow, ...] | None:
        """The registered order; None while it is being learned."""
        return self._expected

    @property
    def can_change_microbatches(self) -> bool:
        """Whether the rank can continue with another number of microbatches, for which it is planned again."""
        return self._order_of is not None

    def change_microbatches(self, num_microbatches: int) -> None:
        """Register the order for another number of microbatches; the next training step counts as a start.

        Raises:
            ScheduleError: the schedule cannot run this number of microbatches.
        """
        assert self._order_of is not None
        order = self._order_of(num_microbatches)
        if self.is_active:
            self._expected = order
            self.pause()
            self.client.change_order(order, num_microbatches=num_microbatches)

    def begin_step(self) -> None:
        """Begin a training step, or the capture of one."""
        if self.is_active and self._captured_steps.begin():
            return
        self.is_in_step = True
        self._num_steps += 1
        self._num_captures = self._captured_steps.num_captures
        self._is_step_an_iteration = self.is_active and self._is_warm and self.client.begin_iteration()

    def sees_instructions(self) -> bool:
        """Return whether the instructions of the step that has begun must be marked.

        They need not outside iterations, and where neither times nor clocks depend on them.
        """
        return self._captured_steps.is_capturing or (self._is_step_an_iteration and self.client.needs_marks)

    def end_step(self) -> None:
        """End a training step, and check the instructions that it ran."""
        if self._captured_steps.is_capturing:
            self._captured_steps.end()
            return
        self._is_warm, self.is_in_step = True, False
        if not self._is_step_an_iteration:
            return
        planned = self.order_to_run
        self._is_step_an_iteration = False
        if self._captured_steps.num_captures != self._num_captures:
            self.client.abandon_iteration()
            return
        order = self.client.end_iteration()
        if not order:
            self._see_nothing()
        elif self._expected is None:
            self._learn(order)
        elif order != (planned or self._expected):
            self._stop_following_plans(order, planned or self._expected)

    @property
    def order_to_run(self) -> tuple[OrderRow, ...]:
        """The order that the plan of the present iteration requires; empty for the framework's own, or between steps.

        An order that cannot replace the registered one is never run, whatever the daemon sends.
        """
        planned = self.client.planned_order if self._is_step_an_iteration else ()
        if planned and planned is not self._checked:
            self._checked, self._can_run_checked = planned, can_replace(planned, self._expected or ())
        return planned if planned and self._can_run_checked else ()

    def fail_step(self) -> None:
        """End a training step that raised: it is not reported, and the next step counts as a start."""
        if self._captured_steps.is_capturing:
            self._captured_steps.abandon()
            return
        self.client.abandon_iteration()
        self._is_step_an_iteration = self.is_in_step = False
        self.pause()

    def pause(self) -> None:
        """Suspend the job, e.g. for an evaluation; the next training step counts as a start."""
        if self._is_warm:
            self.client.pause()
        self._is_warm = False

    def leave(self, *, shall_wait: bool = True) -> None:
        """Leave the job; later steps are not reported."""
        graphs = self.client.graphs
        if self.is_active and not self._num_steps and graphs is not None and graphs.num_unknown_replays:
            logger.warning(
                "gpuenergyd: %s: no training step was seen, but %s of graphs that were captured before attach:"
                " attach first, or use gpuenergyd_trainers.cuda_graphs.attach(graph)",
                self._log_name,
                count_text(graphs.num_unknown_replays, "replay"),
            )
        self.is_active = False
        self.client.release(shall_wait=shall_wait)

    def give_up(self, reason: str) -> None:
        """Leave the job because its instructions cannot be followed, and log the reason."""
        delete_mark()
        logger.warning("gpuenergyd: %s: not followed: %s; training continues at full speed", self._log_name, reason)
        self.leave(shall_wait=False)

    def _learn(self, order: tuple[OrderRow, ...]) -> None:
        self._num_learned += 1
        if order == self._candidate:
            self._expected = order
            self.client.register(order)
        elif self._num_learned == _MAX_LEARNED:
            self.give_up(f"the order of its instructions differed in each of {_MAX_LEARNED} steps")
        self._candidate = order

    def _see_nothing(self) -> None:
        if self._num_steps >= _STEPS_WITHOUT_INSTRUCTIONS:
            steps = count_text(self._num_steps, "step")
            self.give_up(f"none of its instructions was seen in {steps}: the program runs them by means of its own")

    def _stop_following_plans(self, order: tuple[OrderRow, ...], expected: tuple[OrderRow, ...]) -> None:
        pairs = zip(order, expected, strict=False)
        first = next((k for k, (ran, meant) in enumerate(pairs) if ran != meant), min(len(order), len(expected)))
        ran = order[first] if first < len(order) else "missing"
        meant = expected[first] if first < len(expected) else "none"
        self.give_up(f"instruction {first} of the iteration is {ran}, but {meant} in the registered order")
