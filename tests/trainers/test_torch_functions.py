"""Marks around functions that a program registers with a schedule."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuenergyd.client.rank import RankClient
from gpuenergyd_trainers.torch_functions import RegisteredFunctions


@dataclass
class Program:
    """A schedule with stages 1 and 3; `log` holds marks, transfers and calls of functions in their order."""

    log: list[str] = field(default_factory=list)
    num_stage_calls: int = 0
    functions: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.schedule: Any = SimpleNamespace(
            _comp_type_to_function_map=self.functions, fwd_recv_ops={}, bwd_recv_ops={}
        )
        client = SimpleNamespace(
            begin_instruction=self._begin, end_instruction=lambda slot: self.log.append(f"end {slot}")
        )
        self.marked = RegisteredFunctions(
            self.schedule,
            [SimpleNamespace(stage_index=1), SimpleNamespace(stage_index=3)],
            cast("RankClient", client),
            lambda: self.num_stage_calls,
        )

    def _begin(self, kind: str, microbatch_index: int, chunk_index: int) -> int:
        self.log.append(f"begin {kind}{microbatch_index}.{chunk_index}")
        return microbatch_index

    def receive(self, action: Any) -> None:
        """Have a forward wait for a transfer."""
        transfer = SimpleNamespace(wait=lambda: self.log.append("received"))
        self.schedule.fwd_recv_ops[action.stage_index, action.microbatch_index] = [transfer]

    def run(self, kind: str, stage_index: int, microbatch_index: int) -> list[str]:
        """Call a function as torch's runtime does; return what it added to the log."""
        self.log.clear()
        action = SimpleNamespace(stage_index=stage_index, microbatch_index=microbatch_index)
        if kind == "F":
            self.receive(action)
        self.schedule._comp_type_to_function_map[kind](action, None)
        return list(self.log)


def test_an_instruction_begins_after_its_function_has_received() -> None:
    program = Program()

    def forward(action: Any, _: Any) -> None:
        for transfer in program.schedule.fwd_recv_ops.pop((action.stage_index, action.microbatch_index)):
            transfer.wait()
        program.log.append("computed")

    program.schedule._comp_type_to_function_map["F"] = forward  # registered after the attach

    assert program.run("F", 3, 0) == ["received", "computed"]  # shows that it calls no method of a stage
    assert program.run("F", 3, 1) == ["received", "begin F1.1", "computed", "end 1"]
    assert program.run("F", 1, 2) == ["received", "computed"]
    assert program.run("F", 1, 3) == ["received", "begin F3.0", "computed", "end 3"]
    assert program.marked.obstacle == ""


def test_a_function_that_calls_the_stages_methods_has_no_marks_of_its_own() -> None:
    program = Program()

    def backward(*_: Any) -> None:
        program.num_stage_calls += 1

    program.schedule._comp_type_to_function_map["B"] = backward

    assert [program.run("B", 1, number) for number in range(3)] == [[], [], []]


def test_an_instruction_that_is_left_out_has_no_duration() -> None:
    program = Program()
    program.schedule._comp_type_to_function_map["F"] = lambda *_: program.log.append("left out")
    program.run("F", 1, 0)

    assert program.run("F", 1, 1) == ["left out", "begin F1.0", "end 1"]
    assert program.marked.obstacle == ""


def test_functions_that_receive_in_a_way_of_their_own_are_an_obstacle() -> None:
    program = Program()
    program.schedule._comp_type_to_function_map["F"] = lambda *_: program.schedule.fwd_recv_ops.clear()
    for number in range(2):
        program.run("F", 1, number)

    assert program.marked.obstacle == "its own functions do not wait for what they receive as torch's do"


def test_an_exception_of_a_function_passes_through_and_the_instruction_ends() -> None:
    program = Program()
    program.schedule._comp_type_to_function_map["W"] = lambda *_: program.log.append("computed")
    program.run("W", 1, 0)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    program.schedule._comp_type_to_function_map["W"] = fail
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            program.run("W", 1, 7)
    assert not program.log


def test_undoing_keeps_what_the_program_has_registered_meanwhile() -> None:
    program = Program(functions={"UNSHARD": print})
    program.schedule._comp_type_to_function_map["RESHARD"] = len

    assert program.schedule._comp_type_to_function_map["UNSHARD"] is print
    assert program.marked.undo()
    assert type(program.schedule._comp_type_to_function_map) is dict
    assert program.schedule._comp_type_to_function_map == {"UNSHARD": print, "RESHARD": len}
    assert not program.marked.undo()


def test_a_schedule_without_such_functions_stays_as_it_is() -> None:
    schedule = SimpleNamespace()
    marked = RegisteredFunctions(schedule, [], cast("RankClient", None), int)

    assert not marked.undo()
    assert vars(schedule) == {}
