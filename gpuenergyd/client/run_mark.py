"""The mark of `gpuenergyd run`: a file that lasts until a rank of the program joins the daemon.

The program's first process creates it if that is a Python process, and reports at its end that nothing has joined if
the file is still there. The processes of ranks are its descendants and inherit the variable.
"""

import atexit
import contextlib
import os
import sys
from pathlib import Path

from gpuenergyd.client.environment import find_socket_path

MARK_VARIABLE = "GPUENERGYD_RUN_MARK"
"""Variable with the pid of the program's first process and the path of the file, separated by a colon."""


def record_joined() -> None:
    """Delete the mark, because a rank has joined."""
    mark = _mark()
    if mark is not None:
        with contextlib.suppress(OSError):
            mark[1].unlink()


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
    with contextlib.suppress(OSError, ValueError, AttributeError):
        path.unlink()
        sys.stderr.write(
            f"gpuenergyd: nothing joined the daemon at {find_socket_path()}, so clocks stayed as they were: no training"
            " step of torch.distributed.pipelining, DeepSpeed, Lightning or Hugging Face ran with a known GPU; any"
            " other loop joins with gpuenergyd.job\n"
        )


def _mark() -> tuple[int, Path] | None:
    pid, _, path = os.environ.get(MARK_VARIABLE, "").partition(":")
    return (int(pid), Path(path)) if pid.isdecimal() and path else None
