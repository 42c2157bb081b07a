"""Advice to plain loops: what it says a permitted slowdown would save, against what the job then saves.

    python benchmarks/runs/advice.py [--jobs 20] [--phase-jobs 5] [--seed 0] [--policy uniform] [--gpu-model h200]
        [--json]

Seeded jobs in virtual time, each one instruction per iteration, with 0.2 % noise of time and 0.5 % of energy. Their
GPUs are five models of which voltages, knees, static and uncore power differ from the published ones at random; power
caps hold; memory time is a share of 0 to 0.9 and partly hidden; memory traffic has its own energy. The curves that
the advice takes for possible are others. Each job runs with 1, 2 and 5 % permitted, which gives the saving of each: the
exact one of the setting that it ends with. A job that ends slower than permitted, which its measurements cannot tell,
saves more than advised for that; it counts with what its GPU saves at the permitted time, and how much slower it was is
shown. Jobs get advice three times without a permitted slowdown or nearly so: after trials of a few iterations, as by
default; with trials forbidden, which is full speed only; and with 0.1 % permitted. Advice without a figure is a range.

Loops with phases that wait, alone and as two data-parallel ranks, are planned by bubble-aware with no slowdown
permitted, and advised by their phases.

The public sweeps of power limits of shared/data/gpu are a second, independent set: advice from full speed against the
saving that a table's own points allow, every training on four GPU models. With one GPU model of the simulation, there
are only loops of one instruction, all of that model, and a fourth kind that its power limit holds.
Needs the checkout; the tables are left out where they are missing. Policy bubble-aware takes twenty times as long.
"""

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd.core.pipeline.plan import SavingAdvice
from gpuenergyd.core.policy_api.policy import ClockPolicy, Lever
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.setting_curves import LoopAtFullSpeed, possible_curves
from gpuenergyd_policies.setting_search import ADVISED_SLOWDOWNS
from gpuenergyd_policies.uniform_settings import Setting, setting_of
from gpuenergyd_sim.driver.device_parameters import MODELS
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.measured_tables import path_of
from tests.support.plain_jobs import AT_LIMIT, MEMORY_SHARES, GpuLoopWork, loop_training, random_gpu_work
from tests.support.virtual_loop import DataParallelLoops, VirtualLoop, loop_schedule, random_phase_work

TARGET_POINTS = 2.0
TRIALS, FULL_SPEED = "trials (the default)", "full speed only"
SMALL = "0.1 % permitted"
PHASES = "planned phases, 0 % permitted"
_SMALL_RATIO = 0.001
POLICIES: dict[str, Callable[..., ClockPolicy]] = {"uniform": Uniform, "bubble-aware": BubbleAware}
SWEEPS = "gpu/zeus_nsdi23_power_limit_sweeps.csv"
_SWEEP_ENERGY_ERROR = 0.01
"""Standard error of an energy of the sweeps: one run per point (assumed)."""
_FINE_CLOCKS = tuple(Setting(Lever.CLOCKS, level) for level in range(2000, 800, -10))
"""So fine that no slowdown is left unused."""
_ADVISED_AFTER, _TRAINED = 68, 130
"""Iterations of a run that is advised, and of one with the option."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One advice to one job, in percentage points."""

    basis: str
    max_slowdown_ratio: float
    has_figure: bool
    """Whether the advice has a figure, or is only a range."""
    error_points: float
    """The advised saving minus the one of the job when the option was given; of a range, its middle."""
    is_covered: bool
    """Whether that is within the advised interval."""
    width_points: float
    """Of the interval."""
    over_points: float | None = None
    """By how much the job ended slower than permitted; None if that is not known without noise."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a job ends with."""

    saving_ratio: float
    """At no more than the permitted time."""
    over_points: float | None = None
    """By how much it is slower than permitted."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--phase-jobs", type=int, default=5, help="loops with phases, planned by bubble-aware")
    parser.add_argument("--seed", type=int, default=0, help="of the first job of each kind; the others follow")
    parser.add_argument("--policy", choices=POLICIES, default="uniform")
    parser.add_argument("--gpu-model", choices=sorted(MODELS), default="", help="of all jobs; else five take turns")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.jobs < 1 or options.phase_jobs < 0:
        parser.error(f"--jobs {options.jobs}, --phase-jobs {options.phase_jobs}: must be at least 1 and 0")
    table, policy = [], POLICIES[options.policy]
    model = options.gpu_model
    for kind in (*MEMORY_SHARES, AT_LIMIT) if model else MEMORY_SHARES:
        seeds = range(options.seed, options.seed + options.jobs)
        found = [s for seed in seeds for s in compared(policy, random_gpu_work(seed, kind, gpu_model=model), seed)]
        table += [{"kind": kind, **row} for row in rows(found)]
    for num_ranks in () if model else (1, 2):
        seeds = range(options.seed, options.seed + options.phase_jobs)
        found = [one for seed in seeds for one in compared_phases(seed, num_ranks)]
        kind = "phases that wait" if num_ranks == 1 else f"the same, {num_ranks} data-parallel ranks"
        table += [{"kind": kind, **row} for row in rows(found)]
    if path_of(SWEEPS).exists() and not model:
        for gpu, found in on_sweeps().items():
            table += [{"kind": f"public sweeps, {gpu}", **row} for row in rows(found)]
    if options.json:
        figures = {
            "policy": options.policy,
            "gpu_model": model,
            "num_jobs": options.jobs,
            "seed": options.seed,
            "target_points": TARGET_POINTS,
            "rows": table,
        }
        print(json.dumps(figures))
    else:
        for row in table:
            print(row)
    return 0 if all(row["within_target"] == row["num_figures"] for row in table) else 1


def compared(policy: Callable[..., ClockPolicy], work: GpuLoopWork, seed: int) -> list[Comparison]:
    """Return the advice to one job, each against what it then saves."""
    saved: dict[float, Ended] = {}
    for ratio in ADVISED_SLOWDOWNS:
        run = loop_training(policy(), work, max_slowdown_ratio=ratio, seed=100 + seed)
        run.run(_TRAINED)
        saved[ratio] = _ended(run, work, ratio)
    advised = {
        TRIALS: _advice(policy(), work, seed, 0.0),
        FULL_SPEED: _advice(policy(trials="false"), work, seed, 0.0),
        SMALL: _advice(policy(), work, seed, _SMALL_RATIO),
    }
    return [
        _comparison(basis, own, saved[own.max_slowdown_ratio]) for basis, advice in advised.items() for own in advice
    ]


def compared_phases(seed: int, num_ranks: int) -> list[Comparison]:
    """Return the advice to a loop with phases that is permitted no slowdown, against what it then saves.

    Ranks of a data-parallel training have phases of their own; the first one is compared.
    """
    saved = {ratio: _measured(_phases(seed, num_ranks, ratio, _TRAINED, offset=100)) for ratio in ADVISED_SLOWDOWNS}
    advised = _phases(seed, num_ranks, 0.0, _ADVISED_AFTER, offset=0)
    return [_comparison(PHASES, own, saved[own.max_slowdown_ratio]) for own in advised.job.advice]


def _phases(seed: int, num_ranks: int, max_slowdown_ratio: float, num_iterations: int, *, offset: int) -> VirtualLoop:
    ranks = tuple(
        VirtualLoop(
            schedule=loop_schedule(2),
            work=random_phase_work(seed),
            max_slowdown_ratio=max_slowdown_ratio,
            noise_ratio=0.003,
            energy_noise_ratio=0.005,
            num_dp_ranks=num_ranks,
            seed=1000 * rank + offset + seed,
        )
        for rank in range(num_ranks)
    )
    if num_ranks == 1:
        ranks[0].run(num_iterations)
    else:
        DataParallelLoops(ranks).run(num_iterations)
    return ranks[0]


def _ended(run: VirtualTraining, work: GpuLoopWork, permitted_ratio: float) -> Ended:
    """Return what a job of one instruction ends with, without the noise of measurements."""
    setting = setting_of(run.job.current_plan) if run.job.current_plan.ranks else None
    if setting is None:
        return Ended(0.0, 0.0)
    clocks_mhz = sorted((mhz for mhz in work.gpu.supported_sm_clocks_mhz if mhz >= setting.value), reverse=True)
    times_s = [work.time_s(mhz) + run.step_overhead_s for mhz in clocks_mhz]
    energies_j = [
        work.power_w(mhz) * work.time_s(mhz) + run.waiting_power_w(mhz) * run.step_overhead_s for mhz in clocks_mhz
    ]
    slowdowns = [time_s / times_s[0] - 1 for time_s in times_s]
    savings = [1 - energy_j / energies_j[0] for energy_j in energies_j]
    saved = float(np.interp(min(permitted_ratio, slowdowns[-1]), slowdowns, savings))
    return Ended(saved, max(0.0, 100 * (slowdowns[-1] - permitted_ratio)))


def _measured(run: VirtualTraining) -> Ended:
    """Return the measured saving of a job; 0 without one."""
    estimate = run.job.estimate()
    saving = estimate.saving.saving_ratio if estimate is not None and estimate.saving is not None else None
    return Ended(0.0 if saving is None else saving.estimate)


def _comparison(basis: str, advice: SavingAdvice, ended: Ended) -> Comparison:
    return Comparison(
        basis,
        advice.max_slowdown_ratio,
        not advice.is_range,
        100 * (advice.saving_ratio - ended.saving_ratio),
        advice.low_ratio <= ended.saving_ratio <= advice.high_ratio,
        100 * (advice.high_ratio - advice.low_ratio),
        ended.over_points,
    )


def _advice(policy: ClockPolicy, work: GpuLoopWork, seed: int, permitted_ratio: float) -> tuple[SavingAdvice, ...]:
    """Return the advice to a run."""
    limits_w = work.gpu.min_power_limit_w, work.gpu.default_power_limit_w
    run = loop_training(policy, work, max_slowdown_ratio=permitted_ratio, seed=seed, power_limit_range_w=limits_w)
    run.run(_ADVISED_AFTER)
    return run.job.advice


def on_sweeps() -> dict[str, list[Comparison]]:
    """Return advice from full speed against the public sweeps of power limits, by GPU model."""
    tables: dict[tuple[str, str], dict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with path_of(SWEEPS).open() as file:
        for row in csv.DictReader(file):
            key = row["gpu"], f"{row['workload']} {row['batch']} {row['optimizer']}"
            point = float(row["time_per_epoch_s"]), float(row["energy_per_epoch_j"])
            tables[key][float(row["power_limit_w"])].append(point)
    found: dict[str, list[Comparison]] = defaultdict(list)
    for (gpu, _), by_limit in tables.items():
        points = [
            (limit_w, fmean(t for t, _ in own), fmean(e for _, e in own))
            for limit_w, own in sorted(by_limit.items(), reverse=True)
        ]
        limit_w, full_s, full_j = points[0]
        curves = possible_curves(_FINE_CLOCKS, LoopAtFullSpeed(full_j / full_s, limit_w, 1.0, 1.0))
        random = np.random.default_rng(0)
        for ratio in ADVISED_SLOWDOWNS:
            predicted = curves.savings(np.full(len(curves.logs), ratio))
            predicted += _SWEEP_ENERGY_ERROR * random.standard_normal(len(predicted))
            low, middle, high = map(float, np.quantile(predicted, (0.05, 0.5, 0.95)))
            advice = SavingAdvice(ratio, middle, low, high, is_measured=False)
            saved = _saved_on_hull([(t / full_s, e / full_j) for _, t, e in points], ratio)
            found[gpu].append(_comparison(FULL_SPEED, advice, Ended(saved)))
    return found


def _saved_on_hull(points: Sequence[tuple[float, float]], slowdown_ratio: float) -> float:
    """Return the saving within a slowdown by points of time and energy, relative to full speed, and lines between."""
    limit, least = 1 + slowdown_ratio, 1.0
    for fast, fast_energy in points:
        if fast > limit:
            continue
        least = min(least, fast_energy)
        for slow, slow_energy in points:
            if slow > limit:
                least = min(least, fast_energy + (slow_energy - fast_energy) * (limit - fast) / (slow - fast))
    return 1 - least


def rows(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return one row per basis and slowdown."""
    keys = list(dict.fromkeys((one.basis, one.max_slowdown_ratio) for one in found))
    named: list[dict[str, Any]] = []
    for basis, ratio in keys:
        own = [one for one in found if (one.basis, one.max_slowdown_ratio) == (basis, ratio)]
        errors = [abs(one.error_points) for one in own if one.has_figure]
        over = [one.over_points for one in own if one.over_points is not None]
        named.append(
            {
                "basis": basis,
                "max_slowdown_ratio": ratio,
                "num_jobs": len(own),
                "num_figures": len(errors),
                "error_mean_points": round(float(fmean(errors)), 2) if errors else None,
                "error_max_points": round(float(max(errors)), 2) if errors else None,
                "within_target": int(sum(error <= TARGET_POINTS for error in errors)),
                "middle_within_target": int(sum(abs(one.error_points) <= TARGET_POINTS for one in own)),
                "within_interval": int(sum(one.is_covered for one in own)),
                "interval_mean_points": round(float(fmean(one.width_points for one in own)), 1),
                "slower_than_permitted_max_points": round(max(over), 2) if over else None,
            }
        )
    return named


if __name__ == "__main__":
    sys.exit(main())
