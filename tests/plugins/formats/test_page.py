"""The HTML page is one file without network requests, and its charts show the recorded data."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.power_swing import SwingFigure
from gpuenergyd.report.job import job_reports
from gpuenergyd.store import History, PlanRecord, open_history
from gpuenergyd.store.records import RollupRecord
from gpuenergyd_formats.page import report_page, swing_text
from tests.support.chromium import CHROMIUM, Page, in_browser
from tests.support.readable import OVERLAPPING, PALE, SMALL, drawn_marks
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


def charts_of(page: str) -> dict[str, ET.Element]:
    """Return the page's charts for desktops by their class; each chart must be well-formed XML."""
    found = [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]
    return {svg.attrib["class"]: svg for svg in reversed(found)}  # the one for phones follows each


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
    drawn = instructions(charts_of(page)["timeline"])

    assert len(drawn) == 2 * NUM_RANKS * NUM_MICROBATCHES * 2
    widths: dict[str, set[float]] = {}
    for group in drawn:
        title = group.findtext("title") or ""
        if "forward of microbatch 0, stage 3" in title:  # at full speed before and after: the same width
            rect = group.find("rect")
            assert rect is not None
            inset = 2.0 if "critical" in title else 0.5
            widths.setdefault("F0@3", set()).add(round(float(rect.attrib["width"]) + inset, 1))
    assert len(widths["F0@3"]) == 1


def test_a_clock_has_one_colour_and_another_clock_another(page: str) -> None:
    fills: dict[str, set[str]] = {}
    for group in instructions(charts_of(page)["timeline"]):
        rect, title = group.find("rect"), group.findtext("title") or ""
        assert rect is not None
        clock = re.search(r"at (\d+) MHz", title)
        assert clock
        fills.setdefault(clock[1], set()).add(rect.attrib["fill"])

    assert set(fills) == {str(MAX_CLOCK_MHZ), str(SLOW_CLOCK_MHZ)}
    assert [len(colours) for colours in fills.values()] == [1, 1]
    assert fills[str(MAX_CLOCK_MHZ)] != fills[str(SLOW_CLOCK_MHZ)]
    assert f"{SLOW_CLOCK_MHZ} MHz <i" in page


def test_critical_instructions_are_outlined_and_labelled(page: str) -> None:
    drawn = instructions(charts_of(page)["timeline"])
    outlined = [group for group in drawn if group.attrib["class"] == "instruction critical"]

    assert 0 < len(outlined) < len(drawn)
    assert all((group.findtext("title") or "").endswith("critical") for group in outlined)


def test_every_iteration_is_a_dot_and_a_row(page: str) -> None:
    dots = list(charts_of(page)["series"].iter("circle"))

    assert len(dots) == 2 * 28
    assert sum(dot.attrib["class"] == "tuned" for dot in dots) == 2 * 12
    assert page.count('<tr class="disturbed">') == 2


def test_the_page_states_that_gpus_were_simulated(page: str) -> None:
    assert "Simulated GPUs" in page


def test_job_names_are_escaped(tmp_path: Path) -> None:
    path = write_sample_history(tmp_path / "history.sqlite3", job_name=HOSTILE_NAME)
    with open_history(path) as history:
        page = report_page(history, job_reports(history), made_at=MADE_AT)

    assert "<script" not in page
    assert "&lt;script&gt;alert" in page


def test_a_page_without_jobs_states_it(history: History) -> None:
    assert "No jobs ran in this time range" in report_page(history, (), made_at=MADE_AT)


def test_an_unmeasured_job_has_a_page_without_zeros(tmp_path: Path) -> None:
    with open_history(write_sample_history(tmp_path / "history.sqlite3", is_measured=False)) as history:
        page = report_page(history, job_reports(history), made_at=MADE_AT)

    assert "Energy was not measured, so no saving is known; iterations ran " in page
    assert "energy saved</dt>" not in page
    assert "time per iteration, % of baseline" in page
    assert "energy per iteration, % of baseline" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this host")
def test_a_browser_shows_all_charts_legibly_on_phone_and_desktop_in_light_and_dark_mode(tmp_path: Path) -> None:
    """No console errors, no requests, no horizontal overflow, readable text and keyboard access."""
    charts = ("days", "timeline", "plane", "power", "intensity", "series")
    file = tmp_path / "page.html"
    with open_history(write_sample_history(tmp_path / "history.sqlite3", has_grid=True)) as history:
        file.write_text(report_page(history, job_reports(history), made_at=MADE_AT), encoding="utf-8")

    async def look(page: Page) -> None:
        for width, is_dark in ((390, False), (390, True), (1440, True), (1440, False)):
            await page.open(file.as_uri(), width=width, is_dark=is_dark)
            await page.screenshot(f"report-{width}-{'dark' if is_dark else 'light'}", tmp_path)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            marks = {name: int(await page.evaluate(drawn_marks(name))) for name in charts}
            assert all(num_marks >= 2 for num_marks in marks.values()), marks
            for wrong in (PALE, SMALL, OVERLAPPING):
                assert await page.evaluate(wrong) == [], (width, is_dark)
        paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == "rgb(251, 251, 249)"
        reachable = int(await page.evaluate("document.querySelectorAll('.scroll, summary').length"))
        reached = {await page.press_tab() for _ in range(reachable)}
        assert len(reached) == reachable, reached
        assert page.complaints == []
        assert {url for url in page.requests if url != file.as_uri()} <= {"data:,"}

    in_browser(tmp_path / "profile", look)


BEGAN_AT = datetime(2026, 1, 1, tzinfo=UTC)
FIGURES = ((SwingFigure.PEAK, 1553.2), (SwingFigure.TROUGH, 334.6), (SwingFigure.BAND_RMS, 278.1))


def _plan(*figures: tuple[str, float]) -> PlanRecord:
    return PlanRecord("job", 1, ClockPlan("tuned-1", PlanPurpose.TUNED, (), figures=figures), BEGAN_AT, 5)


def _second(number: int, gpu: int, power_w: float | None, bucket_s: int = 1) -> RollupRecord:
    at = BEGAN_AT + timedelta(seconds=number)
    return RollupRecord(
        gpu_uuid=f"GPU-{gpu}", job_id="job", bucket_s=bucket_s, started_at=at, energy_j=None, mean_power_w=power_w,
        max_power_w=power_w, mean_sm_clock_mhz=None, num_samples=10,
    )  # fmt: skip


def test_the_prediction_of_the_plan_in_force_is_reported() -> None:
    assert swing_text(_plan(*FIGURES), (), num_gpus=2) == (
        "Predicted for an iteration of the plan in force: 335 W to 1553 W, 278 W RMS from 0.1 to 20 Hz."
    )


def test_measured_seconds_under_the_plan_are_reported_and_incomplete_ones_left_out() -> None:
    seconds = [
        _second(k, gpu, power_w) for k, power_w in ((-2, 900.0), (0, 300.0), (1, 400.0), (2, 250.0)) for gpu in (0, 1)
    ]
    seconds += [_second(3, 0, 10.0), _second(10, 0, 500.0), _second(10, 1, 500.0), _second(4, 0, None)]
    seconds += [_second(0, gpu, 5000.0, 60) for gpu in (0, 1)]
    text = swing_text(_plan(), seconds, num_gpus=2)
    assert text == "Measured, means of seconds: 500 W to 1000 W, at most 300 W from one second to the next."


def test_what_is_unknown_is_left_out() -> None:
    assert swing_text(None, (), num_gpus=2) == ""
    assert swing_text(None, [_second(k, 0, 100.0) for k in range(3)], num_gpus=1) == ""
    assert swing_text(_plan((SwingFigure.PEAK, 5.0)), [_second(0, 0, 100.0)], num_gpus=1) == ""
