"""Pairs of jobs whose truth is a measured table: one leaves its curves behind, a changed one starts from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property

import numpy as np

from benchmarks.worlds.learning_jobs import MAX_MICROBATCHES, NUM_BASELINE_ITERATIONS, LearningJob
from benchmarks.worlds.learning_plans import Choice, next_clocks
from benchmarks.worlds.learning_tables import TrueTable
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.learned_curves import LearnedCurves
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.learning.evidence import energies_seen, times_seen
from gpuenergyd_policies.learning.job_curves import FittedCurves, fit_curves
from gpuenergyd_policies.learning.past_jobs import PastCurves, of_same_model
from gpuenergyd_policies.learning.published import prior_for
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed, Waiting
from gpuenergyd_policies.learning.shape import GENERIC, CurvePrior
from gpuenergyd_policies.learning.summary import summary_of
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation

NUM_PLANS = 7
_WAITING_SIGMA_RATIO = 0.05
_MAX_GAP_MHZ = 90
"""Between measured clocks that a curve is taken as linear between."""


class Change(StrEnum):
    """What differs between a job and the one before, besides its name, its GPUs and its measurements."""

    NAME = "name"
    MICROBATCHES = "microbatches"
    STAGES = "half the stages"
    """Each of twice the layers: the same work."""
    SCHEDULE = "schedule"
    LAYERS = "half the layers"
    """The first half of the stages: another model, in tables of an encoder and a decoder the encoder alone."""


@dataclass(frozen=True)
class AgainJob(LearningJob):
    """A job whose stages are those of an earlier one, with errors of measurement of its own."""

    earlier_seed: int = 0

    @cached_property
    def truth(self) -> PipelineProfile:
        """The true profile, of the earlier job."""
        return LearningJob(self.table, self.earlier_seed, self.stage_spread_ratio).truth


@dataclass(frozen=True)
class GpipeJob(AgainJob):
    """The same stages with all forward passes first."""

    @cached_property
    def graph(self) -> DependencyGraph:
        """GPipe with the table's stages and up to 16 microbatches."""
        return dependency_graph(gpipe(self.table.num_stages, min(16, self.table.num_microbatches)))


@dataclass(frozen=True)
class MergedJob(AgainJob):
    """The same layers in half as many stages: each one is two of those before."""

    @cached_property
    def truth(self) -> PipelineProfile:
        """The true profile, of the earlier job with its stages merged."""
        return merged(LearningJob(self.table, self.earlier_seed, self.stage_spread_ratio).truth)

    @cached_property
    def graph(self) -> DependencyGraph:
        """1F1B with half of the table's stages."""
        microbatches = min(self.table.num_microbatches, MAX_MICROBATCHES)
        return dependency_graph(one_forward_one_backward(self.table.num_stages // 2, microbatches))


@dataclass(frozen=True)
class Run:
    """The plans of one job, and what it leaves behind."""

    job: LearningJob
    results: tuple[PlanEvaluation, ...]
    learned: LearnedCurves | None

    @property
    def saving_ratios(self) -> tuple[float, ...]:
        """Energy saved by each plan, of that at full speed."""
        return tuple(1 - own.energy_j / self.job.baseline.energy_j for own in self.results)

    @property
    def slowdown_ratios(self) -> tuple[float, ...]:
        """Time of each plan above that at full speed."""
        return tuple(own.iteration_time_s / self.job.baseline.iteration_time_s - 1 for own in self.results)


def gpu_uuids_of(job: LearningJob) -> tuple[str, ...]:
    """Return the GPUs that jobs on this GPU model run on, the first ones of their host."""
    return tuple(f"GPU-{job.table.gpu}-{rank}" for rank in range(job.graph.num_ranks))


def changed_job(table: TrueTable, change: Change, seed: int, *, earlier_seed: int | None = None) -> LearningJob:
    """Return a job on a table after a change, with errors of measurement of its own.

    Its stages are those of the job of `earlier_seed`; without, and with half the layers, they differ from them by the
    spread among stages, as on other GPUs.
    """
    of_stages = seed if earlier_seed is None else earlier_seed
    match change:
        case Change.NAME:
            return AgainJob(table, seed, earlier_seed=of_stages)
        case Change.MICROBATCHES:
            return AgainJob(replace(table, num_microbatches=12), seed, earlier_seed=of_stages)
        case Change.STAGES:
            return MergedJob(table, seed, earlier_seed=of_stages)
        case Change.SCHEDULE:
            return GpipeJob(table, seed, earlier_seed=of_stages)
        case Change.LAYERS:
            return LearningJob(with_stages(table, table.num_stages // 2), seed)


def merged(profile: PipelineProfile) -> PipelineProfile:
    """Return the profile of half as many stages, each of which does the work of two, one after the other.

    Its clocks were measured in both, or in one and between near ones in the other: linear between these.
    """
    classes = {}
    for key, first in profile.classes.items():
        if key.pp_rank % 2 == 0:
            second = profile[replace(key, pp_rank=key.pp_rank + 1)]
            listed = {o.sm_clock_mhz for own in (first, second) for o in own.options}
            clocks = [clock for clock in listed if _is_known(first, clock) and _is_known(second, clock)]
            both = [(first.interpolated(clock), second.interpolated(clock)) for clock in clocks]
            options = [ClockOption(a.sm_clock_mhz, a.time_s + b.time_s, a.energy_j + b.energy_j) for a, b in both]
            merged_key = replace(key, pp_rank=key.pp_rank // 2)
            classes[merged_key] = instruction_profile(options, where=f"merged stage {merged_key.pp_rank}")
    return PipelineProfile(classes, profile.blocking_power_w)


def _is_known(profile: InstructionProfile, sm_clock_mhz: int) -> bool:
    """Return whether a clock was measured, or lies between measured ones that are near enough."""
    clocks = [option.sm_clock_mhz for option in profile.options]
    higher = min((clock for clock in clocks if clock >= sm_clock_mhz), default=math.inf)
    lower = max((clock for clock in clocks if clock <= sm_clock_mhz), default=-math.inf)
    return higher - lower <= _MAX_GAP_MHZ


def with_stages(table: TrueTable, num_stages: int) -> TrueTable:
    """Return a table with the first stages only."""
    classes = {key: own for key, own in table.profile.classes.items() if key.pp_rank < num_stages}
    full_speed = {key: own for key, own in table.full_speed_mhz.items() if key.pp_rank < num_stages}
    return replace(table, profile=PipelineProfile(classes, table.profile.blocking_power_w), full_speed_mhz=full_speed)


def run_job(
    job: LearningJob, past_jobs: Sequence[PastJob] = (), *, num_plans: int = NUM_PLANS, is_gpu_known: bool = True
) -> Run:
    """Plan a job again and again, each time from all iterations before; nothing is known of its model's family."""
    draw = np.random.default_rng([job.seed, 3])
    prior = prior_for(job.table.gpu, without_families=[job.table.family]) if is_gpu_known else GENERIC
    seen = [job.observed(job.baseline, "baseline", k, draw) for k in range(NUM_BASELINE_ITERATIONS)]
    results: list[PlanEvaluation] = []
    learned = None
    gpus = [GpuView(uuid, job.table.gpu, job.classes[0].clocks_mhz, 0.0) for uuid in gpu_uuids_of(job)]
    for number in range(num_plans):
        alone = _fitted(job, prior, seen, ())
        if number == num_plans - 1:
            learned = summary_of(_fitted(job, prior, seen, (), job.classes_at_all_clocks), times_seen(seen), gpus)
        power_w = float(np.mean(list(alone.reference_w.values())))
        past = of_same_model(past_jobs, job.classes, job.table.gpu, power_w, gpu_uuids_of(job))
        fitted = _fitted(job, prior, seen, past).within_reach_of(alone) if past else alone
        clocks = next_clocks(job, fitted, results, num_plans=num_plans, choice=Choice(), draw=draw)
        results.append(job.result(clocks))
        seen.append(job.observed(results[-1], f"tuned-{number}", len(seen), draw))
    return Run(job, tuple(results), learned)


def _fitted(
    job: LearningJob,
    prior: CurvePrior,
    seen: Sequence[IterationObservation],
    past: Sequence[PastCurves],
    classes: Sequence[ClassAtFullSpeed] = (),
) -> FittedCurves:
    waiting = Waiting(job.truth.blocking_power_w, _WAITING_SIGMA_RATIO, 0.0, 0.0)
    return fit_curves(classes or job.classes, prior, times_seen(seen), energies_seen(seen), waiting, past=past)


def past_job(run: Run, job_id: str) -> PastJob:
    """Return what a run leaves behind as the history holds it."""
    assert run.learned is not None
    return PastJob(job_id, job_id, datetime(2026, 11, 1, tzinfo=UTC), run.learned, gpu_uuids=gpu_uuids_of(run.job))
