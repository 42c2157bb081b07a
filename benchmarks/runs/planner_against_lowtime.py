"""Comparison of the planner with lowtime on instance files: energy at the same real iteration time.

Usage: python benchmarks/runs/planner_against_lowtime.py [--instances FOLDER] [--only NAME] [--instance-budget-s 40]

Each plan of lowtime, or a spread sample of them, takes a real time T: un-quantised, with the instance's edge latencies,
which lowtime does not know. Ours is planned for that T, as a permission up to T* and as a forced wait beyond, and both
energies charge waiting until T. Positive differences say that ours needs more. Where lowtime at 1 ms fails or does not
end within its budget of CPU seconds it runs once more with a coarser unit.
"""

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lowtime_rival import LowtimeRun, is_installed, run_lowtime

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd_plan.profiles.profile_files import PlannerInstance, read_pipeline_file
from gpuenergyd_policies.planning.frontier import Effort, min_iteration_time_s, solve, warm_up
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks

INSTANCES = Path(__file__).parents[3] / "shared" / "data" / "instances"
UNIT_MS = 1
COARSEST_UNIT_MS = 5
SAMPLE, LARGE_SAMPLE = 25, 4
LARGE = 4096
"""Instructions from which ours plans with thinned hulls and few plans are compared."""
HEADER = """\
| case | unit | plans compared (up to T*) | T / T_min | mean | worst | lowtime |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of our plan to one of lowtime's."""

    time_ratio: float
    """Its real time over T_min."""
    percent: float
    is_forced: bool


def main() -> None:
    """Print the table for the requested instances."""
    parser = argparse.ArgumentParser(description="planner against lowtime")
    parser.add_argument("--instances", type=Path, default=INSTANCES)
    parser.add_argument("--only", help="the name of one instance")
    parser.add_argument("--instance-budget-s", type=float, default=40.0)
    arguments = parser.parse_args()
    print_against_lowtime(arguments.instances, arguments.instance_budget_s, only=arguments.only)


def print_against_lowtime(folder: Path, budget_s: float, *, only: str | None = None) -> None:
    """Print one row per instance and unit."""
    print("## Against lowtime on every instance, energy of ours relative to its plan at the same real time\n")
    paths = [p for p in folder.glob("s*.json") if only in (None, p.stem)]
    if not paths or not is_installed():
        print("no instances\n" if not paths else "lowtime is not installed\n")
        return
    warm_up()
    print(HEADER)
    for path in sorted(paths, key=lambda p: p.stat().st_size):
        instance = read_pipeline_file(path)
        assert isinstance(instance, PlannerInstance)
        graph, profile = instance.graph, instance.profile
        run = run_lowtime(graph, profile, unit_s=UNIT_MS / 1000, budget_s=budget_s)
        print(comparison_row(path.stem, graph, profile, run), flush=True)
        if not run.is_finished and len(graph.instructions) < LARGE:
            unit_ms = _coarser_unit_ms(graph, profile, run)
            run = run_lowtime(graph, profile, unit_s=unit_ms / 1000, budget_s=budget_s)
            print(comparison_row(path.stem, graph, profile, run, unit_ms=unit_ms), flush=True)
    print()


def comparison_row(
    name: str, graph: DependencyGraph, profile: PipelineProfile, run: LowtimeRun, *, unit_ms: int = UNIT_MS
) -> str:
    """Return a table row, under HEADER, on a run of lowtime."""
    differences = _differences(graph, profile, run.plans)
    percents = [d.percent for d in differences]
    ratios = [d.time_ratio for d in differences]
    cells = (
        name,
        f"{unit_ms} ms",
        f"{len(differences)} ({sum(not d.is_forced for d in differences)})",
        f"{min(ratios):.3f}..{max(ratios):.3f}" if ratios else "-",
        f"{statistics.mean(percents):+.3f} %" if percents else "-",
        f"{max(percents):+.3f} %" if percents else "-",
        f"{run.failure or ('finished' if run.is_finished else 'cut off')}, {len(run.plans)} plans, {run.cpu_s:.3g} s",
    )
    return f"| {' | '.join(cells)} |"


def _differences(
    graph: DependencyGraph, profile: PipelineProfile, plans: tuple[tuple[int, ...], ...]
) -> list[Difference]:
    if not plans:
        return []
    idle_w = graph.num_ranks * profile.blocking_power_w
    min_time_s = min_iteration_time_s(graph, profile)
    least_s = solve(graph, profile, deadline_s=math.inf, effort=Effort.QUICK).min_energy_time_s
    sample = min(len(plans), LARGE_SAMPLE if len(graph.instructions) >= LARGE else SAMPLE)
    result = []
    for at in np.linspace(0, len(plans) - 1, sample):
        theirs = evaluate_clocks(graph, profile, plans[round(at)])
        time_s = theirs.iteration_time_s
        is_forced = time_s > least_s
        ours = solve(graph, profile, deadline_s=time_s, forced=is_forced)
        ours_j = ours.energy_j + idle_w * (time_s - ours.iteration_time_s)
        result.append(Difference(time_s / min_time_s, 100 * (ours_j / theirs.energy_j - 1), is_forced))
    return result


def _coarser_unit_ms(graph: DependencyGraph, profile: PipelineProfile, run: LowtimeRun) -> int:
    """Return a time unit with which lowtime, which removes one unit per plan, may finish within the budget."""
    classes = (profile[i.instruction_class].lower_hull(profile.blocking_power_w)[-1] for i in graph.instructions)
    slowest_s = timeline(graph, [option.time_s for option in classes]).iteration_time_s
    needed = (slowest_s - min_iteration_time_s(graph, profile)) * 1000 / UNIT_MS
    return min(COARSEST_UNIT_MS, max(UNIT_MS + 1, math.ceil(UNIT_MS * needed / max(1, len(run.plans)))))


if __name__ == "__main__":
    main()
