"""The whole demo on the unmodified NVML binding, and a clear error for GPUs that it cannot simulate."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.fake_nvml.control import FakeNvmlControl


@pytest.fixture
def world(fake_nvml_library: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Two simulated GPUs behind the fake driver library, with its environment; paths are short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="nvml-demo-"))
    path = folder / "world"
    SimulatedHost.create(path, ["a100-sxm", "a100-sxm"], seed=7).close()
    with FakeNvmlControl(path) as control:
        control.set_privileged(True)
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "LD_LIBRARY_PATH": str(fake_nvml_library),
        "GPUENERGYD_FAKE_NVML_WORLD": str(path),
    }
    yield path, environment
    shutil.rmtree(folder)


def demo(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuenergyd.cli.main", "demo", "--driver", "nvml", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.torch
@pytest.mark.thorough
def test_the_whole_demo_runs_through_nvml(world: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    path, environment = world
    out = tmp_path / "report.html"

    run = demo(
        environment, "--json", "--out", str(out), "--gpus", "2", "--microbatches", "2", "--policy", "uniform",
        "--max-slowdown", "0.2", "--baseline-iterations", "4", "--tuned-iterations", "2",
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert (figures["gpus"], figures["simulated"]) == (2, True)
    assert figures["energy_j"] < figures["baseline_energy_j"]
    assert out.exists()
    host = SimulatedHost.open(path)
    assert [host.locked_sm_clock_mhz(i.gpu_uuid) for i in host.identities()] == [None, None]
    host.close()


@pytest.mark.torch
def test_demo_refuses_an_unknown_gpu_model_in_one_line(world: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    path, environment = world
    other = path.with_name("other")
    SimulatedHost.create(other, ["a40"], seed=3).close()
    program = (
        f"import os, ctypes; ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2();"
        f" os.environ['GPUENERGYD_FAKE_NVML_WORLD'] = {str(other)!r};"
        " from gpuenergyd.cli.main import run; import sys;"
        f" sys.exit(run(['demo', '--driver', 'nvml', '--gpus', '2', '--out', {str(tmp_path / 'report.html')!r}]))"
    )

    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)

    assert run.returncode == 1
    assert run.stderr.startswith("gpuenergyd: the demo runs on simulated GPUs only, but NVML lists real GPUs")
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.torch
def test_demo_refuses_more_stages_than_gpus(world: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    run = demo(world[1], "--gpus", "4", "--out", str(tmp_path / "report.html"))

    assert run.returncode == 1
    assert run.stderr == "gpuenergyd: --gpus 4: NVML lists only 2 simulated GPUs\n"
