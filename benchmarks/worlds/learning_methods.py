"""Ways to find a plan for a job whose truth is a measured table: ours, EnvPipe's and a full sweep."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from benchmarks.worlds.learning_jobs import ENERGY_NOISE_RATIO, NUM_BASELINE_ITERATIONS, TIME_NOISE_RATIO, LearningJob
from benchmarks.worlds.learning_plans import Choice, fastest_allowed, next_clocks
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_other_policies.envpipe import plan_envelope, valleys
from gpuenergyd_policies.learning.evidence import energies_seen, times_seen
from gpuenergyd_policies.learning.job_curves import FittedCurves, fit_curves
from gpuenergyd_policies.learning.published import prior_for
from gpuenergyd_policies.learning.seen import Waiting
from gpuenergyd_policies.learning.shape import GENERIC
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation

ITERATIONS_PER_PLAN = 4
"""Iterations after which the live policy judges a plan; only the first one is evidence here."""
SWEEP_ITERATIONS = 5
_WAITING_SIGMA_RATIO = 0.05
_NORMAL_90 = 1.645
ALL_PARTS = Choice()

Method = Callable[[LearningJob], "Outcome"]


@dataclass(frozen=True, slots=True)
class Variant:
    """What is left out or changed, for an ablation."""

    is_prior_learned: bool = True
    choice: Choice = ALL_PARTS
    num_replans: int = 6
    is_noise_common: bool = False
    """Whether errors of measurement follow from iteration, class and clock, so that variants differ by themselves."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one method on one job, by plan."""

    iterations_to_plan: int
    regret_ratios: tuple[float, ...]
    slowdown_ratios: tuple[float, ...]
    energy_lost_ratio: float
    """Energy until the last plan beyond that plan's, in iterations at full speed."""
    time_lost_iterations: float
    cpu_s: float
    covered_ratio: float | None = None
    """Share of the times and powers at clocks below the maximum within their 90 % intervals, over all plans."""


def ours(job: LearningJob, variant: Variant) -> Outcome:
    """Plan from the prior after the baseline, and again from the iterations of all plans."""
    began_s = time.process_time()
    draw = np.random.default_rng([job.seed, 3])
    noise = None if variant.is_noise_common else draw
    seen = _baseline_iterations(job, noise)
    prior = GENERIC
    if variant.is_prior_learned:
        prior = prior_for(job.table.gpu, without_families=[job.table.family])
    waiting = Waiting(job.truth.blocking_power_w, _WAITING_SIGMA_RATIO, 0.0, 0.0)
    results: list[PlanEvaluation] = []
    covered: list[float] = []
    for number in range(variant.num_replans + 1):
        if variant.is_noise_common:
            draw = np.random.default_rng([job.seed, 3, number])
        fitted = fit_curves(job.classes, prior, times_seen(seen), energies_seen(seen), waiting)
        covered.append(_covered_ratio(job, fitted))
        clocks = next_clocks(job, fitted, results, num_plans=variant.num_replans + 1, choice=variant.choice, draw=draw)
        results.append(job.result(clocks))
        seen.append(job.observed(results[-1], f"tuned-{number}", NUM_BASELINE_ITERATIONS + number, noise))
    return _outcome(job, [], results, began_s, mean(covered))


def full_sweep(job: LearningJob) -> Outcome:
    """Measure every clock in five iterations, energies of single instructions included, and plan from the raw table."""
    began_s = time.process_time()
    draw = np.random.default_rng([job.seed, 5])
    classes = {}
    for key, own in job.truth.classes.items():
        options = []
        for option in own.options:
            time_s = option.time_s * math.exp(TIME_NOISE_RATIO * draw.standard_normal())
            noise = ENERGY_NOISE_RATIO / math.sqrt(SWEEP_ITERATIONS) * draw.standard_normal()
            options.append(ClockOption(option.sm_clock_mhz, time_s, option.energy_j * math.exp(noise)))
        classes[key] = InstructionProfile(tuple(options))
    believed = PipelineProfile(classes, job.truth.blocking_power_w)
    clocks = sorted({o.sm_clock_mhz for own in job.truth.classes.values() for o in own.options}, reverse=True)
    probes = [job.result(_clocks_near(job, dict.fromkeys(job.truth.classes, clock))) for clock in clocks]
    results = [job.result(fastest_allowed(job, believed))]
    return _outcome(job, [p for p in probes for _ in range(SWEEP_ITERATIONS)], results, began_s, None)


def envpipe(job: LearningJob) -> Outcome:
    """Find one clock per stage from noisy energies, then reconfigure until as fast as full speed."""
    began_s = time.process_time()
    draw = np.random.default_rng([job.seed, 6])
    clocks = sorted({o.sm_clock_mhz for own in job.truth.classes.values() for o in own.options}, reverse=True)
    steps = [clock for clock in clocks if clock % 90 == 0 or clock == clocks[0]]
    noisy = {}
    for key, own in job.truth.classes.items():
        options = [
            ClockOption(o.sm_clock_mhz, o.time_s, o.energy_j * math.exp(noise))
            for o in own.options
            for noise in [ENERGY_NOISE_RATIO / math.sqrt(6) * draw.standard_normal()]
        ]
        noisy[key] = InstructionProfile(tuple(options))
    believed = PipelineProfile(noisy, job.truth.blocking_power_w)
    probes = [job.result(_clocks_near(job, dict.fromkeys(job.truth.classes, clock))) for clock in steps]
    plan = plan_envelope(job.graph, job.truth, valleys(job.graph, believed, steps))
    found = job.result(_listed(job, plan.evaluation.sm_clocks_mhz))
    num = 6 * len(steps) + plan.num_steps
    outcome = _outcome(job, [p for p in probes for _ in range(6)], [found], began_s, None)
    return Outcome(
        num,
        outcome.regret_ratios,
        outcome.slowdown_ratios,
        outcome.energy_lost_ratio,
        outcome.time_lost_iterations,
        outcome.cpu_s,
    )


def _baseline_iterations(job: LearningJob, draw: np.random.Generator | None) -> list[IterationObservation]:
    return [job.observed(job.baseline, "baseline", k, draw) for k in range(NUM_BASELINE_ITERATIONS)]


def _covered_ratio(job: LearningJob, fitted: FittedCurves) -> float:
    hits = []
    for (key, clock), k in fitted.index_of().items():
        own = job.truth[key]
        top, option = own.at_max_clock, own.at_clock(clock)
        if clock < top.sm_clock_mhz:
            off = math.log(option.time_s / top.time_s) - fitted.time.mean[k]
            hits.append(abs(off) <= _NORMAL_90 * fitted.time.sigma[k])
            power_ratio = option.energy_j / option.time_s / fitted.reference_w[key.pp_rank]
            off = math.log(power_ratio) - fitted.power.mean[k]
            hits.append(abs(off) <= _NORMAL_90 * fitted.power.sigma[k])
    return float(np.mean(hits))


def _clocks_near(job: LearningJob, wanted: dict[InstructionClass, int]) -> list[int]:
    near = {
        key: min((o.sm_clock_mhz for o in job.truth[key].options), key=lambda c: abs(c - clock))
        for key, clock in wanted.items()
    }
    return [near[i.instruction_class] for i in job.graph.instructions]


def _listed(job: LearningJob, clocks: Sequence[int]) -> list[int]:
    """Return the clocks of a plan, each replaced by the next higher one that the table has for the class."""
    return [
        min(o.sm_clock_mhz for o in job.truth[i.instruction_class].options if o.sm_clock_mhz >= min(clock, top))
        for i, clock in zip(job.graph.instructions, clocks, strict=True)
        for top in [job.truth[i.instruction_class].at_max_clock.sm_clock_mhz]
    ]


def _outcome(
    job: LearningJob,
    probes: Sequence[PlanEvaluation],
    results: Sequence[PlanEvaluation],
    began_s: float,
    covered_ratio: float | None,
) -> Outcome:
    cpu_s = time.process_time() - began_s
    baseline_s, final_j = job.baseline.iteration_time_s, results[-1].energy_j
    until_final = [*probes, *(r for r in results[:-1] for _ in range(ITERATIONS_PER_PLAN))]
    return Outcome(
        iterations_to_plan=len(probes) + 1,
        regret_ratios=tuple(map(job.regret_ratio, results)),
        slowdown_ratios=tuple(r.iteration_time_s / baseline_s - 1 for r in results),
        energy_lost_ratio=sum(r.energy_j - final_j for r in until_final) / job.baseline.energy_j,
        time_lost_iterations=sum(max(0.0, r.iteration_time_s / baseline_s - 1) for r in until_final),
        cpu_s=cpu_s,
        covered_ratio=covered_ratio,
    )
