"""`gpuenergyd evaluate`: compares policies on one virtual training, for authors of policies."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, checked_slowdown
from gpuenergyd.cli.options import JsonOption
from gpuenergyd.cli.output import people_console, print_json
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError

if TYPE_CHECKING:
    from gpuenergyd_sim.evaluate.evaluation import Achieved, PolicyResult

_PLANNER = "bubble-aware"
"""The policy whose planner, given the true tables, makes the best plans for the comparison."""


def evaluate(
    policies: Annotated[list[str], typer.Argument(metavar="POLICY...", help="Policies, see `gpuenergyd policies`.")],
    *,
    gpu_model: Annotated[str, typer.Option(metavar="MODEL", help="GPU model, e.g. a100-sxm or a40.")] = "a100-sxm",
    stages: Annotated[int, typer.Option(min=1, max=16, metavar="N", help="Pipeline stages, one per GPU.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Microbatches per iteration.")] = 8,
    max_slowdown: Annotated[
        float, typer.Option(callback=checked_slowdown, metavar="RATIO", help=MAX_SLOWDOWN_HELP)
    ] = 0.0,
    iterations: Annotated[int, typer.Option(min=40, max=2000, metavar="N", help="Iterations of each run.")] = 80,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Random seed: stages, their curves, noise and latencies.")
    ] = 0,
    as_json: JsonOption = False,
) -> int:
    """Compare policies on a virtual training.

    Each policy runs the same pipeline under the daemon's own rules, in one process and in virtual time: clocks take
    effect late, counters are coarse, times scatter, GPUs warm up. Energy and time are means of the last 20 iterations;
    the overall saving counts all iterations. The regret is the energy above that of the best plan of equal time, which
    is planned from the true tables and whose clocks change at once. The same seed gives the same figures.

    Examples:
        gpuenergyd evaluate bubble-aware uniform full-speed
        gpuenergyd evaluate my-policy bubble-aware --max-slowdown 0.05 --seed 3
        gpuenergyd evaluate cost:eta=0.7 --gpu-model h100-sxm --stages 8 --json
    """
    from gpuenergyd.daemon.processes.plugins import load_policy  # noqa: PLC0415
    from gpuenergyd_plan.inputs import load_planner  # noqa: PLC0415  start fast
    from gpuenergyd_sim.evaluate.evaluation import Evaluation  # noqa: PLC0415
    from gpuenergyd_sim.virtual_training.random_jobs import random_job  # noqa: PLC0415

    if len({*policies}) < len(policies):
        raise UsageError(f"each policy once, not {' '.join(policies)}")
    job = random_job(seed, gpu_model=gpu_model, num_stages=stages, num_microbatches=microbatches)
    loaded = {name: load_policy(name) for name in policies}
    evaluation = Evaluation(job, load_planner(_PLANNER), max_slowdown, iterations)
    full_speed = evaluation.full_speed()
    results = []
    for name, policy in loaded.items():
        sys.stderr.write(f"gpuenergyd evaluate: running {name}\n")
        results.append(evaluation.result(name, policy, full_speed))
    if as_json:
        print_json(
            {
                "gpu_model": gpu_model,
                "num_stages": stages,
                "num_microbatches": microbatches,
                "max_slowdown_ratio": max_slowdown,
                "num_iterations": iterations,
                "seed": seed,
                "simulated": True,
                "full_speed": asdict(full_speed),
                "policies": [asdict(result) for result in results],
            }
        )
    else:
        size = f"{count_text(stages, 'stage')} x {count_text(microbatches, 'microbatch')}"
        pipeline = f"{size} on simulated {gpu_model}, seed {seed}"
        _print_table(pipeline, full_speed, results)
    failed = [result for result in results if result.failure is not None]
    for result in failed:
        sys.stderr.write(f"gpuenergyd: policy {result.policy!r} failed: {result.failure}\n")
    return int(bool(failed))


def _print_table(pipeline: str, full_speed: "Achieved", results: "Sequence[PolicyResult]") -> None:
    from rich.table import Table  # noqa: PLC0415  start fast

    table = Table("policy", box=None)
    for title in ("energy", "saving", "time", "slowdown", "regret", "overall saving"):
        table.add_column(title, justify="right")
    table.add_row("full speed", f"{full_speed.energy_j:.1f} J", "", f"{full_speed.iteration_time_s:.4f} s")
    for result in results:
        table.add_row(
            result.policy,
            f"{result.energy_j:.1f} J",
            _percent(result.saving_ratio),
            f"{result.iteration_time_s:.4f} s",
            _percent(result.slowdown_ratio),
            _percent(result.regret_ratio),
            _percent(result.total_saving_ratio),
        )
    console = people_console()
    console.print(pipeline)
    console.print(table)


def _percent(ratio: float) -> str:
    return f"{round(100 * ratio, 1) + 0.0:.1f} %"  # + 0.0 avoids -0.0
