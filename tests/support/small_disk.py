"""A small tmpfs that tests fill up or remount read-only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import wait_until


@contextmanager
def small_disk(mount_point: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size; skip the test if that is not permitted."""
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root and mount(8)")
    mount_point.mkdir()
    command = [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount_point)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"mount is refused here: {made.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk completely; return the file that takes the space."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return ballast


def remount(disk: Path, mode: str) -> None:
    """Remount as "ro" or "rw"; retries because "ro" fails while a file is open for writing."""

    def is_done() -> bool:
        return (
            subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], capture_output=True, check=False).returncode
            == 0
        )

    wait_until(is_done)
