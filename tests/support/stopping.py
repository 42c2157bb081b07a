"""Stops processes that use simulated GPUs, outside of driver calls as with real GPUs."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import wait_until

_FREE_WITHIN_S = 1.0


def stop_between_driver_calls(pids: Sequence[int], *world_paths: Path) -> None:
    """Stop processes (SIGSTOP) when none of them holds the lock of a simulated GPU.

    A simulated GPU is a locked record in a file. A process stopped while it holds the lock would block everybody else;
    a real driver's locks are in the kernel, where a process cannot be stopped.
    """
    hosts = [SimulatedHost.open(path) for path in world_paths]
    try:
        while True:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: all(_is_stopped(pid) for pid in pids))
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


def stop_while_lowered(daemon: DaemonProcess) -> None:
    """Stop a daemon (SIGSTOP) at a moment at which it keeps a GPU lowered; its worker keeps what was requested."""
    while True:
        wait_until(daemon.is_lowered)
        os.kill(daemon.pid, signal.SIGSTOP)
        wait_until(lambda: _is_stopped(daemon.pid))
        if daemon.is_lowered():
            return
        os.kill(daemon.pid, signal.SIGCONT)  # a block at full speed had just begun


def _look_at_all(hosts: Sequence[SimulatedHost]) -> None:
    for host in hosts:
        for gpu in host.identities():
            host.locked_sm_clock_mhz(gpu.gpu_uuid)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
