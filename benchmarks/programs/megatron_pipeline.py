"""A pipeline of Megatron-core, 1F1B on two stages of two tensor-parallel ranks: `torchrun megatron_pipeline.py`.

CUDA calls are replaced. There is an evaluation every 30 steps.
"""

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from simulated_gpu import OPTIMIZER_COMPUTE_RATIO, Gpu, num_steps

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.megatron_stages import SEQUENCE, bare_config, batches, forward_step, make_stage, replace_cuda_calls

_NUM_STAGES, _NUM_TP_RANKS, _NUM_MICROBATCHES = 2, 2, 8
_EVALUATED_EVERY = 30
_RATIO, _LAST_RATIO = 2.0, 2.6


def main() -> None:
    """Train one rank."""
    replace_cuda_calls()
    dist.init_process_group("gloo")
    state = importlib.import_module("megatron.core.parallel_state")
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    state.initialize_model_parallel(tensor_model_parallel_size=_NUM_TP_RANKS, pipeline_model_parallel_size=_NUM_STAGES)
    is_last = state.get_pipeline_model_parallel_rank() == _NUM_STAGES - 1
    gpu = Gpu(ratio=_LAST_RATIO if is_last else _RATIO)
    config = bare_config(
        tensor_model_parallel_size=_NUM_TP_RANKS, pipeline_model_parallel_size=_NUM_STAGES, pipeline_dtype=torch.float32
    )
    model = make_stage(config, state, gpu, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(seed: int, *, forward_only: bool) -> list[float]:
        parts = schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches(seed, _NUM_MICROBATCHES)),
            model=model,
            num_microbatches=_NUM_MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [float.fromhex(part["loss"]) for part in parts]

    for step in range(num_steps()):
        losses = run(step, forward_only=False)
        gpu.work(0.01, compute_ratio=OPTIMIZER_COMPUTE_RATIO)
        optimizer.step()
        optimizer.zero_grad()
        gpu.step(sum(losses) if losses else None)
        if step % _EVALUATED_EVERY == _EVALUATED_EVERY - 1:
            with gpu.pause():
                for seed in range(2):
                    run(seed, forward_only=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("done")
