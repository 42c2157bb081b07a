"""Jobs drawn for a host of eight GPUs from tables of time and energy by clock: measured ones, and planner instances."""

import csv
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from tests.plugins.power.powered_host import TableJob

DATA = Path(__file__).parents[3] / "shared" / "data"
MEASURED = {"A100": ("gpt3-175b_a100-sxm.csv", 83.64), "A40": ("gpt3-175b_a40.csv", 70.38)}
"""Files of the measured GPT-3 tables, and the power of a waiting GPU in W."""
INSTANCES = ("s4m8_1f1b_a100", "s4m8_gpipe_a40", "s4m8_zbh1_h200", "s4m32_1f1b_a40noisy", "s8m32_1f1b_a100")
TABLES = (*MEASURED, *INSTANCES)
NUM_GPUS = 8
IDLE_W, HOST_W = 55.0, 300.0
PIPELINE_RATIO = 0.7
"""Share of pipelines among the jobs on several GPUs."""

Stage = Mapping[InstructionKind, Mapping[int, tuple[float, float]]]
"""Time in s and energy in J by clock in MHz, of forward and full backward."""


@dataclass(frozen=True)
class Table:
    """The stages of a model on one kind of GPU."""

    stages: tuple[Stage, ...]
    blocking_w: float


@cache
def table(name: str) -> Table:
    """Return a table by its name."""
    return _measured(*MEASURED[name]) if name in MEASURED else _of_instance(name)


def drawn_jobs(rng: random.Random, error: float, *, name: str = "", num_jobs: int | None = None) -> list[TableJob]:
    """Return jobs on some or all of the host's GPUs, from one table; what is not given is drawn.

    Jobs have one, two, four or eight GPUs. Alone on a GPU they are loops; on several, replicas of a loop, or pipelines,
    whose replicas run in step if there are more GPUs than stages.

    Args:
        rng: source of all draws.
        error: standard deviation of the believed energies of each job, as a ratio.
        name: one of `TABLES`.
        num_jobs: number of jobs, 1 to 8.
    """
    of = table(name or rng.choice(TABLES))
    return [_drawn_job(rng, of, size, error, number) for number, size in enumerate(_sizes(rng, num_jobs))]


def _sizes(rng: random.Random, num_jobs: int | None) -> list[int]:
    """Return the GPUs of each job: drawn jobs are doubled until none fits any more."""
    sizes = [1] * (num_jobs or rng.randint(1, NUM_GPUS))
    most = max(len(sizes), NUM_GPUS - rng.choice([0, 0, 1, 2]))
    while fitting := [k for k, size in enumerate(sizes) if sum(sizes) + size <= most]:
        sizes[rng.choice(fitting)] *= 2
    return sizes


def _drawn_job(rng: random.Random, of: Table, size: int, error: float, number: int) -> TableJob:
    is_pipeline = size > 1 and rng.random() < PIPELINE_RATIO
    num_ranks = min(size, len(of.stages)) if is_pipeline else 1
    first = rng.randrange(len(of.stages) - num_ranks + 1)
    microbatches = rng.choice([4, 8, 16]) if is_pipeline else 1
    spans = microbatches + num_ranks - 1
    fastest_s = max(sum(min(t for t, _ in own.values()) for own in stage.values()) for stage in of.stages)
    scale = rng.uniform(0.3, 2.0) / (spans * fastest_s)
    classes = {
        InstructionClass(rank, kind): InstructionProfile(
            tuple(ClockOption(mhz, scale * t, scale * e) for mhz, (t, e) in sorted(own.items(), reverse=True))
        )
        for rank in range(num_ranks)
        for kind, own in of.stages[first + rank].items()
    }
    return TableJob(
        f"job-{number}",
        dependency_graph(one_forward_one_backward(num_ranks, microbatches)),
        PipelineProfile(classes, of.blocking_w),
        copies=size // num_ranks,
        energy_error=rng.gauss(0.0, error),
    )


def _measured(file_name: str, blocking_w: float) -> Table:
    kinds = {"forward": InstructionKind.F, "backward": InstructionKind.B}
    stages: dict[int, dict[InstructionKind, dict[int, tuple[float, float]]]] = {}
    with (DATA / "profiles" / file_name).open() as file:
        for row in csv.DictReader(file):
            own = stages.setdefault(int(row["stage"]), {kind: {} for kind in kinds.values()})
            own[kinds[row["instruction"]]][int(row["frequency"])] = float(row["time"]), float(row["energy"])
    return Table(tuple(stages[k] for k in sorted(stages)), blocking_w)


def _of_instance(name: str) -> Table:
    of = json.loads((DATA / "instances" / f"{name}.json").read_text())
    profiles = {key: _by_clock(own) for key, own in of["profiles"].items()}
    stages = tuple(
        {
            InstructionKind.F: profiles[f"{k}/F"],
            InstructionKind.B: _merged([own for key, own in profiles.items() if key in {f"{k}/B", f"{k}/W"}]),
        }
        for k in range(of["stages"])
    )
    return Table(stages, of["p_block_w"])


def _by_clock(own: Mapping[str, Sequence[float]]) -> dict[int, tuple[float, float]]:
    return {
        int(mhz): (time_s, energy_j)
        for mhz, time_s, energy_j in zip(own["freq_mhz"], own["time_s"], own["energy_j"], strict=True)
    }


def _merged(parts: Sequence[Mapping[int, tuple[float, float]]]) -> dict[int, tuple[float, float]]:
    """Return input and weight gradient as one full backward, clock by clock."""
    clocks_mhz = set.intersection(*(set(part) for part in parts))
    return {
        mhz: (sum(part[mhz][0] for part in parts), sum(part[mhz][1] for part in parts)) for mhz in sorted(clocks_mhz)
    }
