"""A small training with real Megatron-core on gloo, whose instructions take the time of a simulated GPU.

It has pipeline, tensor and data parallelism. Weights are split over tensor-parallel ranks with Megatron's own
collectives, gradients are averaged over data-parallel ranks, and CUDA calls are replaced. Run `python -m
tests.support.megatron_training --folder DIR --tp 2 --dp 2` for a training with daemons and one without, and what the
daemons say of the first; `--hosts 2` puts half of the ranks on GPUs of another daemon, `--chunks 2 --overlaps-p2p`
interleaves virtual stages, and `--is-combined` overlaps forwards with backwards of other microbatches.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpuenergyd_across_hosts.ranks.job_store import STORE_VARIABLE
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.megatron import attach
from tests.support.megatron_gpt import (
    EXPERT_RANKS,
    gpt_config,
    gpt_forward_step,
    make_gpt_chunk,
    replace_cuda_calls_of_experts,
    token_batches,
)
from tests.support.megatron_stages import bare_config, batches, forward_step, make_stage, replace_cuda_calls
from tests.support.stage_gpu import StageGpu, StepRecord

_LAST_RANK_RATIO = 1.3


@dataclass(frozen=True)
class MegatronTraining:
    """Sizes and length of a training, and the simulated GPUs that it runs on."""

    world_paths: tuple[Path, ...]
    """The GPUs of each host."""
    pp: int = 2
    tp: int = 1
    dp: int = 1
    chunks: int = 1
    """Virtual stages of each pipeline rank."""
    group_size: int | None = None
    """Microbatches that a rank runs of one chunk before the next; None for Megatron's default."""
    overlaps_p2p: bool = False
    """Whether communication between stages overlaps with computation."""
    is_combined: bool = False
    """Whether forwards overlap with backwards of other microbatches: a GPT with experts on two ranks per stage."""
    microbatches: int = 4
    iterations: int = 8
    socket_paths: tuple[str, ...] = ()
    """The daemon of each host; empty for no daemon."""
    num_followed: int = 0
    """The training goes on until every rank has followed plans in so many iterations."""
    scale: float = 1.0
    """Factor on the duration of instructions."""
    max_slowdown: float = 0.01
    record_folder: Path | None = None
    """Where each rank records its steps."""
    begin_steps: Callable[[Handle], Callable[[], None]] | None = None
    """Given the attached handle of a rank, returns a function that is called before each step."""

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp * self._num_expert_ranks

    def run_rank(self, rank: int) -> tuple[list[list[str]], list[int]]:
        """Train in the default process group; return the exact losses and the plan's epoch of each iteration."""
        replace_cuda_calls()
        if self.is_combined:
            replace_cuda_calls_of_experts()
        per_host = self.num_ranks // len(self.world_paths)
        host_index, gpu_index = divmod(rank, per_host)
        os.environ.update(LOCAL_WORLD_SIZE=str(per_host), WORLD_SIZE=str(self.num_ranks), RANK=str(rank))
        import megatron.core.parallel_state as state  # type: ignore[import-not-found]  # noqa: PLC0415  after that
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # type: ignore[import-not-found]  # noqa: PLC0415

        state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self._num_virtual_stages,
            expert_model_parallel_size=self._num_expert_ranks,
        )
        ratio = self._ratio(state.get_pipeline_model_parallel_rank())
        gpu = StageGpu.attached(self.world_paths[host_index], gpu_index, ratio)
        config = self._config()
        make = make_gpt_chunk if self.is_combined else make_stage
        make_data = token_batches if self.is_combined else batches
        is_interleaved = self._num_virtual_stages is not None
        model = [make(config, state, gpu, chunk if is_interleaved else None) for chunk in range(self.chunks)]
        handle = attach(
            config,
            job="megatron",
            run_key="r",
            num_microbatches=self.microbatches,
            gpu_uuid=gpu.gpu_uuid,
            socket_path=self.socket_paths[host_index] if self.socket_paths else "/none",
            max_slowdown_ratio=self.max_slowdown,
            timer=gpu.timer,
        )
        if not self.socket_paths:
            handle.detach()
        parameters = [parameter for chunk in model for parameter in chunk.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        losses: list[list[str]] = []
        epochs: list[int] = []
        before_step = self.begin_steps(handle) if self.begin_steps is not None else lambda: None
        record = StepRecord(gpu, self.record_folder, rank)
        while not self._is_enough(epochs):
            before_step()
            step = len(losses)
            data = make_data(step * 97 + state.get_data_parallel_rank(), self.microbatches)
            parts = get_forward_backward_func()(
                forward_step_func=gpt_forward_step if self.is_combined else forward_step,
                data_iterator=[iter(data) for _ in model] if is_interleaved else iter(data),
                model=model if is_interleaved else model[0],
                num_microbatches=self.microbatches,
                seq_length=data[0].shape[1 if self.is_combined else 0],
                micro_batch_size=1,
                forward_only=False,
            )
            for parameter in parameters:
                if parameter.grad is None:  # of an expert without tokens
                    parameter.grad = torch.zeros_like(parameter)
                if getattr(parameter, "allreduce", True):  # not an expert's
                    dist.all_reduce(parameter.grad, group=state.get_data_parallel_group())
            optimizer.step()
            optimizer.zero_grad()
            losses.append([part["loss"] for part in parts])
            epochs.append(handle.plan_epoch)
            record.add(handle.plan_epoch)
        assert handle.num_errors == 0
        handle.detach()
        gpu.detach()
        return losses, epochs

    def _is_enough(self, epochs: list[int]) -> bool:
        """Return whether the training has lasted long enough on all ranks."""
        num_followed = sum(epoch > 0 for epoch in epochs)
        is_enough = len(epochs) >= self.iterations and num_followed >= self.num_followed
        answer = torch.tensor([int(is_enough)])
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer.item())

    @property
    def _num_virtual_stages(self) -> int | None:
        return self.chunks if self.chunks > 1 else None

    @property
    def _num_expert_ranks(self) -> int:
        return EXPERT_RANKS if self.is_combined else 1

    def _ratio(self, pp_rank: int) -> float:
        return self.scale * (_LAST_RANK_RATIO if pp_rank == self.pp - 1 else 1.0)

    def _config(self) -> Any:
        settings = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self._num_virtual_stages,
            "microbatch_group_size_per_vp_stage": self.group_size,
            "overlap_p2p_comm": self.overlaps_p2p,
            "batch_p2p_comm": not self.overlaps_p2p,
            "pipeline_dtype": torch.bfloat16 if self.is_combined else torch.float32,
        }
        return gpt_config(num_layers=self.pp * self.chunks, **settings) if self.is_combined else bare_config(**settings)


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
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--overlaps-p2p", action="store_true")
    parser.add_argument("--is-combined", action="store_true")
    options = parser.parse_args(arguments)
    names = ("pp", "tp", "dp", "microbatches", "iterations", "scale")
    layout = ("chunks", "group_size", "overlaps_p2p", "is_combined")
    sizes = {name: getattr(options, name) for name in (*names, *layout)}
    num_gpus = MegatronTraining((), **sizes).num_ranks // options.hosts
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
        wait_until(lambda: not any(daemon.job() for daemon in daemons))
        jobs = [job for daemon in daemons for job in daemon.status()["ended_jobs"]]
        without = run_ranks(own.num_ranks, alone, MegatronTraining(worlds, **sizes).run_rank)
    finally:
        for daemon in daemons:
            daemon.stop()
    fields = ("job_name", "outcome", "summary", "saving_ratio", "saving_interval", "slowdown_ratio", "baseline_time_s")
    result = {
        "num_ranks": own.num_ranks,
        "jobs": [{name: job[name] for name in fields} for job in jobs],
        "are_losses_equal": [losses for losses, _ in joined] == [losses for losses, _ in without],
        "num_iterations_under_plans": [sum(epoch > 0 for epoch in epochs) for _, epochs in joined],
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
