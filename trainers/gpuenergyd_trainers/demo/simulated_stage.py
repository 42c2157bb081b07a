"""Pipeline stages with the durations of a simulated GPU: after the real computation, they wait for the simulated end.

Call `simulate` before `attach`, so that recorded instructions include the wait.
"""

import os
from collections.abc import Mapping
from typing import Any

from gpuenergyd.gpu.drivers.simulated import InstructionWork, SimulatedHost
from gpuenergyd_trainers.joining.handle import Call, WrappedAttribute
from gpuenergyd_trainers.timing.simulated import SimulatedTimer

__all__ = ["InstructionWork", "SimulatedHost", "SimulatedTimer", "SimulationHandle", "simulate"]


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


def simulate(
    stage: Any,
    host: SimulatedHost,
    gpu_uuid: str,
    work_by_kind: Mapping[str, InstructionWork],
    *,
    timer: SimulatedTimer | None = None,
) -> SimulationHandle:
    """Put a stage of torch.distributed.pipelining on a simulated GPU.

    `work_by_kind` is the work of a forward (F), a full backward (B), an input gradient (I) or a weight gradient (W); a
    missing kind is not simulated. Real computation counts towards the simulated time. A `timer` that `attach` gets,
    too, records the simulated durations.

    Raises:
        GpuNotFoundError: no such GPU.
    """
    host.attach_process(gpu_uuid, os.getpid())

    def around(kind_of: Call) -> Any:
        def make(compute: Call) -> Call:
            def compute_on_simulated_gpu(*args: Any, **kwargs: Any) -> Any:
                work = work_by_kind.get(kind_of(args, kwargs))
                if work is None:
                    return compute(*args, **kwargs)
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

    return SimulationHandle(
        host,
        gpu_uuid,
        [
            WrappedAttribute(stage, "forward_one_chunk", around(lambda *_: "F")),
            WrappedAttribute(stage, "backward_one_chunk", around(backward_kind)),
            WrappedAttribute(stage, "backward_weight_one_chunk", around(lambda *_: "W" if stage.has_backward else "")),
        ],
    )
