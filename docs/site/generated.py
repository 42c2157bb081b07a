"""All pages and pictures in docs/ that are generated from the code; `python -m docs.site.generated` writes them.

They are committed, so that links work in a checkout; a test compares them with the code.
"""

from collections.abc import Mapping
from pathlib import Path

from docs.site import job_states
from docs.site.commands import command_line_page
from docs.site.entry_points import entry_points_page
from docs.site.house_map import map_page
from docs.site.http_api import http_api_page
from docs.site.metrics import metrics_page
from docs.site.pictures import pictures
from docs.site.python_api import python_api_page
from docs.site.schedules import schedules_page
from docs.site.settings import settings_page

DOCS = Path(__file__).resolve().parents[1]
NOTICE = "<!-- Generated from the code: `python -m docs.site.generated`. A test fails on edits here. -->\n\n"


def generated_files() -> Mapping[str, str]:
    """Return the text of every generated file by its path in docs/."""
    pages = {
        "command-line.md": command_line_page(),
        "settings.md": settings_page(),
        "http-api.md": http_api_page(),
        "metrics.md": metrics_page(),
        "entry-points.md": entry_points_page(),
        "python-api.md": python_api_page(),
        "schedules.md": schedules_page(),
        "map.md": map_page(),
    }
    return {
        **{f"reference/{name}": NOTICE + text for name, text in pages.items()},
        "reference/job-states.md": job_states.current_page(),
        **{f"pictures/{name}": text for name, text in pictures().items()},
    }


if __name__ == "__main__":
    for name, text in generated_files().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text, encoding="utf-8")
