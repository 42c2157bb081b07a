"""Kills of a daemon's processes, and of programs that hold contexts, while their GPUs are lowered for idleness."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import LIMIT_S, wait_until

VICTIMS = ("holder", "daemon", "worker", "worker_and_sentinel", "all")
_NUM_HOLDERS = 3
SOON = (
    "from gpuenergyd_idle.rules import control, idle_spans, lost_time\n"
    "control._LEAST_PAUSE_S = 3.0\nidle_spans._ASSUMED_SPANS_A_DAY = 0.0\nlost_time.PER_DAY_S = 1e6\n"
)
"""Lowers GPUs again soon after a kill, not a minute later, however much time its lift took."""


@dataclass(frozen=True, slots=True)
class IdleKill:
    """One kill: how many GPUs were lowered, and how many of them were not lifted after it."""

    victim: str
    num_lowered: int
    num_left: int
    restored_after_s: float


class IdleKills:
    """A daemon with simulated GPUs, each held by a process that does nothing."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        idle = {"idle": {"enabled": True, "after_s": 1.0}}
        self._daemon = DaemonProcess(folder, overrides={"service_options": idle}, prologue=SOON).start()
        self._host = SimulatedHost.open(self._daemon.world_path)
        self._gpus = [identity.gpu_uuid for identity in self._host.identities()][:_NUM_HOLDERS]
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._rng = rng

    def run(self, num_kills: int) -> Iterator[IdleKill]:
        """Kill so often, each victim as often."""
        for number in range(num_kills):
            self._hold()
            wait_until(lambda: len(self._lowered()) == _NUM_HOLDERS, log=lambda: self._daemon.log[-3000:])
            time.sleep(self._rng.uniform(0.0, 0.3))
            yield self._kill(VICTIMS[number % len(VICTIMS)])

    def close(self) -> None:
        """End all processes."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        self._daemon.stop()
        self._host.close()

    def _lowered(self) -> set[str]:
        return {gpu for gpu in self._gpus if self._host.locked_sm_clock_mhz(gpu) is not None}

    def _hold(self) -> None:
        assert self._daemon.process is not None
        if self._daemon.process.poll() is not None:
            self._daemon.start()
        for gpu in self._gpus:
            if gpu not in self._holders:
                self._holders[gpu] = subprocess.Popen(["sleep", "infinity"])
                self._host.attach_process(gpu, self._holders[gpu].pid)

    def _kill(self, victim: str) -> IdleKill:
        worker = self._daemon.status()["worker"]
        sets_before = {gpu: self._host.num_clock_sets(gpu) for gpu in self._lowered()}
        begun_s = time.monotonic()
        match victim:
            case "holder":
                gpu = self._rng.choice(sorted(sets_before))
                sets_before = {gpu: sets_before[gpu]}
                holder = self._holders.pop(gpu)
                holder.kill()
                holder.wait()
            case "daemon":
                self._kill_daemon()
            case "all":
                os.kill(self._daemon.pid, signal.SIGSTOP)
                _kill(worker["sentinel_pid"], worker["pid"])
                self._kill_daemon()
                restore = [sys.executable, "-I", "-m", "gpuenergyd.gpu.restore.command"]
                restore += ["--journal", str(self._daemon.journal_path)]
                subprocess.run(restore, check=False, capture_output=True, timeout=LIMIT_S)
            case _:
                pids = (worker["pid"],) if victim == "worker" else (worker["sentinel_pid"], worker["pid"])
                _kill(*pids)
        left = set(sets_before)
        while left and time.monotonic() < begun_s + LIMIT_S:
            if victim in {"daemon", "all"}:
                left &= self._lowered()
            else:  # a living daemon may lower a GPU again before this loop sees it lifted
                left -= {gpu for gpu in left if self._host.num_clock_sets(gpu) > sets_before[gpu]}
            time.sleep(0.002)
        return IdleKill(victim, len(sets_before), len(left), time.monotonic() - begun_s)

    def _kill_daemon(self) -> None:
        assert self._daemon.process is not None
        self._daemon.process.kill()
        self._daemon.process.wait(LIMIT_S)


def _kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
