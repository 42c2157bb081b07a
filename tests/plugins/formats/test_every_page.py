"""Every kind of report and of live page fits phones and desktops, without an empty chart, in light and dark."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import gpuenergyd
from docs.site.generated import DOCS
from docs.site.screenshots import WIDTHS, live_pages, picture_names, version_of, wait_for_live_data, write_reports
from tests.support.chromium import CHROMIUM, Page, in_browser
from tests.support.readable import EMPTY_CHARTS, OVERFLOWING, OVERLAPPING, PALE, SMALL
from tests.support.thorough import thorough

NUM_CHARTS = {
    "report-pipeline": 5, "report-loop": 3, "report-carbon": 6, "report-empty": 0, "live-jobs": 6, "live-no-daemon": 5,
}  # fmt: skip
"""Charts that must be visible; a live page without a daemon shows those of the history."""
CHECKS = {
    "wider than the window": OVERFLOWING,
    "charts without data": EMPTY_CHARTS,
    "low contrast": PALE,
    "small letters": SMALL,
    "labels over each other": OVERLAPPING,
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    folder = tmp_path_factory.mktemp("pages")
    reports = write_reports(folder)
    with live_pages(folder, folder / "report-pipeline.sqlite3") as live:
        yield reports | live


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this host")
@pytest.mark.parametrize(
    "name",
    ["report-pipeline", *thorough("report-empty", "live-jobs", "report-loop", "report-carbon", "live-no-daemon")],
)
def test_no_page_overflows_or_has_an_empty_chart_or_unreadable_text(
    name: str, urls: Mapping[str, str], tmp_path: Path
) -> None:
    async def look(page: Page) -> None:
        for width, is_dark in zip(WIDTHS, (False, True), strict=True):
            await page.open(urls[name], width=width, is_dark=is_dark)
            await wait_for_live_data(page, name)
            wrong = {what: found for what, script in CHECKS.items() if (found := await page.evaluate(script))}
            assert wrong == {}, width
            visible = "[...document.querySelectorAll('svg')].filter((svg) => svg.clientWidth > 0).length"
            assert await page.evaluate(visible) == NUM_CHARTS[name], width

    in_browser(tmp_path / "profile", look)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this host")
def test_the_live_page_leads_with_the_watts_saved_now_and_names_the_job_of_each_gpu(
    urls: Mapping[str, str], tmp_path: Path
) -> None:
    async def look(page: Page) -> None:
        await page.open(urls["live-jobs"], width=1280)
        await wait_for_live_data(page, "live-jobs")
        text = "document.getElementById({!r}).innerText"
        assert await page.evaluate(text.format("saved")) == "146 W saved now"
        note = str(await page.evaluate(text.format("saved-note")))
        assert note.startswith("95 % confidence: 143 W to 150 W, from 1 of 3 jobs.")
        assert "Not counted, because not significant: llama-ddp (3.2 W)" in note
        jobs = str(await page.evaluate(text.format("jobs")))
        assert "13.4 % less" in jobs
        assert "95 %: 13.1 % to 13.7 % less" in jobs
        assert "no slower" in jobs
        ended = str(await page.evaluate(text.format("ended-jobs")))
        assert ended.startswith("bert ended ")
        assert ended.endswith(" s ago: while trying settings, after 21 iterations")
        owners = "[...document.querySelectorAll('#gpus td.job-name')].map((cell) => cell.textContent)"
        assert await page.evaluate(owners) == ["gpt-2.6b"] * 4 + ["llama-ddp"] * 2 + ["resnet", "idle"]
        await page.open(urls["live-no-daemon"], width=1280)
        await wait_for_live_data(page, "live-no-daemon")
        assert "no daemon answers on /run/gpuenergyd/gpuenergyd.sock" in str(await page.evaluate(text.format("state")))
        assert not await page.evaluate("document.getElementById('live').checkVisibility()")

    in_browser(tmp_path / "profile", look)


def test_the_documents_hold_a_small_screenshot_of_every_page_in_both_widths_and_colour_schemes() -> None:
    listed = (DOCS / "reference" / "screenshots.md").read_text(encoding="utf-8")

    assert {path.name for path in (DOCS / "pictures").glob("*.png")} == set(picture_names())
    assert [name for name in picture_names() if name not in listed] == []
    assert sum(path.stat().st_size for path in (DOCS / "pictures").glob("*.png")) < 1_500_000


def test_every_screenshot_shows_the_present_version() -> None:
    shown = {path.name: version_of(path) for path in (DOCS / "pictures").glob("*.png")}

    assert shown == dict.fromkeys(shown, gpuenergyd.__version__)
