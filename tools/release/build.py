"""Builds wheel and sdist: the same commit gives the same bytes, whenever and wherever it is built."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NO_COMMIT_EPOCH_S = 1_767_225_600
"""Of 2026-01-01, for sources that are in no git repository, as an sdist is."""


def commit_epoch_s() -> int:
    """Return when the sources were committed, the instant that every file in a package carries."""
    if (given := os.environ.get("SOURCE_DATE_EPOCH")) is not None:
        return int(given)
    asked = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 and asked.stdout.strip() else _NO_COMMIT_EPOCH_S


def build_packages(out: Path) -> tuple[Path, Path]:
    """Build and check sdist and wheel into a folder, and return wheel and sdist.

    Raises:
        CalledProcessError: a build or `twine check` failed; it has said why.
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
