"""Looking at processes that may end while they are looked at."""

from pathlib import Path


def child_pids(pid: int) -> list[int]:
    """Return the pids of a process's living children, whichever of its threads began them; none when it is gone.

    A thread that ends while the list is made hands its children to another thread, so then the list is made again.
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
    """Return the threads of a process; none when it is gone."""
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
