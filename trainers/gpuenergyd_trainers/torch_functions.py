"""Times instructions that a program replaces by its own functions, with `schedule.register_custom_function`.

torch's runtime keeps these functions by computation type in a private dictionary and calls `function(action, context)`
instead of its own code; torchtitan's graph pipelines use this. Here the dictionary is replaced by one that marks each
call, whenever the function was registered; the function itself is not changed.

A function may call the stage's own methods, which are marked already. So its first call for each stage, in the step
that does not count as an iteration, is only used to find out whether it does. If not, the instruction begins once the
function has received its inputs: an entry added to the end of its list of transfers marks that time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuenergyd.client.rank import RankClient
from gpuenergyd.client.timing.recorder import NOT_RECORDED

_FUNCTIONS = "_comp_type_to_function_map"
_RECEIVED = {"F": "fwd_recv_ops", "B": "bwd_recv_ops", "I": "bwd_recv_ops", "W": "bwd_recv_ops"}
"""The schedule's pending transfers for which each kind of instruction waits: lists by stage and microbatch."""
_OVERLAP = "OVERLAP_F_B"

Function = Callable[[Any, Any], None]


class RegisteredFunctions:
    """The functions registered with a schedule, marked until `undo`; does nothing if torch has no such functions."""

    def __init__(
        self, schedule: Any, stages: Sequence[Any], client: RankClient, num_stage_calls: Callable[[], int]
    ) -> None:
        """Replace the schedule's functions; `num_stage_calls` counts the marked calls of the stages' methods."""
        self._schedule = schedule
        self._client = client
        self._num_stage_calls = num_stage_calls
        self._chunks = {int(stage.stage_index): chunk for chunk, stage in enumerate(stages)}
        self._calls_stage: dict[tuple[Function, int], bool] = {}
        self.obstacle = ""
        """Why the instructions of this schedule cannot be followed; empty if they can."""
        functions = getattr(schedule, _FUNCTIONS, None)
        self.are_marked = isinstance(functions, dict)
        """Whether the schedule may run its instructions by functions instead of its stages' methods."""
        if isinstance(functions, dict):
            setattr(schedule, _FUNCTIONS, _MarkedFunctions(functions, self._marked))

    def undo(self) -> bool:
        """Give the schedule a plain dictionary again; return False if the program has replaced ours."""
        functions = getattr(self._schedule, _FUNCTIONS, None)
        if not isinstance(functions, _MarkedFunctions):
            return False
        setattr(self._schedule, _FUNCTIONS, dict(functions.items()))
        return True

    def _marked(self, kind: str, function: Function) -> Function:
        if kind not in _RECEIVED and kind != _OVERLAP:
            return function

        def function_in_job(action: Any, context: Any) -> None:
            key = (function, int(action.stage_index))
            if kind in _RECEIVED and self._calls_stage.get(key) is False and key[1] in self._chunks:
                self._run(kind, function, action, context)
                return
            before = self._num_stage_calls()
            function(action, context)
            if key not in self._calls_stage:
                self._calls_stage[key] = self._num_stage_calls() > before
                if kind == _OVERLAP and not self._calls_stage[key]:
                    self.obstacle = "it overlaps forwards and backwards in a function of its own"

        return function_in_job

    def _run(self, kind: str, function: Function, action: Any, context: Any) -> None:
        place = int(action.stage_index), int(action.microbatch_index)
        mark = _Begin(self._client, kind, place[1], self._chunks[place[0]])
        pending = getattr(self._schedule, _RECEIVED[kind], None)
        if isinstance(pending, dict) and place in pending:
            pending[place] = [*pending[place], mark]
        else:
            mark.wait()
        try:
            function(action, context)
        finally:
            if not mark.is_reached:
                if isinstance(pending, dict) and place not in pending:
                    self.obstacle = "its own functions do not wait for what they receive as torch's do"
                mark.wait()  # else it skipped the instruction, e.g. if the weight gradient does the whole backward
            self._client.end_instruction(mark.slot)


class _Begin:
    """The beginning of an instruction, in the form of a transfer that is awaited after all others."""

    def __init__(self, client: RankClient, kind: str, microbatch_index: int, chunk_index: int) -> None:
        self._client = client
        self._row = (kind, microbatch_index, chunk_index)
        self.slot = NOT_RECORDED
        self.is_reached = False

    def wait(self, *_: Any, **__: Any) -> bool:
        if not self.is_reached:
            self.is_reached = True
            self.slot = self._client.begin_instruction(*self._row)
        return True


class _MarkedFunctions(dict[Any, Function]):
    """The functions of a schedule by computation type; a look-up returns the function with its call marked."""

    def __init__(self, functions: Mapping[Any, Function], marked: Callable[[str, Function], Function]) -> None:
        super().__init__(functions)
        self._make = marked
        self._made: dict[Any, tuple[Function, Function]] = {}

    def __getitem__(self, computation_type: Any) -> Function:
        function = super().__getitem__(computation_type)
        made = self._made.get(computation_type)
        if made is None or made[0] is not function:
            made = function, self._make(str(getattr(computation_type, "value", computation_type)), function)
            self._made[computation_type] = made
        return made[1]
