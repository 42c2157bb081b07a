"""Examples, links and indexes of the documentation are correct."""

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpuenergyd.cli.app import command_line
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import check_plan
from gpuenergyd.core.policy_api.testing import job_view

ROOT = Path(__file__).resolve().parents[2]
NOTES = ROOT / "benchmarks" / "notes"
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").rglob("*.md"), *NOTES.glob("*.md")]
)


def test_the_policy_of_the_documentation_plans_a_pipeline_and_passes_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "tutorials" / "my-own-policy.md").read_text(encoding="utf-8")
    policy_code, test_code = re.findall(r"```python[^\n]*\n(.*?)```", page, flags=re.DOTALL)
    module = ModuleType("one_step_down")
    exec(policy_code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = {}
    exec(test_code, names)
    tests = [name for name in names if name.startswith("test_")]
    for name in tests:
        names[name]()

    view = job_view(one_forward_one_backward(4, 8), supported_sm_clocks_mhz=(1410, 1395, 1380))
    plan = module.OneStepDown().next_plan(view)

    check_plan(plan, view.schedule, [(1410, 1395, 1380)] * 4)
    assert {clock for rank in plan.ranks for clock in rank.sm_clocks_mhz} == {1395}
    assert tests


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_of_the_checkout_and_a_heading(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href|srcset)=\"([^\"]+)\"", text):
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if "://" not in target and not (path.exists() and (not anchor or anchor in anchors(path))):
            wrong.append(target)

    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_in_a_document_exists(document: Path) -> None:
    if document.name == "CHANGELOG.md" or document.parent.name in {"adr", "notes"}:
        return  # they name what has been
    roots = "gpuenergyd|policies|trainers|tests|benchmarks|tools|docs|examples|deploy|systemd"
    named = re.findall(rf"(?<!`)`((?:{roots})/[\w./-]+)`", document.read_text(encoding="utf-8"))

    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_and_make_target_in_a_document_exists(document: Path) -> None:
    if document.name == "CHANGELOG.md" or document.parent.name in {"adr", "notes"}:
        return  # they name what has been
    text = document.read_text(encoding="utf-8")
    own = ("gpuenergyd", "tests", "docs", "benchmarks", "tools")
    modules = [name for name in re.findall(r"python3? (?:-I )?-m ([\w.]+)", text) if name.startswith(own)]
    targets = re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", text, flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    assert [name for name in modules if importlib.util.find_spec(name.rstrip(".")) is None] == []
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, flags=re.MULTILINE)] == []


def test_every_document_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    reached, waiting = {index}, [index]
    while waiting:
        page = waiting.pop()
        for name in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
            target = (page.parent / name).resolve()
            if target.exists() and target not in reached:
                reached.add(target)
                waiting.append(target)

    assert set((ROOT / "docs").rglob("*.md")) - reached == set()
    assert [str(path) for path in (ROOT / "docs").rglob("*.md") if path.stat().st_size == 0] == []


def test_the_reference_lists_every_command() -> None:
    commands = [*command_line().commands]
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")

    assert [command for command in commands if f"gpuenergyd {command}" not in page] == []


def test_the_index_lists_every_decision_record() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")

    assert [r.name for r in (ROOT / "docs" / "adr").glob("0*.md") if f"({r.name})" not in index] == []
