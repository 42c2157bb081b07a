"""Restore sentinel: a process that outlives the GPU worker and restores the GPUs when the worker was killed.

It is forked before the worker opens the driver, so no interpreter has to start when it is needed. It sleeps until the
worker is dead, restores what the journal still lists, and ends. After an orderly stop the journal is empty.
"""

import contextlib
import os
import select
import signal
from pathlib import Path

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.worker.daemon_connection import log

_NAME = "gpue-sentinel"


def start_sentinel(journal_path: Path) -> int:
    """Fork the sentinel of this process, which must not have any other thread; return its pid."""
    worker_pidfd = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        try:
            _become_sentinel()
            wait_and_restore(worker_pidfd, journal_path)
        finally:
            os._exit(0)
    os.close(worker_pidfd)
    return pid


def _become_sentinel() -> None:
    # A service manager signals the whole process group: the worker stops on it, and the sentinel ends after the worker.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(_NAME)


def wait_and_restore(worker_pidfd: int, journal_path: Path) -> None:
    """Wait for the end of the worker, then restore what its journal lists."""
    select.select([worker_pidfd], [], [])
    try:
        outcomes = restore(journal_path)
    except GpuEnergyError as error:
        log(f"restore after the worker's end failed: {error}")
        return
    for outcome in outcomes:
        log(f"after the worker's end: {outcome.gpu_uuid} {outcome.control} {outcome.result}: {outcome.detail}")
