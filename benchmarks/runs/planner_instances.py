"""Benchmark of the planner on instance files: CPU seconds, gap to the proven bound, memory, growth with size.

Usage: python benchmarks/runs/planner_instances.py [FOLDER] [--exact-large] [--json]

FOLDER holds instance JSONs and, where known, their bounds.json. Each instance runs in a process of its own, compiled
kernels loaded beforehand; CPU is process time of one thread and covers the frontier with 64 rounded and certified
plans. Gaps are to the proven bound, in percent of the energy.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from gpuenergyd_plan.profiles.profile_files import PlannerInstance, read_pipeline_file
from gpuenergyd_policies.planning.frontier import Frontier, frontier, solve, warm_up
from gpuenergyd_policies.planning.problem import LARGE_PIPELINE, make_problem

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "instances"
THIN = 1e-3


def main(arguments: list[str]) -> None:
    """Print one row per instance, then the growth of CPU time."""
    if arguments[:1] == ["--one"]:
        print(json.dumps(_measure(Path(arguments[1]), exact_large="--exact-large" in arguments)))
        return
    flags = [a for a in arguments if a.startswith("--")]
    folder = Path(next((a for a in arguments if not a.startswith("--")), FOLDER))
    header = (
        f"{'instance':<22}{'ops':>6}{'exact s':>9}{'thin s':>8}{'bends':>8}{'gap mean':>10}{'max':>7}{'thin mean':>11}"
        f"{'max':>7}{'plan s':>8}{'plan gap':>10}{'vs known':>10}{'MB':>6}"
    )
    is_json = "--json" in flags
    if not is_json:
        print(header)
    rows = []
    for path in sorted(folder.glob("s*.json"), key=lambda p: p.stat().st_size):
        child = [sys.executable, __file__, "--one", str(path), *flags]
        row = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
        rows.append(row)
        if is_json:
            continue
        print(
            f"{row['name']:<22}{row['num_ops']:>6}{_cell(row['exact_cpu_s'], 9)}{row['thin_cpu_s']:>8.3f}"
            f"{row['breakpoints']:>8}{_cell(row['gap_mean'], 10)}{_cell(row['gap_max'], 7)}"
            f"{row['thin_gap_mean']:>11.3f}{row['thin_gap_max']:>7.3f}{row['plan_cpu_s']:>8.3f}{row['plan_gap']:>10.3f}"
            f"{_cell(row['deviation'], 10, '.1e')}{row['memory_mb']:>6.0f}",
            flush=True,
        )
    if is_json:
        print(json.dumps({"rows": rows, "growth_exponents": _growth({row["name"]: row for row in rows})}))
    else:
        for name, exponent in _growth({row["name"]: row for row in rows}).items():
            print(f"{name:<12} grows with exponent {exponent:.2f} from 512 to 2048 instructions at 8 stages")


def _measure(path: Path, *, exact_large: bool) -> dict[str, Any]:
    instance = read_pipeline_file(path)
    assert isinstance(instance, PlannerInstance)
    graph, profile = instance.graph, instance.profile
    warm_up()
    frontier(graph, profile, num_points=1, thin_tolerance=0.1)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_exact = len(graph.instructions) < LARGE_PIPELINE or exact_large
    exact, exact_cpu_s = _timed(lambda: frontier(graph, profile, thin_tolerance=0.0)) if is_exact else (None, None)
    thin, thin_cpu_s = _timed(lambda: frontier(graph, profile, thin_tolerance=THIN))
    memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    plan, plan_cpu_s = _timed(lambda: solve(graph, profile, deadline_s=1.05 * thin.min_time_s))
    gaps = _gaps(exact) if exact else None
    problem = make_problem(graph, profile, 0.0 if exact else THIN)
    sweep = problem.sweep(np.array([problem.min_time_s]), stop_early=False)
    return {
        "name": path.stem,
        "num_ops": len(graph.instructions),
        "exact_cpu_s": exact_cpu_s,
        "thin_cpu_s": thin_cpu_s,
        "breakpoints": len(sweep.breakpoint_times_s),
        "gap_mean": float(gaps.mean()) if gaps is not None else None,
        "gap_max": float(gaps.max()) if gaps is not None else None,
        "thin_gap_mean": float(_gaps(thin).mean()),
        "thin_gap_max": float(_gaps(thin).max()),
        "plan_cpu_s": plan_cpu_s,
        "plan_gap": 100 * (plan.energy_j / plan.lower_bound_j - 1),
        "deviation": _deviation(path, instance),
        "memory_mb": memory_kib / 1024,
    }


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    began_s = time.process_time()
    result = run()
    return result, time.process_time() - began_s


def _gaps(whole: Frontier) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.array([100 * (p.energy_j / p.lower_bound_j - 1) for p in whole.points if p.lower_bound_j is not None])


def _deviation(path: Path, instance: PlannerInstance) -> float | None:
    """Return the largest relative difference to the known certified bounds, over all listed deadlines."""
    known = path.parent / "bounds.json"
    if not known.exists():
        return None
    points = json.loads(known.read_text())[path.stem]["points"]
    problem = make_problem(instance.graph, instance.profile)
    deadlines_s = np.array([p["T_s"] for p in points])
    sweep = problem.sweep(deadlines_s, stop_early=False)
    bounds_j = problem.cost_bounds_j(sweep, np.arange(len(points)), deadlines_s)
    bounds_j = bounds_j + problem.tables.idle_power_w * deadlines_s
    return float(np.max(np.abs(bounds_j / [p["E_certified_lower_bound_J"] for p in points] - 1)))


def _growth(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the exponent of CPU time in the number of instructions, from 512 to 2048 at eight stages."""
    small, large = rows.get("s8m32_1f1b_a100"), rows.get("s8m128_1f1b_a100")
    if not small or not large:
        return {}
    ratio = log(large["num_ops"] / small["num_ops"])
    return {name: log(large[name] / small[name]) / ratio for name in ("exact_cpu_s", "thin_cpu_s", "plan_cpu_s")}


def _cell(value: float | None, width: int, form: str = ".3f") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


if __name__ == "__main__":
    main(sys.argv[1:])
