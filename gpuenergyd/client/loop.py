"""`gpuenergyd.job` for plain training loops: one clock for the whole iteration, learned under the job's target."""

from types import TracebackType
from typing import Self

from gpuenergyd.client.environment import find_gpu_uuid, find_rank, find_run_key
from gpuenergyd.client.rank import RankClient

SCHEDULE_NAME = "loop"
_ITERATIONS_TO_FIND_GPU = 3


class LoopJob:
    """A training loop without a pipeline; every process is a pipeline of one rank, `dp_rank` its number.

    The GPU is looked for until the third iteration, since many programs touch CUDA only in the first.
    """

    def __init__(
        self,
        name: str,
        *,
        gpu_uuid: str | None = None,
        socket_path: str | None = None,
        run_key: str | None = None,
        policy: str | None = None,
        max_slowdown_ratio: float | None = None,
        num_iterations: int | None = None,
    ) -> None:
        self._name = name
        self._gpu_uuid = gpu_uuid
        self._socket_path = socket_path
        self._run_key = run_key
        self._policy = policy
        self._max_slowdown_ratio = max_slowdown_ratio
        self._num_iterations = num_iterations
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
        """Say that no iteration follows now, but evaluation, a checkpoint or such: it is no part of the one before."""
        if self._client is not None:
            self._client.pause()

    def _try_to_join(self) -> RankClient | None:
        gpu_uuid = find_gpu_uuid(self._gpu_uuid)
        self._num_tries += 1
        if gpu_uuid is None and self._num_tries < _ITERATIONS_TO_FIND_GPU:
            return None
        rank, world_size = find_rank()
        return RankClient(
            job_name=self._name,
            run_key=find_run_key(self._run_key, num_processes=world_size),
            gpu_uuid=gpu_uuid,
            schedule_name=SCHEDULE_NAME,
            num_microbatches=1,
            dp_rank=rank,
            order=(("F", 0, 0),),
            framework="loop",
            policy=self._policy,
            max_slowdown_ratio=self._max_slowdown_ratio,
            num_iterations=self._num_iterations,
            socket_path=self._socket_path,
        )


class LoopIteration:
    """One iteration of a plain loop; an exception inside passes through, and the iteration is not reported."""

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
    name: str,
    *,
    gpu_uuid: str | None = None,
    socket_path: str | None = None,
    run_key: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
    num_iterations: int | None = None,
) -> LoopJob:
    """Return a context manager that joins a plain training loop to the daemon; without one it does nothing.

    Args:
        name: what the job is called in reports.
        gpu_uuid: this process's GPU; found from GPUENERGYD_GPU_UUID or CUDA when left out.
        socket_path: the daemon's socket; found from GPUENERGYD_SOCKET or the usual places when left out.
        run_key: what tells this run from others of its name; from the launcher's variables when left out.
        policy: the clock policy to use; the daemon's default when left out.
        max_slowdown_ratio: how much slower than full speed it may become, e.g. 0.05; the daemon's default
            when left out.
        num_iterations: how many iterations this run will have, so that a slowdown budget can be planned to its end;
            GPUENERGYD_JOB_ITERATIONS, _HOURS and _DEADLINE say it too.
    """
    return LoopJob(
        name,
        gpu_uuid=gpu_uuid,
        socket_path=socket_path,
        run_key=run_key,
        policy=policy,
        max_slowdown_ratio=max_slowdown_ratio,
        num_iterations=num_iterations,
    )
