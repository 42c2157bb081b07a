"""A training of one framework whose phases take the time of a simulated GPU: one rank of a data-parallel job.

    python -m tests.support.phase_training FRAMEWORK --world PATH --iterations N --out FILE

The program marks nothing and knows nothing of the daemon; `gpuenergyd run` joins it. The model is small and real, its
gradients are averaged by gloo; in addition its forward, its backward and its optimizer step occupy the simulated GPU
for given times, and after each backward the rank waits as for gradients that nothing hides. At its end it writes the
losses, and the time, exact energy and locked clock at the end of each optimizer step and of each forward.
A rank may be slower by turns: `--slow-rank 1 --slow-from 120 --slow-for 30` for 30 steps of each 60.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost

WORK = {
    "F": InstructionWork(0.0144, 0.0458, 0.25),
    "B": InstructionWork(0.0348, 0.0852, 0.27),
    "O": InstructionWork(0.0250, 0.0050, 0.25),
}
"""Memory and compute time in s, and W/MHz. Forward and backward: shares and powers of the published GPT-3 tables on
A100 (Perseus), as in the simulated driver. Optimizer: AdamW reads and writes 28 bytes per parameter and computes about
15 operations on them, so that memory bounds it; that a sixth of its time follows the clock is an assumption."""
COMMUNICATION_S, DATA_S = 0.070, 0.050
"""Exposed gradient communication and wait for data: a fifth and a seventh of the iteration. Published data stalls take
10 to 70 % (Mohan et al., VLDB 2021)."""
_NUM_FEATURES = 16
_BATCH = 8


@dataclass(frozen=True, slots=True)
class SlowSteps:
    """Steps in which a rank is slower: after the first ones, as many slow as usual ones by turns."""

    first: int
    num_slow: int
    slow_ratio: float

    def ratio(self, step: int) -> float:
        """Return the factor on the time of a step."""
        return self.slow_ratio if step >= self.first and (step - self.first) // self.num_slow % 2 == 0 else 1.0


@dataclass
class SimulatedGpu:
    """The GPU of this rank, and what was measured in each step."""

    host: SimulatedHost
    gpu_uuid: str
    times_s: list[float] = field(default_factory=list)
    energies_j: list[float] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    clocks_mhz: list[int | None] = field(default_factory=list)
    """The clock lock at the end of the last forward of each step."""
    scale: float = 1.0
    slow_steps: SlowSteps | None = None
    overhead_ns: int = 0
    overheads_ns: list[int] = field(default_factory=list)
    """Time in this package's hooks until the end of each step."""
    _clock_mhz: int | None = None

    def run(self, kind: str) -> None:
        """Occupy the GPU with a phase until it ends."""
        work, scale = WORK[kind], self.scale
        if self.slow_steps is not None:
            scale *= self.slow_steps.ratio(len(self.times_s))
        memory_s, compute_s = scale * work.memory_time_s, scale * work.compute_time_s
        self.host.begin_work(self.gpu_uuid, InstructionWork(memory_s, compute_s, work.power_coefficient_w_per_mhz))
        self.host.hold(self.gpu_uuid)
        self.host.finish_work(self.gpu_uuid)
        if kind == "F":
            self._clock_mhz = self.host.locked_sm_clock_mhz(self.gpu_uuid)

    def end_step(self) -> None:
        """Run the optimizer's phase, and measure."""
        self.run("O")
        self.times_s.append(time.monotonic())
        self.energies_j.append(self.host.exact_energy_j(self.gpu_uuid))
        self.clocks_mhz.append(self._clock_mhz)
        self.overheads_ns.append(self.overhead_ns)


class OnGpu(torch.nn.Module):
    """A layer whose forward and backward occupy the GPU; the backward ends with a wait for communication."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(_NUM_FEATURES))
        self._gpu = gpu

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _Scale.apply(rows, self.scale, self._gpu)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, scale: torch.Tensor, gpu: SimulatedGpu) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.gpu, ctx.is_training = gpu, torch.is_grad_enabled()
        gpu.run("F")
        return rows * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (rows,) = ctx.saved_tensors
        ctx.gpu.run("B")
        # Where torch's wrappers wait for the gradients of other ranks.
        communication_s = ctx.gpu.scale * COMMUNICATION_S
        torch.autograd.Variable._execution_engine.queue_callback(lambda: time.sleep(communication_s))
        return None, (gradients[0] * rows).sum(0), None


class Model(torch.nn.Module):
    """A small classifier on the GPU; it returns loss and outputs as models of Hugging Face do."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Sequential(OnGpu(gpu), torch.nn.Linear(_NUM_FEATURES, 32), torch.nn.Tanh())
        self.head = torch.nn.Linear(32, 4)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the outputs."""
        outputs = self.head(self.body(rows))
        return {"loss": torch.nn.functional.cross_entropy(outputs, labels), "logits": outputs}


class SimulatedAdamW(torch.optim.AdamW):
    """AdamW whose step occupies the GPU."""

    gpu: SimulatedGpu

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, then take the time of a large model's step."""
        result = super().step(closure)
        self.gpu.end_step()
        return result


def optimizer_of(model: torch.nn.Module, gpu: SimulatedGpu) -> SimulatedAdamW:
    optimizer = SimulatedAdamW(model.parameters(), lr=1e-2)
    optimizer.gpu = gpu
    return optimizer


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random rows, the same ones in every run."""

    def __init__(self, num_rows: int) -> None:
        random = torch.Generator().manual_seed(7)
        self._rows = torch.randn(num_rows, _NUM_FEATURES, generator=random)
        self._labels = torch.randint(0, 4, (num_rows,), generator=random)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": self._rows[index], "labels": self._labels[index]}


@dataclass(frozen=True, slots=True)
class SlowBatch:
    """Makes a batch after the time that loading takes."""

    gpu: SimulatedGpu

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        time.sleep(self.gpu.scale * DATA_S)
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def run_loop(gpu: SimulatedGpu, num_iterations: int, *, is_sharded: bool) -> None:
    """Train as a loop written by hand, with DistributedDataParallel or FSDP2."""
    dist.init_process_group("gloo")
    model: torch.nn.Module = Model(gpu)
    if is_sharded:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  needs gloo
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  as above

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optimizer_of(model, gpu)
    rows = Rows(num_iterations * _BATCH * dist.get_world_size())
    sampler: Any = DistributedSampler(rows, seed=3)
    for batch in torch.utils.data.DataLoader(rows, batch_size=_BATCH, sampler=sampler, collate_fn=SlowBatch(gpu)):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gpu.losses.append(float(loss.detach()).hex())


def run_huggingface(gpu: SimulatedGpu, num_iterations: int) -> None:
    """Train with the Trainer of Hugging Face."""
    transformers: Any = importlib.import_module("transformers")
    model = Model(gpu)

    class LoggingTrainer(transformers.Trainer):  # type: ignore[misc]  # installed in its own environment
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            gpu.losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()).hex())
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=os.path.join(os.environ["TMPDIR"], "out"),  # noqa: PTH118  a text is wanted
        max_steps=num_iterations,
        per_device_train_batch_size=_BATCH,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=1,
    )
    optimizer = optimizer_of(model, gpu)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    rows = Rows(num_iterations * _BATCH * int(os.environ["WORLD_SIZE"]))
    LoggingTrainer(
        model=model, args=arguments, train_dataset=rows, data_collator=SlowBatch(gpu), optimizers=(optimizer, schedule)
    ).train()


def run_lightning(gpu: SimulatedGpu, num_iterations: int) -> None:
    lightning: Any = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc]  # installed in its own environment
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(gpu)

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            loss = self.model(**batch)["loss"]
            gpu.losses.append(float(loss.detach()).hex())
            return loss  # type: ignore[no-any-return]  # as above

        def configure_optimizers(self) -> Any:
            return optimizer_of(self, gpu)

    rows = Rows(num_iterations * _BATCH * int(os.environ["WORLD_SIZE"]))
    loader = torch.utils.data.DataLoader(rows, batch_size=_BATCH, collate_fn=SlowBatch(gpu))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=num_iterations,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)


RUNS: dict[str, Callable[[SimulatedGpu, int], None]] = {
    "ddp": lambda gpu, n: run_loop(gpu, n, is_sharded=False),
    "fsdp2": lambda gpu, n: run_loop(gpu, n, is_sharded=True),
    "huggingface": run_huggingface,
    "lightning": run_lightning,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=sorted(RUNS))
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the times of all phases")
    parser.add_argument("--slow-rank", type=int, help="rank whose phases are longer in some steps")
    parser.add_argument("--slow-from", type=int, default=120, help="the first such step")
    parser.add_argument("--slow-for", type=int, default=30, help="number of slow steps, and of usual ones after them")
    parser.add_argument("--slow-ratio", type=float, default=1.2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    host = SimulatedHost.open(options.world)
    gpu = SimulatedGpu(host, host.identities()[int(os.environ["LOCAL_RANK"])].gpu_uuid)
    gpu.scale = options.scale
    if options.slow_rank == int(os.environ["RANK"]):
        gpu.slow_steps = SlowSteps(options.slow_from, options.slow_for, options.slow_ratio)
    host.attach_process(gpu.gpu_uuid, os.getpid())
    measure_hooks(gpu)
    RUNS[options.framework](gpu, options.iterations)
    if dist.is_initialized():
        # The Trainer of Hugging Face leaves it, and threads of gloo may abort a process that exits with it.
        dist.destroy_process_group()
    found = {
        "times_s": gpu.times_s,
        "energies_j": gpu.energies_j,
        "clocks_mhz": gpu.clocks_mhz,
        "losses": gpu.losses,
        "overheads_ns": gpu.overheads_ns,
    }
    options.out.write_text(json.dumps(found), encoding="ascii")
    return 0


def measure_hooks(gpu: SimulatedGpu) -> None:
    """Add up the time that this package's hooks take in the training thread."""
    from gpuenergyd.client.phases.marks import PhaseMarks  # noqa: PLC0415  as the program would be without
    from gpuenergyd.client.phases.torch_hooks import TorchPhases  # noqa: PLC0415  as above
    from gpuenergyd_trainers.loop import StepMarks  # noqa: PLC0415  as above

    for owner, names in (
        (TorchPhases, ("_before_forward", "_after_forward", "_on_gradient", "before_step", "after_step")),
        (PhaseMarks, ("backward_ends",)),
        (StepMarks, ("begin", "end", "pause")),
    ):
        for name in names:
            setattr(owner, name, _measured(getattr(owner, name), gpu))


def _measured(method: Callable[..., Any], gpu: SimulatedGpu) -> Callable[..., Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        try:
            return method(*args, **kwargs)
        finally:
            gpu.overhead_ns += time.perf_counter_ns() - begin_ns

    return measured


if __name__ == "__main__":
    sys.exit(main())
