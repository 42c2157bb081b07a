"""`gpuenergyd.job` for plain training loops: one clock for the whole iteration."""

from dataclasses import replace
from types import TracebackType
from typing import Self

from gpuenergyd.client.environment import find_gpu_uuid, find_rank, find_run_key
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.timing.cuda import loaded_cuda_device
from gpuenergyd.client.timing.device_recorder import DeviceRecorder

SCHEDULE_NAME = "loop"
_TRIES_TO_FIND_GPU = 3


class LoopJob:
    """A training loop without a pipeline; each process is a pipeline of one rank, with its rank as `dp_rank`.

    The GPU is searched until the third iteration, because many programs use CUDA only from the first one on.
    """

    def __init__(self, rank: RankDescription, *, run_key: str | None, socket_path: str | None) -> None:
        self._rank = rank
        self._run_key = run_key
        self._socket_path = socket_path
        self._client: RankClient | None = None
        self._num_tries = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.release()

    def iteration(self) -> "LoopIteration":
        """Return a context manager around one iteration."""
        if self._client is None:
            self._client = self._try_to_join()
        return LoopIteration(self._client)

    def pause(self) -> None:
        """Mark a pause after an iteration (evaluation, checkpoint), so that it does not count into the iteration."""
        if self._client is not None:
            self._client.pause()

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
        timer = None if device is None else DeviceRecorder(device, capacity=1)
        return RankClient(rank, order=(("F", 0, 0),), socket_path=self._socket_path, timer=timer)


class LoopIteration:
    """Context manager of one iteration; an exception propagates, and the iteration is not reported."""

    __slots__ = ("_client", "_slot")

    def __init__(self, client: RankClient | None) -> None:
        self._client = client
        self._slot = -1

    def __enter__(self) -> None:
        if self._client is not None:
            self._client.begin_iteration()
            self._slot = self._client.begin_instruction("F", 0, 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._client is None:
            return
        if kind is not None:
            self._client.abandon_iteration()
            return
        self._client.end_instruction(self._slot)
        self._client.end_iteration()


def job(
    name: str | None = None,
    *,
    gpu_uuid: str | None = None,
    socket_path: str | None = None,
    run_key: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
    num_iterations: int | None = None,
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
    """
    rank = RankDescription(
        job_name=name,
        run_key="",
        gpu_uuid=gpu_uuid,
        schedule_name=SCHEDULE_NAME,
        num_microbatches=1,
        framework="loop",
        policy=policy,
        max_slowdown_ratio=max_slowdown_ratio,
        num_iterations=num_iterations,
    )
    return LoopJob(rank, run_key=run_key, socket_path=socket_path)
