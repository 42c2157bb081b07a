"""Screenshots of the report, the live page and the site: `python -m docs.site.screenshots [PAGE...]` writes them.

They need Chromium and Pillow, show sample jobs (`docs.site.sample_jobs`), and are committed as pictures of few colours.
"""

import asyncio
import base64
import io
import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console

import gpuenergyd
from docs.site import sample_jobs
from docs.site.build import build_site
from docs.site.generated import DOCS
from gpuenergyd.report.job import job_reports
from gpuenergyd.report.terminal.live import screen_view, total_power_w
from gpuenergyd.store import open_history
from gpuenergyd_dashboard.server import DashboardServer, HistoryView
from gpuenergyd_formats.page import report_page
from tests.support.chromium import Page, chromium_page
from tests.support.sample_status import sample_status, status_socket
from tests.support.stored_history import write_records

PAGES = (*("report-pipeline", "report-loop", "report-carbon", "report-empty"), *("live-jobs", "live-no-daemon", "site"))
WIDTHS = (1280, 390)
_MAX_HEIGHTS: Mapping[str, tuple[int, int]] = {
    "live-jobs": (1450, 2000), "live-no-daemon": (800, 1200), "site": (1100, 1500),
}  # fmt: skip
_MAX_HEIGHT = (2300, 2800)
"""Of reports. Longer pages are cut off; the history below the live part is that of the report."""
_NUM_COLOURS = 56
_RESULT_NAME, _RESULT_HEIGHT = "result.png", 960
"""The upper part of a report, for the README: the result and both timelines."""
_ORIGIN_KEY = "gpuenergyd"
"""Key of the text in a picture that is the version shown."""
_MADE_AT = datetime(2026, 3, 9, 8, 0, 0, tzinfo=UTC)
_SECONDS_OF_POWER = 10


def picture_names() -> tuple[str, ...]:
    """Return the file names of all screenshots."""
    shots = itertools.product(PAGES, WIDTHS, ("light", "dark"))
    return (*(f"{page}-{width}-{scheme}.png" for page, width, scheme in shots), "status-watch.png", _RESULT_NAME)


def write_reports(folder: Path) -> dict[str, str]:
    """Write one report per kind of job and an empty one; return their URLs by name."""
    jobs = {
        "report-pipeline": sample_jobs.pipeline_job(),
        "report-loop": sample_jobs.loop_job(),
        "report-carbon": sample_jobs.carbon_job(),
        "report-empty": iter(()),
    }
    found = {}
    for name, records in jobs.items():
        database = write_records(folder / f"{name}.sqlite3", *records)
        with open_history(str(database)) as history:
            page = report_page(history, job_reports(history), made_at=_MADE_AT)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
        found[name] = (folder / f"{name}.html").as_uri()
    return found


@contextmanager
def live_pages(folder: Path, database: Path) -> Iterator[dict[str, str]]:
    """Serve the live page with three jobs and without a daemon; yield their URLs by name."""
    with ExitStack() as stack:
        socket_path = stack.enter_context(status_socket(folder))
        urls = {}
        for name, path in (("live-jobs", socket_path), ("live-no-daemon", "/run/gpuenergyd/gpuenergyd.sock")):
            view = HistoryView(str(database), shown_days=100_000)
            server = stack.enter_context(DashboardServer(0, path, view))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            urls[name] = server.url
        yield urls


async def wait_for_live_data(page: Page, name: str, num_readings: int = 3) -> None:
    """Wait until a live page shows its jobs and a power chart, or that there is no daemon."""
    if name == "live-jobs":
        await page.wait_until(f"powers.length >= {num_readings}")
    elif name == "live-no-daemon":
        await page.wait_until("document.getElementById('state').className === 'bad'")


def write_status_screen(folder: Path) -> str:
    """Write the screen of `gpuenergyd status --watch` as a picture of a terminal; return its URL."""
    console = Console(
        file=io.StringIO(), width=112, height=26, record=True, force_terminal=True, color_system="truecolor"
    )
    powers_w = [total_power_w(sample_status(second)) for second in range(60)]
    console.print(screen_view(sample_status(60.0), console, powers_w))
    svg = console.export_svg(title="gpuenergyd status --watch")
    page = folder / "status-watch.html"
    page.write_text(f'<!doctype html><body style="margin: 0; background: #fff">{svg}', encoding="utf-8")
    return page.as_uri()


async def _photograph(page: Page, name: str, url: str, target: Path) -> None:
    """Take a page in both widths and colour schemes."""
    most = dict(zip(WIDTHS, _MAX_HEIGHTS.get(name, _MAX_HEIGHT), strict=True))
    for width, is_dark in itertools.product(WIDTHS, (False, True)):
        # A window as high as the picture: the navigation of the site fills the height of the window.
        height = most[width] if name == "site" else 900
        await page.open(url, width=width, height=height, is_dark=is_dark)
        await wait_for_live_data(page, name, _SECONDS_OF_POWER)
        height = int(await page.evaluate("document.body.scrollHeight"))
        scheme = "dark" if is_dark else "light"
        await _write_picture(page, target / f"{name}-{width}-{scheme}.png", (width, min(height, most[width])))


async def _photograph_screen(page: Page, url: str, target: Path) -> None:
    await page.open(url, width=1280)
    height = int(await page.evaluate("document.querySelector('svg').getBoundingClientRect().height"))
    await _write_picture(page, target / "status-watch.png", (1280, height), num_colours=256)


async def _write_picture(page: Page, target: Path, size: tuple[int, int], *, num_colours: int = _NUM_COLOURS) -> None:
    clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
    shot = await page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    await asyncio.to_thread(target.write_bytes, _quantized(base64.b64decode(shot["data"]), num_colours))


def version_of(picture: Path) -> str | None:
    """Return the version of gpuenergyd that a screenshot shows; None if it does not say so."""
    with Image.open(picture) as image:
        version: str | None = image.info.get(_ORIGIN_KEY)
    return version


def _quantized(png: bytes, num_colours: int) -> bytes:
    """Return a picture with a palette of few colours, which is several times smaller."""
    whole = Image.open(io.BytesIO(png)).convert("RGB")
    # The palette is the most frequent colours themselves: other methods shift those of small marks.
    counted = cast("list[tuple[int, tuple[int, int, int]]]", whole.getcolors(whole.width * whole.height))
    colours = sorted(counted, reverse=True)[:num_colours]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in colours for part in colour])
    reduced = whole.quantize(palette=palette, dither=Image.Dither.NONE)
    return _encoded(reduced)


def _encoded(image: Image.Image) -> bytes:
    out, origin = io.BytesIO(), PngInfo()
    origin.add_text(_ORIGIN_KEY, gpuenergyd.__version__)
    image.save(out, format="PNG", optimize=True, pnginfo=origin)
    return out.getvalue()


def write_result(target: Path) -> None:
    """Cut the README's picture out of the screenshot of a report."""
    with Image.open(target / "report-pipeline-1280-light.png") as report:
        cut = report.crop((0, 0, report.width, _RESULT_HEIGHT))
    (target / _RESULT_NAME).write_bytes(_encoded(cut))


async def _photograph_all(folder: Path, live: Mapping[str, str], target: Path, only: Sequence[str]) -> None:
    wanted = only or ("status-watch", *PAGES)
    urls = {**{name: (folder / f"{name}.html").as_uri() for name in PAGES}, **live}
    for name in wanted:
        async with chromium_page(folder / f"profile-{name}") as page:
            if name == "status-watch":
                await _photograph_screen(page, write_status_screen(folder), target)
            elif name == "site":  # last: it shows the other pictures
                site = await asyncio.to_thread(build_site, folder / "site")
                await _photograph(page, name, (site / "index.html").as_uri(), target)
            else:
                await _photograph(page, name, urls[name], target)


def main(only: Sequence[str] = (), target: Path = DOCS / "pictures") -> None:
    """Write the screenshots of some pages, by default of all, into a folder."""
    for name in picture_names():
        (target / name).touch()  # documents link them all
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_reports(folder)
        with live_pages(folder, folder / "report-pipeline.sqlite3") as live:
            asyncio.run(_photograph_all(folder, live, target, only))
    write_result(target)


if __name__ == "__main__":
    main(sys.argv[1:])
