"""Pipeline stages with the durations of a simulated GPU.

After the real computation they either wait for the simulated end, or launch the simulated work on a stream and return.
Call `simulate` before `attach`, so that recorded instructions include the wait.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
from gpuenergyd_sim.driver.stream import SimulatedStream
from gpuenergyd_sim.driver.stream_signals import StreamSignals
from gpuenergyd_sim.training.timers import SimulatedTimer
from gpuenergyd_trainers.joining.handle import Call, WrappedAttribute

__all__ = ["InstructionWork", "SimulatedHost", "SimulatedTimer", "SimulationHandle", "StageStream", "simulate"]


class SimulationHandle:
    """A stage on a simulated GPU; `detach` undoes that."""

    def __init__(self, host: SimulatedHost, gpu_uuid: str, wrapped: list[WrappedAttribute]) -> None:
        self._host = host
        self._gpu_uuid = gpu_uuid
        self._wrapped = wrapped

    def detach(self) -> None:
        """Restore the stage and detach this process from the GPU."""
        for wrapped in reversed(self._wrapped):
            wrapped.undo()
        self._host.detach_process(self._gpu_uuid, os.getpid())


@dataclass(frozen=True, slots=True)
class StageStream:
    """The stream that executes a stage, and the signals through which it waits for the neighbouring stages."""

    stream: SimulatedStream
    signals: StreamSignals


def simulate(
    stage: Any,
    host: SimulatedHost,
    gpu_uuid: str,
    work_by_kind: Mapping[str, InstructionWork],
    *,
    timer: SimulatedTimer | None = None,
    stage_stream: StageStream | None = None,
) -> SimulationHandle:
    """Put a stage of torch.distributed.pipelining on a simulated GPU.

    `work_by_kind` is the work of a forward (F), a full backward (B), an input gradient (I) or a weight gradient (W); a
    missing kind is not simulated. Without a `stage_stream` the program waits for each instruction, and the time of the
    real computation is part of the simulated time; a `timer` that is also passed to `attach` records the simulated
    durations. With one, instructions are launched ahead and executed after the work that they depend on.

    Raises:
        GpuNotFoundError: no such GPU.
    """
    host.attach_process(gpu_uuid, os.getpid())

    def around(kind_of: Call) -> Any:
        def make(compute: Call) -> Call:
            def compute_on_simulated_gpu(*args: Any, **kwargs: Any) -> Any:
                kind = kind_of(args, kwargs)
                work = work_by_kind.get(kind)
                if work is None:
                    return compute(*args, **kwargs)
                if stage_stream is not None:
                    result = compute(*args, **kwargs)
                    stage_stream.stream.launch(work)
                    _signal_peer(stage, stage_stream, kind)
                    return result
                host.begin_work(gpu_uuid, work)
                try:
                    result = compute(*args, **kwargs)
                    host.hold(gpu_uuid)
                finally:
                    ended_ns = host.finish_work(gpu_uuid)
                    if timer is not None:
                        timer.work_ended_ns = ended_ns
                return result

            return compute_on_simulated_gpu

        return make

    def backward_kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if not stage.has_backward:
            return ""
        return "B" if kwargs.get("full_backward", args[2] if len(args) > 2 else True) else "I"

    wrapped = [
        WrappedAttribute(stage, "forward_one_chunk", around(lambda *_: "F")),
        WrappedAttribute(stage, "backward_one_chunk", around(backward_kind)),
        WrappedAttribute(stage, "backward_weight_one_chunk", around(lambda *_: "W" if stage.has_backward else "")),
    ]
    if stage_stream is not None:
        wrapped += [
            WrappedAttribute(stage, "get_fwd_recv_ops", _receiving(stage_stream, _output_of(stage.stage_index - 1))),
            WrappedAttribute(stage, "get_bwd_recv_ops", _receiving(stage_stream, _gradient_of(stage.stage_index + 1))),
        ]
    return SimulationHandle(host, gpu_uuid, wrapped)


def num_channels(num_stages: int) -> int:
    """Return the number of channels between the stages of a pipeline."""
    return 2 * num_stages


def _output_of(stage_index: int) -> int:
    """Return the channel on which a stage signals that an activation is ready."""
    return 2 * stage_index


def _gradient_of(stage_index: int) -> int:
    """Return the channel on which a stage signals that a gradient is ready."""
    return 2 * stage_index + 1


def _receiving(stage_stream: StageStream, channel: int) -> Any:
    """Wrap the method that returns a stage's receives, so that the stream waits where the program does, as with NCCL.

    The signals of a channel are in the order of its messages, so the program has to wait in that order.
    """

    def make(receives: Call) -> Call:
        def receives_on_stream(*args: Any, **kwargs: Any) -> Any:
            operations = receives(*args, **kwargs)
            if operations:  # one signal, for all that is received from the peer
                operations[-1].op = _with_stream_wait(operations[-1].op, stage_stream, channel)
            return operations

        return receives_on_stream

    return make


def _with_stream_wait(receive: Call, stage_stream: StageStream, channel: int) -> Call:
    """Return a torch receive whose `wait` also makes the stream wait for a signal."""

    @wraps(receive)
    def receive_on_stream(*args: Any, **kwargs: Any) -> "_StreamWork | None":
        work = receive(*args, **kwargs)
        return None if work is None else _StreamWork(work, stage_stream, channel)

    return receive_on_stream


class _StreamWork:
    """The work of a posted receive: what is launched after its `wait` is executed once the data has arrived."""

    def __init__(self, work: Any, stage_stream: StageStream, channel: int) -> None:
        self._work = work
        self._stage_stream = stage_stream
        self._channel = channel

    def wait(self, *args: Any) -> Any:
        """Make the stream wait for the sender's stream, then wait for the data."""
        self._stage_stream.stream.wait_for(self._stage_stream.signals, self._channel)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _signal_peer(stage: Any, stage_stream: StageStream, kind: str) -> None:
    if kind == "F" and not stage.is_last:
        stage_stream.stream.send(stage_stream.signals, _output_of(stage.stage_index))
    elif kind in {"B", "I"} and not stage.is_first:
        stage_stream.stream.send(stage_stream.signals, _gradient_of(stage.stage_index))
