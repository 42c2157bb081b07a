"""Adapter for loops that replay one CUDA graph per iteration: `attach(graph, job="gpt-1.3b")`.

Each replay is an iteration at one clock, since clocks cannot be changed inside a replay. The processes of a host replay
together and use the same clock. The graph may be captured before or later. A pipeline schedule that is captured after
`torch_pipelining.attach` gets more: a timetable of clocks for each replay, see docs/how-to/captured-graphs.md.
"""

import os
from typing import Any

from gpuenergyd.client.environment import find_gpu_uuid, find_job_options, find_rank, find_run_key
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.timing.captured_graphs import CapturedGraphs, Replay
from gpuenergyd.client.timing.cuda import loaded_cuda_device
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.event_device import EventDevice
from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.log_lines import safe_logger
from gpuenergyd_trainers.joining.attached import AttachedObjects

logger = safe_logger("gpuenergyd.trainers")


class GraphHandle:
    """An attached graph, until `detach`; without a client, a graph that could not be attached."""

    def __init__(
        self, graph: Any = None, client: RankClient | None = None, graphs: CapturedGraphs | None = None
    ) -> None:
        self._graph = graph
        self._client = client
        self._graphs = graphs
        if graphs is not None:
            graphs.follow(graph, self._replay)

    @property
    def is_attached(self) -> bool:
        """Whether replays of the graph are iterations of a job."""
        return self._client is not None

    @property
    def job_name(self) -> str:
        """Name of the job in reports; empty for a graph that is not attached."""
        return self._client.job_name if self._client is not None else ""

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the training; only that rank prints messages to the user."""
        return self._client is not None and self._client.is_first

    @property
    def num_errors(self) -> int:
        """Number of this package's own exceptions that were suppressed; each is a bug worth reporting."""
        return self._client.total_errors if self._client is not None else 0

    def pause(self) -> None:
        """Mark a pause after a replay (evaluation, checkpoint), so that its time is not counted in the iteration."""
        if self._client is not None:
            self._client.pause()

    def detach(self) -> None:
        """Leave the job."""
        client, self._client = self._client, None
        _attached.remove(self._graph)
        if self._graphs is not None:
            self._graphs.unfollow(self._graph)
        if client is not None:
            client.release()

    def _replay(self, replay: Replay) -> Any:
        client = self._client
        if client is None:
            return replay()
        client.begin_iteration()
        slot = client.begin_instruction("F", 0, 0)
        try:
            result = replay()
        except BaseException:
            client.abandon_iteration()
            raise
        client.end_instruction(slot)
        client.end_iteration()
        return result


_attached: AttachedObjects[GraphHandle] = AttachedObjects()


def attach(
    graph: Any,
    *,
    job: str | None = None,
    gpu_uuid: str | None = None,
    socket_path: str | None = None,
    run_key: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
    device: EventDevice | None = None,
) -> GraphHandle:
    """Count each replay of a graph as an iteration of a job, and return a handle that undoes this.

    Without a daemon, or if no CUDA device is in use, the graph is replayed as before, with one warning in the log. For
    a graph that is already attached, its handle is returned.

    Args:
        graph: the `torch.cuda.CUDAGraph` that is replayed once per iteration, captured or not.
        job: name of the job in reports; by default from GPUENERGYD_JOB or the program.
        gpu_uuid: this process's GPU; by default from GPUENERGYD_GPU_UUID or the CUDA device in use.
        socket_path: path of the daemon's socket; by default from GPUENERGYD_SOCKET or the usual places.
        run_key: a key that differs between runs of the same name; by default from the launcher's variables.
        policy: name of the clock policy; by default from GPUENERGYD_JOB_POLICY, else the daemon's.
        max_slowdown_ratio: permitted slowdown against full speed; by default from GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO,
            else the daemon's.
        device: the device that runs the graph; by default the CUDA device in use.
    """
    if (known := _attached.find(graph, type(graph).__name__)) is not None:
        return known
    try:
        found = loaded_cuda_device() if device is None else device
        if found is None:
            return _not_attached(job, "this process has not used a CUDA device")
        rank, world_size = find_rank()
        is_on_one_host = os.environ.get("LOCAL_WORLD_SIZE", "1") == str(world_size)
        description = RankDescription(
            job_name=job,
            run_key=find_run_key(run_key, num_processes=world_size),
            gpu_uuid=find_gpu_uuid(gpu_uuid),
            schedule_name=LOOP_SCHEDULE,
            num_microbatches=1,
            # The ranks of one stage run each instruction together and follow one plan, each on its own GPU.
            stage_rank=rank if is_on_one_host else 0,
            num_stage_ranks=world_size if is_on_one_host else 1,
            dp_rank=0 if is_on_one_host else rank,
            num_dp_ranks=1 if is_on_one_host else world_size,
            framework="CUDA graph",
            policy=policy,
            max_slowdown_ratio=max_slowdown_ratio,
            is_first=rank == 0,
            is_replayed=True,
        )
        client = RankClient(
            description, order=(("F", 0, 0),), socket_path=socket_path, timer=DeviceRecorder(found, capacity=1)
        )
        handle = GraphHandle(graph, client, found.graphs)
        _attached.add(graph, handle)
    except Exception as error:  # noqa: BLE001  training must continue unchanged
        return _not_attached(job, repr(error))
    return handle


def _not_attached(job: str | None, reason: str) -> GraphHandle:
    job_name = find_job_options(job).job_name
    logger.warning(
        "gpuenergyd: job %s: the graph cannot be joined, training continues at full speed: %s", job_name, reason
    )
    return GraphHandle()
