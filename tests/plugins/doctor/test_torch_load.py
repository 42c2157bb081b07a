"""The load by torch is a process that says what it measured, or why it cannot compute, and ends with its input."""

from pathlib import Path

import pytest

from gpuenergyd.errors import DriverError
from gpuenergyd_doctor import torch_load
from gpuenergyd_doctor.torch_load import TorchLoad
from tests.support.waiting import wait_until

COMPUTES = """
import json, os, sys
print(json.dumps({"run_ahead_s": 0.03, "step_s": 0.02}), flush=True)
sys.stdin.read()
open(os.environ["ENDED"], "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
"""
FAILS_LATER = COMPUTES.replace("sys.stdin.read()", """print('{"error": "torch: a lost GPU"}', flush=True)""")
FAILS = 'print(\'{"error": "torch: out of memory"}\', flush=True)'


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the program that computes."""
    monkeypatch.setattr(torch_load, "_PROGRAM", "program_on_gpu")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))
    return tmp_path / "program_on_gpu.py"


def test_a_load_yields_what_it_measured_and_ends_with_the_context(program: Path) -> None:
    program.write_text(COMPUTES)

    with TorchLoad().on("GPU-1") as found:
        assert found == {"run_ahead_s": 0.03, "step_s": 0.02}

    assert program.with_name("ended").read_text() == "GPU-1"


@pytest.mark.parametrize(("text", "reason"), [(FAILS, "torch: out of memory"), ("", "did not start")])
def test_a_load_that_cannot_compute_names_the_reason(program: Path, text: str, reason: str) -> None:
    program.write_text(text)

    with pytest.raises(DriverError, match=reason), TorchLoad().on("GPU-1"):
        pass


def test_a_load_that_ends_while_it_is_needed_names_the_reason(program: Path) -> None:
    program.write_text(FAILS_LATER)

    with pytest.raises(DriverError, match="torch: a lost GPU"), TorchLoad().on("GPU-1"):
        wait_until(program.with_name("ended").exists)


def test_modules_of_the_current_folder_are_not_run(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text(COMPUTES)
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(program.parent)

    with pytest.raises(DriverError, match="did not start"), TorchLoad().on("GPU-1"):
        pass
