"""Examples, links and indexes of the documentation are correct."""

import re
from pathlib import Path
from typing import Any

import pytest

from docs.site.build import reference_pages
from gpuenergyd.cli.app import command_line
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import check_plan
from gpuenergyd.core.policy_api.policy import BaselineView, ClockPolicy, GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_policy_of_the_documentation_plans_a_pipeline() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "writing-a-policy.md").read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    policy: ClockPolicy = names["OneStepDown"]()
    clocks_mhz = (1410, 1395, 1380)
    view = JobView(
        job_id="j",
        schedule=one_forward_one_backward(4, 8),
        gpus=tuple(GpuView(f"GPU-{rank}", "A100", clocks_mhz, 0.01) for rank in range(4)),
        target=PerformanceTarget(),
        baseline=BaselineView(1.0, 100.0, 10),
        observations=(),
        issued_plans=(),
    )

    plan = policy.next_plan(view)

    check_plan(plan, view.schedule, [clocks_mhz] * 4)
    assert {clock for rank in plan.ranks for clock in rank.sm_clocks_mhz} == {1395}


def leads_somewhere(path: Path) -> bool:
    return path.exists() or (path.parent.name == "reference" and path.name in reference_pages())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_have_targets(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))

    missing = [target for target in targets if "://" not in target and not leads_somewhere(document.parent / target)]

    assert missing == []


def test_the_readme_lists_every_command() -> None:
    app = command_line()
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {group.name for group in app.registered_groups if group.name}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert {command for command in commands if f"gpuenergyd {command}" not in readme} == set()


def test_the_index_lists_every_decision_record() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")

    assert [r.name for r in (ROOT / "docs" / "adr").glob("0*.md") if f"({r.name})" not in index] == []
