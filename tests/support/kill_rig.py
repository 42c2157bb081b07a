"""Kills processes of a running daemon and its jobs at random moments, and checks that the GPUs are restored."""

import contextlib
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
from tests.support.daemon_process import DaemonProcess
from tests.support.gpu_commands import GpuCommands
from tests.support.waiting import LIMIT_S, wait_until

Victim = Literal["client", "daemon", "worker", "worker_and_sentinel", "policy_host", "all"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)
UNDER_A_BUDGET = (3, 3, 1, 1, 2, 3)
"""Weights of the victims under a power budget."""
_BUDGET_STAYS = frozenset[Victim](("client", "policy_host"))
"""Victims whose death leaves the budget's ceilings in force: the budget is withdrawn just after it."""
NUM_GPUS = 4
"""Number of GPUs with a job; one more has none."""
WORK = InstructionWork(memory_time_s=0.005, compute_time_s=0.02, power_coefficient_w_per_mhz=0.25)
LONG_WORK = InstructionWork(memory_time_s=0.015, compute_time_s=0.06, power_coefficient_w_per_mhz=0.25)
"""With commands, which take longer than calls of a driver, and whose processes need the CPU."""
GIVE_UP_S = 90.0
COMMANDS_GIVE_UP_S = 90.0
"""Each restore starts a program, and waits for one that is under way; programs fail and hang, and are run again."""
_COMMAND_TIMEOUT_S = 3.0
_LOWERED_WITHIN_S = 60.0
_TRIES_TO_HIT_LOWERED = 8
"""How long a trial waits for what it interrupts; whatever is the case then is interrupted, too."""
_MAX_RESTORES = 20
_ANY_MOMENT_RATIO = 0.15
"""Share of the kills at any moment; the others happen while a GPU is lowered."""
LEAST_LOWERED_RATIO = 1 / 5
"""Of the kills, that must hit a lowered GPU: with fewer, a run shows nothing about restores."""
_LEAST_KILLS = 5
"""Of one victim, so that the ratio is required of its kills too."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill: number of GPUs lowered at that moment, time until all were restored, number never restored."""

    victim: Victim
    num_lowered: int
    restored_after_s: float
    num_left_lowered: int
    is_database_damaged: bool


def without_effect(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return each victim, and all together, whose kills hit too few lowered GPUs, with the numbers."""
    groups = {"all victims": list(trials)} | {
        victim: own for victim in VICTIMS if len(own := [t for t in trials if t.victim == victim]) >= _LEAST_KILLS
    }
    hits = {name: sum(trial.num_lowered > 0 for trial in own) for name, own in groups.items()}
    return tuple(
        f"{name}: {hits[name]} of {len(own)} kills hit a lowered GPU"
        for name, own in groups.items()
        if hits[name] < LEAST_LOWERED_RATIO * len(own)
    )


@dataclass(slots=True)
class KillRig:
    """A daemon on simulated GPUs with a job of one process on each."""

    folder: Path
    rng: random.Random
    weights: Sequence[int] = (60, 8, 8, 8, 8, 8)
    """Relative frequency of each of `VICTIMS`."""
    policy: str = "uniform"
    levers: tuple[Lever, ...] = tuple(Lever)
    """What the daemon may set; power limits alone lower limits instead of clocks."""
    model: str = "a100-sxm"
    """Of the simulated GPUs."""
    power_budget_w: float | None = None
    """Requested power budget of the host; its ceilings lower GPUs too."""
    uses_commands: bool = False
    """Whether GPUs are changed by an administrator's programs, which misbehave, instead of by the driver."""
    on_trial: Callable[[], None] = lambda: None
    """Called just before each kill."""
    daemon: DaemonProcess = field(init=False)
    host: SimulatedHost = field(init=False)
    trainers: dict[int, int] = field(default_factory=dict)
    num_started: int = 0

    def __post_init__(self) -> None:
        self.daemon = DaemonProcess(
            self.folder,
            NUM_GPUS + 1,
            {
                "mode": "control",
                "policy": self.policy,
                "max_slowdown_ratio": 1.0,
                "warmup_iterations": 0,
                "baseline_iterations": 2,
                "levers": [lever.value for lever in self.levers],
            },
            model=self.model,
        )
        if self.uses_commands:
            commands = GpuCommands.create(
                self.folder / "commands", self.daemon.world_path, timeout_s=_COMMAND_TIMEOUT_S
            )
            for name in ("lock", "reset", "limit"):
                commands.let(name, "flaky")
            self.daemon.overrides |= {"driver": "command", "commands_path": str(commands.path)}
        self.host = SimulatedHost.open(self.daemon.world_path)
        self.daemon.start()

    @property
    def gpus(self) -> list[str]:
        """The GPUs' UUIDs in order of their index."""
        return [i.gpu_uuid for i in self.host.identities()]

    def lowered(self) -> set[int]:
        """Return the GPUs below their maximum clock or default power limit, or with a workload power profile."""
        return {
            index
            for index, gpu in enumerate(self.host.identities()[:NUM_GPUS])
            if (self.host.locked_sm_clock_mhz(gpu.gpu_uuid) or 1 << 20) < gpu.supported_sm_clocks_mhz[0]
            or self.host.power_limit_w(gpu.gpu_uuid) < (gpu.default_power_limit_w or 0.0)
            or (gpu.power_profiles and self.host.requested_power_profiles(gpu.gpu_uuid))
        }

    def run(self, num_trials: int) -> Iterator[Trial]:
        """Run trials: kill, wait for the restores, restart what is missing."""
        # Chosen beforehand, so that a seed gives the same victims whatever the timing.
        for victim in self.rng.choices(VICTIMS, self.weights, k=num_trials):
            self._restart_missing()
            # Also at moments of registration, measurement and full speed.
            is_any_moment = self.rng.random() < _ANY_MOMENT_RATIO
            candidates = self._wait_a_while() if is_any_moment else self._wait_while_lowered()
            self.on_trial()
            yield self._kill(victim, self.rng.choice(sorted(candidates) or range(NUM_GPUS)))

    def _wait_a_while(self) -> set[int]:
        time.sleep(self.rng.uniform(0.0, 0.06))
        return set()

    def _wait_while_lowered(self) -> set[int]:
        """Return GPUs that have been lowered for a while; experiments last for an iteration, so it takes some tries."""
        for _ in range(_TRIES_TO_HIT_LOWERED):
            with contextlib.suppress(AssertionError):
                wait_until(lambda: bool(self.lowered()), _LOWERED_WITHIN_S)
            self._wait_a_while()
            if lowered := self.lowered():
                return lowered
        return set()

    def time_bare_restore(self) -> float:
        """Return the time of the minimum that a restore needs: detect a process death, then one driver call."""
        pid = _fork(signal.pause)
        pidfd = os.pidfd_open(pid)
        begun_s = time.monotonic()
        _kill(pid)
        select.select([pidfd], [], [])
        self.host.reset_sm_clock(self.gpus[NUM_GPUS])
        took_s = time.monotonic() - begun_s
        os.close(pidfd)
        os.waitpid(pid, 0)
        return took_s

    def close(self) -> None:
        """End all processes, also those that still restore a GPU."""
        for index in list(self.trainers):
            self._kill_trainer(index)
        if self.daemon.process is not None and self.daemon.process.poll() is None:
            worker = self.daemon.status()["worker"]
            self.daemon.stop()
            restorers = [Path("/proc", str(worker[name])) for name in ("pid", "sentinel_pid")]
            wait_until(lambda: not any(process.exists() for process in restorers), COMMANDS_GIVE_UP_S)
        self.host.close()

    def _kill(self, victim: Victim, target: int) -> Trial:
        lowered = self.lowered()
        begun_s = time.monotonic()
        match victim:
            case "client":
                lowered &= {target}
                self._kill_trainer(target)
            case "daemon":
                self._kill_daemon()
            case "worker":
                pid = self._children()["worker"]
                lowered, begun_s = self.lowered(), time.monotonic()
                _kill(pid)
            case "worker_and_sentinel":  # only the next worker can restore
                children = self._children()
                lowered, begun_s = self.lowered(), time.monotonic()
                _kill(children["sentinel"])
                _kill(children["worker"])
            case "policy_host":
                pid = self._children()["policy_host"]
                lowered, begun_s = self.lowered(), time.monotonic()
                _kill(pid)
                for index in range(NUM_GPUS):  # a plan outlives its policy host, but not its job
                    self._kill_trainer(index)
            case "all":
                children = self._children()
                os.kill(self.daemon.pid, signal.SIGSTOP)  # so that it cannot restart what dies first
                for name in ("sentinel", "worker", "policy_host"):
                    _kill(children[name])
                for index in range(NUM_GPUS):
                    self._kill_trainer(index)
                self._kill_daemon()
                lowered = self.lowered()
                begun_s = time.monotonic()
                restore = [sys.executable, "-I", "-m", "gpuenergyd.gpu.restore.command"]
                for _ in range(_MAX_RESTORES if self.uses_commands else 1):  # as an operator or systemd repeats it
                    done = subprocess.run(
                        [*restore, "--journal", str(self.daemon.journal_path)],
                        check=False,
                        timeout=COMMANDS_GIVE_UP_S,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                    if done.returncode == 0:
                        break
        if victim in _BUDGET_STAYS:
            self._request_budget(None)
        left = set(lowered)
        while left and time.monotonic() < begun_s + (COMMANDS_GIVE_UP_S if self.uses_commands else GIVE_UP_S):
            left &= self.lowered()
            if left:
                time.sleep(0.005 if self.uses_commands else 0.0005)
        restored_s = time.monotonic() - begun_s
        is_damaged = False
        if victim in {"daemon", "all"}:
            for index in list(self.trainers):
                self._kill_trainer(index)
            if victim == "daemon":
                wait_until(lambda: not self.lowered(), COMMANDS_GIVE_UP_S if self.uses_commands else GIVE_UP_S)
            is_damaged = self._is_database_damaged()
        return Trial(victim, len(lowered), restored_s, len(left), is_damaged)

    def _restart_missing(self) -> None:
        """Start processes that are missing."""
        assert self.daemon.process is not None
        if (status := self.daemon.process.poll()) is not None:
            assert status == -signal.SIGKILL, f"the daemon ended by itself, status {status}:\n{self.daemon.log[-5000:]}"
            self.daemon.start()
        self._request_budget(self.power_budget_w)
        for index in range(NUM_GPUS):
            if index not in self.trainers:
                self.num_started += 1
                self.trainers[index] = _fork(lambda index=index: self._train(index))  # type: ignore[misc]

    def _request_budget(self, budget_w: float | None) -> None:
        if self.power_budget_w is not None:
            with contextlib.closing(self.daemon.client()) as client:
                client.put("/v1/power-budget", {"power_budget_w": budget_w})

    def _train(self, index: int) -> None:
        host = SimulatedHost.open(self.daemon.world_path)
        gpu = host.identities()[index].gpu_uuid
        host.attach_process(gpu, os.getpid())
        rank = RankDescription(
            job_name=f"job-{index}",
            run_key=f"run-{self.num_started}",
            gpu_uuid=gpu,
            schedule_name="plain",
            num_microbatches=1,
        )
        client = RankClient(rank, order=[("F", 0, 0)], socket_path=str(self.daemon.socket_path))
        while True:
            client.begin_iteration()
            slot = client.begin_instruction("F", 0)
            host.begin_work(gpu, LONG_WORK if self.uses_commands else WORK)
            host.hold(gpu)
            host.finish_work(gpu)
            client.end_instruction(slot)
            client.end_iteration()

    def _children(self) -> dict[str, int]:
        """Return the pids of the daemon's processes, once none of them is being replaced."""
        pids: dict[str, int] = {}

        def are_all_there() -> bool:
            status = self.daemon.status()
            pids["sentinel"] = status["worker"]["sentinel_pid"] or 0
            pids["worker"] = status["worker"]["pid"] or 0
            pids["policy_host"] = status["policy_host"]["pid"] or 0
            return all(pids.values())

        wait_until(are_all_there)
        return pids

    def _kill_trainer(self, index: int) -> None:
        pid = self.trainers.pop(index)
        _kill(pid)
        os.waitpid(pid, 0)

    def _kill_daemon(self) -> None:
        assert self.daemon.process is not None
        self.daemon.process.kill()
        self.daemon.process.wait(LIMIT_S)

    def _is_database_damaged(self) -> bool:
        database = sqlite3.connect(self.daemon.database_path)
        try:
            (verdict,) = database.execute("PRAGMA quick_check").fetchone()
        except sqlite3.DatabaseError:
            return True
        finally:
            database.close()
        return bool(verdict != "ok")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _fork(work: Callable[[], None]) -> int:
    """Run a function in a forked child, which shares the imported modules, and return its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs the loss of its daemon
            work()
            status = 0
        finally:
            os._exit(status)
    return pid
