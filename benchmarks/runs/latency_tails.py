"""Plans where clocks take effect late, by target clock and with tails, and are reported too early.

    python benchmarks/runs/latency_tails.py [--kinds a100-like hopper-like] [--jobs 8] [--seed 0] [--json]

A pipeline of four stages in virtual time. Every target clock has a median latency of its own, log-uniform between two
bounds; one change in a hundred takes 200 to 400 ms; a clock is reported 3 or 20 ms before it takes effect; a call takes
1 ms, one GPU of the host at a time. The bubble-aware policy knows none of this. Each job draws other latencies. Savings
and slowdowns are those of the virtual GPUs over all iterations from the first plan on, blocks at full speed included;
the ideal saving is that of the best plan from exact knowledge if clocks took effect at once.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.printing import print_figures
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.perfect_knowledge import least_energy_j
from tests.support.unkind_training import TargetLatencies, UnkindDriver, UnkindTraining

WEIGHTS = (1.0, 0.93, 1.0, 1.1)
NUM_MICROBATCHES = 8
NUM_ITERATIONS = 250
TIME_NOISE_RATIO = 0.003
ASSUMED_LATENCY_S = 0.03
MAX_SLOWDOWN_RATIO = 0.01


@dataclass(frozen=True, slots=True)
class Kind:
    """How late and how early reported clocks are on a kind of GPU."""

    min_median_s: float
    max_median_s: float
    reported_early_s: float
    least_share: float
    """Least share of the ideal saving."""


KINDS = {"a100-like": Kind(0.005, 0.02, 0.003, 0.8), "hopper-like": Kind(0.02, 0.1, 0.02, 0.65)}


@dataclass(frozen=True, slots=True)
class Job:
    """Results of one training."""

    kind: str
    seed: int
    iterations_to_the_plan: int | None
    num_plans: int
    saving_ratio: float
    slowdown_ratio: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=8, help="trainings of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    jobs = []
    for kind in options.kinds:
        for k in range(options.jobs):
            jobs.append(run(kind, options.seed + k))
            print(jobs[-1], file=sys.stderr, flush=True)
    figures = summary(jobs) | {"seed": options.seed}
    print_figures(figures, is_json=options.json, left_out="jobs")
    return 0 if is_met(figures) else 1


def summary(jobs: list[Job]) -> dict[str, Any]:
    """Return the figures of all jobs, and of each kind."""
    ideal = ideal_saving_ratio()
    kinds = {}
    for name in dict.fromkeys(job.kind for job in jobs):
        own = [job for job in jobs if job.kind == name]
        kinds[name] = {
            "num_jobs": len(own),
            "share_of_ideal": mean(job.saving_ratio for job in own) / ideal,
            "least_share_of_ideal": min(job.saving_ratio for job in own) / ideal,
            "target_share": KINDS[name].least_share,
            "slowdown_p99_ratio": _quantile([job.slowdown_ratio for job in own], 0.99),
        }
    return {"ideal_saving_ratio": ideal, "kinds": kinds, "jobs": [asdict(job) for job in jobs]}


def is_met(figures: dict[str, Any]) -> bool:
    """Return whether each kind saves its share of the ideal on average and keeps the time."""
    return all(
        own["share_of_ideal"] >= own["target_share"] and own["slowdown_p99_ratio"] <= MAX_SLOWDOWN_RATIO
        for own in figures["kinds"].values()
    )


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def immediate(policy: ClockPolicy) -> VirtualTraining:
    """Return the training if clocks took effect at once."""
    schedule = one_forward_one_backward(len(WEIGHTS), NUM_MICROBATCHES)
    return VirtualTraining(schedule, a100_stages(WEIGHTS), policy, switch_latency_s=1e-6)


@cache
def ideal_saving_ratio() -> float:
    """Return the saving of the best plan from exact knowledge without latency."""
    best_j = least_energy_j(immediate)
    at_full_speed = immediate(BubbleAware())
    at_full_speed.run(6)
    return float(1 - best_j / at_full_speed.history[-1][1])


def run(kind: str, seed: int) -> Job:
    """Train once."""
    of = KINDS[kind]
    latencies = TargetLatencies(of.min_median_s, of.max_median_s, tail_ratio=0.01, seed=seed)
    training = UnkindTraining(
        one_forward_one_backward(len(WEIGHTS), NUM_MICROBATCHES),
        a100_stages(WEIGHTS),
        BubbleAware(),
        noise_ratio=TIME_NOISE_RATIO,
        assumed_latency_s=ASSUMED_LATENCY_S,
        seed=seed,
        driver=UnkindDriver(latencies, call_s=0.001, reported_early_s=of.reported_early_s),
    )
    training.run(NUM_ITERATIONS)
    tuned = [k for k, (_, _, plan) in enumerate(training.history) if (plan or "").startswith("tuned")]
    first = tuned[0] if tuned else None
    full_speed, after = training.history[2:8], training.history[first or 8 :]
    time_s, energy_j = mean(t for t, _, _ in after), mean(e for _, e, _ in after)
    return Job(
        kind=kind,
        seed=seed,
        iterations_to_the_plan=first,
        num_plans=len({training.history[k][2] for k in tuned}),
        saving_ratio=float(1 - energy_j / mean(e for _, e, _ in full_speed)) if tuned else 0.0,
        slowdown_ratio=float(time_s / mean(t for t, _, _ in full_speed) - 1) if tuned else 0.0,
    )


if __name__ == "__main__":
    sys.exit(main())
