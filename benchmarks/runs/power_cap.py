"""Benchmark of plans under a power cap: how much of what one locked clock costs they avoid, and how far from the bound.

Usage: python benchmarks/runs/power_cap.py [--window-s 0.1] [--json]

Each case caps the power of a pipeline, all GPUs together, at a share of its peak at full speed: the measured GPT-3
tables with 8 stages, and the planner's instances. Plans are replayed: time and peak are computed again from order and
clocks alone. Reported is the slowdown of the plan, of the best single clock that fits, of equal limits, and the first
plan of the time-energy frontier below the cap; `avoided` is the share of the single clock's slowdown that a plan
avoids. Exits with 1 if a replayed peak exceeds its cap, or the median plan for a number of microbatches avoids less
than half.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from gpuenergyd.core.pipeline.power_swing import power_wave
from gpuenergyd.core.policy_api.policy import OfflinePlan
from gpuenergyd.errors import TargetError
from gpuenergyd_plan.inputs import PlanInput, plan_input
from gpuenergyd_plan.offline.bubble_aware import plan_offline
from gpuenergyd_plan.tables import PlanOptions
from gpuenergyd_policies.planning.frontier import Effort, solve
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks
from gpuenergyd_policies.planning.power_waves import wave_of

DATA = Path(__file__).parents[3] / "shared" / "data"
TABLES = {"A100": ("gpt3-175b_a100-sxm.csv", 83.64), "A40": ("gpt3-175b_a40.csv", 70.38)}
NUM_MICROBATCHES = (8, 32)
INSTANCES = ("s4m8_1f1b_a100", "s4m8_gpipe_a40", "s4m8_zbh1_h200", "s4m32_1f1b_a40noisy", "s8m32_1f1b_a100")
RATIOS = (0.7, 0.8, 0.9)
"""Caps relative to the peak at full speed."""
SLOWDOWN_RATIOS = tuple(0.0025 * step for step in range(121))
"""Slowdowns at which the frontier is searched for its first plan below a cap."""
LEAST_AVOIDED = 0.5
TOLERANCE = 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--window-s", type=float, default=None, help="cap the mean power of windows this long")
    parser.add_argument("--short", action="store_true", help="only 8 microbatches, without instances")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [
        case for name, path, given in _inputs(is_short=options.short) for case in _cases(name, path, given, options)
    ]
    sizes = sorted({case["num_microbatches"] for case in cases if case["is_table"]})
    medians = {
        str(size): median(c["avoided"] for c in cases if c["is_table"] and c["num_microbatches"] == size)
        for size in sizes
    }
    first = {
        str(size): median(
            c["first_avoided"] for c in cases if c["is_table"] and c["num_microbatches"] == size and c["first_avoided"]
        )
        for size in sizes
    }
    figures = {
        "window_s": options.window_s or 0.0,
        "cases": cases,
        "avoided_median_by_microbatches": medians,
        "first_of_frontier_avoided_median_by_microbatches": first,
        "peak_to_cap_max_ratio": max(case["peak_w"] / case["cap_w"] for case in cases),
        "solve_cpu_max_s": max(case["solve_cpu_s"] for case in cases),
    }
    if not options.json:
        for case in cases:
            print(case)
    print(json.dumps(figures))
    is_met = min(medians.values()) >= LEAST_AVOIDED and figures["peak_to_cap_max_ratio"] <= 1 + TOLERANCE
    return 0 if is_met else 1


def _inputs(*, is_short: bool) -> Iterator[tuple[str, Path, PlanOptions]]:
    for gpu, (file, blocking_power_w) in TABLES.items():
        for count in NUM_MICROBATCHES[: 1 if is_short else None]:
            yield (
                f"{gpu}, 8 x {count}",
                DATA / "profiles" / file,
                PlanOptions(microbatches=count, blocking_power_w=blocking_power_w),
            )
    for name in () if is_short else INSTANCES:
        yield name, DATA / "instances" / f"{name}.json", PlanOptions()


def _cases(name: str, path: Path, given: PlanOptions, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    plain = plan_input(path, given).request
    full_speed = wave_of(
        plain.graph, plain.profile, [plain.profile[i.instruction_class].fastest for i in plain.graph.instructions]
    )
    window_s = options.window_s or 0.0
    for ratio in RATIOS:
        cap_w = ratio * full_speed.peak_mean_w(window_s)
        capped = plan_input(path, PlanOptions(**{**_fields(given), "power_cap_w": cap_w, "window_s": options.window_s}))
        try:
            planned = plan_offline(capped.request)
        except TargetError as error:
            print(f"{name} at {ratio}: {error}", file=sys.stderr)
            continue
        yield {"name": name, "is_table": path.suffix == ".csv", "cap_ratio": ratio} | _figures(capped, planned, cap_w)


def _fields(given: PlanOptions) -> dict[str, Any]:
    return {name: getattr(given, name) for name in PlanOptions.__dataclass_fields__}


def _figures(capped: PlanInput, planned: OfflinePlan, cap_w: float) -> dict[str, Any]:
    request, power = capped.request, planned.power
    assert power is not None
    clocks = [planned.sm_clocks_mhz[i] for i in request.graph.instructions]
    replayed = evaluate_clocks(request.graph, request.profile, clocks)
    options = [
        request.profile[i.instruction_class].at_clock(mhz)
        for i, mhz in zip(request.graph.instructions, clocks, strict=True)
    ]
    wave = power_wave(replayed.timeline, [o.energy_j / o.time_s for o in options], request.profile.blocking_power_w)
    fastest_s = baseline(request.graph, request.profile).iteration_time_s
    single_s, first_s = power.single_clock_time_s, _first_of_frontier_s(capped, power.cap.window_s, cap_w)

    def slowdown(time_s: float | None) -> float | None:
        return None if time_s is None else time_s / fastest_s - 1

    def avoided(time_s: float | None) -> float | None:
        if time_s is None or single_s is None or single_s <= fastest_s * (1 + TOLERANCE):
            return None
        return 1 - max(0.0, time_s - fastest_s) / (single_s - fastest_s)

    return {
        "num_stages": request.graph.num_ranks,
        "num_microbatches": capped.schedule.num_microbatches,
        "cap_w": cap_w,
        "peak_w": wave.peak_mean_w(power.cap.window_s),
        "slowdown_ratio": slowdown(replayed.iteration_time_s),
        "single_clock_slowdown_ratio": slowdown(single_s),
        "equal_limits_slowdown_ratio": slowdown(power.equal_limits_time_s),
        "first_of_frontier_slowdown_ratio": slowdown(first_s),
        "avoided": avoided(replayed.iteration_time_s),
        "first_avoided": avoided(first_s),
        "gap_to_bound_ratio": replayed.iteration_time_s / power.time_bound_s - 1,
        "solve_cpu_s": planned.solve_cpu_s,
    }


def _first_of_frontier_s(capped: PlanInput, window_s: float, cap_w: float) -> float | None:
    """Return the time of the first plan of the frontier below the cap."""
    graph, profile = capped.request.graph, capped.request.profile
    fastest_s = baseline(graph, profile).iteration_time_s
    for ratio in SLOWDOWN_RATIOS:
        solved = solve(graph, profile, deadline_s=fastest_s * (1 + ratio), forced=True, effort=Effort.QUICK)
        options = [
            profile[i.instruction_class].at_clock(mhz)
            for i, mhz in zip(graph.instructions, solved.sm_clocks_mhz, strict=True)
        ]
        if wave_of(graph, profile, options).peak_mean_w(window_s) <= cap_w:
            return solved.iteration_time_s
    return None


if __name__ == "__main__":
    sys.exit(main())
