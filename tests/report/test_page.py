"""The HTML page is one file that asks nothing of any network, and its pictures show what was recorded."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpuenergyd.report.job import job_reports
from gpuenergyd.report.page import report_page
from gpuenergyd.store import History, open_history
from tests.support.sample_history import (
    MAX_CLOCK_MHZ,
    NUM_MICROBATCHES,
    NUM_RANKS,
    SLOW_CLOCK_MHZ,
    write_sample_history,
)

MADE_AT = datetime(2026, 3, 2, tzinfo=UTC)
HOSTILE_NAME = "<script>alert('x')</script>&\"gpt\""


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with open_history(write_sample_history(tmp_path / "history.sqlite3")) as history:
        yield history


@pytest.fixture
def page(history: History) -> str:
    return report_page(history, job_reports(history), made_at=MADE_AT)


def pictures(page: str) -> dict[str, ET.Element]:
    """Return the page's SVG elements by their class; each must be well-formed XML."""
    found = [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]
    return {svg.attrib["class"]: svg for svg in found}


def instructions(svg: ET.Element) -> list[ET.Element]:
    return [group for group in svg.iter("g") if group.attrib["class"].startswith("instruction")]


class _Tags(HTMLParser):
    """Collects attributes that load something, and checks that every tag is closed."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in {"src", "href", "action", "data"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_tag_is_closed_and_nothing_is_loaded_from_outside(page: str) -> None:
    tags = _Tags()
    tags.feed(page)

    assert tags.open == []
    assert tags.sources == ["data:,"]
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\((?!#)", page)


def test_both_timelines_show_every_instruction_on_one_scale(page: str) -> None:
    drawn = instructions(pictures(page)["timeline"])

    assert len(drawn) == 2 * NUM_RANKS * NUM_MICROBATCHES * 2
    widths: dict[str, set[float]] = {}
    for group in drawn:
        title = group.findtext("title") or ""
        if "forward of microbatch 0, stage 3" in title:  # un-tuned before and after: as wide in both
            rect = group.find("rect")
            assert rect is not None
            inset = 2.0 if "critical" in title else 0.5
            widths.setdefault("F0@3", set()).add(round(float(rect.attrib["width"]) + inset, 1))
    assert len(widths["F0@3"]) == 1


def test_a_clock_has_one_colour_and_another_clock_another(page: str) -> None:
    fills: dict[str, set[str]] = {}
    for group in instructions(pictures(page)["timeline"]):
        rect, title = group.find("rect"), group.findtext("title") or ""
        assert rect is not None
        clock = re.search(r"at (\d+) MHz", title)
        assert clock
        fills.setdefault(clock[1], set()).add(rect.attrib["fill"])

    assert set(fills) == {str(MAX_CLOCK_MHZ), str(SLOW_CLOCK_MHZ)}
    assert [len(colours) for colours in fills.values()] == [1, 1]
    assert fills[str(MAX_CLOCK_MHZ)] != fills[str(SLOW_CLOCK_MHZ)]
    assert f"{SLOW_CLOCK_MHZ} MHz <i" in page


def test_critical_instructions_are_outlined_and_say_so(page: str) -> None:
    drawn = instructions(pictures(page)["timeline"])
    outlined = [group for group in drawn if group.attrib["class"] == "instruction critical"]

    assert 0 < len(outlined) < len(drawn)
    assert all((group.findtext("title") or "").endswith("critical") for group in outlined)


def test_every_iteration_is_a_dot_and_a_row(page: str) -> None:
    dots = list(pictures(page)["series"].iter("circle"))

    assert len(dots) == 2 * 28
    assert sum(dot.attrib["class"] == "tuned" for dot in dots) == 2 * 12
    assert page.count('<tr class="irregular">') == 2


def test_the_page_says_what_was_simulated(page: str) -> None:
    assert "The GPUs were simulated" in page


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    path = write_sample_history(tmp_path / "history.sqlite3", job_name=HOSTILE_NAME)
    with open_history(path) as history:
        page = report_page(history, job_reports(history), made_at=MADE_AT)

    assert "<script" not in page
    assert "&lt;script&gt;alert" in page


def test_a_page_without_jobs_says_so(history: History) -> None:
    assert "No job ran in this span of time" in report_page(history, (), made_at=MADE_AT)


def test_an_unmeasured_job_has_a_page_without_zeros(tmp_path: Path) -> None:
    with open_history(write_sample_history(tmp_path / "history.sqlite3", is_measured=False)) as history:
        page = report_page(history, job_reports(history), made_at=MADE_AT)

    assert '<dt>energy saved</dt><dd class="">-</dd>' in page
    assert "time per iteration" in page
    assert "energy per iteration</text>" not in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this host")
@pytest.mark.parametrize("width", [390, 1440])
def test_a_browser_shows_it_without_an_error_and_without_scrolling_sideways(
    page: str, tmp_path: Path, width: int
) -> None:
    probe = """<script>
      window.onerror = (message) => { document.title = "error: " + message; };
      addEventListener("load", () => {
        const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
        const drawn = [...document.querySelectorAll("svg")].every((svg) => svg.getBoundingClientRect().height > 100);
        document.title = wide ? "too wide" : drawn ? "fine" : "a picture is missing";
      });
    </script>"""
    framed = tmp_path / "page.html"
    framed.write_text(page.replace("</head>", probe + "</head>"), encoding="utf-8")
    # A window of headless Chromium is at least 500 pixels wide; a frame is as narrow as asked for.
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe src="page.html" width="{width}" height="900"></iframe><script>addEventListener("load", () => '
        "{ document.body.dataset.result = frames[0].document.title; });</script>",
        encoding="utf-8",
    )
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --allow-file-access-from-files --virtual-time-budget=5000"

    result = subprocess.run(
        ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", outer.as_uri()],
        capture_output=True,
        text=True,
        check=True,
    )

    assert 'data-result="fine"' in result.stdout, result.stdout[:500]
