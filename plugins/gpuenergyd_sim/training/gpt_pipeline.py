"""The demo's model under any schedule of torch: the stages of a rank, and their training step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed import pipelining

from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import InstructionTimer
from gpuenergyd.errors import UsageError
from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
from gpuenergyd_sim.driver.stream import SimulatedStream
from gpuenergyd_sim.driver.stream_signals import StreamSignals
from gpuenergyd_sim.training.gpt_model import build_stage, loss_of, make_batch, simulated_works
from gpuenergyd_sim.training.simulated_stage import StageStream, num_channels, simulate
from gpuenergyd_sim.training.timers import SimulatedDevice, SimulatedGraph, SimulatedTimer
from gpuenergyd_trainers.torch_inflight import Schedule1F1BExtraInflight

_LEARNING_RATE = 3e-3
_MAX_KINDS = 3  # F, then B or I and W


class RunAhead(NamedTuple):
    """How far a program may launch work ahead of its simulated GPU, and the file for signals between GPUs."""

    iterations: float
    """Size of the launch queue, as a number of iterations."""
    signals_path: Path
    """File for the signals between the streams, the same for all ranks of a run."""
    open_signals: Callable[[Path, int], StreamSignals] = StreamSignals
    """Called with the path and the number of channels to open the file."""


class PipelineFamily(NamedTuple):
    """A schedule of torch and its placement of stages on ranks."""

    schedule_class: Any
    num_chunks: int = 1
    is_v_shaped: bool = False

    def stage_indices(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        if self.is_v_shaped:
            return rank, 2 * num_ranks - 1 - rank
        return tuple(chunk * num_ranks + rank for chunk in range(self.num_chunks))


PIPELINES: Mapping[str, PipelineFamily] = MappingProxyType(
    {
        "1f1b": PipelineFamily(pipelining.Schedule1F1B),
        "gpipe": PipelineFamily(pipelining.ScheduleGPipe),
        "interleaved": PipelineFamily(pipelining.ScheduleInterleaved1F1B, 2),
        "looped-bfs": PipelineFamily(pipelining.ScheduleLoopedBFS, 2),
        "interleaved-zb": PipelineFamily(pipelining.ScheduleInterleavedZeroBubble, 2),
        "zbv": PipelineFamily(pipelining.ScheduleZBVZeroBubble, 2, is_v_shaped=True),
        "dualpipev": PipelineFamily(pipelining.ScheduleDualPipeV, 2, is_v_shaped=True),
    }
)
"""Schedules by their names in `gpuenergyd plan --schedule`."""


class GptRank:
    """One rank of the demo's training; with `extra_inflight`, its constructor is a collective call."""

    def __init__(
        self,
        schedule_name: str,
        rank: int,
        num_ranks: int,
        num_microbatches: int,
        *,
        extra_inflight: Sequence[int] | None = None,
        seed: int = 0,
        stage_class: Any = pipelining.PipelineStage,
    ) -> None:
        family = PIPELINES[schedule_name]
        self._num_ranks, self._num_microbatches, self._seed = num_ranks, num_microbatches, seed
        self.num_stages = num_ranks * family.num_chunks
        indices = family.stage_indices(rank, num_ranks)
        self.is_first, self.is_last = 0 in indices, self.num_stages - 1 in indices
        models = [build_stage(index, self.num_stages, seed=seed) for index in indices]
        self.stages: list[Any] = [
            stage_class(model, index, self.num_stages, torch.device("cpu"))
            for model, index in zip(models, indices, strict=True)
        ]
        self.schedule: Any
        if extra_inflight is not None:
            self.schedule = Schedule1F1BExtraInflight(
                self.stages[0], num_microbatches, extra_inflight=extra_inflight, loss_fn=loss_of
            )
        else:
            held = self.stages if family.num_chunks > 1 else self.stages[0]
            self.schedule = family.schedule_class(held, num_microbatches, loss_fn=loss_of)
        parameters = [parameter for model in models for parameter in model.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE)
        self.timer: InstructionTimer | None = None
        """The timer to pass to `attach` when the stages are on a simulated GPU."""
        self.works: list[dict[str, InstructionWork]] = []
        """The simulated work of each kind of instruction, by stage; changes take effect at the next instruction."""
        self._stream: SimulatedStream | None = None
        self._device: SimulatedDevice | None = None

    def simulate_on(
        self, host: SimulatedHost, gpu_uuid: str, *, duration_scale: float = 1.0, run_ahead: RunAhead | None = None
    ) -> ExitStack:
        """Put the rank's stages on a simulated GPU; closing the stack undoes that.

        Without `run_ahead` the program waits for each instruction.
        """
        cleanup = ExitStack()
        timer, stage_stream = SimulatedTimer(), None
        if run_ahead is None:
            self.timer = timer
        else:
            per_iteration = _MAX_KINDS * self._num_microbatches * len(self.stages)
            signals = run_ahead.open_signals(run_ahead.signals_path, num_channels(self.num_stages))
            cleanup.callback(signals.close)
            works_ahead = round(run_ahead.iterations * 2 * self._num_microbatches * len(self.stages))
            self._stream = SimulatedStream(host, gpu_uuid, max_launched=works_ahead)
            cleanup.callback(self._stream.close)
            self._device = SimulatedDevice(self._stream)
            self.timer = DeviceRecorder(self._device, per_iteration + 1)
            stage_stream = StageStream(self._stream, signals)
        for stage in self.stages:
            works = simulated_works(
                stage.stage_index, self.num_stages, num_ranks=self._num_ranks, duration_scale=duration_scale
            )
            self.works.append(works)
            simulated = simulate(stage, host, gpu_uuid, works, timer=timer, stage_stream=stage_stream)
            cleanup.callback(simulated.detach)
        return cleanup

    def synchronize(self) -> None:
        """Wait until the simulated GPU has executed everything, as a program that reads the loss does."""
        if self._stream is not None:
            self._stream.synchronize()

    def step(self, iteration_index: int) -> tuple[torch.Tensor, ...]:
        """Train on one batch; return the loss of each microbatch, or nothing on ranks without the last stage."""
        losses = self.add_gradients(iteration_index)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses

    def add_gradients(self, iteration_index: int) -> tuple[torch.Tensor, ...]:
        """Run forwards and backwards of one batch without an optimizer step; return the losses as `step` does."""
        return self._run(self.schedule.step, iteration_index)

    def capture_step(self, iteration_index: int) -> SimulatedGraph:
        """Capture the forwards and backwards of one batch in a graph; replays do only the simulated GPU's work.

        Raises:
            UsageError: the stages are not simulated, or without `run_ahead`.
        """
        if self._stream is None or self._device is None:
            raise UsageError("a step is captured on the stream of a simulated GPU: simulate_on(..., run_ahead=...)")
        graph = SimulatedGraph(self._device, self._stream)
        with graph.capture():
            self.add_gradients(iteration_index)
        return graph

    def evaluate(self, iteration_index: int) -> tuple[torch.Tensor, ...]:
        """Run the forwards of one batch; return the losses as `step` does."""
        with torch.no_grad():
            return self._run(self.schedule.eval, iteration_index)

    def _run(self, run: Callable[..., Any], iteration_index: int) -> tuple[torch.Tensor, ...]:
        inputs, targets = make_batch(iteration_index, self._num_microbatches, seed=self._seed)
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.is_first else ()
        run(*arguments, return_outputs=False, **({"target": targets, "losses": losses} if self.is_last else {}))
        return tuple(losses)
