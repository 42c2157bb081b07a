"""A daemon that keeps all its files in a folder of its own and ignores the settings of an installed one."""

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from gpuenergyd.errors import DaemonNotRunningError

if TYPE_CHECKING:
    from gpuenergyd.client.connection import DaemonClient
    from gpuenergyd_sim.private_daemon.processes import Children

_START_TIMEOUT_S = 60.0
_POLL_S = 0.05


def forget_settings(kept: Collection[str] = ()) -> None:
    """Remove the settings of an installed daemon from this process's environment, except those in `kept`."""
    for name in [name for name in os.environ if name.startswith("GPUENERGYD_")]:
        if name != "GPUENERGYD_DEBUG" and name not in kept:
            del os.environ[name]


def start_daemon(children: "Children", folder: Path, *options: str) -> None:
    """Start `gpuenergyd serve` with configuration, sockets and history in a folder."""
    own = ("--config", "config.toml"), ("--runtime-dir", "run"), ("--state-dir", "state")
    in_folder = [word for option, name in own for word in (option, str(folder / name))]
    children.start("daemon", ["gpuenergyd.cli.main", "serve", *in_folder, *options])


def wait_for_daemon(client: "DaemonClient", check: Callable[[], None]) -> None:
    """Wait until the daemon answers; `check` raises if it has ended.

    Raises:
        DaemonNotRunningError: it did not answer in time.
    """
    until_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        check()
        try:
            client.get_status()
        except DaemonNotRunningError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)
        else:
            return
