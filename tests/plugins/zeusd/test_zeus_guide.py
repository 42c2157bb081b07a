"""The programs in the how-to guide for Zeus run as written, with the unmodified package, beside simulated GPUs."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.zeusd.conftest import environment_of_zeus, limits_w, nvml_daemon
from tests.support.daemon_process import DaemonProcess
from tests.support.documents import blocks
from tests.support.tools_environment import tools_environment
from tests.support.waiting import wait_until

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "zeus.md"
FOUND_W = 350.0
TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
    synchronize = staticmethod(lambda device=None: None)

class distributed:
    is_available = staticmethod(lambda: False)
"""
"""Zeus waits for the GPU through torch, which has no CUDA for simulated GPUs."""
PRELUDE = """
import time
loader = range(1000)
def train_step(batch): time.sleep(0.006)
"""
AFTERWARDS = """
import json
print(json.dumps({
    "limits_w": [m.power_limit for m in optimizer.measurements],
    "chosen_w": optimizer.state.optimal_power_limit / 1000,
    "current_w": gpus.get_power_management_limit(0) / 1000,
}))
"""


@pytest.fixture
def daemon(tmp_path: Path, fake_nvml_library: Path) -> Iterator[DaemonProcess]:
    with nvml_daemon(tmp_path, fake_nvml_library, num_gpus=1, limit_w=FOUND_W) as made:
        yield made


def run_tool(daemon: DaemonProcess, library: Path, *arguments: str, python_path: Path) -> str:
    """Run Zeus's Python with the socket as the guide sets it; return what it prints."""
    environ = environment_of_zeus(daemon, library) | {"HOME": str(python_path), "PYTHONPATH": str(python_path)}
    command = [str(tools_environment() / "python"), "-W", "ignore", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_the_programs_of_the_guide_run_as_written_and_leave_the_gpu_as_it_was(
    daemon: DaemonProcess, fake_nvml_library: Path, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    given = [block.text for block in blocks(GUIDE) if block.language == "python"]
    program = "\n".join([PRELUDE, *given, AFTERWARDS])

    *_, last = run_tool(daemon, fake_nvml_library, "-c", program, python_path=tmp_path).splitlines()
    wait_until(lambda: daemon.status()["gpus"][0]["zeusd_client_lease"] is None)

    outcome = json.loads(last)
    assert outcome["limits_w"] == sorted(outcome["limits_w"], reverse=True)
    assert len(outcome["limits_w"]) > 3
    assert outcome["chosen_w"] == outcome["current_w"] in outcome["limits_w"]
    assert limits_w(daemon) == [FOUND_W]
    assert daemon.is_as_found()


def test_zeus_shows_the_daemon_as_the_guide_says(
    daemon: DaemonProcess, fake_nvml_library: Path, tmp_path: Path
) -> None:
    shown = run_tool(daemon, fake_nvml_library, "-m", "zeus.show_env", python_path=tmp_path)

    assert f"Endpoint: {daemon.socket_path}" in shown
    assert "can_control_gpu: True" in shown
    assert "can_read_cpu: False" in shown
