"""Pages and pictures that are generated from code and results; `python -m docs.site.generated` writes them.

They are committed, so that links work in a checkout; a test compares them with the code.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docs.site.commands import command_line_page
from docs.site.entry_points import entry_points_page
from docs.site.figures import with_current_parts
from docs.site.house_map import map_page
from docs.site.http_api import http_api_page
from docs.site.manual.manual_pages import manual_pages, section_folder
from docs.site.metrics import metrics_page
from docs.site.pictures import PICTURES
from docs.site.python_api import python_api_page
from docs.site.schedules import schedules_page
from docs.site.settings import settings_page

DOCS = Path(__file__).resolve().parents[1]
_REFERENCE = {
    "command-line.md": command_line_page,
    "settings.md": settings_page,
    "http-api.md": http_api_page,
    "metrics.md": metrics_page,
    "entry-points.md": entry_points_page,
    "python-api.md": python_api_page,
    "schedules.md": schedules_page,
    "map.md": map_page,
}
_PAGES_WITH_PARTS = (
    "../README.md", "index.md", "results.md", "explanation/expected-savings.md", "readers/trainer-authors.md",
    "explanation/comparison.md", "explanation/learning.md", "reference/job-states.md",
)  # fmt: skip
NOTICE = "<!-- Generated from the code: `python -m docs.site.generated`. A test fails on edits here. -->\n\n"


def renderers() -> Mapping[str, Callable[[], str]]:
    """Return a function for every generated file, by its path in docs/, that returns its text."""
    return {
        **{f"reference/{name}": partial(_with_notice, page) for name, page in _REFERENCE.items()},
        **{name: partial(_with_parts, DOCS / name) for name in _PAGES_WITH_PARTS},
        **{f"pictures/{name}": picture for name, picture in PICTURES.items()},
        **{f"man/{section_folder(name)}/{name}": partial(str, text) for name, text in manual_pages().items()},
    }


def _with_notice(page: Callable[[], str]) -> str:
    return NOTICE + page()


def _with_parts(path: Path) -> str:
    return with_current_parts(path.read_text(encoding="utf-8"))


def write_generated_files() -> None:
    """Write every generated file, and the generated parts of written pages."""
    for name, render in renderers().items():
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    write_generated_files()
