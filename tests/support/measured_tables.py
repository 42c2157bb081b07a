"""Published measurements of real GPUs, converted to the iterations that profiling would have measured.

The data are not part of this repository; `path_of` returns their expected location.
"""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks
from gpuenergyd_policies.profiling.design import LOWEST_RATIO, design_points, next_clock
from gpuenergyd_policies.profiling.fit import FittedProfile, fit_profile
from gpuenergyd_policies.profiling.times import fit_times

F, B = InstructionKind.F, InstructionKind.B
KINDS = {"forward": F, "backward": B}
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
BLOCKING_W = {"a100-sxm": 83.64, "a40": 70.38}
"""Published power while waiting for a peer."""
SLOWDOWNS = (1.0, 1.02, 1.05, 1.1, 1.2)
NUM_RANKS, NUM_MICROBATCHES = 4, 8
COUNT = NUM_MICROBATCHES
V100_TOP_MHZ = 1530
Table = Mapping[InstructionKind, Mapping[int, tuple[float, float]]]
"""Time and energy of one instruction by kind and clock."""


def path_of(name: str) -> Path:
    """Return the path of a table, whether it exists or not."""
    return DATA / name


@cache
def stages_of(gpu: str) -> tuple[Table, ...]:
    """Return the last four of the eight GPT-3 stages; the first ones repeat one measurement."""
    stages: list[dict[InstructionKind, dict[int, tuple[float, float]]]] = [{F: {}, B: {}} for _ in range(8)]
    with path_of(f"profiles/gpt3-175b_{gpu}.csv").open() as file:
        for row in csv.DictReader(file):
            own = stages[int(row["stage"])][KINDS[row["instruction"]]]
            own[int(row["frequency"])] = float(row["time"]), float(row["energy"])
    return tuple(stages[-NUM_RANKS:])


def observations_of(stages: Sequence[Table], clocks: Sequence[int], blocking_w: float) -> list[IterationObservation]:
    """Return the iterations of a two-block design over some clocks, descending, without added noise."""
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
    return observations


def fit_from(gpu: str, clocks: Sequence[int]) -> FittedProfile:
    """Return the fit of a GPT-3 table from some of its clocks, descending."""
    stages, blocking_w = stages_of(gpu), BLOCKING_W[gpu]
    supported = tuple(sorted(stages[0][F], reverse=True))
    gpus = [GpuView(f"GPU-{r}", "as in the table", supported, 0.0, blocking_w) for r in range(len(stages))]
    return fit_profile(observations_of(stages, clocks, blocking_w), gpus)


def chosen_clocks(gpu: str, num_clocks: int) -> list[int]:
    """Return the clocks that the design selects one by one, given the times at earlier ones."""
    stages = stages_of(gpu)
    measured: list[int] = []
    while len(measured) < num_clocks:
        seen = observations_of(stages, sorted(measured, reverse=True), BLOCKING_W[gpu]) if len(measured) > 1 else []
        clock = next_clock(tuple(stages[0][F]), measured, fit_times(seen).values())
        if clock is None:
            break
        measured.append(clock)
    return sorted(measured, reverse=True)


def full_table(gpu: str, only_clocks: Sequence[int] | None = None) -> PipelineProfile:
    """Return the profile of a GPT-3 table, or of some of its clocks."""
    classes: dict[InstructionClass, InstructionProfile] = {}
    for rank, table in enumerate(stages_of(gpu)):
        for kind, own in table.items():
            options = [ClockOption(c, *cost) for c, cost in own.items() if only_clocks is None or c in only_clocks]
            classes[InstructionClass(rank, kind)] = instruction_profile(options, where="table")
    return PipelineProfile(classes, BLOCKING_W[gpu])


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of a plan made from a fitted profile, at one deadline."""

    energy_ratio: float
    """Relative excess of energy over the plan from the whole table with the same time."""
    late_ratio: float
    """Relative excess of the plan's time on the table over the target."""


def losses_of(gpu: str, believed: PipelineProfile) -> list[Loss]:
    """Return the loss at each of `SLOWDOWNS`, evaluated on the whole table."""
    graph = dependency_graph(one_forward_one_backward(NUM_RANKS, NUM_MICROBATCHES))
    truth = full_table(gpu)
    baseline_s = baseline(graph, truth).iteration_time_s
    losses = []
    for slowdown in SLOWDOWNS:
        target_s = slowdown * baseline_s
        solved = solve(graph, believed, deadline_s=max(target_s, min_iteration_time_s(graph, believed)))
        evaluated = evaluate_clocks(graph, truth, solved.sm_clocks_mhz)
        best = solve(graph, truth, deadline_s=max(evaluated.iteration_time_s, min_iteration_time_s(graph, truth)))
        losses.append(Loss(evaluated.energy_j / best.energy_j - 1, evaluated.iteration_time_s / target_s - 1))
    return losses


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Relative errors of predicted time and power at held-out clocks."""

    time_errors: tuple[float, ...]
    power_errors: tuple[float, ...]


def held_out_errors(gpu: str, clocks: Sequence[int]) -> HeldOut:
    """Return the errors of a GPT-3 table fitted from some clocks, at all other offered clocks.

    Power is that of forward and backward together: every iteration runs equally many of both, so their shares are not
    measured, and no plan depends on them.
    """
    profile = fit_from(gpu, clocks).profile
    time_errors: list[float] = []
    power_errors: list[float] = []
    for rank, table in enumerate(stages_of(gpu)):
        offered = [{o.sm_clock_mhz: o for o in profile[InstructionClass(rank, kind)].options} for kind in (F, B)]
        for clock in set(offered[0]) & set(offered[1]) - set(clocks):
            fitted, true = [own[clock] for own in offered], [table[kind][clock] for kind in (F, B)]
            time_errors += [option.time_s / time_s - 1 for option, (time_s, _) in zip(fitted, true, strict=True)]
            fitted_w = sum(o.energy_j for o in fitted) / sum(o.time_s for o in fitted)
            power_errors.append(fitted_w / (sum(e for _, e in true) / sum(t for t, _ in true)) - 1)
    return HeldOut(tuple(time_errors), tuple(power_errors))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Time and power of one workload in one run at a clock that was read back."""

    workload: str
    sm_clock_mhz: int
    time_s: float
    power_w: float


def v100_sweeps() -> list[Sweep]:
    """Return the V100 runs at clocks that a plan may use: locked, or limited by a power limit."""
    with path_of("gpu/gridpilot_v100sxm2_cap_x_clock.csv").open() as file:
        found = [
            Sweep(
                row["workload"],
                round(float(row["sm_mean_mhz"])),
                1 / float(row["iters_per_s"]),
                float(row["power_mean_w"]),
            )
            for row in csv.DictReader(file)
        ]
    return [sweep for sweep in found if sweep.sm_clock_mhz >= LOWEST_RATIO * V100_TOP_MHZ]


def a100_fp32_sweeps() -> list[Sweep]:
    """Return the A100-PCIe runs of a pure FP32 kernel, ten clocks."""
    with path_of("gpu/kerneltuner_a100pcie_fp32_clock_sweep.csv").open() as file:
        return [
            Sweep(
                row["kernel"],
                round(float(row["sm_clock_mhz"])),
                float(row["time_ms"]) / 1e3,
                float(row["power_w"]),
            )
            for row in csv.DictReader(file)
        ]


def sweep_errors(sweeps: Sequence[Sweep], held_out: Sequence[tuple[str, int]], *, top_mhz: int) -> HeldOut:
    """Return the errors at (workload, clock) pairs, fitted from all other runs; each workload represents a GPU."""
    workloads = sorted({sweep.workload for sweep in sweeps})
    supported = tuple(sorted({top_mhz, *(sweep.sm_clock_mhz for sweep in sweeps)}, reverse=True))
    seen = []
    true: dict[tuple[str, int], list[Sweep]] = defaultdict(list)
    for number, sweep in enumerate(sweeps):
        if (sweep.workload, sweep.sm_clock_mhz) in held_out:
            true[sweep.workload, sweep.sm_clock_mhz].append(sweep)
            continue
        rank, time_s = workloads.index(sweep.workload), sweep.time_s
        sample = InstructionSample(rank, F, (ClockShare(sweep.sm_clock_mhz, time_s),), 1)
        at = (TimeAtClock(F, sweep.sm_clock_mhz, time_s),)
        energy = RankEnergy(rank, time_s, sweep.power_w * time_s, at)
        seen.append(IterationObservation(number, f"p{number}", time_s, (sample,), (energy,)))
    gpus = [GpuView(f"GPU-{r}", "as in the table", supported, 0.0, None) for r in range(len(workloads))]
    profile = fit_profile(seen, gpus).profile
    time_errors, power_errors = [], []
    for (workload, clock), runs in true.items():
        option = profile[InstructionClass(workloads.index(workload), F)].at_clock(clock)
        time_errors.append(option.time_s / mean(run.time_s for run in runs) - 1)
        power_errors.append(option.energy_j / option.time_s / mean(run.power_w for run in runs) - 1)
    return HeldOut(tuple(time_errors), tuple(power_errors))


def v100_errors() -> HeldOut:
    """Return the errors at every clock between a workload's lowest and highest, each left out in turn.

    A workload ran at four clocks above 0.55 of the maximum, so each is predicted from its other three and the four of
    the other workloads on the same GPU.
    """
    sweeps = v100_sweeps()
    found = []
    for workload in sorted({sweep.workload for sweep in sweeps}):
        clocks = sorted({sweep.sm_clock_mhz for sweep in sweeps if sweep.workload == workload})
        found += [sweep_errors(sweeps, [(workload, clock)], top_mhz=V100_TOP_MHZ) for clock in clocks[1:-1]]
    return HeldOut(tuple(e for f in found for e in f.time_errors), tuple(e for f in found for e in f.power_errors))


def a100_fp32_errors() -> HeldOut:
    """Return the errors at five of the ten clocks, fitted from every other one."""
    sweeps = a100_fp32_sweeps()
    ordered = sorted(sweeps, key=lambda sweep: sweep.sm_clock_mhz)
    # Both ends are measured; they are below the lowest clock of the design.
    measured = {ordered[k].sm_clock_mhz for k in (0, 3, 5, 7, 9)}
    held_out = [(s.workload, s.sm_clock_mhz) for s in ordered if s.sm_clock_mhz not in measured]
    return sweep_errors(sweeps, held_out, top_mhz=max(measured))
