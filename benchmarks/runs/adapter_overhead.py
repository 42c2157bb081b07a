"""Measures the overhead of every adapter in a paired run with a null arm, and the CPU time of its calls.

    python benchmarks/runs/adapter_overhead.py [--pairs 20] [--steps 4] [--only NAME ...] [--json]

One training per adapter, in the environments built by `make frameworks`, under a real daemon in mode `observe`: ranks
register, record and report as usual, and set no clocks. The adapter is switched on and off in blocks of one process, in
random order: attached, attached with timed calls, plain, and plain again, the null arm, which shows the resolution of
this machine. Blocks are compared by their median step (`wall`) and by its CPU time in the training thread
(`thread_cpu`); medians over the pairs have a bootstrap 95 % interval and the 5th and 95th percentile (spread). `calls`
is the CPU time of the training thread inside the client's methods, summed over a step; wrappers around them count in
`thread_cpu` only.

Steps are as long as short ones on GPUs: instructions of 10 ms (forward) and 20 ms (backward) of simulated work, steps
of 100 ms without a pipeline. On a busy host wall times show no more than their null arm; CPU times depend less on other
work, but on caches that it empties: run it on a quiet one. The target is a share of at most 0.5 % of a step, at the
upper end of the interval: `is_met` of an adapter holds for `calls`, and for `thread_cpu` where it `is_resolved`, that
is, where the null arm lies within 0.5 %; `is_wall_met` holds for wall time. The ranks of `megatron-combined` compute a
small GPT with more processes than cores, so that only its calls are resolved on two cores. Timers are those of the
host; what recording CUDA events costs is measured by gpu_pipeline.py. Needs the checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paired_steps import US_PER_S, PairedBlocks, Switch

from docs.site.house_map import PYTHON_PATH
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.framework_environments import is_built, python_of

LIMIT_RATIO = 0.005
STEP_S = 0.1
RUN_LIMIT_S = 1_200.0
ENVIRONMENTS = {
    "loop": None,
    "torch-pipelining": None,
    "lightning": "lightning",
    "huggingface": "huggingface",
    "deepspeed": "deepspeed",
    "megatron-1f1b": "megatron",
    "megatron-interleaved": "megatron",
    "megatron-combined": "megatron",
}
"""The adapters and layouts, and the environment of each; None for that of the package."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per block")
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", choices=ENVIRONMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        print(json.dumps(measured(options.inside, options.pairs, options.steps)))
        return 0
    result: dict[str, Any] = {}
    for name in options.only:
        environment = ENVIRONMENTS[name]
        if environment is not None and not is_built(environment):
            print(f"no environment for {name}; `make frameworks` builds one", file=sys.stderr)
            continue
        python = sys.executable if environment is None else str(python_of(environment))
        command = [python, __file__, "--inside", name, "--pairs", str(options.pairs), "--steps", str(options.steps)]
        environ = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=RUN_LIMIT_S, check=True)
        result[name] = json.loads(done.stdout.splitlines()[-1])
        show(name, result[name])
    missing = sorted(set(options.only) - set(result))
    is_met = not missing and all(figures["is_met"] for figures in result.values())
    if options.json:
        circumstances = {"missing": missing, "load_average": round(os.getloadavg()[0], 1)}
        print(json.dumps({"is_met": is_met, **circumstances, "adapters": result}))
    return 0 if is_met else 1


def measured(name: str, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Train with one adapter; return its figures, of all ranks those of the slowest calls."""
    stdout, sys.stdout = sys.stdout, sys.stderr  # output of the frameworks must not mix with the results
    settings: dict[str, Any] = {"mode": "observe", "sample_period_s": 0.1}
    try:
        with tempfile.TemporaryDirectory() as folder, running_daemon(Path(folder) / "daemon", **settings) as daemon:
            sizes = {"num_pairs": num_pairs, "num_steps": num_steps}
            ranks = TRAININGS[name](Path(folder), daemon, sizes)
    finally:
        sys.stdout = stdout
    figures = max(ranks, key=lambda each: float(each["thread_cpu_share"]["high"]))
    null = figures["thread_cpu_null_us"]
    is_resolved = max(abs(null["low"]), abs(null["high"])) <= LIMIT_RATIO * figures["step_s"] * US_PER_S
    is_met = figures["calls_share"]["high"] <= LIMIT_RATIO
    return {
        **figures,
        "ranks": len(ranks),
        "is_resolved": is_resolved,
        "is_met": is_met and (not is_resolved or figures["thread_cpu_share"]["high"] <= LIMIT_RATIO),
        "is_wall_met": figures["wall"]["high"] <= 1.0 + LIMIT_RATIO,
    }


# --- trainings without a pipeline ---


def steps_of(blocks: PairedBlocks) -> Iterator[int]:
    """Yield the number of each step, measured from one to the next."""
    for step in range(blocks.num_steps):
        blocks.before_step()
        yield step
    blocks.before_step()


def train_loop(_: Path, daemon: DaemonProcess, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Run a plain loop."""
    import gpuenergyd  # noqa: PLC0415  patched by PairedBlocks first

    blocks, is_on = PairedBlocks(**sizes), True

    def turn(now_on: bool) -> None:  # noqa: FBT001  as PairedBlocks calls it
        nonlocal is_on
        is_on = now_on

    blocks.turn = turn
    with gpuenergyd.job("overhead", gpu_uuid=first_gpu(daemon), socket_path=str(daemon.socket_path)) as job:
        for _step in steps_of(blocks):
            if is_on:
                with job.iteration():
                    time.sleep(STEP_S)
            else:
                time.sleep(STEP_S)
    return [blocks.figures()]


def hook_switch(callback: Any, names: Sequence[str]) -> Callable[[bool], None]:
    """Return a function that replaces hooks of a callback by ones that do nothing, and back."""

    def turn(is_on: bool) -> None:  # noqa: FBT001  as PairedBlocks calls it
        for name in names:
            if is_on:
                vars(callback).pop(name, None)
            else:
                setattr(callback, name, lambda *_, **__: None)

    return turn


def make_rows(blocks: PairedBlocks) -> Any:
    """Return a dataset whose items are the steps."""
    import torch  # noqa: PLC0415  only where it is needed

    class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]  # of rows
        def __iter__(self) -> Iterator[Any]:
            """Yield the rows of the steps."""
            for _ in steps_of(blocks):
                yield {"x": torch.ones(4), "labels": torch.ones(1)}

    return Rows()


def train_lightning(folder: Path, daemon: DaemonProcess, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Run Lightning's Trainer."""
    import lightning.pytorch as lightning  # type: ignore[import-not-found]  # noqa: PLC0415  only in its environment
    import torch  # noqa: PLC0415  as above

    from gpuenergyd_trainers.lightning import gpuenergy_callback  # noqa: PLC0415  patched by PairedBlocks first

    blocks = PairedBlocks(**sizes)

    class Module(lightning.LightningModule):  # type: ignore[misc]  # known only in its environment
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _index: int) -> Any:
            """Return the loss after the time of a step."""
            time.sleep(STEP_S)
            return self.layer(batch["x"]).square().mean()

        def configure_optimizers(self) -> Any:
            """Return plain SGD."""
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = gpuenergy_callback("overhead", gpu_uuid=first_gpu(daemon), socket_path=str(daemon.socket_path))
    blocks.turn = hook_switch(callback, ("on_train_batch_start", "on_train_batch_end"))
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(make_rows(blocks), batch_size=1))
    return [blocks.figures()]


def train_huggingface(folder: Path, daemon: DaemonProcess, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Run the Hugging Face Trainer."""
    import torch  # noqa: PLC0415  only where it is needed
    import transformers  # noqa: PLC0415  only in its environment

    from gpuenergyd_trainers.huggingface import gpuenergy_callback  # noqa: PLC0415  patched by PairedBlocks first

    blocks = PairedBlocks(**sizes)

    class Model(torch.nn.Module):
        """A linear layer that takes the time of a step."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            """Return the loss after the time of a step."""
            time.sleep(STEP_S)
            return {"loss": (self.layer(x) - labels).square().mean()}

    callback = gpuenergy_callback("overhead", gpu_uuid=first_gpu(daemon), socket_path=str(daemon.socket_path))
    blocks.turn = hook_switch(callback, ("on_step_begin", "on_step_end"))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=blocks.num_steps,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(model=Model(), args=arguments, train_dataset=make_rows(blocks), callbacks=[callback]).train()
    return [blocks.figures()]


# --- pipelines ---


def train_torch(folder: Path, daemon: DaemonProcess, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Run a pipeline of torch.distributed.pipelining."""
    return on_ranks(2, folder, torch_rank, str(daemon.world_path), str(daemon.socket_path), gpus(daemon)[:2], sizes)


def torch_rank(rank: int, world: str, socket_path: str, gpu_uuids: list[str], sizes: dict[str, int]) -> dict[str, Any]:
    """Run one rank of the demo's pipeline."""
    from overhead import simulated  # noqa: PLC0415  needs torch

    from gpuenergyd_trainers.torch_pipelining import attach  # noqa: PLC0415  patched by PairedBlocks first

    blocks = PairedBlocks(**sizes)
    step, schedule, timer = simulated(rank, gpu_uuids, 4, world, duration_scale=0.25)
    step()  # torch infers shapes in it
    names: dict[str, Any] = {"job": "overhead", "run_key": "r", "gpu_uuid": gpu_uuids[rank], "socket_path": socket_path}
    handle = attach(schedule, **names, timer=timer)
    switch = Switch(handle)
    blocks.turn = lambda is_on: switch.turn(is_on=is_on)
    for _ in steps_of(blocks):
        step()
    assert handle.is_attached, "the daemon was not followed"
    handle.detach()
    return blocks.figures()


def train_deepspeed(folder: Path, daemon: DaemonProcess, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Run DeepSpeed's pipeline engine."""
    from benchmarks.worlds.deepspeed_training import DeepSpeedTraining  # noqa: PLC0415  only in its environment

    training = DeepSpeedTraining((daemon.world_path,), socket_paths=(str(daemon.socket_path),))
    return on_ranks(training.num_ranks, folder, framework_rank, training, sizes)


def train_megatron(folder: Path, daemon: DaemonProcess, sizes: dict[str, int], **layout: Any) -> list[dict[str, Any]]:
    """Run Megatron-core's schedules."""
    from tests.support.megatron_training import MegatronTraining  # noqa: PLC0415  only in its environment

    training = MegatronTraining((daemon.world_path,), socket_paths=(str(daemon.socket_path),), **layout)
    return on_ranks(training.num_ranks, folder, framework_rank, training, sizes)


def framework_rank(rank: int, training: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Run one rank of a training with a framework."""
    blocks = PairedBlocks(**sizes)

    def begin(handle: Any) -> Callable[[], None]:
        config = getattr(handle, "_config", None)  # Megatron's
        switch = Switch(handle, others=((config, "timers"),) if config is not None else ())
        blocks.turn = lambda is_on: switch.turn(is_on=is_on)
        return blocks.before_step

    replace(training, iterations=blocks.num_steps + 1, begin_steps=begin).run_rank(rank)
    return blocks.figures()


def on_ranks(num_ranks: int, folder: Path, body: Callable[..., Any], *arguments: Any) -> list[dict[str, Any]]:
    """Run a function on every rank of a training in processes of their own."""
    from tests.trainers.pipeline_processes import run_ranks  # noqa: PLC0415  needs torch

    return list(run_ranks(num_ranks, folder, body, *arguments, limit_s=RUN_LIMIT_S))


def gpus(daemon: DaemonProcess) -> list[str]:
    return [str(gpu["gpu_uuid"]) for gpu in daemon.status()["gpus"]]


def first_gpu(daemon: DaemonProcess) -> str:
    return gpus(daemon)[0]


TRAININGS: dict[str, Callable[[Path, DaemonProcess, dict[str, int]], list[dict[str, Any]]]] = {
    "loop": train_loop,
    "torch-pipelining": train_torch,
    "lightning": train_lightning,
    "huggingface": train_huggingface,
    "deepspeed": train_deepspeed,
    "megatron-1f1b": train_megatron,
    "megatron-interleaved": lambda *args: train_megatron(*args, chunks=2, overlaps_p2p=True, scale=0.5),
    "megatron-combined": lambda *args: train_megatron(*args, chunks=2, overlaps_p2p=True, scale=0.5, is_combined=True),
}


def show(name: str, figures: dict[str, Any]) -> None:
    def interval(key: str, digits: int) -> str:
        one = figures[key]
        median = next(value for what, value in one.items() if what.startswith("median"))
        return f"{median:.{digits}f} [{one['low']:.{digits}f}, {one['high']:.{digits}f}]"

    share = 100 * figures["thread_cpu_share"]["median_ratio"]
    print(
        f"{name:<21} step {1e3 * figures['step_s']:.0f} ms; wall {interval('wall', 4)},"
        f" null {interval('wall_null', 4)}; CPU of the training thread, us: {interval('thread_cpu_us', 0)},"
        f" null {interval('thread_cpu_null_us', 0)}, {share:.3f} % of a step;"
        f" in calls {interval('calls_us', 0)}; {'met' if figures['is_met'] else 'not met'}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
