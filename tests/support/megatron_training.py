"""A small training with real Megatron-core on gloo, whose instructions take the time of a simulated GPU.

It has pipeline, tensor and data parallelism. Weights are split over tensor-parallel ranks with Megatron's own
collectives, gradients are averaged over data-parallel ranks, and CUDA calls are replaced. Run `python -m
tests.support.megatron_training --folder DIR --tp 2 --dp 2` for a training with daemons and one without, and what the
daemons say of the first; `--hosts 2` puts half of the ranks on GPUs of another daemon.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpuenergyd.gpu.drivers.simulated import InstructionWork, SimulatedHost
from gpuenergyd_trainers.across_hosts.job_store import STORE_VARIABLE
from gpuenergyd_trainers.megatron import attach
from gpuenergyd_trainers.timing.simulated import SimulatedTimer

NUM_STAGES = 2
_WIDTH, _SEQUENCE = 8, 4
_FORWARD_S, _BACKWARD_S = 0.010, 0.020
_LAST_STAGE_RATIO = 1.3
_COMPUTE_SHARE, _POWER_W_PER_MHZ = 0.8, 0.2


@dataclass(frozen=True)
class MegatronTraining:
    """Sizes and length of a training, and the simulated GPUs that it runs on."""

    world_paths: tuple[Path, ...]
    """The GPUs of each host."""
    tp: int = 1
    dp: int = 1
    microbatches: int = 4
    iterations: int = 8
    socket_paths: tuple[str, ...] = ()
    """The daemon of each host; empty for no daemon."""
    num_followed: int = 0
    """The training goes on until every rank has followed plans in so many iterations."""
    scale: float = 1.0
    """Factor on the duration of instructions."""
    max_slowdown: float = 0.01

    @property
    def num_ranks(self) -> int:
        """Processes of the training."""
        return NUM_STAGES * self.tp * self.dp

    def run_rank(self, rank: int) -> tuple[list[list[str]], list[int]]:
        """Train in the default process group; return the exact losses and the plan's epoch of each iteration."""
        _replace_cuda_calls()
        per_host = self.num_ranks // len(self.world_paths)
        host_index, gpu_index = divmod(rank, per_host)
        os.environ.update(LOCAL_WORLD_SIZE=str(per_host), WORLD_SIZE=str(self.num_ranks), RANK=str(rank))
        import megatron.core.parallel_state as state  # type: ignore[import-not-found]  # noqa: PLC0415  after that
        from megatron.core.pipeline_parallel.schedules import (  # type: ignore[import-not-found]  # noqa: PLC0415
            forward_backward_pipelining_without_interleaving as run_step,
        )

        state.initialize_model_parallel(tensor_model_parallel_size=self.tp, pipeline_model_parallel_size=NUM_STAGES)
        host, timer = SimulatedHost.open(self.world_paths[host_index]), SimulatedTimer()
        gpu_uuid = host.identities()[gpu_index].gpu_uuid
        host.attach_process(gpu_uuid, os.getpid())
        gpu = _Gpu(host, gpu_uuid, timer, self._ratio(state.get_pipeline_model_parallel_rank()))
        config = _config(self.tp)
        stage = _make_stage(config, state, gpu)
        handle = attach(
            config,
            job="megatron",
            run_key="r",
            num_microbatches=self.microbatches,
            gpu_uuid=gpu_uuid,
            socket_path=self.socket_paths[host_index] if self.socket_paths else "/none",
            max_slowdown_ratio=self.max_slowdown,
            timer=timer,
        )
        if not self.socket_paths:
            handle.detach()
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        losses: list[list[str]] = []
        epochs: list[int] = []
        while not self._is_enough(epochs):
            step = len(losses)
            generator = torch.Generator().manual_seed(step * 97 + state.get_data_parallel_rank())
            data = [torch.randn(_SEQUENCE, 1, _WIDTH, generator=generator) for _ in range(self.microbatches)]
            parts = run_step(
                forward_step_func=_forward_step,
                data_iterator=iter(data),
                model=stage,
                num_microbatches=self.microbatches,
                seq_length=_SEQUENCE,
                micro_batch_size=1,
                forward_only=False,
            )
            for parameter in stage.parameters():
                dist.all_reduce(parameter.grad, group=state.get_data_parallel_group())
            optimizer.step()
            optimizer.zero_grad()
            losses.append([part["loss"] for part in parts])
            epochs.append(handle.plan_epoch)
        assert handle.num_errors == 0
        handle.detach()
        host.detach_process(gpu_uuid, os.getpid())
        return losses, epochs

    def _is_enough(self, epochs: list[int]) -> bool:
        """Return whether the training has lasted long enough on all ranks."""
        num_followed = sum(epoch > 0 for epoch in epochs)
        is_enough = len(epochs) >= self.iterations and num_followed >= self.num_followed
        answer = torch.tensor([int(is_enough)])
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer.item())

    def _ratio(self, pp_rank: int) -> float:
        return self.scale * (_LAST_STAGE_RATIO if pp_rank == NUM_STAGES - 1 else 1.0)


@dataclass(frozen=True)
class _Gpu:
    """The simulated GPU of one rank."""

    host: SimulatedHost
    gpu_uuid: str
    timer: SimulatedTimer
    ratio: float

    def work(self, time_s: float) -> None:
        """Wait until work of this duration at full speed is done."""
        own_s = time_s * self.ratio
        self.host.begin_work(
            self.gpu_uuid,
            InstructionWork(
                memory_time_s=own_s * (1 - _COMPUTE_SHARE),
                compute_time_s=own_s * _COMPUTE_SHARE,
                power_coefficient_w_per_mhz=_POWER_W_PER_MHZ,
            ),
        )
        self.host.hold(self.gpu_uuid)
        self.timer.work_ended_ns = self.host.finish_work(self.gpu_uuid)


def _replace_cuda_calls() -> None:
    zeros = torch.zeros
    replaced: Any = torch
    replaced.zeros = lambda *args, **kwargs: zeros(*args, **{**kwargs, "device": "cpu"})
    replaced.cuda.current_device = lambda: "cpu"
    replaced.cuda.synchronize = lambda *_: None


def _config(num_tp_ranks: int) -> Any:
    from megatron.core import ModelParallelConfig  # noqa: PLC0415  after the replacing

    config = ModelParallelConfig(
        tensor_model_parallel_size=num_tp_ranks,
        pipeline_model_parallel_size=NUM_STAGES,
        pipeline_dtype=torch.float32,
    )
    config.hidden_size = _WIDTH
    config.fine_grained_activation_offloading = False  # a transformer's configuration has it, this bare one has not
    return config


def _make_stage(config: Any, state: Any, gpu: _Gpu) -> Any:
    from megatron.core.enums import ModelType  # type: ignore[import-not-found]  # noqa: PLC0415  after the replacing
    from megatron.core.tensor_parallel import mappings  # type: ignore[import-not-found]  # noqa: PLC0415

    class Backward(torch.autograd.Function):
        """Nothing in a forward, the GPU's work in a backward."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            """Return the input."""
            del ctx
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            """Take the time of a backward."""
            del ctx
            gpu.work(_BACKWARD_S)
            return gradients[0]

    class Stage(torch.nn.Module):
        """A linear layer whose weights are split by columns of its input."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(state.get_pipeline_model_parallel_rank() * 8 + state.get_tensor_model_parallel_rank())
            self.layer = torch.nn.Linear(_WIDTH, _WIDTH)
            self.config = config
            self.model_type = ModelType.encoder_or_decoder
            self.received: Any = None

        def set_input_tensor(self, tensors: list[Any]) -> None:
            """Set the activations of the previous stage."""
            self.received = tensors[0]

        def forward(self, x: Any) -> Any:
            """Return activations, after the time of a forward; tensor-parallel ranks then wait for each other."""
            gpu.work(_FORWARD_S)
            own = mappings.copy_to_tensor_model_parallel_region(x if self.received is None else self.received)
            summed = mappings.reduce_from_tensor_model_parallel_region(self.layer(own))
            return Backward.apply(summed)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    return Stage()


def _forward_step(data: Any, stage: Any) -> Any:
    output = stage(next(data))
    return output, lambda out: (out.square().mean(), {"loss": float(out.detach().square().mean()).hex()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with and without daemons on simulated GPUs; print what the daemons measured, as JSON."""
    from tests.support.daemon_process import DaemonProcess  # noqa: PLC0415  the tests need neither
    from tests.support.waiting import wait_until  # noqa: PLC0415
    from tests.trainers.pipeline_processes import run_ranks  # noqa: PLC0415

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("tp", "dp", "microbatches", "iterations", "scale")}
    num_gpus = NUM_STAGES * options.tp * options.dp // options.hosts
    folders = [options.folder / f"host{k}" for k in range(options.hosts)]
    daemons = [DaemonProcess(folder, num_gpus, {"baseline_iterations": 10}).start() for folder in folders]
    alone = options.folder / "alone"
    alone.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # public
    os.environ[STORE_VARIABLE] = f"127.0.0.1:{store.port}"
    try:
        worlds = tuple(daemon.world_path for daemon in daemons)
        sockets = tuple(str(daemon.socket_path) for daemon in daemons)
        own = MegatronTraining(worlds, socket_paths=sockets, **sizes)
        joined = run_ranks(own.num_ranks, options.folder, own.run_rank)
        wait_until(lambda: not any(daemon.job() for daemon in daemons), 60)
        jobs = [job for daemon in daemons for job in daemon.status()["ended_jobs"]]
        without = run_ranks(own.num_ranks, alone, MegatronTraining(worlds, **sizes).run_rank)
    finally:
        for daemon in daemons:
            daemon.stop()
    names = ("job_name", "outcome", "summary", "saving_ratio", "saving_interval", "slowdown_ratio", "baseline_time_s")
    result = {
        "num_ranks": own.num_ranks,
        "jobs": [{name: job[name] for name in names} for job in jobs],
        "are_losses_equal": [losses for losses, _ in joined] == [losses for losses, _ in without],
        "num_iterations_under_plans": [sum(epoch > 0 for epoch in epochs) for _, epochs in joined],
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
