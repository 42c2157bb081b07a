"""Marker file of `gpuenergyd run`, deleted when a rank joins: if it remains, nothing has joined.

The program's first process, if it is a Python process, creates the file, and reports at its end that nothing has joined
if the file still exists. The ranks' processes are its descendants and inherit the variable; they write into the file
why they have not joined. If the program has several ranks, the first one that joins renames the file. A rank that ends
without a step of an optimizer, such as a worker of a parameter server, then deletes it, and says so for all of these.
"""

import atexit
import contextlib
import os
import sys
from pathlib import Path

from gpuenergyd.client.environment import find_socket_path

MARK_VARIABLE = "GPUENERGYD_RUN_MARK"
"""Variable with the pid of the program's first process and the path of the file, separated by a colon."""

_NO_TRAINING = (
    "no process of the program ran a training step, of an optimizer of torch or of a supported framework; other loops"
    " join with gpuenergyd.job"
)

_is_reported = False
"""Whether this process has joined, or has logged why it does not."""


def delete_mark() -> None:
    """Delete the mark, because a rank has joined or has logged why it does not."""
    global _is_reported  # noqa: PLW0603  once per process, like the mark
    _is_reported = True
    mark = _mark()
    if mark is not None:
        with contextlib.suppress(OSError):
            if mark[0] == os.getpid() or os.environ.get("WORLD_SIZE", "1") == "1":
                mark[1].unlink()
            else:
                mark[1].rename(_others(mark[1]))


def report_without_steps(num_steps: int) -> None:
    """Say, once per program, that others have joined but not this rank, which the program's first process started."""
    mark = _mark()
    if num_steps or _is_reported or mark is None or mark[0] != os.getppid():
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        _others(mark[1]).unlink()
        sys.stderr.write(
            f"gpuenergyd: rank {os.environ.get('RANK', '?')} took no step of an optimizer, so it did not join, and its"
            " GPU ran at full speed; this is said once for all such ranks\n"
        )


def record_obstacle(reason: str) -> None:
    """Write why this process has not joined, replacing an earlier reason; do nothing if a rank has joined."""
    mark = _mark()
    if mark is not None:
        with contextlib.suppress(OSError), mark[1].open("r+", encoding="utf-8") as file:
            file.write(reason)
            file.truncate()


def watch_for_ranks() -> None:
    """Create the mark and check it at the end of this process; do nothing if it is not the program's first process."""
    mark = _mark()
    if mark is None or mark[0] != os.getpid():
        return
    with contextlib.suppress(OSError):
        mark[1].touch(mode=0o600, exist_ok=True)
        atexit.register(_report_if_marked, *mark)


def _report_if_marked(pid: int, path: Path) -> None:
    if os.getpid() != pid:  # a fork of the program's first process
        return
    with contextlib.suppress(OSError):
        _others(path).unlink()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        reason = path.read_text(encoding="utf-8") or _NO_TRAINING
        path.unlink()
        sys.stderr.write(
            f"gpuenergyd: nothing joined the daemon at {find_socket_path()}, so clocks stayed as they were: {reason}\n"
        )


def _others(path: Path) -> Path:
    """Return the name of the file once a rank of several has joined."""
    return path.with_name(f"{path.name}-joined")


def _mark() -> tuple[int, Path] | None:
    pid, _, path = os.environ.get(MARK_VARIABLE, "").partition(":")
    return (int(pid), Path(path)) if pid.isdecimal() and path else None
