"""Unmodified tools of other projects, from PyPI, in an environment of their own."""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

TOOLS = ("zeus==0.16.0", "nvitop==1.7.2", "gpustat==1.1.1", "codecarbon==3.3.2")


def tools_environment(tools: Sequence[str] = TOOLS) -> Path:
    """Return the folder with their programs, made once per list of versions; skip where they cannot be had."""
    digest = hashlib.sha256(f"{tools}{sys.version}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"gpuenergyd-tools-{os.getuid()}-{digest}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _made(folder, tools)


def _made(folder: Path, tools: Sequence[str]) -> Path:
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
        done = subprocess.run(
            [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *tools],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        if done.returncode != 0:
            pytest.skip(f"cannot install {', '.join(tools)}: {done.stderr.strip().splitlines()[-1]}")
        (folder / "complete").touch()
    return folder / "bin"
