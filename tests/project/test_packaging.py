"""The wheel works outside the checkout, and importing the package loads the standard library only."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site.house_map import PACKAGES
from gpuenergyd import __version__
from gpuenergyd_prove.folder import VERDICT
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.plugins.prove.tampering import edited_energy, proved
from tests.plugins.prove.virtual_training import VirtualTraining
from tests.support.processes import finished
from tests.support.sample_history import write_sample_history
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
BARE_ROOT = (
    "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink",
    "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
)  # fmt: skip
"""Options of bubblewrap: a root with the system's programs alone, and no network."""
MODULES = tuple(Path(package).name for package in PACKAGES)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into a folder of its own."""
    target = tmp_path_factory.mktemp("installed")
    pip = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target),
        str(wheel),
    ]  # fmt: skip
    subprocess.run(pip, check=True, capture_output=True)
    return target


@pytest.fixture(scope="module")
def plain_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel without extras into a virtual environment of its own; return the folder of its programs."""
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return folder / "bin"


def gpuenergyd(programs: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command outside the checkout, with nothing else in its environment."""
    environ = {"PATH": f"{programs}:{os.defpath}", "HOME": str(programs.parent), **variables}
    command = [str(programs / "gpuenergyd"), *arguments]
    return subprocess.run(
        command, cwd=programs.parent, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def run_installed(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python outside the checkout, with the installed wheel in front of it."""
    return finished([sys.executable, *arguments], cwd=installed, env={**os.environ, "PYTHONPATH": str(installed)})


def files(source: Path) -> set[str]:
    """Return what of a package's folder belongs into a wheel."""
    return {
        str(path.relative_to(source.parent))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_contains_exactly_the_files_of_the_packages(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [ROOT / package for package in PACKAGES]

    units = {f"gpuenergyd/{name}" for name in files(ROOT / "systemd")}
    pages = {f"gpuenergyd-{__version__}.data/data/share/{name}" for name in files(ROOT / "docs" / "man")}
    assert names == units.union(pages, *(files(source) for source in sources))
    assert {f"{module}/py.typed" for module in MODULES} <= names


@pytest.mark.thorough
def test_the_wheel_works_outside_the_checkout(installed: Path) -> None:
    program = "import json; " + "; ".join(f"import {module}" for module in MODULES)
    program += f"; print(json.dumps([p.__file__ for p in ({', '.join(MODULES)})]))"

    where = run_installed(installed, "-c", program)
    version = run_installed(installed, "-m", "gpuenergyd.cli.main", "--version")
    listed = run_installed(installed, "-m", "gpuenergyd.cli.main", "policies", "--json")

    assert where.returncode == 0, where.stderr
    assert all(file.startswith(str(installed)) for file in json.loads(where.stdout))
    assert version.stdout.startswith("gpuenergyd ")
    assert all(row["is_usable"] for row in json.loads(listed.stdout)["policies"]), listed.stdout


def test_a_plain_install_prints_its_versions(plain_environment: Path) -> None:
    done = gpuenergyd(plain_environment, "--version")

    first, python, *parts = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert first == f"gpuenergyd {__version__}"
    assert python.endswith(f"({plain_environment / 'python'})")
    assert all("not installed" in part for part in parts)


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not here")
def test_man_finds_the_pages_of_the_environment_on_the_path(plain_environment: Path) -> None:
    environ = {"PATH": f"{plain_environment}:{os.defpath}"}

    found = subprocess.run(
        ["man", "--where", "gpuenergyd", "gpuenergyd-plan", "gpuenergyd.toml"],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "minimized" in found.stdout:
        pytest.skip("man of this minimized system shows no pages")

    pages = plain_environment.parent / "share" / "man"
    names = ("man1/gpuenergyd.1", "man1/gpuenergyd-plan.1", "man5/gpuenergyd.toml.5")
    assert found.stdout.splitlines() == [str(pages / name) for name in names], found.stderr


def test_a_plain_install_starts_a_program_that_attaches(plain_environment: Path, tmp_path: Path) -> None:
    program = "import gpuenergyd\nwith gpuenergyd.job() as job:\n    with job.iteration():\n        print('trained')\n"
    with FakeDaemon(tmp_path) as daemon:
        done = gpuenergyd(
            plain_environment,
            *("run", "--job", "gpt", "--socket", daemon.socket_path, "--", "python", "-c", program),
            GPUENERGYD_GPU_UUID="GPU-1",
            TMPDIR=str(tmp_path),
        )
        registration = daemon.registrations.get(timeout=WAIT_LIMIT_S)

    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert done.stderr.splitlines() == [f"gpuenergyd: job gpt (job-1) joined the daemon at {daemon.socket_path}"]
    assert registration["job_name"] == "gpt"


def test_the_hook_of_a_plain_install_is_in_every_process(plain_environment: Path, tmp_path: Path) -> None:
    shows = "import sys; print([type(finder).__name__ for finder in sys.meta_path][0])"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {shows!r}], check=True)"

    done = gpuenergyd(plain_environment, "run", "--socket", str(tmp_path / "none.sock"), "python", "-c", starts)

    assert (done.returncode, done.stdout) == (0, "Watcher\n"), done.stderr


def test_run_has_the_same_help_and_errors_in_a_plain_install(plain_environment: Path) -> None:
    for arguments in (["run", "--help"], ["run", "--nope"], ["run"], ["run", "--max-slowdown", "5", "true"]):
        plain = gpuenergyd(plain_environment, *arguments)
        full = gpuenergyd(Path(sys.executable).parent, *arguments)

        assert (plain.returncode, plain.stdout, plain.stderr) == (full.returncode, full.stdout, full.stderr)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], ["status"], ["report", "--help"], ["report", "--database", "history.sqlite3"], ["plan", "x.csv"]],
    ids=" ".join,
)
def test_every_other_command_of_a_plain_install_names_the_extra_in_one_line(
    plain_environment: Path, arguments: list[str]
) -> None:
    write_sample_history(plain_environment.parent / "history.sqlite3")

    done = gpuenergyd(plain_environment, *arguments)

    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"gpuenergyd: this command needs '(typer|rich)': pip install 'gpuenergyd\[daemon\]'; without it,"
        r" only `gpuenergyd run` and `gpuenergyd --version` work\n",
        done.stderr,
    ), done.stderr


def test_a_stranger_checks_a_proof_without_network_home_or_checkout(installed: Path, tmp_path: Path) -> None:
    """In namespaces that see the wheel, the libraries and the folder, a verdict is recomputed byte for byte."""
    bwrap = shutil.which("bwrap")
    if bwrap is None or subprocess.run([bwrap, *BARE_ROOT, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs bubblewrap and permission for namespaces")
    proof, base = tmp_path / "proof", Path(sys.base_prefix)
    proved(proof, VirtualTraining(seed=5))
    libraries = Path(sysconfig.get_path("purelib"))
    seen = [
        "--ro-bind", str(installed), "/wheel", "--ro-bind", str(libraries), "/libraries", "--bind", str(proof),
        "/proof",
    ]  # fmt: skip
    seen += [] if base.is_relative_to("/usr") else ["--ro-bind", str(base), str(base)]

    def check() -> dict[str, Any]:
        python = [str(Path(sys.executable).resolve()), "-m", "gpuenergyd.cli.main"]
        environ = {"PYTHONPATH": "/wheel:/libraries", "PATH": "/usr/bin", "LC_ALL": "C"}
        command = [bwrap, *BARE_ROOT, *seen, *python, "prove", "--check", "/proof", "--json"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    before = check()
    edited_energy(proof)
    after = check()

    assert before["holds"] is True, before["problems"]
    assert before["verdict"] == json.loads((proof / VERDICT).read_text())
    assert after == {"holds": False, "problems": ["raw/blocks.jsonl is not as it was signed"], "verdict": None}


def test_the_wheel_contains_the_page_templates(installed: Path) -> None:
    program = "from jinja2 import PackageLoader; print(*PackageLoader('gpuenergyd_formats').list_templates())"

    result = run_installed(installed, "-c", program)

    assert result.stdout.split() == ["live.html.j2", "report.html.j2"], result.stderr


@pytest.mark.parametrize("module", ["gpuenergyd", "gpuenergyd.client.rank", "gpuenergyd.gpu.restore.command"])
def test_importing_the_client_loads_the_standard_library_only(module: str) -> None:
    program = (
        f"import sys; before = set(sys.modules); import {module}\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(name for name in names - sys.stdlib_module_names if not name.startswith('gpuenergyd')))"
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"


def test_the_readme_names_the_version() -> None:
    version = ".".join(__version__.split(".")[:2])

    assert f"Version {version}, alpha." in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_plain_install_has_no_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["dependencies"] == []


def test_every_pinned_version_is_exact_and_torch_among_them() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]

    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    assert "torch==2.13.0" in pins


def test_ci_runs_the_command_that_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    assert re.search(r"^make test\b", readme, flags=re.MULTILINE)
    assert re.search(r"^make test\b", ci, flags=re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_licence_is_the_one_that_the_metadata_names(wheel: Path) -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))

    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
