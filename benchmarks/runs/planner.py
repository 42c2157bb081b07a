"""Benchmark of the planner against EnvPipe's planner, lowtime 0.3.0 and HiGHS on the same inputs in one run.

Usage: python benchmarks/runs/planner.py [--lowtime-budget-s 60] [--instance-budget-s 40] [--tables FOLDER]
           [--instances FOLDER]

CPU is process time of one thread, medians with their spread; ours covers the frontier with 64 rounded and certified
plans, kernels loaded beforehand. An unfinished lowtime run counts as the time it had. Savings are against every
instruction at its highest clock, at no slowdown, evaluated on un-quantised times. FOLDER holds measured stage tables
(gpt3-175b_a100-sxm.csv, gpt3-175b_a40.csv); without them a table from a formula stands in. The instances' folder is
for planner_against_lowtime.py, which runs at the end. lowtime is optional: pip install lowtime==0.3.0.
"""

import argparse
import importlib
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from late_clocks import print_late_clocks
from lowtime_rival import is_installed, run_lowtime
from planner_against_lowtime import HEADER, INSTANCES, UNIT_MS, comparison_row, print_against_lowtime

from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd_other_policies.envpipe import EnvelopeMode, extra_warm_up, plan_envelope, profiled_clocks, valleys
from gpuenergyd_plan.offline.inflight import plan_inflight
from gpuenergyd_plan.profiles.profile_files import ProfileTable, read_pipeline_file
from gpuenergyd_policies.planning.frontier import frontier, solve, warm_up
from gpuenergyd_policies.planning.orders.relaxation import OrderTask
from gpuenergyd_policies.planning.plan_evaluation import baseline

F, B = InstructionKind.F, InstructionKind.B
TABLES = Path(__file__).parents[3] / "shared" / "data" / "profiles"
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline to plan."""

    name: str
    num_stages: int
    num_microbatches: int
    profile: PipelineProfile

    @property
    def graph(self) -> DependencyGraph:
        """Plain 1F1B."""
        return dependency_graph(one_forward_one_backward(self.num_stages, self.num_microbatches))


@dataclass(frozen=True, slots=True)
class Timed:
    """CPU seconds of repeated runs."""

    seconds: tuple[float, ...]
    is_finished: bool = True

    @property
    def median_s(self) -> float:
        """Median of the runs."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        spread = f" ({min(self.seconds):.3g}..{max(self.seconds):.3g}, n={len(self.seconds)})"
        return f"{'' if self.is_finished else '>'}{self.median_s:.3g}{spread if len(self.seconds) > 1 else ' (n=1)'}"


def main() -> None:
    """Print one section per question."""
    parser = argparse.ArgumentParser(description="planner benchmark")
    parser.add_argument("--lowtime-budget-s", type=float, default=60.0)
    parser.add_argument("--instance-budget-s", type=float, default=40.0)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--instances", type=Path, default=INSTANCES)
    arguments = parser.parse_args()
    profiles = _profiles(arguments.tables)
    warm_up()
    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores,", end=" ")
    print(f"Python {platform.python_version()}, numpy {np.__version__}")
    print(f"tables: {', '.join(profiles)}; load {os.getloadavg()[0]:.1f} at the start\n")
    sizes = ((4, 8), (4, 32), (8, 32))
    first = next(iter(profiles))
    _print_speed([_case(first, profiles[first], *size) for size in sizes], arguments.lowtime_budget_s)
    _print_savings([_case(name, profiles[name], *size) for name in profiles for size in (*sizes[:2], (8, 8), sizes[2])])
    _print_microbatches([_case(name, profiles[name], 8, m) for name in profiles for m in (12, 24, 48, 96)])
    print()
    tables = {gpu: (table_path(arguments.tables, gpu), power_w) for gpu, power_w in BLOCKING_POWER_W.items()}
    print_late_clocks(tables, arguments.instances)
    print_against_lowtime(arguments.instances, arguments.instance_budget_s)


def table_path(folder: Path, gpu: str) -> Path:
    """Return the path of a GPU's measured stage table."""
    return folder / f"gpt3-175b_{gpu}.csv"


def _profiles(folder: Path) -> dict[str, PipelineProfile]:
    """Return eight-stage profiles: the measured ones, else one from a formula."""
    result = {}
    for gpu, blocking_power_w in BLOCKING_POWER_W.items():
        path = table_path(folder, gpu)
        if path.is_file():
            table = read_pipeline_file(path)
            assert isinstance(table, ProfileTable)
            result[gpu] = PipelineProfile(table.classes, blocking_power_w)
    return result or {"formula": _formula_profile()}


def _formula_profile() -> PipelineProfile:
    """Return eight nearly equal stages: power static plus cubic in the clock, part of the time not scaling."""
    classes = {}
    for stage, (kind, work) in itertools.product(range(8), ((F, 1.0), (B, 2.0))):
        weight = work * 0.05 * (1.07 if stage == 7 else 1.0)
        classes[InstructionClass(stage, kind)] = instruction_profile(
            (
                ClockOption(mhz, t := weight * (0.3 + 0.7 * 1410 / mhz), t * (120.0 + 300.0 * (mhz / 1410) ** 3))
                for mhz in range(1410, 840, -15)
            ),
            where="formula",
        )
    return PipelineProfile(classes, 80.0)


def _case(name: str, profile: PipelineProfile, num_stages: int, num_microbatches: int) -> Case:
    """Return a case with eight stages, or with neighbours merged into four."""
    per_stage = 8 // num_stages
    classes = {}
    for stage, kind in itertools.product(range(num_stages), (F, B)):
        parts = [profile[InstructionClass(stage * per_stage + k, kind)] for k in range(per_stage)]
        classes[InstructionClass(stage, kind)] = InstructionProfile(
            tuple(
                ClockOption(
                    o.sm_clock_mhz,
                    sum(part.at_clock(o.sm_clock_mhz).time_s for part in parts),
                    sum(part.at_clock(o.sm_clock_mhz).energy_j for part in parts),
                )
                for o in parts[0].options
            )
        )
    return Case(
        f"{name} {num_stages}x{num_microbatches}",
        num_stages,
        num_microbatches,
        PipelineProfile(classes, profile.blocking_power_w),
    )


def _timed(work: Callable[[], object], repeats: int = REPEATS) -> Timed:
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return Timed(tuple(seconds))


def _print_speed(cases: list[Case], lowtime_budget_s: float) -> None:
    print("## Speed, CPU seconds: median (spread, n)\n")
    print("| case | ours, 64 plans | EnvPipe balanced | HiGHS, one deadline | lowtime, 1 ms | lowtime / ours |")
    print("|---|---|---|---|---|---|")
    comparisons = []
    for case in cases:
        graph, profile = case.graph, case.profile
        deadline_s = baseline(graph, profile).iteration_time_s
        ours = _timed(lambda graph=graph, profile=profile: frontier(graph, profile))  # type: ignore[misc]
        valleys_mhz = valleys(graph, profile, profiled_clocks(profile))
        envpipe = _timed(
            lambda graph=graph, profile=profile, v=valleys_mhz: plan_envelope(graph, profile, v)  # type: ignore[misc]
        )
        highs = _timed(lambda graph=graph, profile=profile, t=deadline_s: _highs_j(graph, profile, t), 3)  # type: ignore[misc]
        theirs, ratio = "-", "not installed"
        if is_installed():
            run = run_lowtime(graph, profile, unit_s=UNIT_MS / 1000, budget_s=lowtime_budget_s)
            comparisons.append((case, run))
            lowtime = Timed((run.cpu_s,), run.is_finished)
            theirs = str(lowtime)
            ratio = f"{'' if lowtime.is_finished else '>'}{lowtime.median_s / ours.median_s:.0f}"
        print(f"| {case.name} | {ours} | {envpipe} | {highs} | {theirs} | {ratio} |", flush=True)
    print("\n## Against lowtime at the same real time, energy of ours relative to its plan\n")
    print(HEADER)
    for case, run in comparisons:
        print(comparison_row(case.name, case.graph, case.profile, run), flush=True)
    print()


def _print_savings(cases: list[Case]) -> None:
    print("## Saving at no slowdown, percent\n")
    print(
        "| case | EnvPipe, better of two | ours | bound | EnvPipe + extra | ours on its order | ours + extra | extra |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        graph, profile = case.graph, case.profile
        full_speed = baseline(graph, profile)
        deadline_s = full_speed.iteration_time_s

        def percent(energy_j: float, reference_j: float = full_speed.energy_j) -> str:
            return f"{100 * (1 - energy_j / reference_j):.2f}"

        valleys_mhz = valleys(graph, profile, profiled_clocks(profile))
        extra = extra_warm_up(profile, valleys_mhz, num_microbatches=case.num_microbatches)
        roomy = dependency_graph(one_forward_one_backward(case.num_stages, case.num_microbatches, extra))
        modes = (EnvelopeMode.BALANCED, EnvelopeMode.GREEDY)
        theirs = min(plan_envelope(graph, profile, valleys_mhz, mode=m).evaluation.energy_j for m in modes)
        theirs_extra = min(plan_envelope(roomy, profile, valleys_mhz, mode=m).evaluation.energy_j for m in modes)
        ours = solve(graph, profile, deadline_s=deadline_s)
        on_theirs = solve(roomy, profile, deadline_s=deadline_s)
        task = OrderTask(case.num_microbatches, profile, deadline_s, [case.num_microbatches] * case.num_stages)
        chosen = plan_inflight(task)
        print(
            f"| {case.name} | {percent(theirs)} | {percent(ours.energy_j)} | {percent(ours.lower_bound_j)} |"
            f" {percent(theirs_extra)} | {percent(on_theirs.energy_j)} | {percent(chosen.solved.energy_j)} |"
            f" {list(chosen.schedule.extra_inflight) or [0] * case.num_stages} |",
            flush=True,
        )
    print()


PERSEUS_TABLE_6 = {"a100-sxm": {12: 15.2, 24: 14.2, 48: 13.6, 96: 13.3}, "a40": {12: 11.8, 24: 10.2, 48: 9.3, 96: 8.9}}
"""Intrinsic saving of GPT-3 175B on 8 stages, percent (Chung et al., SOSP'24)."""


def _print_microbatches(cases: list[Case]) -> None:
    print("## Eight stages by microbatches, saving at no slowdown, percent (Perseus: as published, SOSP'24 Table 6)\n")
    print("| case | Perseus | ours | proven bound | ours + extra |")
    print("|---|---|---|---|---|")
    for case in cases:
        full_speed = baseline(case.graph, case.profile)
        deadline_s = full_speed.iteration_time_s
        ours = solve(case.graph, case.profile, deadline_s=deadline_s)
        task = OrderTask(case.num_microbatches, case.profile, deadline_s, [case.num_microbatches] * 8)
        extra = plan_inflight(task)
        published = PERSEUS_TABLE_6.get(case.name.split()[0], {}).get(case.num_microbatches)
        cells = [
            100 * (1 - j / full_speed.energy_j) for j in (ours.energy_j, ours.lower_bound_j, extra.solved.energy_j)
        ]
        print(f"| {case.name} | {published or '-'} | {cells[0]:.2f} | {cells[1]:.2f} | {cells[2]:.2f} |", flush=True)


def _highs_j(graph: DependencyGraph, profile: PipelineProfile, deadline_s: float) -> float:
    """Return the optimum of the relaxation at one deadline, as a linear program."""
    optimize: Any = importlib.import_module("scipy.optimize")
    sparse: Any = importlib.import_module("scipy.sparse")
    n = len(graph.instructions)
    blocking_power_w = profile.blocking_power_w
    hulls = [profile[i.instruction_class].lower_hull(blocking_power_w) for i in graph.instructions]
    costs, upper = [0.0] * n, [deadline_s] * n
    pieces: list[list[int]] = []
    for hull in hulls:
        columns = []
        for left, right in itertools.pairwise(hull):
            width_s = right.time_s - left.time_s
            columns.append(len(costs))
            costs.append(
                (right.effective_energy_j(blocking_power_w) - left.effective_energy_j(blocking_power_w)) / width_s
            )
            upper.append(width_s)
        pieces.append(columns)
    rows: list[int] = []
    columns_: list[int] = []
    values: list[float] = []
    limits: list[float] = []

    def require(u: int, v: int | None, latency_s: float) -> None:
        row = len(limits)
        for column, value in [(u, 1.0), *((c, 1.0) for c in pieces[u]), *([(v, -1.0)] if v is not None else [])]:
            rows.append(row)
            columns_.append(column)
            values.append(value)
        limits.append((deadline_s if v is None else -latency_s) - hulls[u][0].time_s)

    for u, after in enumerate(graph.successors):
        for v, latency_s in after:
            require(u, v, latency_s)
        if not after:
            require(u, None, 0.0)
    matrix = sparse.csr_matrix((values, (rows, columns_)), shape=(len(limits), len(costs)))
    solution = optimize.linprog(
        costs, A_ub=matrix, b_ub=limits, bounds=list(zip([0.0] * len(costs), upper, strict=True)), method="highs"
    )
    fixed_j = sum(hull[0].effective_energy_j(blocking_power_w) for hull in hulls)
    return float(solution.fun + fixed_j + blocking_power_w * graph.num_ranks * deadline_s)


if __name__ == "__main__":
    main()
