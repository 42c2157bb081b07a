"""Lists children and threads of processes that may end at any moment."""

from pathlib import Path


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
