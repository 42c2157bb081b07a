"""Profiling against tables that others measured on real GPUs; skipped where the data are not at hand."""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from gpuenergyd.core.observation import ClockShare, InstructionSample, IterationObservation, RankEnergy, TimeAtClock
from gpuenergyd.core.pipeline import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.policy import GpuView
from gpuenergyd.core.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.core.timeline import iteration_energy_j, timeline
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.profiling.design import design_points
from gpuenergyd_policies.profiling.fit import FittedProfile, fit_profile

F, B = InstructionKind.F, InstructionKind.B
KINDS = {"forward": F, "backward": B}
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
BLOCKING_W = {"a100-sxm": 83.64}
COUNT = 8
Table = Mapping[InstructionKind, Mapping[int, tuple[float, float]]]


def path_of(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no measured tables at {path}")
    return path


@cache
def stages_of(gpu: str) -> tuple[Table, ...]:
    """Return (time, energy) by kind and clock of each of the eight GPT-3 stages."""
    stages: list[dict[InstructionKind, dict[int, tuple[float, float]]]] = [{F: {}, B: {}} for _ in range(8)]
    with path_of(f"profiles/gpt3-175b_{gpu}.csv").open() as file:
        for row in csv.DictReader(file):
            key = KINDS[row["instruction"]]
            stages[int(row["stage"])][key][int(row["frequency"])] = float(row["time"]), float(row["energy"])
    return tuple(stages)


def fit_from(stages: Sequence[Table], clocks: Sequence[int], blocking_w: float) -> FittedProfile:
    """Return the fit of a two-block design over some clocks, without any noise but the tables' own."""
    observations = []
    for number, point in enumerate(design_points([(F, B)] * len(stages), len(clocks))[: 2 * len(clocks) + 1]):
        samples, ranks = [], []
        for rank, table in enumerate(stages):
            time_at = [TimeAtClock(None, clocks[0], 0.3 + 0.1 * (number % 4))]
            energy_j = blocking_w * time_at[0].time_s
            for kind, level in point.levels[rank].items():
                time_s, joules = table[kind][clocks[level]]
                samples.append(InstructionSample(rank, kind, (ClockShare(clocks[level], time_s),), COUNT))
                time_at.append(TimeAtClock(kind, clocks[level], COUNT * time_s))
                energy_j += COUNT * joules
            window_s = sum(share.time_s for share in time_at)
            ranks.append(RankEnergy(rank, window_s, energy_j, tuple(time_at)))
        observations.append(IterationObservation(number, f"p{number}", 1.0, tuple(samples), tuple(ranks)))
    supported = tuple(sorted(stages[0][F], reverse=True))
    gpus = [GpuView(f"GPU-{r}", "as in the table", supported, 0.0, blocking_w) for r in range(len(stages))]
    return fit_profile(observations, gpus)


def full_table(stages: Sequence[Table], blocking_w: float) -> PipelineProfile:
    classes: dict[InstructionClass, InstructionProfile] = {}
    for rank, table in enumerate(stages):
        for kind, own in table.items():
            options = [ClockOption(clock, *cost) for clock, cost in own.items()]
            classes[InstructionClass(rank, kind)] = instruction_profile(options, where="table")
    return PipelineProfile(classes, blocking_w)


def levels_of(gpu: str) -> list[int]:
    """Return five clocks: the ends, one just below the power cap, and two between."""
    return {"a100-sxm": [1410, 1320, 1215, 1080, 855]}[gpu]


@pytest.mark.parametrize("gpu", ["a100-sxm"])
def test_plans_from_five_clocks_lose_little_against_plans_from_all(gpu: str) -> None:
    stages = stages_of(gpu)[4:]
    graph = dependency_graph(one_forward_one_backward(4, 8))
    believed = fit_from(stages, levels_of(gpu), BLOCKING_W[gpu]).profile
    truth = full_table(stages, BLOCKING_W[gpu])
    untuned = [truth[i.instruction_class].at_clock(levels_of(gpu)[0]).time_s for i in graph.instructions]
    untuned_s = timeline(graph, untuned).iteration_time_s

    losses = []
    for slowdown in (1.0, 1.02, 1.05, 1.1, 1.2):
        deadline_s = max(slowdown * untuned_s, min_iteration_time_s(graph, believed))
        clocks = solve(graph, believed, deadline_s=deadline_s).sm_clocks_mhz
        options = [
            truth[i.instruction_class].at_clock(clock) for i, clock in zip(graph.instructions, clocks, strict=True)
        ]
        time_s = timeline(graph, [o.time_s for o in options]).iteration_time_s
        energy_j = iteration_energy_j(
            energies_j=[o.energy_j for o in options],
            durations_s=[o.time_s for o in options],
            iteration_time_s=time_s,
            num_ranks=4,
            blocking_power_w=truth.blocking_power_w,
        )
        best = solve(graph, truth, deadline_s=max(time_s, min_iteration_time_s(graph, truth)))
        losses.append(energy_j / best.energy_j - 1)
    assert mean(losses) <= 0.007, losses


@pytest.mark.parametrize("gpu", ["a100-sxm"])
def test_time_and_power_at_clocks_that_were_not_measured_are_predicted(gpu: str) -> None:
    """Power is that of forward and backward together: every iteration runs as many of one as of the other."""
    stages = stages_of(gpu)[4:]
    profile = fit_from(stages, levels_of(gpu), BLOCKING_W[gpu]).profile
    table, last = stages[-1], len(stages) - 1

    time_errors, power_errors = [], []
    for clock in table[F]:
        if clock in levels_of(gpu):
            continue
        fitted = [profile[InstructionClass(last, kind)].at_clock(clock) for kind in (F, B)]
        true = [table[kind][clock] for kind in (F, B)]
        time_errors += [option.time_s / time_s - 1 for option, (time_s, _) in zip(fitted, true, strict=True)]
        fitted_w = sum(o.energy_j for o in fitted) / sum(o.time_s for o in fitted)
        power_errors.append(fitted_w / (sum(e for _, e in true) / sum(t for t, _ in true)) - 1)
    assert np.sqrt(np.mean(np.square(time_errors))) <= 0.005
    assert np.sqrt(np.mean(np.square(power_errors))) <= 0.015
