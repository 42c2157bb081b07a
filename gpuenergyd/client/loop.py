"""`gpuenergyd.job` for training loops without a pipeline; with torch, forward, backward and optimizer are timed."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from gpuenergyd.client.environment import find_gpu_uuid, find_rank, find_run_key
from gpuenergyd.client.exchanges import start_pace_exchange
from gpuenergyd.client.figures import Metrics, metrics_of
from gpuenergyd.client.lookout import DaemonLookout
from gpuenergyd.client.phases.marks import MAX_PHASES, PhaseMarks
from gpuenergyd.client.phases.step_cycle import StepCycle, StepTurn
from gpuenergyd.client.phases.torch_hooks import TorchPhases
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.timing.cuda import loaded_cuda_device
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import InstructionTimer
from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire.messages import JobFigures

logger = safe_logger("gpuenergyd.client")

_TRIES_TO_FIND_GPU = 3
_NOT_FOLLOWED: AbstractContextManager[None] = nullcontext()
"""Context manager of an iteration before the loop has joined, which does nothing."""
LOOP_RANK = RankDescription(framework="loop")


class LoopJob:
    """A training loop without a pipeline: each process is a pipeline of one rank, with its rank as `dp_rank`.

    The loop joins once a daemon runs. It looks for its GPU up to the third iteration, because many programs use CUDA
    only from the first iteration on.
    """

    def __init__(
        self,
        rank: RankDescription,
        *,
        run_key: str | None,
        socket_path: str | None,
        timer: InstructionTimer | None = None,
        finds_phases: bool = True,
        cycle: StepCycle | None = None,
        registers_steps: bool = True,
    ) -> None:
        self._rank = rank
        self._run_key = run_key
        self._socket_path = socket_path
        self._timer = timer
        self._finds_phases = finds_phases
        self._registers_steps = registers_steps
        self._cycle = cycle
        self._marks = PhaseMarks(cycle=cycle)
        self._hooks: TorchPhases | None = None
        self._client: RankClient | None = None
        self._last_figures: JobFigures | None = None
        """The last figures of a client that has left."""
        self._stop_exchange: Callable[[], None] | None = None
        self._num_tries = self._num_left_out = 0
        self._lookout = DaemonLookout(socket_path)
        self.has_given_way = False
        """Whether this loop marks nothing any more: another part of the process replaced it, or it could not join."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._marks.end_learning()
        self._leave(shall_wait=True)

    def _leave(self, *, shall_wait: bool) -> None:
        if self._hooks is not None:
            self._hooks.detach()
            self._hooks = None
        if self._stop_exchange is not None:
            self._stop_exchange()
            self._stop_exchange = None
        client, self._client = self._client, None
        if client is not None:
            self._last_figures = client.figures
            client.release(shall_wait=shall_wait)

    def _leave_to_another(self) -> None:
        self.has_given_way = True
        self._leave(shall_wait=True)

    def iteration(self, *, num_tokens: int | None = None) -> AbstractContextManager[None]:
        """Return a context manager around one iteration, in which this process handles so many tokens (or samples)."""
        if self._num_left_out:
            self._num_left_out -= 1
            return _NOT_FOLLOWED
        client = self._client
        if client is not None and client.num_left > client.num_in_full:  # as little as possible
            client.num_tokens = num_tokens
            return self._marks
        if (client is None or client.is_unheard) and not self.join():
            self._num_left_out = self._lookout.num_to_leave_out
            return _NOT_FOLLOWED
        self.set_num_tokens(num_tokens)
        return self._marks

    def set_num_tokens(self, num_tokens: int | None) -> None:
        """Set the number of tokens of the current iteration, where it is known only at the end."""
        if self._client is not None:
            self._client.num_tokens = num_tokens

    def metrics(self, *, price_per_kwh: float | None = None) -> Metrics:
        """Return the job's measured figures for the program's own log; see `gpuenergyd.client.figures`."""
        return metrics_of(self.figures, price_per_kwh=price_per_kwh)

    @property
    def figures(self) -> JobFigures | None:
        """The figures as the daemon last sent them: the same object until newer ones arrive."""
        return self._last_figures if self._client is None else self._client.figures

    def pause(self) -> None:
        """Mark a pause after an iteration (evaluation, checkpoint), so that it is not part of the iteration's time."""
        self._marks.pause()

    def join(self) -> bool:
        """Join the job if a daemon runs and the loop has not joined yet; return whether it has joined."""
        try:
            return not self.has_given_way and self._join()
        except Exception as error:  # noqa: BLE001  nothing of ours may stop a training
            self.has_given_way = True
            logger.warning("gpuenergyd: cannot join the daemon (%r); training continues at full speed", error)
            return False

    def _join(self) -> bool:
        if self._client is not None and not self._client.is_unheard:
            return True
        if self._client is not None:
            self._leave(shall_wait=False)
            self._marks = PhaseMarks(cycle=self._cycle)
            self._lookout.record_refusal()
        if self._lookout.sees_daemon():
            self._client = self._try_to_join()
        return self._client is not None

    def _try_to_join(self) -> RankClient | None:
        gpu_uuid = find_gpu_uuid(self._rank.gpu_uuid)
        self._num_tries += 1
        if gpu_uuid is None and self._num_tries < _TRIES_TO_FIND_GPU:
            return None
        dp_rank, world_size = find_rank()
        run_key = find_run_key(self._run_key, num_processes=world_size)
        rank = replace(
            self._rank,
            run_key=run_key,
            dp_rank=dp_rank,
            num_dp_ranks=world_size,
            gpu_uuid=gpu_uuid,
            is_first=dp_rank == 0,
        )
        device = loaded_cuda_device() if gpu_uuid is not None else None
        timer = self._timer if device is None or self._timer else DeviceRecorder(device, capacity=MAX_PHASES)
        client = RankClient(
            rank,
            socket_path=self._socket_path,
            timer=timer,
            learn_times=self._marks.learn_times,
            give_way=self._leave_to_another if self._cycle is not None else None,
        )
        self._marks.follow(client, waits_for_others=world_size > 1)
        self._hooks = self._find_phases() if client.is_managed and self._finds_phases else None
        if self._hooks is None:
            self._marks.register_whole()
        self._stop_exchange = start_pace_exchange("loop", client, self._socket_path, run_key=run_key, dp_rank=dp_rank)
        return client

    @property
    def phases(self) -> TorchPhases | None:
        """The torch hooks that find the phases; None if there are none."""
        return self._hooks

    def join_after(self, turn: StepTurn) -> None:
        """Join the job of a loop without marks, after a step of one of its optimizers."""
        self.join()
        self._marks.begin_turns(turn)

    def after_step(self, optimizer: Any) -> None:
        """Handle an optimizer step of a loop without marks; join if a daemon has appeared."""
        self.join()
        if self._hooks is not None:
            self._hooks.after_step(optimizer)
        else:
            self._marks.follow_step(optimizer, is_of_model=True)

    def _find_phases(self) -> TorchPhases | None:
        """Return the hooks; None if the program has not loaded torch, or an unsupported version of it."""
        torch: Any = sys.modules.get("torch")
        try:
            return None if torch is None else TorchPhases(torch, self._marks, registers_steps=self._registers_steps)
        except Exception:  # noqa: BLE001  torch may lack any attribute; the loop then runs without hooks
            return None


def job(
    name: str | None = None,
    *,
    gpu_uuid: str | None = None,
    socket_path: str | None = None,
    run_key: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
    num_iterations: int | None = None,
    phases: bool = True,
) -> LoopJob:
    """Return a context manager that joins a training loop to the daemon; without a daemon it does nothing.

    Args:
        name: name of the job in reports; by default from GPUENERGYD_JOB or the program.
        gpu_uuid: this process's GPU; by default from GPUENERGYD_GPU_UUID or the CUDA device in use.
        socket_path: path of the daemon's socket; by default from GPUENERGYD_SOCKET or the usual places.
        run_key: a key that differs between runs of the same name; by default from the launcher's variables.
        policy: name of the clock policy; by default from GPUENERGYD_JOB_POLICY, else the daemon's.
        max_slowdown_ratio: permitted slowdown against full speed, e.g. 0.05; by default from
            GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO, else the daemon's.
        num_iterations: number of iterations of this run, for planning the slowdown budget to its end; alternatives are
            the variables GPUENERGYD_JOB_ITERATIONS, _HOURS and _DEADLINE.
        phases: whether forward, backward and other phases, found by torch's hooks, get separate clocks; False plans one
            clock for the whole iteration.
    """
    rank = replace(
        LOOP_RANK,
        job_name=name,
        gpu_uuid=gpu_uuid,
        policy=policy,
        max_slowdown_ratio=max_slowdown_ratio,
        num_iterations=num_iterations,
    )
    return LoopJob(rank, run_key=run_key, socket_path=socket_path, finds_phases=phases)


def unmarked_job(cycle: StepCycle) -> LoopJob:
    """Return the job of a loop that does not mark its iterations; all options come from the environment.

    The caller calls `before_step` of `LoopJob.phases` before each optimizer step, and `LoopJob.after_step` after it.
    """
    return LoopJob(LOOP_RANK, run_key=None, socket_path=None, cycle=cycle, registers_steps=False)
