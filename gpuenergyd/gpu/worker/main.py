"""GPU worker: the only process that changes GPUs. It serves one daemon, and restores when that daemon is gone.

    python -I -m gpuenergyd.gpu.worker.main --link PATH --journal PATH --driver NAME [--world PATH]

Standard library and the driver only.
"""

import argparse
import os
import pwd
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuenergyd.errors import DriverError, GpuEnergyError, UsageError
from gpuenergyd.gpu.device import GpuDriver
from gpuenergyd.gpu.drivers.opening import DRIVERS, open_driver, preload
from gpuenergyd.gpu.worker.daemon_connection import log
from gpuenergyd.gpu.worker.restore_sentinel import start_sentinel
from gpuenergyd.gpu.worker.supervisor import Supervisor, WorkerOptions
from gpuenergyd.service_manager import Watchdog, notify

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0
_SWITCH_INTERVAL_S = 0.0005
"""Longest time a thread computes while another waits: a restore must not wait for a round of readings."""


def main(arguments: Sequence[str] | None = None, *, start_sentinel: Callable[[Path], int] = start_sentinel) -> int:
    """Run the worker and return its exit code; `start_sentinel` starts the process that outlives it."""
    parser = argparse.ArgumentParser(prog="gpuenergyd-worker", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--link", type=Path, required=True, help="Unix socket for the daemon")
    parser.add_argument("--journal", type=Path, required=True, help="restore journal, in a folder owned by the worker")
    parser.add_argument("--driver", required=True, help=f"{', '.join(DRIVERS)}, or an installed one")
    parser.add_argument(
        "--world", type=Path, help="file with the simulated GPUs, or with the commands of the command driver"
    )
    parser.add_argument("--sample-period-s", type=float, default=0.02)
    parser.add_argument(
        "--daemon-user", dest="daemon_uid", type=_uid, help="user or uid of the daemon (default: the worker's own)"
    )
    parser.add_argument(
        "--daemon-silence-limit-s", type=float, default=10.0, help="restore after this time without a message"
    )
    parser.add_argument(
        "--exit-with-daemon",
        dest="exits_with_daemon",
        action="store_true",
        help="exit when the daemon or the parent process ends",
    )
    parser.add_argument(
        "--parent-pid",
        type=int,
        default=os.getppid(),
        help="the parent process, in case it has ended already (default: the present one)",
    )
    parser.add_argument(
        "--observe-only", dest="observes_only", action="store_true", help="read GPUs, never change them"
    )
    parser.add_argument(
        "--read-deadline-s", type=float, default=10.0, help="after this time a read call counts as hung"
    )
    parser.add_argument("--set-deadline-s", type=float, default=30.0, help="after this time a set call counts as hung")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        options = WorkerOptions(**vars(parser.parse_args(arguments)))
        if not 0.001 <= options.sample_period_s <= 10.0:
            raise UsageError(f"--sample-period-s {options.sample_period_s} must be between 0.001 and 10")
        preload(options.driver)
        sentinel_pid = start_sentinel(options.journal)
        Supervisor(_open_patiently(options), options, sentinel_pid).run()
    except GpuEnergyError as error:
        log(str(error))
        return error.exit_code
    return 0


def _uid(user: str) -> int:
    if user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise UsageError(f"--daemon-user {user}: no such user on this host") from None


def _open_patiently(options: WorkerOptions) -> GpuDriver:
    """Open the driver; a systemd unit retries until the driver is available, a child process fails at once."""
    pause_s = _FIRST_RETRY_S
    watchdog = Watchdog()
    while True:
        try:
            return open_driver(options.driver, options.world)
        except DriverError as error:
            if options.exits_with_daemon or options.driver in {"simulated", "command"}:
                raise
            log(f"{error}; retrying in {pause_s:g} s")
            # The process itself is healthy, so it reports readiness and the reason for waiting.
            notify(f"READY=1\nSTATUS={error}")
            until_mono_s = time.monotonic() + pause_s
            while (left_s := until_mono_s - time.monotonic()) > 0:
                watchdog.feed()
                time.sleep(min(left_s, watchdog.period_s or left_s))
            pause_s = min(2 * pause_s, _LAST_RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
