"""The page on the flow of an iteration agrees with the code: each file hands over to the next one as the table says."""

import ast
import re
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from gpuenergyd.daemon.api import routes
from gpuenergyd.daemon.api.routes import Route

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `([^`]+\.py)` \| .* \| (?:(call|message|route|entry point) `([^`]+)`)? ?\|$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One row of the table."""

    path: str
    kind: str
    name: str


STEPS = [Step(*found) for found in ROW.findall((ROOT / "docs" / "explanation" / "iteration-flow.md").read_text())]


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


def module_of_policy(name: str) -> str:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    target: str = settings["project"]["entry-points"]["gpuenergyd.policies"][name]
    return target.split(":", maxsplit=1)[0].replace(".", "/") + ".py"


def test_the_path_has_at_most_twenty_files_each_named_once() -> None:
    paths = [step.path for step in STEPS]

    assert 10 < len(paths) <= 20
    assert len(set(paths)) == len(paths)
    assert (ROOT / "docs" / "explanation" / "iteration-flow.md").read_text().count(".py` |") == len(paths)
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
        case "entry point":
            assert "gpuenergyd.policies" in literals(step.path)
            assert following.path.endswith(module_of_policy(step.name))
        case _:
            pytest.fail(f"{step.path}: unknown hand-over {step.kind!r}")
