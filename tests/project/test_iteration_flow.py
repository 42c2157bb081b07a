"""The page on the flow of an iteration agrees with the code: each file hands over to the next one as the table says."""

import ast
import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import Command, Event, JobPhase
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.api import routes
from gpuenergyd.daemon.api.routes import Route
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.job_run import SCHEDULE, WORK, plan

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `([^`]+\.py)` \| .* \| (?:(call|message|route) `([^`]+)`)? ?\|$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One row of the table."""

    path: str
    kind: str
    name: str


PAGE = (ROOT / "docs" / "explanation" / "iteration-flow.md").read_text()
STEPS = [Step(*found) for found in ROW.findall(PAGE)]
RETURNS = re.findall(r"^\| `(\w+)` \| `([^`]+\.py)` \| `(\w+)` \|", PAGE, re.MULTILINE)
"""Event, file and function of each return to the transitions of the state machine."""


def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def defined(path: str) -> set[str]:
    """Return the functions, methods and classes that a file defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree(path)) if isinstance(node, kinds)}


def used(path: str) -> set[str]:
    """Return the names and attributes that a file uses."""
    nodes = list(ast.walk(tree(path)))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def literals(path: str) -> set[str]:
    nodes = ast.walk(tree(path))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def served_paths(path: str) -> set[str]:
    """Return the paths of the routes that a file uses from the list of routes."""
    known = {name: value.path for name, value in vars(routes).items() if isinstance(value, Route)}
    return {known[name] for name in known.keys() & used(path)}


def test_the_path_has_at_most_sixteen_files_each_named_once() -> None:
    paths = [step.path for step in STEPS]

    assert 10 < len(paths) <= 16
    assert len(set(paths)) == len(paths)
    assert PAGE.count(".py` |") == len(paths) + len(RETURNS)
    assert [step.path for step in STEPS if not step.kind] == [paths[-1]]


@pytest.mark.parametrize(("step", "following"), list(pairwise(STEPS)), ids=lambda step: Path(step.path).stem)
def test_each_file_hands_over_to_the_next_one_as_the_table_says(step: Step, following: Step) -> None:
    match step.kind:
        case "call":
            assert step.name in used(step.path)
            assert step.name in defined(following.path)
        case "message":
            assert step.name in used(step.path)
            assert step.name in used(following.path) | defined(following.path)
        case "route":
            assert step.name in literals(step.path)
            assert step.name in served_paths(following.path)
        case _:
            pytest.fail(f"{step.path}: unknown hand-over {step.kind!r}")


def _in_core_job(path: str) -> str:
    return path.rpartition("/core/job/")[2] if "/core/job/" in path else ""


def _is_transition(path: str) -> bool:
    own = _in_core_job(path)
    return own in {"job.py", "state.py"} or own.startswith("transitions/")


class _Slower:
    def next_plan(self, view: JobView) -> ClockPlan:
        assert view.job_id
        return plan("slower", clock=1395)


def test_an_iteration_comes_back_to_the_transitions_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    run = VirtualTraining(SCHEDULE, WORK, _Slower(), max_slowdown_ratio=0.5)
    run.run(30)
    handle, event_names, returns = Job.handle, list[str](), list[tuple[str, str, str]]()

    def trace(frame: FrameType, kind: str, _arg: object) -> None:
        path, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if kind == "return" and _in_core_job(path) and _is_transition(caller) and not _is_transition(path):
            returns.append((event_names[-1], _in_core_job(path), frame.f_code.co_name))

    def traced(job: Job, event: Event) -> tuple[Command, ...]:
        event_names.append(type(event).__name__)
        sys.setprofile(trace)
        try:
            return handle(job, event)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Job, "handle", traced)
    run.run(1)

    assert run.job.phase is JobPhase.TUNED
    assert event_names == ["RankReported", "RankReported", "IterationObserved", "PlanDecided"]
    assert returns[1:] == RETURNS, "of the rank that reports last"
    assert len(RETURNS) <= 6
