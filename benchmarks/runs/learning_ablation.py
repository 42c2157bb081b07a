"""What each part of learning from plans is worth: the same jobs without it, or with something else in its place.

    python benchmarks/runs/learning_ablation.py --jobs 16 --seed 1 --json

Jobs are those of `learning.py`, by default on curves measured during trainings. Errors of measurement follow from the
iteration, the class and the clock, so that all variants of a job share them and differences are those of the variants.
A part is worth having if the regret is at least 0.1 points larger without it, after some number of replans, or a plan
more than 1 % late; differences are given with their standard errors over jobs (simulated, no GPU).
"""

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from learning_options import parser_of, tables_of

from benchmarks.worlds.learning_jobs import LearningJob
from benchmarks.worlds.learning_methods import Outcome, Variant, ours
from benchmarks.worlds.learning_plans import Choice
from benchmarks.worlds.learning_tables import TrueTable
from gpuenergyd_policies.learning import job_curves
from gpuenergyd_policies.learning.shape import FloatArray
from tests.support.measured_tables import path_of

AS_IT_IS = "as it is"
WITHOUT_PHYSICS = "without physics in beliefs"
VARIANTS = {
    AS_IT_IS: Variant(),
    "without learned prior": Variant(is_prior_learned=False),
    WITHOUT_PHYSICS: Variant(),
    "without caution": Variant(choice=Choice(caution_sigmas=0.0)),
    "with half a standard deviation of caution always": Variant(choice=Choice(caution_sigmas=0.5)),
    "without keeping the best plan": Variant(choice=Choice(keeps_best_known=False)),
    "without experiments after the first plan": Variant(choice=Choice(has_experiments=False)),
    "without more time for experiments after kept plans": Variant(choice=Choice(experiment_late_ratio=0.0)),
    "with Thompson sampling of powers": Variant(choice=Choice(is_thompson=True)),
}
REPLANS = (0, 1, 3, 6)


@dataclass(frozen=True, slots=True)
class Task:
    """One variant on one job."""

    table: TrueTable
    job_seed: int
    name: str
    is_gpu_known: bool
    num_replans: int


def outcome_of(task: Task) -> Outcome:
    """Return what the variant does on the job."""
    job = LearningJob(task.table, task.job_seed)
    own = VARIANTS[task.name]
    is_learned = own.is_prior_learned and task.is_gpu_known
    variant = replace(own, is_prior_learned=is_learned, num_replans=task.num_replans, is_noise_common=True)
    with ExitStack() as stack:
        if task.name == WITHOUT_PHYSICS:
            stack.enter_context(patch.object(job_curves, "_monotone", _as_drawn))
        return ours(job, variant)


def _as_drawn(values: FloatArray, _clocks_mhz: FloatArray, _full_speed_mhz: float, *, is_time: bool) -> FloatArray:
    del is_time
    return values


def summary(outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of a variant, and by how many points its regret is larger than that of `base`, by replans."""
    by_plan = list(zip(*(own.regret_ratios for own in outcomes), strict=True))
    slowdowns = [max(0.0, ratio) for own in outcomes for ratio in own.slowdown_ratios]
    covered = [own.covered_ratio for own in outcomes if own.covered_ratio is not None]
    more = {
        k: [a.regret_ratios[k] - b.regret_ratios[k] for a, b in zip(outcomes, base, strict=True)]
        for k in REPLANS
        if k < len(by_plan) and k < len(base[0].regret_ratios)
    }
    return {
        "regret_mean_ratio_by_plan": [mean(own) for own in by_plan],
        "regret_max_ratio": max(by_plan[-1]),
        "more_regret_ratio": {str(k): mean(own) for k, own in more.items()},
        "more_regret_error_ratio": {str(k): stdev(own) / math.sqrt(len(own)) for k, own in more.items()},
        "slowdown_max_ratio": max(slowdowns),
        "num_late": sum(ratio > 0.01 for ratio in slowdowns),
        "iterations_to_plan": max(own.iterations_to_plan for own in outcomes),
        "time_lost_iterations": mean(own.time_lost_iterations for own in outcomes),
        "interval_covered_ratio": mean(covered) if covered else None,
    }


def main() -> int:
    """Run and print."""
    parser = parser_of(__doc__, path_of("profiles") / "insitu")
    parser.add_argument("--jobs", type=int, default=16, help="jobs in all, two at least; tables take turns")
    parser.add_argument("--replans", type=int, default=6, help="plans after the first one")
    parser.add_argument("--only", action="append", choices=VARIANTS, default=None)
    arguments = parser.parse_args()
    tables = tables_of(parser, arguments.tables)
    if arguments.jobs < 2:
        parser.error(f"--jobs {arguments.jobs}: at least 2, as errors are those over jobs")
    names = [AS_IT_IS, *(own for own in arguments.only or VARIANTS if own != AS_IT_IS)]
    task = partial(Task, is_gpu_known=not arguments.unknown_gpu, num_replans=arguments.replans)
    tasks = [
        task(tables[k % len(tables)], 1000 * arguments.seed + k, name) for k in range(arguments.jobs) for name in names
    ]
    with ProcessPoolExecutor(arguments.processes, initializer=threadpool_limits, initargs=(1,)) as pool:
        outcomes = list(pool.map(outcome_of, tasks))
    of = {name: outcomes[k :: len(names)] for k, name in enumerate(names)}
    result: dict[str, Any] = {
        "simulated": True,
        "seed": arguments.seed,
        "jobs": arguments.jobs,
        "is_gpu_known": not arguments.unknown_gpu,
        "variants": {name: summary(own, of[AS_IT_IS]) for name, own in of.items()},
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    for name, own in result["variants"].items():
        regrets = " ".join(f"{100 * ratio:.2f}" for ratio in own["regret_mean_ratio_by_plan"])
        more = " ".join(
            f"{100 * ratio:+.2f}±{100 * own['more_regret_error_ratio'][k]:.2f}"
            for k, ratio in own["more_regret_ratio"].items()
        )
        print(f"{name}: regret {regrets} %, more {more}, slowest {100 * own['slowdown_max_ratio']:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
