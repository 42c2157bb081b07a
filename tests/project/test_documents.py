"""Code blocks of the documentation run as written, and everything public is documented."""

import importlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.site.entry_points import GROUPS, offered_entry_points
from docs.site.generated import renderers
from docs.site.house_map import PYTHON_PATH
from docs.site.manual.command_tree import described_commands
from docs.site.metrics import exported_families
from docs.site.python_api import public_modules
from docs.site.screenshots import WIDTHS
from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.daemon.api.openapi import api_description
from gpuenergyd.daemon.host_services import host_services
from gpuenergyd.daemon.settings import Settings, load_settings
from gpuenergyd_carbon.signal_file import SignalFile
from gpuenergyd_fleet.event_input import events_of_file
from gpuenergyd_other_policies.frequency_file import FrequencyFile
from gpuenergyd_plan.profiles.instance_json import parse_instance
from gpuenergyd_plan.profiles.profile_csv import parse_profile_table
from gpuenergyd_plan.profiles.profile_files import parse_order, read_waiting_power_file
from gpuenergyd_power.schedule_file import read_schedule
from tests.support.chromium import CHROMIUM, Page, in_browser
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.documents import Block, blocks, inline_commands, missing_output, shell_script
from tests.support.readable import EMPTY_CHARTS, OVERFLOWING, OVERLAPPING, PALE, SMALL
from tests.support.thorough import thorough
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "examples" / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md")),
)
LANGUAGES = {"sh", "python", "toml", "json", "text"}
PRELUDE = """
import torch
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
loader, train_step, loss_fn = [1, 2, 3], print, nn.functional.mse_loss
stage = PipelineStage(nn.Linear(2, 2), 0, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 8, loss_fn=loss_fn)
"""
"""Names that Python blocks assume: a pipeline of two stages whose other rank does not exist."""
RUN_EACH = """
import json, os, sys
import gpuenergyd_trainers.torch_pipelining
exec("\\n".join(line for line in sys.argv[1].splitlines() if "import" in line))

results = {}
for name, program in json.load(open("programs.json")).items():
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
        sys.exit(0)
    results[name] = (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), open("stderr").read())
json.dump(results, open("results.json", "w"))
"""
"""Runs programs from programs.json; importing torch for each of them would take most of the time."""


RENDERERS = renderers()


def with_blocks(language: str) -> list[Path]:
    return [path for path in DOCUMENTS if any(block.language == language for block in blocks(path))]


def with_shell() -> list[Path]:
    """Return the documents whose shell blocks run here; `tools/ci/newcomer` types the tutorials as a user does."""
    return [
        path
        for path in with_blocks("sh")
        if path.parent.name != "tutorials" and any(b.language == "sh" and not b.words for b in blocks(path))
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Run a daemon with simulated GPUs and a job in its history."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        with training(daemon, iterations=3) as run:
            assert run.wait(LIMIT_S) == 0
        wait_until(lambda: daemon.job() is None)
        yield daemon


@pytest.fixture
def reader(tmp_path: Path, daemon: DaemonProcess) -> tuple[Path, dict[str, str]]:
    """Return a folder with the examples and an environment in which the commands are at hand."""
    return tmp_path, reader_environment(tmp_path, daemon)


def reader_environment(folder: Path, daemon: DaemonProcess) -> dict[str, str]:
    """Put the examples into a folder; return an environment in which the commands are at hand."""
    (folder / "examples").symlink_to(ROOT / "examples")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": PYTHON_PATH,
        "HOME": str(folder),
        "GPUENERGYD_SOCKET": str(daemon.socket_path),
        "GPUENERGYD_DATABASE_URL": f"sqlite:///{daemon.database_path}",
    }


@pytest.mark.thorough
@pytest.mark.parametrize("document", with_shell(), ids=name_of)
def test_shell_blocks_run_as_written(document: Path, reader: tuple[Path, dict[str, str]]) -> None:
    folder, environ = reader
    script = shell_script(document)
    if "gpuenergyd serve" in script:  # it brings its own
        del environ["GPUENERGYD_DATABASE_URL"]

    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    log = folder / "daemon.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_in_a_document_exists_with_its_options(document: Path) -> None:
    commands = {command.name: command for command in described_commands()}
    wrong = []
    for text in inline_commands(document):
        words = text.split(" -- ")[0].split()
        if words[1:2] == ["help"]:
            words.remove("help")
        words = [word for word in words if word != "COMMAND"]
        name = next((n for k in (3, 2, 1) if (n := " ".join(words[:k])) in commands), None)
        known = " ".join(option.usage for option in commands[name].options) if name is not None else ""
        options = {word.partition("=")[0].rstrip(",.]") for word in words if word.startswith("--") and word != "--"}
        if name is None or (name == "gpuenergyd" and len(words) > 1 and not options):
            wrong.append(text)
        wrong += [f"{text}: {option}" for option in options if not re.search(rf"{option}\b", known)]

    assert wrong == []


def test_shown_output_is_compared_in_order_and_exactly_or_apart_from_numbers() -> None:
    exact = Block(Path("page.md"), 1, "text", ("output",), "first 1\n...\nlast  2\n")
    varying = Block(Path("page.md"), 1, "text", ("output", "numbers"), exact.text)

    assert missing_output(exact, "before\nfirst 1\nbetween\nlast  2\n") == ""
    assert missing_output(exact, "last  2\nfirst 1\n") == "last  2\n"
    assert missing_output(exact, "first 7\nlast  2\n") == "first 1\n"
    assert missing_output(varying, "first 7.5\nlast -3\n") == ""
    assert missing_output(varying, "first 7.5 and\nlast none\n") == "last  2\n"
    reflowed = Block(Path("page.md"), 1, "text", ("output", "numbers"), "12.5 % less energy, +1 to\n+3 %\n")
    assert missing_output(reflowed, "9 % more energy, -1\nto +3\n%\n") == ""


@pytest.fixture(scope="module")
def python_results(
    daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run the Python blocks of each document in a process of its own, forked from one that has imported torch."""
    folder = tmp_path_factory.mktemp("python")
    programs = {name_of(document): "\n".join(python_program(document)) for document in with_blocks("python")}
    (folder / "programs.json").write_text(json.dumps(programs), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-c", RUN_EACH, PRELUDE], cwd=folder, env=reader_environment(folder, daemon), check=True,
        timeout=300,
    )  # fmt: skip
    found: dict[str, tuple[int, str]] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {name: subprocess.CompletedProcess(name, code, "", errors) for name, (code, errors) in found.items()}


def python_program(document: Path) -> list[str]:
    """Return a document's Python blocks whose packages are installed."""
    given = [block for block in blocks(document) if block.language == "python"]
    program = [PRELUDE] if any(re.search(r"\bloader\b|\(schedule\b", block.text) for block in given) else []
    for block in given:
        needed = [word.removeprefix("needs=") for word in block.words]
        if all(importlib.util.find_spec(name) for name in needed):
            program.append(block.text)
    return program


@pytest.mark.parametrize("document", with_blocks("python"), ids=name_of)
def test_python_blocks_are_valid_and_import_what_exists(document: Path) -> None:
    for block in (block for block in blocks(document) if block.language == "python"):
        compile(block.text, f"{document}:{block.line}", "exec")
        for module, names in re.findall(r"^from (gpuenergyd\S*) import (.+)$", block.text, flags=re.MULTILINE):
            imported = importlib.import_module(module)
            named = names.split(", ")
            missing = [
                n for n in named if not hasattr(imported, n) and importlib.util.find_spec(f"{module}.{n}") is None
            ]
            assert missing == []


@pytest.mark.thorough
@pytest.mark.parametrize("document", with_blocks("python"), ids=name_of)
def test_python_blocks_run_as_written(
    document: Path, python_results: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    assert python_results[name_of(document)].returncode == 0, python_results[name_of(document)].stderr


@pytest.mark.parametrize("document", with_blocks("toml"), ids=name_of)
def test_toml_blocks_are_read_as_settings_or_as_a_package(document: Path, tmp_path: Path) -> None:
    if document.name == "settings.md":
        return  # examples of single settings, generated from the default configuration file
    for block in (block for block in blocks(document) if block.language == "toml"):
        keys = set(tomllib.loads(block.text))
        if keys <= {*Settings.model_fields, *host_services()}:
            (tmp_path / "config.toml").write_text(block.text, encoding="utf-8")
            load_settings(tmp_path / "config.toml")
        else:
            assert keys <= {"build-system", "project"}, block


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_code_block_has_a_language(document: Path) -> None:
    fences = re.findall(r"^```(.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    opening = fences[::2]

    assert [fence for fence in opening if not fence.strip() and document.name != "README.md"] == []
    assert {fence.split()[0] for fence in opening if fence.strip()} <= LANGUAGES
    assert {block.words for block in blocks(document) if block.language == "sh"} <= {(), ("slow",), ("host",)}
    assert {block.words for block in blocks(document) if block.language == "text"} <= {
        (), ("output",), ("output", "numbers"),
    }  # fmt: skip


def test_the_documented_example_is_the_packaged_one() -> None:
    given = blocks(ROOT / "docs" / "tutorials" / "my-own-policy.md")
    by_language = {block.language: block.text for block in given if not block.words}
    package = ROOT / "examples" / "one_step_down"

    assert by_language["python"] == (package / "one_step_down.py").read_text(encoding="utf-8")
    assert by_language["toml"] == (package / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "block", blocks(ROOT / "docs" / "reference" / "file-formats.md"), ids=lambda b: f"line-{b.line}"
)
def test_every_documented_file_is_accepted(block: Block, tmp_path: Path) -> None:
    match block.language:
        case "text" if block.text.startswith("stage"):
            assert parse_profile_table(Path("example.csv"), block.text).num_stages == 1
        case "text" if block.text.startswith("rank"):
            assert parse_order(Path("example.csv"), block.text, 2).num_microbatches == 1
        case "text" if block.text.startswith("frequency"):
            (tmp_path / "waiting.csv").write_text(block.text, encoding="utf-8")
            assert read_waiting_power_file(tmp_path / "waiting.csv").clocks_mhz[-1] == 1410
        case "text" if block.text.startswith("["):
            (tmp_path / "plan.py").write_text(block.text, encoding="utf-8")
            FrequencyFile(str(tmp_path / "plan.py"))
        case "text" if block.text.startswith("start"):
            (tmp_path / "power.csv").write_text(block.text, encoding="utf-8")
            assert len(read_schedule(tmp_path / "power.csv")) == 2
        case "text" if block.text.startswith("event_id"):
            (tmp_path / "events.csv").write_text(block.text, encoding="utf-8")
            assert len(events_of_file(tmp_path / "events.csv", now_s=1_795_500_000.0)) == 1
        case "text":
            (tmp_path / "signal.csv").write_text(block.text, encoding="utf-8")
            assert SignalFile(tmp_path / "signal.csv", "GB").read() is not None
        case "json" if "ops" in block.text:
            assert parse_instance(Path("example.json"), block.text).schedule.num_ranks == 2
        case language:
            assert language == "json"
            assert {"T", "E"} == set(json.loads(block.text)[0])


def test_every_variable_of_the_client_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "environment-variables.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "gpuenergyd" / "client").glob("*.py"), *(ROOT / "trainers").rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"\"(GPUENERGYD_[A-Z_]+[A-Z])\"", path.read_text())}

    assert {name for name in read if f"`{name}`" not in page} == {"GPUENERGYD_HOOK_ROOTS", "GPUENERGYD_RUN_MARK"}


# --- everything public is documented ---


def test_every_public_name_has_a_docstring() -> None:
    modules = [module for group in public_modules().values() for module in group]
    bare = [f"{module.name}.{name.name}" for module in modules for name in module.names if not name.docstring]
    bare += [
        f"{module.name}.{name.name}.{member.name}"
        for module in modules
        for name in module.names
        for member in name.members
        if member.signature.startswith(f"{member.name}(") and not member.docstring
    ]

    assert bare == []
    assert [module.name for module in modules if not module.docstring] == []


def test_every_moved_module_is_at_its_new_place() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `gpuenergyd[\w.]*` \| (.*) \|$", changelog, re.MULTILINE)
    moved = [name for places in listed for name in re.findall(r"`(gpuenergyd[\w.]*)`", places)]
    count = re.search(r"modules, (\d+) in all", changelog)

    assert [name for name in moved if importlib.util.find_spec(name) is None] == []
    assert count is not None
    assert len(listed) == int(count[1])


def test_the_reference_lists_every_setting() -> None:
    page = RENDERERS["reference/settings.md"]()

    assert [key for key in Settings.model_fields if f"| `{key}` |" not in page] == []


def test_the_reference_lists_every_resource_and_message() -> None:
    page, document = RENDERERS["reference/http-api.md"](), api_description()

    assert [path for path in document["paths"] if f"| `{path}` |" not in page] == []
    assert [name for name in document["components"]["schemas"] if f"### {name}\n" not in page] == []
    assert [path for path, methods in document["paths"].items() for m in methods.values() if not m["summary"]] == []


def test_the_reference_lists_every_exported_metric(daemon: DaemonProcess) -> None:
    connection = HttpConnection(str(daemon.socket_path))
    try:
        _, body = connection.request("GET", "/v1/metrics", limit_s=LIMIT_S)
        exported = set(re.findall(r"^# TYPE (\S+)", body.decode(), flags=re.MULTILINE))
    finally:
        connection.close()

    documented = {name: text for name, _, _, text in exported_families()}
    assert exported - set(documented) == set()
    assert [name for name, text in documented.items() if not text] == []
    page = RENDERERS["reference/metrics.md"]()
    assert [name for name in documented if f"| `{name}` |" not in page] == []


def test_every_entry_point_group_is_documented() -> None:
    offered, page = offered_entry_points(), RENDERERS["reference/entry-points.md"]()

    assert set(offered) == set(GROUPS)
    assert [name for offers in offered.values() for name in offers if f"| `{name}` |" not in page] == []


# --- the site ---


class _Resources(HTMLParser):
    """Collects what a page loads, not what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.has_viewport = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.has_viewport |= tag == "meta" and given.get("name") == "viewport"
        self.loaded += [given[key] or "" for key in ("src", "srcset", "data") if key in given]
        if tag == "link":
            self.loaded.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does, a warning being an error."""
    target = tmp_path_factory.mktemp("docs") / "site"
    subprocess.run([sys.executable, "-m", "docs.site", str(target)], cwd=ROOT, check=True, timeout=1200)
    return target


@pytest.mark.thorough
def test_the_site_loads_nothing_from_other_hosts_and_fits_a_phone(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = _Resources()
        found.feed(page.read_text(encoding="utf-8"))
        assert [target for target in found.loaded if "//" in target] == [], page
        assert found.has_viewport, page
    outside = [
        f"{style.name}: {target}"
        for style in site.rglob("*.css")
        for target in re.findall(
            r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", style.read_text(encoding="utf-8")
        )
    ]
    assert outside == []


@pytest.mark.thorough
def test_every_page_and_picture_is_in_the_site(site: Path) -> None:
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}

    assert pages - {str(path.relative_to(site)) for path in site.rglob("*.html")} == set()
    shown = (site / "explanation" / "how-it-works.html").read_text(encoding="utf-8")
    assert len(re.findall(r'<img [^>]*src="\.\./_images/\w+\.svg"', shown)) == 3


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this host")
def test_the_start_page_fits_phones_and_desktops_and_shows_its_picture(site: Path, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        for width, is_dark in itertools.product(WIDTHS, (False, True)):
            await page.open((site / "index.html").as_uri(), width=width, is_dark=is_dark)
            await page.wait_until("document.querySelector('article img').complete")
            assert [await page.evaluate(script) for script in (OVERFLOWING, PALE)] == [[], []], (width, is_dark)
            assert await page.evaluate("document.querySelector('article img').naturalWidth > 0"), width
            shown = str(await page.evaluate("document.querySelector('article img').currentSrc"))
            assert shown.endswith("/pipeline-narrow.svg" if width < 640 else "/pipeline.svg")

    in_browser(tmp_path / "profile", look)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this host")
@pytest.mark.parametrize(("name", "width"), thorough(("pipeline-narrow", 358), ("pipeline", 838)))
def test_the_picture_of_the_readme_is_readable_in_the_column_of_a_desktop_and_of_a_phone(
    name: str, width: int, tmp_path: Path
) -> None:
    svg = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    svg = re.sub(r'width="\d+" height="\d+"', f'class="timeline" width="{width}"', svg, count=1)
    file = tmp_path / "page.html"
    papers = "body { background: #fff; } @media (prefers-color-scheme: dark) { body { background: #0d1117; } }"
    file.write_text(f"<!doctype html><style>{papers}</style><body>{svg}", encoding="utf-8")

    async def look(page: Page) -> None:
        for is_dark in (False, True):
            await page.open(file.as_uri(), width=width + 16, is_dark=is_dark)
            checks = (OVERFLOWING, PALE, SMALL, OVERLAPPING, EMPTY_CHARTS)
            assert [await page.evaluate(script) for script in checks] == [[]] * len(checks), is_dark
            beyond = (
                "[...document.querySelectorAll('svg text')].filter((each) => each.getBoundingClientRect().right >"
                " document.querySelector('svg').getBoundingClientRect().right + 1).map((each) => each.textContent)"
            )
            assert await page.evaluate(beyond) == []

    in_browser(tmp_path / "profile", look)
