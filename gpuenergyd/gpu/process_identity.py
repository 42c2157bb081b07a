"""Identification of processes and boots: a pid is reused, so a process is identified by its start time too."""

from pathlib import Path


def process_start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None when it has ended or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as stat:  # noqa: PTH123 - hot path, pathlib costs double
            after_name = stat.read(1024).rpartition(b")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in {b"Z", b"X"} else int(after_name[19])


def read_boot_id() -> str:
    """Return the id of the present boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
