"""Telling processes and boots apart: a pid alone is reused."""

from pathlib import Path


def process_start_ticks(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot, or None when it is gone or only awaits its parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as stat:  # noqa: PTH123 - hot path, pathlib costs double
            after_name = stat.read(1024).rpartition(b")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in {b"Z", b"X"} else int(after_name[19])


def read_boot_id() -> str:
    """Return what tells this boot of the host from others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
