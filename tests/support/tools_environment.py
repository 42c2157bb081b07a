"""Virtual environments with unmodified third-party tools from PyPI.

`make frameworks` builds all of them (`python -m tests.support.tools_environment`) ahead of the tests. A test that finds
none builds it, or skips where that fails.
"""

import fcntl
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
_BUILD_LIMIT_S = 900


def tools_environment(tools: Sequence[str] = MONITORING_TOOLS) -> Path:
    """Return the folder with the tools' programs, built once per list of versions; skip the test if that fails."""
    try:
        return build(tools)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot install {', '.join(tools)}: {error.stderr.strip().splitlines()[-1]}")


def build(tools: Sequence[str]) -> Path:
    """Build the environment unless it exists, and return the folder with its programs.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    digest = hashlib.sha256(f"{tuple(tools)}{sys.version}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"gpuenergyd-tools-{os.getuid()}-{digest}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=_BUILD_LIMIT_S)
            pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *tools], capture_output=True, text=True, check=True, timeout=_BUILD_LIMIT_S)
            (folder / "complete").touch()
    return folder / "bin"


if __name__ == "__main__":
    for each in (MONITORING_TOOLS, KERNEL_TUNER, OPENTELEMETRY, API_TEST_TOOLS):
        build(each)
