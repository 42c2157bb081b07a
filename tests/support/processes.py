"""Runs programs to their end, and lists children and threads of processes that may end at any moment."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def finished(command: Sequence[str | Path], *, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return a program that has ended, with its output as text."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


def child_pids(pid: int) -> list[int]:
    """Return the pids of a process's children, started by any of its threads; empty if it is gone.

    A thread that ends while the list is read passes its children to another thread, so the list is read again.
    """
    tasks = Path(f"/proc/{pid}/task")
    while True:
        found: set[int] = set()
        try:
            threads = sorted(tasks.iterdir())
        except OSError:
            return []
        try:
            for thread in threads:
                found |= {int(child) for child in (thread / "children").read_text(encoding="ascii").split()}
        except OSError:
            continue
        return sorted(found)


def task_ids(pid: int) -> list[int]:
    """Return the threads of a process; empty if it is gone."""
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
