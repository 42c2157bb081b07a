"""gpuenergyd, policies and trainers without `plugins/`: start, register, plan, restore and report."""

import json
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from docs.site.house_map import PACKAGES, ROOT
from gpuenergyd import __version__
from gpuenergyd.cli.app import _OF_PLUGINS
from gpuenergyd.gpu.restore.command import restore
from tests.gpu.conftest import fake_nvml_library
from tests.support.daemon_process import DaemonProcess, training
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.waiting import LIMIT_S, wait_until

__all__ = ["fake_nvml_library"]
PLUGINS = tuple(Path(package).name for package in PACKAGES if package.startswith("plugins/"))


@pytest.fixture(scope="module")
def core_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install everything but `plugins/` into an environment of its own; return its interpreter."""
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "gpuenergyd" not in entry.name:
            (site / entry.name).symlink_to(entry)
    for package in PACKAGES:
        if not package.startswith("plugins/"):
            (site / Path(package).name).symlink_to(ROOT / package)
    info = site / f"gpuenergyd-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gpuenergyd\nVersion: {__version__}\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    lines = []
    for group, points in groups.items():
        lines += [
            f"[{group}]",
            *(f"{name} = {value}" for name, value in points.items() if not value.startswith(PLUGINS)),
        ]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return folder / "bin" / "python"


def gpuenergyd(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the environment, outside the checkout."""
    command = [str(python), "-m", "gpuenergyd.cli.main", *arguments]
    return subprocess.run(command, cwd=python.parent, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_no_plugin_can_be_imported_and_commands_of_plugins_are_unknown(core_python: Path) -> None:
    imports = "; ".join(f"assert importlib.util.find_spec({name!r}) is None" for name in PLUGINS)
    found = subprocess.run([str(core_python), "-I", "-c", f"import importlib.util; {imports}"], check=False)

    refused = gpuenergyd(core_python, "demo")
    group_refused = gpuenergyd(core_python, "report", "--group-by", "state")
    format_refused = gpuenergyd(core_python, "report", "--format", "html")
    listed = gpuenergyd(core_python, "--help")
    flattest = "from gpuenergyd_policies.bubble_aware.policy import BubbleAware; BubbleAware(flattest='true')"
    flat = subprocess.run([str(core_python), "-I", "-c", flattest], capture_output=True, text=True, check=False)

    assert found.returncode == 0
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "gpuenergyd: no command 'demo': its plugin gpuenergyd_sim is not installed\n"
    assert (format_refused.returncode, group_refused.returncode, listed.returncode) == (2, 2, 0)
    assert format_refused.stderr == "gpuenergyd: --format html: its plugin gpuenergyd_formats is not installed\n"
    (reason,) = group_refused.stderr.splitlines()
    assert reason.endswith(
        "valid: one of job, training, user, host, gpu, day, month, tag, or two of them, such as user,month"
    )
    assert flat.stderr.endswith("bubble-aware:flattest=true: its plugin gpuenergyd_plan is not installed\n")
    assert "serve" in listed.stdout
    assert "demo" not in listed.stdout


def test_every_command_of_a_plugin_names_it() -> None:
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["gpuenergyd.commands"]

    assert {name: f"gpuenergyd_{plugin}" for name, plugin in _OF_PLUGINS.items()} == {
        name: value.partition(":")[0] for name, value in commands.items()
    }


def test_a_carbon_zone_without_the_plugin_is_refused_in_one_line(
    core_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUENERGYD_CARBON_ZONE", "GB")

    refused = gpuenergyd(core_python, "serve", "--runtime-dir", str(tmp_path), "--state-dir", str(tmp_path))

    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith(
        "carbon_zone is set, but no installed package provides the service 'carbon'; the plugin gpuenergyd_carbon does"
    )


def test_a_driver_of_a_missing_plugin_is_refused_in_one_line(core_python: Path, tmp_path: Path) -> None:
    refused = gpuenergyd(
        core_python, "serve", "--driver", "simulated", "--world", str(tmp_path / "world"), "--runtime-dir",
        str(tmp_path / "run"), "--state-dir", str(tmp_path / "state"),
    )  # fmt: skip

    assert refused.returncode == 2
    assert refused.stderr.splitlines() == ["gpuenergyd: --driver = 'simulated': must be one of nvml"]


def test_a_job_is_lowered_restored_and_reported_without_plugins(
    core_python: Path, tmp_path: Path, fake_nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml_library))
    monkeypatch.setenv("GPUENERGYD_FAKE_NVML_WORLD", str(tmp_path / "world"))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # the plans of so small a pipeline need no compiled kernels
    daemon = DaemonProcess(tmp_path, overrides={"driver": "nvml", "mode": "control"}, python=str(core_python))
    with FakeNvmlControl(daemon.world_path) as control:
        control.set_privileged(True)
        daemon.start()

        with training(daemon, arguments=("--policy", "bubble-aware", "--max-slowdown", "0.2")):
            wait_until(daemon.is_lowered)
            wait_until(lambda: bool((job := daemon.job()) and job["num_tuned_iterations"]))
        wait_until(lambda: daemon.job() is None)
        wait_until(daemon.is_as_found)
        assert daemon.stop() == 0

    reported = gpuenergyd(core_python, "report", "--database", str(daemon.database_path), "--json")
    (job,) = json.loads(reported.stdout)["jobs"]
    assert job["policy"] == "bubble-aware"
    assert job["num_tuned_iterations"] > 0
    assert restore(daemon.journal_path) == ()
