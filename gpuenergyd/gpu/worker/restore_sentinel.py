"""The keeper: a process that outlives the GPU worker for one purpose, to put GPUs back when the worker was killed.

It is forked before the worker opens the driver, so it costs no start of an interpreter when it is needed, sleeps until
the worker is dead, restores what the journal still holds, and ends. A worker that stopped in order leaves it nothing.
"""

import contextlib
import os
import select
import signal
from pathlib import Path

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.worker.daemon_connection import log

_NAME = "gpue-keeper"


def start_keeper(journal_path: Path) -> int:
    """Fork the keeper of this process, which must not have any other thread; return its pid."""
    worker_pidfd = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        try:
            _keep(worker_pidfd, journal_path)
        finally:
            os._exit(0)
    os.close(worker_pidfd)
    return pid


def _keep(worker_pidfd: int, journal_path: Path) -> None:
    # A service manager tells the whole group to stop; the worker does, and we end with it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(_NAME)
    select.select([worker_pidfd], [], [])
    try:
        outcomes = restore(journal_path)
    except GpuEnergyError as error:
        log(f"after the worker: {error}")
        return
    for outcome in outcomes:
        log(f"after the worker: {outcome.gpu_uuid} {outcome.control} {outcome.result}: {outcome.detail}")
