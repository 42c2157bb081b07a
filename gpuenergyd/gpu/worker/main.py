"""The GPU worker: the one process that may change GPUs. It obeys one core, and restores when that core is gone.

    python -I -m gpuenergyd.gpu.worker.main --link PATH --journal PATH --driver simulated|nvml [--world PATH]

Standard library and the driver only.
"""

import argparse
import pwd
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpuenergyd.errors import DriverError, GpuEnergyError, UsageError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.drivers.opening import DRIVERS, open_driver, preload
from gpuenergyd.gpu.worker.daemon_connection import log
from gpuenergyd.gpu.worker.options import WorkerOptions
from gpuenergyd.gpu.worker.restore_sentinel import start_keeper
from gpuenergyd.gpu.worker.supervisor import Worker
from gpuenergyd.service_manager import Watchdog, notify

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0
_SWITCH_INTERVAL_S = 0.0005
"""How long a thread may compute while another waits: a restore must not wait for a round of readings."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker."""
    parser = argparse.ArgumentParser(prog="gpuenergyd-worker", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--link", type=Path, required=True, help="Unix socket the core connects to")
    parser.add_argument("--journal", type=Path, required=True, help="restore journal, in a folder of our own")
    parser.add_argument("--driver", choices=DRIVERS, required=True)
    parser.add_argument("--world", type=Path, help="file with the simulated GPUs")
    parser.add_argument("--sample-period-s", type=float, default=0.02)
    parser.add_argument("--core-user", help="user or uid of the core where it is not our own")
    parser.add_argument("--core-silence-limit-s", type=float, default=10.0, help="a core silent for longer is dead")
    parser.add_argument("--exit-with-core", action="store_true", help="end when the core or the parent is gone")
    parser.add_argument("--observe-only", action="store_true", help="read GPUs and change none")
    parser.add_argument("--read-deadline-s", type=float, default=10.0, help="a GPU that takes longer to read is wedged")
    parser.add_argument("--set-deadline-s", type=float, default=30.0, help="a GPU that takes longer to set is wedged")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        if not 0.001 <= options.sample_period_s <= 10.0:
            raise UsageError(f"--sample-period-s {options.sample_period_s} must be between 0.001 and 10")
        preload(options.driver)
        keeper_pid = start_keeper(options.journal)
        controller = _open_patiently(options)
        Worker(
            controller,
            WorkerOptions(
                driver=options.driver,
                world_path=options.world,
                link_path=options.link,
                journal_path=options.journal,
                sample_period_s=options.sample_period_s,
                core_uid=None if options.core_user is None else _uid(options.core_user),
                exits_with_core=options.exit_with_core,
                observes_only=options.observe_only,
                read_deadline_s=options.read_deadline_s,
                set_deadline_s=options.set_deadline_s,
                core_silence_limit_s=options.core_silence_limit_s,
                keeper_pid=keeper_pid,
            ),
        ).run()
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
        raise UsageError(f"--core-user {user}: no such user on this host") from None


def _open_patiently(options: argparse.Namespace) -> GpuController:
    """Return the driver; a unit of its own waits for a driver that is not there yet, a child fails at once."""
    pause_s = _FIRST_RETRY_S
    watchdog = Watchdog()
    while True:
        try:
            return open_driver(options.driver, options.world)
        except DriverError as error:
            if options.exit_with_core or options.driver != "nvml":
                raise
            log(f"{error}; tried again in {pause_s:g} s")
            # Nothing is wrong with this process: it is ready, and says what it waits for.
            notify(f"READY=1\nSTATUS={error}")
            until_mono_s = time.monotonic() + pause_s
            while (left_s := until_mono_s - time.monotonic()) > 0:
                watchdog.feed()
                time.sleep(min(left_s, watchdog.period_s or left_s))
            pause_s = min(2 * pause_s, _LAST_RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
