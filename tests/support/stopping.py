"""Stopping processes that use simulated GPUs where one on a real GPU would be stopped: outside of driver calls."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from gpuenergyd.gpu.drivers.simulated import SimulatedHost
from tests.support.waiting import wait_until

_FREE_WITHIN_S = 1.0


def stop_between_driver_calls(pids: Sequence[int], *world_paths: Path) -> None:
    """Stop processes (SIGSTOP) at a moment when none of them holds a simulated GPU.

    A simulated GPU is a record in a file that whoever looks at it locks. Nobody else could use it while its holder is
    stopped; a real driver's locks are in the kernel, where no signal stops anybody.
    """
    hosts = [SimulatedHost.open(path) for path in world_paths]
    try:
        while True:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: all(_is_stopped(pid) for pid in pids), 20)
            looks = threading.Thread(target=_look_at_all, args=(hosts,), daemon=True)
            looks.start()
            looks.join(_FREE_WITHIN_S)
            if not looks.is_alive():
                return
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            looks.join()
    finally:
        for host in hosts:
            host.close()


def _look_at_all(hosts: Sequence[SimulatedHost]) -> None:
    for host in hosts:
        for gpu in host.identities():
            host.locked_sm_clock_mhz(gpu.gpu_uuid)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
