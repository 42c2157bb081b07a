"""Captured pipelines: savings by hooks, by timetables from event nodes, and by one clock per replay.

    python benchmarks/runs/captured.py [--jobs 5] [--iterations 120] [--seed 0] [--json]

The demo's pipeline of four stages and eight microbatches on simulated A100s, in virtual time: the job's state machine
and the bubble-aware policy are real, times and energies those of the simulated GPUs, with noise, late clocks and fewer
than all iterations tuned. `hooked`: the program runs Python at every instruction. `captured`: it replays a graph with
event nodes, which the client's recorder reads on a virtual device whose clock drifts; one timetable per replay sets the
clocks. `without events`: the same graph without event nodes; one clock for all ranks in each replay, at a permitted
slowdown of 1 %, since one clock saves nothing at none. Savings and slowdowns are those of all iterations after
the first tuned one, blocks at full speed included, against the iterations of the baseline.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.printing import print_figures
from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionKind,
    Schedule,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.captured_training import CapturedTraining, WholeReplay, demo_work, waiting_power_w

NUM_STAGES, NUM_MICROBATCHES = 4, 8
NOISE_RATIO = 0.003
SWITCH_LATENCY_S, LATENCY_SPREAD_RATIO = 0.014, 0.3
MAX_SLOWDOWN_RATIO = 0.01
LEAST_SHARE = 0.9
BASELINE = slice(2, 12)
"""Iterations of the baseline, after those of the warm-up."""


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one training."""

    arm: str
    seed: int
    saving_ratio: float
    slowdown_ratio: float
    num_tuned_iterations: int
    time_error_max_ratio: float = 0.0
    num_unread_replays: int = 0
    calls_in_capture: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=5, help="trainings of each kind")
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for k in range(options.jobs):
        for run in (run_hooked, run_captured, run_without_events):
            results.append(run(options.seed + k, options.iterations))
            print(results[-1], file=sys.stderr, flush=True)
    figures = summary(results) | {
        "num_jobs": options.jobs,
        "num_iterations": options.iterations,
        "seed": options.seed,
        "jobs": [asdict(result) for result in results],
    }
    print_figures(figures, is_json=options.json, left_out="jobs")
    return 0 if is_met(figures) else 1


def summary(results: list[Result]) -> dict[str, Any]:
    """Return the figures of all trainings."""
    arms = dict.fromkeys(r.arm for r in results)
    savings = {arm: fmean(r.saving_ratio for r in results if r.arm == arm) for arm in arms}
    captured = [r for r in results if r.arm == "captured"]
    hooked = {r.seed: r.saving_ratio for r in results if r.arm == "hooked"}
    return {
        "hooked_saving_ratio": savings["hooked"],
        "captured_saving_ratio": savings["captured"],
        "captured_share_of_hooked": savings["captured"] / savings["hooked"],
        "captured_share_of_hooked_min": min(r.saving_ratio / hooked[r.seed] for r in captured),
        "without_events_saving_ratio": savings["without events"],
        "slowdown_max_ratio": max(r.slowdown_ratio for r in captured),
        "hooked_slowdown_max_ratio": max(r.slowdown_ratio for r in results if r.arm == "hooked"),
        "without_events_slowdown_max_ratio": max(r.slowdown_ratio for r in results if r.arm == "without events"),
        "time_error_max_ratio": max(r.time_error_max_ratio for r in captured),
        "num_unread_replays": sum(r.num_unread_replays for r in captured),
        "calls_in_capture": sum(r.calls_in_capture for r in captured),
    }


def is_met(figures: dict[str, Any]) -> bool:
    """Return whether captured pipelines save enough, in time, with correct times and nothing of ours in a capture."""
    return bool(
        figures["captured_share_of_hooked"] >= LEAST_SHARE
        and figures["slowdown_max_ratio"] <= MAX_SLOWDOWN_RATIO
        and figures["without_events_slowdown_max_ratio"] <= MAX_SLOWDOWN_RATIO
        and figures["time_error_max_ratio"] <= 1e-3
        and figures["calls_in_capture"] == 0
    )


def _options(seed: int) -> dict[str, Any]:
    return {
        "noise_ratio": NOISE_RATIO,
        "switch_latency_s": SWITCH_LATENCY_S,
        "latency_spread_ratio": LATENCY_SPREAD_RATIO,
        "waiting_power_w": waiting_power_w,
        "seed": seed,
    }


def run_hooked(seed: int, num_iterations: int) -> Result:
    """Train with hooks at every instruction."""
    schedule = one_forward_one_backward(NUM_STAGES, NUM_MICROBATCHES)
    training = VirtualTraining(schedule, demo_work(NUM_STAGES), BubbleAware(), **_options(seed))
    training.run(num_iterations)
    return Result("hooked", seed, *_outcome(training))


def run_captured(seed: int, num_iterations: int) -> Result:
    """Train by replays of a graph with event nodes."""
    schedule = one_forward_one_backward(NUM_STAGES, NUM_MICROBATCHES)
    training = CapturedTraining(schedule, demo_work(NUM_STAGES), BubbleAware(), **_options(seed))
    try:
        training.run(num_iterations)
    finally:
        training.close()
    outcome = _outcome(training)
    return Result(
        "captured", seed, *outcome, training.time_error_max_ratio, training.num_unread, training.num_calls_in_capture
    )


def run_without_events(seed: int, num_iterations: int) -> Result:
    """Train by replays of a graph without event nodes: all ranks replay one instruction, with one clock for all."""
    graph = dependency_graph(one_forward_one_backward(NUM_STAGES, NUM_MICROBATCHES), communication_latency_s=0.001)
    training = VirtualTraining(
        Schedule("loop", 1, ((Instruction(0, InstructionKind.F, 0),),)),
        {(0, InstructionKind.F): WholeReplay(graph, demo_work(NUM_STAGES))},
        BubbleAware(),
        max_slowdown_ratio=MAX_SLOWDOWN_RATIO,
        num_stage_ranks=NUM_STAGES,
        **_options(seed),
    )
    training.run(num_iterations)
    return Result("without events", seed, *_outcome(training))


def _outcome(training: VirtualTraining) -> tuple[float, float, int]:
    """Return saving, slowdown and number of the iterations from the first plan on, against the baseline."""
    rows = training.history
    first = next((k for k, (_, _, plan_id) in enumerate(rows) if (plan_id or "").startswith("tuned")), len(rows))
    baseline, tuned = rows[BASELINE], rows[first:]
    if not tuned:
        return 0.0, 0.0, 0
    saving = 1 - fmean(energy_j for _, energy_j, _ in tuned) / fmean(energy_j for _, energy_j, _ in baseline)
    slowdown = fmean(time_s for time_s, _, _ in tuned) / fmean(time_s for time_s, _, _ in baseline) - 1
    return saving, slowdown, len(tuned)


if __name__ == "__main__":
    sys.exit(main())
