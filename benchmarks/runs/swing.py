"""Benchmark of swings: how much flatter the power of a host gets at equal time and at most 0.2 % more energy.

Usage: python benchmarks/runs/swing.py [--short] [--json]

The demo's host (simulated A100s, four stages, eight microbatches), the measured GPT-3 tables and the planner's
instances. The least-energy plan, the flattest plan found in its time, and full speed are compared by the energy of the
power of all GPUs from 0.1 to 20 Hz: the mean square of that part of the wave, computed exactly from the clocks, with
every clock in effect in time. For the demo's host, also with more time, with more energy, with other seeds, and with
the flattest of the orders of nearly the least energy, within the memory of 1F1B and with more of it. Ramps are those of
the real limiter on a host in virtual time: the steepest rise from one second to the next when a job starts and goes on
after a stall, the steepest fall at its known end, and the time from the start of work to full clocks. Everything is
simulated. Exits with 1 unless the swing of the demo's host falls by a fifth where the order may change, against the
plan of least energy of 1F1B and against that of all orders, in the same time and with at most 0.2 % more energy, and no
ramp is 5 % steeper than asked. In the order of 1F1B a fifth is impossible, which the bound shows.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.worlds.swing_bound import least_band_energy_w2
from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.power_swing import SwingFigures, swing_of
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_plan.flat.plan import EXTRA_ENERGY_RATIO, flat_plan, flattest_order
from gpuenergyd_plan.inputs import plan_input
from gpuenergyd_plan.offline.order_choice import plan_order
from gpuenergyd_plan.tables import PlanOptions
from gpuenergyd_policies.planning.frontier import SolvedPlan, solve
from gpuenergyd_policies.planning.orders.relaxation import OrderTask
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_policies.planning.power_waves import wave_of
from gpuenergyd_power.rules.ramp import RampLimiter
from gpuenergyd_sim.driver.device_model import capped_sm_clock_mhz, instruction_time_s, working_power_w
from gpuenergyd_sim.driver.device_parameters import device_parameters
from gpuenergyd_sim.training.gpt_model import simulated_works
from tests.plugins.power.ramped_host import CLOCKS_MHZ, RampedHost, steady_after

DATA = Path(__file__).parents[3] / "shared" / "data"
TABLES = {"A100": ("gpt3-175b_a100-sxm.csv", 83.64), "A40": ("gpt3-175b_a40.csv", 70.38)}
NUM_MICROBATCHES = (8, 32)
INSTANCES = ("s4m8_1f1b_a100", "s4m8_gpipe_a40", "s4m8_zbh1_h200", "s4m32_1f1b_a40noisy", "s8m32_1f1b_a100")
SLOWDOWN_RATIOS = (0.0, 0.02, 0.05, 0.1)
EXTRA_RATIOS = (0.005, 0.01, 0.02, 0.03)
SEEDS = (1, 2, 3)
DEMO_STAGES, DEMO_MICROBATCHES, DEMO_GPU = 4, 8, "a100-sxm"
DEMO_LIMITS = ((4, 3, 2, 1), (6, 5, 4, 3), (8, 8, 8, 8))
"""Microbatches that each stage may hold: those of 1F1B, two more, and all."""
LEAST_FALL, SAME_RATIO = 0.2, 1e-9
RAMPS_W_PER_S = (200.0, 300.0, 600.0)
START_S, STALL_S, STALLED_S, TOTAL = 5.0, 80.0, 20.0, 120
"""When the job of the ramps starts and stalls, for how long, and its iterations."""
MOST_STEEPNESS = 1.05

Pipeline = tuple[DependencyGraph, PipelineProfile]


@dataclass(frozen=True)
class Case:
    """One pipeline at one permitted slowdown."""

    name: str
    pipeline: Pipeline
    slowdown_ratio: float = 0.0
    extra_ratio: float = EXTRA_ENERGY_RATIO
    seed: int = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="only the demo's host without more time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = []
    for case in _cases(is_short=options.short):
        cases.append(_figures(case))
        if not options.json:
            print(cases[-1])
    demo = [case for case in cases if case["is_demo"] and case["extra_ratio"] == EXTRA_ENERGY_RATIO]
    without_time = [case["fall_ratio"] for case in demo if case["slowdown_ratio"] == 0]
    chosen = [_chosen_order(limits) for limits in (DEMO_LIMITS[:1] if options.short else DEMO_LIMITS)]
    figures = {
        "extra_energy_ratio": EXTRA_ENERGY_RATIO,
        "demo_fall_ratio": max(without_time),
        "demo_fall_min_ratio": min(without_time),
        "num_seeds": len(without_time),
        "demo_fall_bound_ratio": _most_fall(Case("demo", demo_pipeline())),
        "demo_chosen_orders": chosen,
        "extra_energy_max_ratio": max(case["extra_energy_ratio"] - case["extra_ratio"] for case in cases),
        "longer_max_ratio": max(case["longer_ratio"] for case in cases),
        "ramps": [_ramps(ramp_w_per_s) for ramp_w_per_s in (*RAMPS_W_PER_S, None)],
        "cases": cases,
    }
    print(json.dumps(figures))
    is_limited = all(ramp["steepest_ratio"] <= MOST_STEEPNESS for ramp in figures["ramps"] if ramp["steepest_ratio"])
    return 0 if all(_is_flat_enough(own) for own in chosen) and is_limited else 1


def _is_flat_enough(own: dict[str, Any]) -> bool:
    """Return whether a chosen order swings a fifth less than both plans of least energy, in their time and energy."""
    return bool(
        min(own["fall_ratio"], own["fall_of_own_ratio"]) >= LEAST_FALL
        and max(own["longer_ratio"], own["longer_than_own_ratio"]) <= SAME_RATIO
        and max(own["extra_energy_ratio"], own["extra_energy_of_own_ratio"]) <= EXTRA_ENERGY_RATIO + SAME_RATIO
    )


def demo_pipeline(*, with_split: bool = False) -> Pipeline:
    """Return the pipeline of `gpuenergyd demo` as its simulated GPUs run it, `with_split` with split backwards."""
    parameters, classes = device_parameters(DEMO_GPU), {}
    for rank in range(DEMO_STAGES):
        for kind, work in simulated_works(rank, DEMO_STAGES).items():
            if kind in {"F", "B"} or with_split:
                options = []
                for mhz in parameters.supported_sm_clocks_mhz:
                    clock = capped_sm_clock_mhz(parameters, work, mhz, parameters.default_power_limit_w)
                    time_s = instruction_time_s(parameters, work, clock)
                    options.append(ClockOption(mhz, time_s, time_s * working_power_w(parameters, work, clock)))
                classes[InstructionClass(rank, InstructionKind(kind))] = InstructionProfile(tuple(options))
    graph = dependency_graph(one_forward_one_backward(DEMO_STAGES, DEMO_MICROBATCHES))
    return graph, PipelineProfile(classes, parameters.blocking_power_w)


def _cases(*, is_short: bool) -> Iterator[Case]:
    demo = demo_pipeline()
    for seed in SEEDS:
        yield Case("demo", demo, seed=seed)
    if is_short:
        return
    for slowdown_ratio in SLOWDOWN_RATIOS[1:]:
        yield Case("demo", demo, slowdown_ratio)
    for extra_ratio in EXTRA_RATIOS:
        yield Case("demo", demo, extra_ratio=extra_ratio)
    if not DATA.exists():
        return
    for gpu, (file, blocking_power_w) in TABLES.items():
        for count in NUM_MICROBATCHES:
            options = PlanOptions(microbatches=count, blocking_power_w=blocking_power_w)
            request = plan_input(DATA / "profiles" / file, options).request
            for slowdown_ratio in (0.0, 0.05):
                yield Case(f"{gpu}, 8 x {count}", (request.graph, request.profile), slowdown_ratio)
    for name in INSTANCES:
        request = plan_input(DATA / "instances" / f"{name}.json", PlanOptions()).request
        yield Case(name, (request.graph, request.profile))


def _figures(case: Case) -> dict[str, Any]:
    graph, profile = case.pipeline
    solved = solve(graph, profile, deadline_s=baseline(graph, profile).iteration_time_s * (1 + case.slowdown_ratio))
    flat = flat_plan(graph, profile, solved, extra_energy_ratio=case.extra_ratio, seed=case.seed)
    full_speed = wave_of(graph, profile, [profile[i.instruction_class].at_max_clock for i in graph.instructions])
    swings = {
        "full_speed": swing_of(full_speed),
        "least_energy": _swing(case.pipeline, solved),
        "flat": swing_of(flat.wave),
    }
    return {
        "name": case.name,
        "is_demo": case.name == "demo",
        "slowdown_ratio": case.slowdown_ratio,
        "extra_ratio": case.extra_ratio,
        "seed": case.seed,
        "iteration_time_s": flat.wave.iteration_time_s,
        "longer_ratio": flat.wave.iteration_time_s / solved.iteration_time_s - 1,
        "extra_energy_ratio": flat.wave.energy_j / solved.energy_j - 1,
        "fall_ratio": 1 - swings["flat"].band_energy_w2 / swings["least_energy"].band_energy_w2,
        "fall_from_full_speed_ratio": 1 - swings["flat"].band_energy_w2 / swings["full_speed"].band_energy_w2,
        "least_energy_fall_from_full_speed_ratio": 1
        - swings["least_energy"].band_energy_w2 / swings["full_speed"].band_energy_w2,
    } | {name: _shown(swing) for name, swing in swings.items()}


def _most_fall(case: Case) -> float:
    """Return by how much no clocks lower the swing of a pipeline more, in its order."""
    graph, profile = case.pipeline
    solved = solve(graph, profile, deadline_s=baseline(graph, profile).iteration_time_s * (1 + case.slowdown_ratio))
    flat = flat_plan(graph, profile, solved, extra_energy_ratio=case.extra_ratio, seed=case.seed)
    limit_j = solved.energy_j * (1 + case.extra_ratio)
    return (
        1
        - least_band_energy_w2(graph, profile, flat.wave, limit_j=limit_j)
        / _swing(case.pipeline, solved).band_energy_w2
    )


def _chosen_order(limits: Sequence[int]) -> dict[str, Any]:
    """Return the swing of the demo's host with an order within a memory, in the time of 1F1B at full speed.

    *Own* is the plan of least energy of all orders, 1F1B included.
    """
    graph, profile = demo_pipeline(with_split=True)
    deadline_s = baseline(graph, profile).iteration_time_s
    usual = solve(graph, profile, deadline_s=deadline_s)
    cheapest = plan_order(OrderTask(DEMO_MICROBATCHES, profile, deadline_s, limits), near_ratio=EXTRA_ENERGY_RATIO)
    _, flat = flattest_order(cheapest)
    least = _swing((graph, profile), usual)
    own, flattest = _swing((cheapest.graph, cheapest.profile), cheapest.solved), swing_of(flat.wave)
    return {
        "held_microbatches": limits,
        "num_near_orders": len(cheapest.near),
        "longer_than_own_ratio": flat.wave.iteration_time_s / cheapest.solved.iteration_time_s - 1,
        "extra_energy_of_own_ratio": flat.wave.energy_j / cheapest.solved.energy_j - 1,
        "fall_of_own_ratio": 1 - flattest.band_energy_w2 / own.band_energy_w2,
        "longer_ratio": flat.wave.iteration_time_s / usual.iteration_time_s - 1,
        "extra_energy_ratio": flat.wave.energy_j / usual.energy_j - 1,
        "order_fall_ratio": 1 - own.band_energy_w2 / least.band_energy_w2,
        "fall_ratio": 1 - flattest.band_energy_w2 / least.band_energy_w2,
        "least_energy_of_1f1b": _shown(least),
        "least_energy": _shown(own),
        "flat": _shown(flattest),
    }


def _ramps(ramp_w_per_s: float | None) -> dict[str, Any]:
    """Return the steepest ramps of a job that starts, stalls and ends; None: without a limit."""
    limiter = None if ramp_w_per_s is None else RampLimiter(ramp_w_per_s)
    work = steady_after(START_S)
    host = RampedHost(
        limiter, lambda now_s: 0.0 if STALL_S <= now_s < STALL_S + STALLED_S else work(now_s), total=TOTAL
    )
    host.run(600.0)
    resumes_s = STALL_S + STALLED_S
    before_end_s = next(at_s for (at_s, _), done in zip(host.trace, host.done_at, strict=True) if done >= TOTAL / 2)
    start_w, stall_w = host.steepest_w(0.0, resumes_s - 2), host.steepest_w(resumes_s - 2)
    end_w = host.steepest_w(max(before_end_s, resumes_s + 5), is_rise=False)
    full_s = next(at_s for (at_s, _), mhz in zip(host.trace, host.clocks_mhz, strict=True) if mhz == CLOCKS_MHZ[0])
    return {
        "ramp_w_per_s": ramp_w_per_s,
        "start_w_per_s": start_w,
        "stall_w_per_s": stall_w,
        "end_w_per_s": end_w,
        "stalled_fall_w_per_s": host.steepest_w(STALL_S - 2, resumes_s, is_rise=False),
        "start_to_full_clocks_s": None if ramp_w_per_s is None else full_s - START_S,
        "steepest_ratio": None if ramp_w_per_s is None else max(start_w, stall_w, end_w) / ramp_w_per_s,
    }


def _swing(pipeline: Pipeline, solved: SolvedPlan) -> SwingFigures:
    graph, profile = pipeline
    clocks = zip(graph.instructions, solved.sm_clocks_mhz, strict=True)
    return swing_of(wave_of(graph, profile, [profile[i.instruction_class].at_clock(mhz) for i, mhz in clocks]))


def _shown(swing: SwingFigures) -> dict[str, float]:
    return {
        "peak_w": swing.peak_w,
        "trough_w": swing.trough_w,
        "ramp_w_per_s": swing.ramp_w_per_s,
        "band_energy_w2": swing.band_energy_w2,
        "band_rms_w": swing.band_rms_w,
    }


if __name__ == "__main__":
    sys.exit(main())
