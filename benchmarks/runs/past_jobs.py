"""Tests what jobs learn from past jobs: pairs of jobs whose truth is a measured table, and histories that lie.

    python benchmarks/runs/past_jobs.py --pairs 40 --seed 1 --json

The first job of a pair makes seven plans and leaves its curves behind. The second one is the same model under another
name, with other microbatches, with half the stages for the same layers, or in GPipe's order, with errors of measurement
of its own; or it is the first half of the layers, another model, whose stages differ by a spread of 1 % from those of
the first job, as all do with `--other-gpus`.
It starts from the first one's curves among those of other models on the same GPU model, and the saving of its first
plan is compared with that of its seventh. What the shipped prior learned from the same family of models is left out.

Both run on the same GPUs (with `--other-gpus` on others of the model) and belong to one user.

Poisoned histories consist of six past jobs that agree with one another, or of one beside the honest one, each with
hardly any error: that no clock costs time, or half of what it costs (imported, as another user's past jobs reach a job
in no other way); a sensor that hangs (of this job's GPUs); the curves of another GPU model under this one's name. What
a program of the same user may report of this job's GPUs is shown apart from the target: nobody else can do that. A job
is deceived until the regret of its plans stays within 0.5 points of the same job's without a history.
Every other table has such jobs.
The tables are not part of this repository; switch latencies, drift and communication are not simulated (no GPU).
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from learning_options import parser_of, tables_of

from benchmarks.worlds.learning_jobs import LearningJob
from benchmarks.worlds.learning_pairs import Change, changed_job, past_job, run_job
from benchmarks.worlds.learning_tables import TrueTable
from gpuenergyd.core.policy_api.past_jobs import PastJob
from tests.support.measured_tables import path_of
from tests.support.past_jobs import LIES, changed, half_the_slope, sure

MAX_GAP_RATIO = 0.01
MAX_SLOWDOWN_RATIO = 0.01
MAX_PLANS = 8
RECOVERED_RATIO = 0.005
NUM_FIRST_PLANS = 7
LIES_ABOUT_TIME = ("no clock costs time", "half the cost of a clock")
OWN_PROGRAM = "told by the user's own program"
OTHER_GPU = "curves of another GPU model"


@dataclass(frozen=True, slots=True)
class Pair:
    """The two jobs of a pair by table, change and seed, and past jobs of other models."""

    table: TrueTable
    change: Change
    seed: int
    is_gpu_known: bool
    is_on_other_gpus: bool
    others: tuple[PastJob, ...] = ()
    first: PastJob | None = None


@dataclass(frozen=True, slots=True)
class Poisoned:
    """A job on a table with a history that lies."""

    table: TrueTable
    seed: int
    past_jobs: dict[str, tuple[PastJob, ...]]
    """By lie."""


def left_behind(pair: Pair) -> PastJob:
    """Return what the first job of a pair leaves behind."""
    job = LearningJob(pair.table, pair.seed)
    run = run_job(job, num_plans=NUM_FIRST_PLANS, is_gpu_known=pair.is_gpu_known)
    return past_job(run, f"first-{pair.table.name}-{pair.seed}")


def second(pair: Pair) -> dict[str, Any]:
    """Return the figures of the second job of a pair, with and without the history."""
    assert pair.first is not None
    earlier_seed = None if pair.is_on_other_gpus else pair.seed
    job = changed_job(pair.table, pair.change, pair.seed + 500, earlier_seed=earlier_seed)
    known = run_job(job, (pair.first, *pair.others), is_gpu_known=pair.is_gpu_known)
    alone = run_job(job, num_plans=1, is_gpu_known=pair.is_gpu_known)
    final = known.saving_ratios[-1]
    row = {
        "table": pair.table.name,
        "change": str(pair.change),
        "first_saving_ratio": known.saving_ratios[0],
        "final_saving_ratio": final,
        "gap_ratio": final - known.saving_ratios[0],
        "first_regret_ratio": job.regret_ratio(known.results[0]),
        "final_regret_ratio": job.regret_ratio(known.results[-1]),
        "gap_without_ratio": final - alone.saving_ratios[0],
        "slowdown_ratios": [max(0.0, own) for own in known.slowdown_ratios],
    }
    print(f"{row}", file=sys.stderr, flush=True)
    return row


def deceived(case: Poisoned) -> list[dict[str, Any]]:
    """Return how histories that lie change a job's plans."""
    job = LearningJob(case.table, case.seed + 500)
    alone = run_job(job, num_plans=MAX_PLANS)
    honest = [job.regret_ratio(own) for own in alone.results]
    found = []
    for lie, past_jobs in case.past_jobs.items():
        run = run_job(job, past_jobs, num_plans=MAX_PLANS)
        wrong = [job.regret_ratio(own) for own in run.results]
        worse = [k for k, (a, b) in enumerate(zip(wrong, honest, strict=True)) if a > b + RECOVERED_RATIO]
        row = {
            "table": case.table.name,
            "lie": lie,
            "slowdown_ratios": [max(0.0, own) for own in run.slowdown_ratios],
            "plans_until_recovered": 1 + max(worse, default=-1) + 1,
            "final_regret_ratio": wrong[-1],
            "final_regret_without_ratio": honest[-1],
        }
        print(f"{row}", file=sys.stderr, flush=True)
        found.append(row)
    return found


def pairs_of(tables: Sequence[TrueTable], arguments: argparse.Namespace) -> list[Pair]:
    """Return the pairs; tables take turns, then changes."""
    changes, found = [Change(name) for name in arguments.change or Change], []
    for k in range(arguments.pairs):
        table, change = tables[k % len(tables)], changes[k // len(tables) % len(changes)]
        seed = 1000 * arguments.seed + k
        found.append(Pair(table, change, seed, not arguments.unknown_gpu, arguments.other_gpus))
    return found


def with_history(pairs: Sequence[Pair], firsts: Sequence[PastJob]) -> list[Pair]:
    """Return the pairs with the first job's curves and those of one job of each other model on the same GPU model."""
    found = []
    for pair, first in zip(pairs, firsts, strict=True):
        others = {
            own.table.name: job
            for own, job in zip(pairs, firsts, strict=True)
            if own.table.gpu == pair.table.gpu and own.table.name != pair.table.name
        }
        found.append(replace(pair, first=first, others=tuple(others.values())))
    return found


def poisoned_of(pairs: Sequence[Pair]) -> list[Poisoned]:
    """Return the cases of poisoned histories, for the first pair of every other table."""
    found = []
    for pair in list({own.table.name: own for own in pairs}.values())[::2]:
        assert pair.first is not None
        lies = {
            "no clock costs time": replace(changed(pair.first, LIES["no clock costs time"]), is_imported=True),
            "half the cost of a clock": replace(changed(pair.first, half_the_slope), is_imported=True),
            "a sensor that hangs": changed(pair.first, LIES["a sensor that hangs"]),
        }
        for other in pairs:
            if other.table.gpu.partition("-")[0] != pair.table.gpu.partition("-")[0] and other.first is not None:
                lies[OTHER_GPU] = changed(relabelled(other.first, pair.first), sure)
        past_jobs: dict[str, tuple[PastJob, ...]] = {f"{name}, six times": (liar,) * 6 for name, liar in lies.items()}
        past_jobs |= {
            f"{name}, {OWN_PROGRAM}": (replace(lies[name], is_imported=False),) * 6 for name in LIES_ABOUT_TIME
        }
        past_jobs |= {f"{name}, beside the honest job": (liar, pair.first) for name, liar in lies.items()}
        found.append(Poisoned(pair.table, pair.seed, past_jobs))
    return found


def relabelled(other: PastJob, like: PastJob) -> PastJob:
    """Return the curves of a job on another GPU model under this one's name, power and maximum clock."""
    own, top = other.learned, like.learned.max_sm_clock_mhz
    scale = top / own.max_sm_clock_mhz
    curves = tuple(
        replace(
            curve,
            full_speed_mhz=curve.full_speed_mhz * scale,
            time_s=same.time_s,
            points=tuple(replace(p, sm_clock_mhz=round(p.sm_clock_mhz * scale)) for p in curve.points),
        )
        for curve, same in zip(own.curves, like.learned.curves, strict=True)
    )
    return replace(other, learned=replace(like.learned, curves=curves))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile, the larger neighbour."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def summary_of_pairs(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of some pairs."""
    gaps, slowdowns = [row["gap_ratio"] for row in rows], [s for row in rows for s in row["slowdown_ratios"]]
    return {
        "pairs": len(rows),
        "final_saving_mean_ratio": mean(row["final_saving_ratio"] for row in rows),
        "gap_mean_ratio": mean(gaps),
        "gap_p95_ratio": quantile(gaps, 0.95),
        "gap_max_ratio": max(gaps),
        "num_within": sum(gap <= MAX_GAP_RATIO for gap in gaps),
        "first_regret_mean_ratio": mean(row["first_regret_ratio"] for row in rows),
        "final_regret_mean_ratio": mean(row["final_regret_ratio"] for row in rows),
        "num_within_at_equal_time": sum(
            row["first_regret_ratio"] - row["final_regret_ratio"] <= MAX_GAP_RATIO for row in rows
        ),
        "gap_without_mean_ratio": mean(row["gap_without_ratio"] for row in rows),
        "gap_without_max_ratio": max(row["gap_without_ratio"] for row in rows),
        "slowdown_p99_ratio": quantile(slowdowns, 0.99),
        "slowdown_max_ratio": max(slowdowns),
        "first_slowdown_max_ratio": max(row["slowdown_ratios"][0] for row in rows),
    }


def summary_of_poisoned(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of some poisoned histories."""
    slowdowns = [s for row in rows for s in row["slowdown_ratios"]]
    return {
        "jobs": len(rows),
        "slowdown_p99_ratio": quantile(slowdowns, 0.99),
        "slowdown_max_ratio": max(slowdowns),
        "plans_until_recovered_max": max(row["plans_until_recovered"] for row in rows),
        "final_regret_mean_ratio": mean(row["final_regret_ratio"] for row in rows),
        "final_regret_without_mean_ratio": mean(row["final_regret_without_ratio"] for row in rows),
    }


def by(rows: Sequence[dict[str, Any]], name: str) -> dict[str, list[dict[str, Any]]]:
    """Return rows by the value of one of their entries."""
    return {value: [row for row in rows if row[name] == value] for value in dict.fromkeys(row[name] for row in rows)}


def main() -> int:
    """Run and print; return 1 if a target is missed."""
    parser = parser_of(__doc__, path_of("profiles"))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--change", action="append", choices=[str(own) for own in Change], help="only these, by turns")
    parser.add_argument("--other-gpus", action="store_true", help="let the stages of all second jobs differ")
    parser.add_argument("--without-poison", action="store_true", help="leave the poisoned histories out")
    arguments = parser.parse_args()
    tables = tables_of(parser, arguments.tables)
    pairs = pairs_of(tables, arguments)
    with ProcessPoolExecutor(arguments.processes, initializer=threadpool_limits, initargs=(1,)) as pool:
        pairs = with_history(pairs, list(pool.map(left_behind, pairs)))
        rows = list(pool.map(second, pairs))
        poisoned_jobs = [] if arguments.without_poison else poisoned_of(pairs)
        cases = [row for rows_of_job in pool.map(deceived, poisoned_jobs) for row in rows_of_job]
    result: dict[str, Any] = {
        "simulated": True,
        "seed": arguments.seed,
        "is_gpu_known": not arguments.unknown_gpu,
        "is_on_other_gpus": arguments.other_gpus,
        **summary_of_pairs(rows),
        "by_change": {name: summary_of_pairs(own) for name, own in by(rows, "change").items()},
        "by_table": {name: summary_of_pairs(own) for name, own in by(rows, "table").items()},
    }
    is_met = result["gap_p95_ratio"] <= MAX_GAP_RATIO and result["slowdown_p99_ratio"] <= MAX_SLOWDOWN_RATIO
    if cases:
        from_others = [row for row in cases if OWN_PROGRAM not in row["lie"]]
        result["poisoned"] = summary_of_poisoned(from_others)
        result["poisoned_by_lie"] = {name: summary_of_poisoned(own) for name, own in by(from_others, "lie").items()}
        own = [row for row in cases if OWN_PROGRAM in row["lie"]]
        result["own_program_by_lie"] = {name: summary_of_poisoned(rows) for name, rows in by(own, "lie").items()}
        poisoned = result["poisoned"]
        is_met &= poisoned["slowdown_p99_ratio"] <= MAX_SLOWDOWN_RATIO
        is_met &= poisoned["plans_until_recovered_max"] <= MAX_PLANS
    if arguments.json:
        print(json.dumps(result))
    else:
        print(json.dumps(result, indent=1))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
