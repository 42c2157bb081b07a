"""Generated pages and pictures in docs/ match the code, and the map lists every module with its purpose."""

import pytest

from docs.site.generated import DOCS, renderers
from docs.site.house_map import ROOT, first_line, folders, map_page, modules
from docs.site.job_states import transitions
from docs.site.schedules import schedules_page
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.schedules import SCHEDULES

RENDERERS = renderers()


@pytest.mark.parametrize("name", RENDERERS)
def test_a_generated_file_matches_the_code(name: str) -> None:
    is_current = (DOCS / name).exists() and (DOCS / name).read_text(encoding="utf-8") == RENDERERS[name]()

    assert is_current, f"docs/{name} is out of date: run `python -m docs.site.generated`"


def test_every_module_and_folder_has_a_first_line() -> None:
    found = list(folders())
    files = [folder / "__init__.py" for folder in found] + [path for folder in found for path in modules(folder)]

    assert [str(path.relative_to(ROOT)) for path in files if not first_line(path)] == []


def test_the_map_names_every_module() -> None:
    page = map_page()
    listed = [path for folder in folders() for path in modules(folder)]

    assert [path for path in listed if f"](../../{path.relative_to(ROOT)})" not in page] == []


def test_every_schedule_is_documented() -> None:
    assert [name for name in SCHEDULES if f"### {name}\n" not in schedules_page()] == []


def test_every_phase_of_a_job_is_reached_and_only_the_end_is_final() -> None:
    found = transitions()

    assert {after for _, after in found} == set(JobPhase) - {JobPhase.JOINING}
    assert {before for before, _ in found} == set(JobPhase) - {JobPhase.ENDED}
