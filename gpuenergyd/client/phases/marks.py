"""Marks the phases of an iteration as instructions of one rank, and decides which phases to mark.

Theory of operation. An iteration of a plain loop is a chain of phases. For each accumulated microbatch: forward (F,
from the start of the iteration, including the loss), backward (B), and gradient communication (C, from the end of the
backward's computation to the next phase). Then the optimizer step (O), and the wait for the next batch (D), from the
end of the iteration to the start of the next, which ends it. The daemon treats a wait much longer than usual
(evaluation, checkpoint, a slow disk) as a pause, as for any loop, and does not count its iteration.

The first iterations are only measured. Once two in a row have run the same phases, those long enough for a clock of
their own are registered, and only they are marked from then on. A loop has one instruction per iteration if no phases
are seen or they differ each time. The same holds for a loop that steps several optimizers in turn, each after its own
forward and backward passes, since these do not form one chain of phases.

Phases are registered again when others have run for a while, for instance since more microbatches are accumulated, or
since the first steps were skipped because their gradients overflowed. When iterations have none, because the program
trains another model or has wrapped it anew, that model is searched for. If most iterations run others, but not always
the same, the loop has one instruction per iteration.

Longer than 400 lines, since all hooks of a step change one state, which several objects would have to share.
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

from gpuenergyd.client.phases.step_cycle import StepCycle, StepTurn
from gpuenergyd.client.rank import RankClient
from gpuenergyd.client.timing.recorder import NOT_RECORDED, IterationTimes
from gpuenergyd.wire.messages import OrderRow

MAX_PHASES = 128
"""Most phases of an iteration that are recorded; with more, the loop has one instruction per iteration."""
SHORTEST_PHASE_S = 0.005
"""Shorter phases get no clock of their own, because a clock change takes about as long (typically 5 to 15 ms)."""
SHORTEST_PHASE_RATIO = 0.01
"""Phases shorter than this share of the iteration get no clock of their own either."""
_MIN_LEARNED, _MAX_LEARNED = 3, 24
"""Fewest and most iterations measured before phases are registered; the first iteration differs from the others."""
_NUM_ALIKE = 3
"""Iterations in a row with as many phases, but not the usual number, after which all are marked; without any, after
which the model is searched for again."""
WHOLE_ITERATION: tuple[OrderRow, ...] = (("F", 0, 0),)
_NS_PER_S = 1e9


def _shielded(act: Callable[["PhaseMarks"], None]) -> Callable[["PhaseMarks"], None]:
    """Suppress and count exceptions of a function that is called inside a training step."""

    @wraps(act)
    def shielded(self: "PhaseMarks") -> None:
        try:
            act(self)
        except Exception:  # noqa: BLE001  must not reach training
            self.num_errors += 1

    return shielded


class PhaseMarks:
    """Marks of one rank's phases; called by the hooks of the training, in order of launch.

    As a context manager it marks an iteration. With a `cycle`, nobody marks iterations: one ends with the last step of
    the optimizers' cycle, and the next begins with the first forward after that, or at once where no forward is seen
    before the next step.
    """

    def __init__(self, *, cycle: StepCycle | None = None) -> None:
        self._client: RankClient | None = None
        self._cycle = cycle
        self._may_begin = cycle is not None
        """Whether the next forward begins an iteration."""
        self._begins_at_end = False
        self._has_stepped = False
        """Whether an optimizer other than the last one has stepped in this iteration."""
        self._shall_be_whole = False
        self._is_learning = True
        self._num_begun = 0
        self.is_whole = False
        """Whether iterations have one instruction, without phases."""
        self._kept: frozenset[OrderRow] | None = None
        """The phases that are marked; None for all."""
        self._learned: deque[IterationTimes] = deque(maxlen=_MAX_LEARNED)
        self.is_in_iteration = False
        """Whether an iteration has begun and not ended."""
        self._is_paused = False
        self.is_left_out = False
        """Whether the present iteration is recorded together with others, so that nothing of it is marked."""
        self._kind = ""
        self._slot = NOT_RECORDED
        self._microbatch = self._num_steps = self._num_unseen = self._num_lost = 0
        self._num_phases = self._num_usual = 0
        """Phases of the present iteration so far, marked or not, and of an iteration when they were registered."""
        self._recent: deque[int] = deque(maxlen=_MAX_LEARNED)
        """Numbers of phases of the newest iterations."""
        self._are_all_marked = False
        """Whether dropped phases are marked too, because the newest iterations all run others than usual."""
        self._num_wanted = 0
        """Number of phases of most of the newest iterations, if it is not the usual one."""
        self._has_phases = False
        self._has_seen_model = False
        self.when_whole: Callable[[], None] = _do_nothing
        """Called when phases are no longer marked."""
        self.when_unseen: Callable[[], None] = _do_nothing
        """Called when the newest iterations had no phases, because the program trains another model."""
        self.num_errors = 0
        """Number of suppressed exceptions."""
        self._waits_for_others = False

    def follow(self, client: RankClient, *, waits_for_others: bool) -> None:
        """Mark the phases of this rank's iterations; say whether other ranks can keep it waiting."""
        self._client, self._waits_for_others = client, waits_for_others

    def learn_times(self, times: IterationTimes) -> None:
        """Store the times of an iteration whose instructions were timed; callable on any thread."""
        self._learned.append(times)

    def register_whole(self) -> None:
        """Register one instruction per iteration, for all following iterations."""
        self._is_learning, self.is_whole, self._kept = False, True, frozenset(WHOLE_ITERATION)
        self.when_whole()
        if self._client is not None:
            self._client.register(WHOLE_ITERATION)

    @property
    def follows_steps(self) -> bool:
        """Whether optimizer steps end the iterations, because the program does not mark them."""
        return self._cycle is not None

    @property
    def has_several_optimizers(self) -> bool:
        """Whether optimizer steps end the iterations and several optimizers take part."""
        return self._cycle is not None and self._cycle.num_optimizers > 1

    @property
    def begins_at_first_module(self) -> bool:
        """Whether any module's call may begin the next iteration, because the loop trains several in turn."""
        return self._may_begin and self._shall_be_whole and self.has_several_optimizers

    @_shielded
    def end_learning(self) -> None:
        """Register a loop that ends before its phases are known, so that the daemon knows the job."""
        if self._is_learning and self._num_begun:
            self.register_whole()

    def begin_iteration(self) -> None:
        """Begin an iteration, with its first forward."""
        client = self._client
        if client is None:
            return
        if client.num_left > client.num_in_full and client.can_leave_out and client.begin_next():
            self.is_in_iteration = self.is_left_out = True
            self._may_begin = self._has_stepped = False
            return
        try:
            self._may_begin = self._has_stepped = False
            if self._shall_be_whole and not self.is_whole:
                self._become_whole()
            elif self._num_wanted:
                self._change()
            client.begin_iteration()
            if self._is_learning:
                self._num_begun += 1
                self._decide()
            self.is_in_iteration, self._is_paused, self._has_phases = True, False, False
            self._microbatch, self._num_steps, self._num_phases = 0, 0, 1
            self._kind = "F"
            self._slot = client.begin_instruction("F", 0)
        except Exception:  # noqa: BLE001  must not reach training
            self.num_errors += 1

    __enter__ = begin_iteration

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the iteration; one that raises is discarded."""
        if self.is_left_out and kind is None:
            self.is_in_iteration = self.is_left_out = False
            if self._client is not None and self._client.has_spans:
                self._client.end_next()
        elif kind is not None:
            self.abandon_iteration()
        else:
            self.end_iteration()

    def end_iteration(self) -> None:
        """End the iteration; the time until the next one begins is a wait for data."""
        client = self._client
        if client is None or not self.is_in_iteration:
            return
        if self.is_left_out:
            self.__exit__(None, None, None)
            return
        try:
            if self._slot != NOT_RECORDED:
                client.end_instruction(self._slot)
            self._kind, self._slot = "", NOT_RECORDED
            self.is_in_iteration = False
            if self._has_phases:
                self._num_unseen = 0
                self._begin("D", 0)
                self._kind, self._slot = "", NOT_RECORDED
                self._see_change()
            elif self._is_learning and (self._num_begun >= _MIN_LEARNED or not self._has_seen_model):
                self.register_whole()
            elif not (self._is_learning or self.is_whole):
                self._num_unseen += 1
                if self._num_unseen % _NUM_ALIKE == 0:
                    self.when_unseen()
            client.end_iteration()
        except Exception:  # noqa: BLE001  must not reach training
            self.num_errors += 1

    @_shielded
    def abandon_iteration(self) -> None:
        """Discard the iteration, for instance after an exception."""
        if self._client is not None:
            self.is_in_iteration = self.is_left_out = False
            self._kind, self._slot = "", NOT_RECORDED
            self._client.abandon_iteration()

    @_shielded
    def pause(self) -> None:
        """Mark an evaluation or a checkpoint between iterations, which is part of neither."""
        if self._client is not None and not self.is_in_iteration and not self._is_paused:
            self._is_paused = True
            self._client.pause()

    @_shielded
    def forward_begins(self) -> None:
        self._has_seen_model = True
        if not self.is_in_iteration:
            if self._may_begin:
                self.begin_iteration()
            return
        self._shall_be_whole |= self._has_stepped
        if self._kind == "C":
            self._end()
            self._microbatch += 1
            self._begin("F", self._microbatch)

    def backward_begins(self) -> bool:
        """Mark the start of a backward; return whether `backward_ends` must be called at its end."""
        if self.is_whole or not self.is_in_iteration:
            return False
        self._shall_be_whole |= self._has_stepped
        if self._kind not in {"F", "C"}:
            return False
        if self._kind == "C":  # a second backward of the same forward, so this is not communication
            self._num_steps += 1
            self._begin_next("O", self._num_steps)
            return False
        self._has_phases = True
        self._begin_next("B", self._microbatch)
        return True

    @_shielded
    def backward_ends(self) -> None:
        """Mark the end of a backward's computation."""
        if self._kind == "B":
            self._begin_next("C", self._microbatch)

    @_shielded
    def optimizer_begins(self) -> None:
        if self.is_in_iteration and self._kind in {"", "C"} and self._has_phases:
            self._begin_next("O", self._num_steps)
            self._num_steps += 1

    @_shielded
    def optimizer_ends(self) -> None:
        """Mark the end of a step of an optimizer of the model."""
        if self._kind == "O":
            self._end()

    def follow_step(self, optimizer: Any, *, is_of_model: bool) -> None:
        """Handle the step of any optimizer, which may end an iteration that the program does not mark."""
        if self._cycle is not None:
            self._handle_turn(self._cycle.step(optimizer))
            self._shall_be_whole |= not is_of_model and self.has_several_optimizers

    def begin_turns(self, turn: StepTurn) -> None:
        """Start after an optimizer step that was taken before this loop joined."""
        self._may_begin = turn is StepTurn.LAST

    def _handle_turn(self, turn: StepTurn) -> None:
        is_known = turn in {StepTurn.WITHIN, StepTurn.LAST}
        if is_known and self._may_begin and not self.is_in_iteration:  # no forward was seen since the last step
            if self._has_seen_model and self._num_lost < _NUM_ALIKE:
                self._num_lost += 1
                self._recent.clear()
                self.when_unseen()
                self.pause()
            else:
                self._begins_at_end = self._shall_be_whole = True
        self._may_begin, self._has_stepped = False, True
        if turn is StepTurn.LAST:
            self.end_iteration()
            if self._begins_at_end:
                self.begin_iteration()
            else:
                self._may_begin = True
        elif not is_known:
            self.abandon_iteration()
            if turn is StepTurn.UNKNOWN:
                self.pause()

    def _become_whole(self) -> None:
        if self._is_learning or self._client is None:
            self.register_whole()
            return
        self.is_whole, self._kept = True, frozenset(WHOLE_ITERATION)
        self._client.pause()
        self._client.change_order(WHOLE_ITERATION, num_microbatches=1)

    def _begin_next(self, kind: str, index: int) -> None:
        self._end()
        self._begin(kind, index)

    def _begin(self, kind: str, index: int) -> None:
        assert self._client is not None
        self._kind = kind
        self._num_phases += 1
        if self._kept is None or (kind, index, 0) in self._kept or self._are_all_marked:
            self._slot = self._client.begin_instruction(kind, index)

    def _end(self) -> None:
        if self._slot != NOT_RECORDED and self._client is not None:
            self._client.end_instruction(self._slot)
        self._kind, self._slot = "", NOT_RECORDED

    def _decide(self) -> None:
        """Register the phases of the loop once they are known."""
        assert self._client is not None
        order = None
        if len(self._learned) >= _MIN_LEARNED:
            newest = list(self._learned)[-2:]
            order = kept_phases(newest, waits_for_others=self._waits_for_others)
            self._num_usual = len(newest[-1].instructions)
        if order is None and self._num_begun > _MAX_LEARNED:
            order = WHOLE_ITERATION
        if order == WHOLE_ITERATION:
            self.register_whole()
        elif order is not None:
            self._is_learning, self._kept = False, frozenset(order)
            self._client.register(order)

    def _see_change(self) -> None:
        """See whether most iterations run other phases than the registered ones."""
        if self._is_learning or self.is_whole:
            return
        recent, num_phases = self._recent, self._num_phases
        recent.append(num_phases)
        if len(recent) == _MAX_LEARNED:
            self._num_lost = 0
        if recent.count(self._num_usual) == len(recent):
            return
        are_alike = list(recent)[-_NUM_ALIKE:] == [num_phases] * _NUM_ALIKE
        self._are_all_marked = are_alike and num_phases != self._num_usual
        (common, num_common), *_ = Counter(recent).most_common(1)
        self._num_wanted = common if num_common > _MAX_LEARNED / 2 and common != self._num_usual else 0
        self._shall_be_whole |= len(recent) == _MAX_LEARNED and num_common < _MAX_LEARNED / 2

    def _change(self) -> None:
        """Register the phases of most iterations, once two iterations in which all of them were timed are known."""
        newest = list(self._learned)[-2:]
        is_wanted = len(newest[-1].instructions) == self._num_wanted
        order = kept_phases(newest, waits_for_others=self._waits_for_others) if is_wanted else None
        if order == WHOLE_ITERATION:
            self._become_whole()
        elif order is not None and self._client is not None:
            self._kept, self._num_usual, self._num_wanted = frozenset(order), self._num_wanted, 0
            self._are_all_marked = False
            self._recent.clear()
            self._client.pause()
            self._client.change_order(order, num_microbatches=max(1 + index for _, index, _ in order))


def _do_nothing() -> None:
    """Stand in for a function that removes hooks if there are none."""


def kept_phases(iterations: list[IterationTimes], *, waits_for_others: bool) -> tuple[OrderRow, ...] | None:
    """Return the phases long enough for a clock of their own; None if the iterations ran different phases.

    If fewer than two kinds are long enough, return the whole iteration. A forward is kept with its backward. A wait for
    data counts by its longest time, as it is unknown before a pause; so does a wait for others, which varies.
    """
    orders = [tuple((kind, index, chunk) for kind, index, chunk, *_ in times.instructions) for times in iterations]
    order = orders[-1]
    if len(set(orders)) > 1 or len(set(order)) < len(order) or len(order) >= MAX_PHASES:
        return None
    last = iterations[-1]
    end_ns = last.next_begin_mono_ns or last.end_mono_ns
    shortest_ns = max(SHORTEST_PHASE_S * _NS_PER_S, SHORTEST_PHASE_RATIO * (end_ns - last.begin_mono_ns))
    lasted_ns = [[_duration_ns(times, number) for times in iterations] for number in range(len(order))]
    waits = {"D", "C"} if waits_for_others else {"D"}
    longest_ns = {row: (max if row[0] in waits else min)(lasted) for row, lasted in zip(order, lasted_ns, strict=True)}
    kinds = {row[0] for row in order if longest_ns[row] >= shortest_ns}
    if len(kinds) < 2:  # one clock for all
        return WHOLE_ITERATION
    kinds |= {"F"}  # a backward needs its forward
    kept = [row for row in order if row[0] in kinds and (row[0] != "C" or longest_ns[row] >= shortest_ns)]
    return tuple(kept)


def _duration_ns(times: IterationTimes, number: int) -> int:
    *_, begin_ns, end_ns = times.instructions[number]
    return end_ns - begin_ns
