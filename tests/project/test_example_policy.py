"""The policy packages of the examples decide clocks when they are installed into an environment."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from docs.site.house_map import SOURCES
from tests.support.daemon_process import DaemonProcess, training
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples" / "one_step_down"
REFERENCE_PACKAGE = ROOT / "examples" / "reference_policy"
SECOND_HIGHEST_MHZ = 1395


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment that sees this checkout, install the packages into it, and return its interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    installed = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    seen = [*SOURCES, *installed]
    (site / "checkout.pth").write_text("".join(f"{path}\n" for path in seen), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", str(PACKAGE), str(REFERENCE_PACKAGE)], check=True, timeout=300)
    return python


def test_the_package_is_about_forty_lines() -> None:
    lines = [line for path in PACKAGE.iterdir() if path.is_file() for line in path.read_text().splitlines()]

    assert len(lines) <= 40


def test_the_installed_packages_are_listed_by_name(environment: Path) -> None:
    command = [str(environment), "-m", "gpuenergyd.cli.main", "policies", "--json"]

    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=environment.parent)

    packages = {"one-step-down": "one-step-down", "reference": "reference-policy"}
    rows = [row for row in json.loads(listed.stdout)["policies"] if row["name"] in packages]
    assert all(row["is_usable"] for row in rows), rows
    assert {row["name"]: row["package"] for row in rows} == packages
    assert {row["version"] for row in rows} == {"1.0"}


def test_a_daemon_applies_the_policy_of_the_package(environment: Path, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, overrides={"policy": "one-step-down"}, python=str(environment)).start()
    try:
        with training(daemon):
            wait_until(lambda: set(daemon.locks_mhz()) == {SECOND_HIGHEST_MHZ})
            job = daemon.job()
    finally:
        daemon.stop()

    assert job is not None
    assert job["policy"] == "one-step-down"
    assert "one step below" in json.dumps(job)
    assert daemon.is_as_found()
