"""Reproducible builds of wheel and sdist: the same commit gives the same bytes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NO_COMMIT_EPOCH_S = 1_767_225_600
"""2026-01-01 UTC, for sources outside a git repository such as an unpacked sdist."""


def commit_epoch_s() -> int:
    """Return the commit time, which becomes the modification time of every packaged file."""
    if (given := os.environ.get("SOURCE_DATE_EPOCH")) is not None:
        return int(given)
    log = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(log.stdout) if log.returncode == 0 and log.stdout.strip() else _NO_COMMIT_EPOCH_S


def build_packages(out: Path) -> tuple[Path, Path]:
    """Build sdist and wheel into a folder, check them and return (wheel, sdist).

    Raises:
        CalledProcessError: a build or `twine check` failed.
    """
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(commit_epoch_s())}
    build = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, env=environ, check=True, stdout=subprocess.DEVNULL)
    (wheel,), (sdist,) = out.glob("gpuenergyd-*.whl"), out.glob("gpuenergyd-*.tar.gz")
    check = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    subprocess.run(check, check=True, stdout=subprocess.DEVNULL)
    return wheel, sdist


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
