"""Fits time and power over the clock for one job, from the prior of its GPU model and from all its iterations.

The clock at which a GPU really runs is not reported per instruction, so whether a power cap limits full speed shows
in times at lower clocks: of several bends per kind of instruction the most probable one is taken. Before any plan has
run, full speed counts as the maximum clock, which overestimates times and is on the safe side. Of a GPU that was seen
at its power limit, bends around the clock that it sustains are tried; clocks above these are one setting, the maximum.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean, median, median_low

import numpy as np

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.sustained_clock import SustainedClock, sustained_clocks
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.learned_curves import LearnedCurves
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import GpuView, JobView
from gpuenergyd.count_text import count_text
from gpuenergyd_policies.learning.calls import CALLS_SIGMA_S, CallCost, call_cost
from gpuenergyd_policies.learning.curves import CurveModel
from gpuenergyd_policies.learning.deviations import TIME
from gpuenergyd_policies.learning.evidence import energies_seen, times_seen, without_outliers
from gpuenergyd_policies.learning.job_curves import FittedCurves, fit_curves
from gpuenergyd_policies.learning.past_jobs import of_same_model
from gpuenergyd_policies.learning.published import prior_for
from gpuenergyd_policies.learning.seen import (
    ClassAtFullSpeed,
    NotEnoughDataError,
    TimeRows,
    TimeSeen,
    Waiting,
    time_evidence,
    time_rows,
)
from gpuenergyd_policies.learning.summary import summary_of
from gpuenergyd_policies.learning.waits import waits_seen
from gpuenergyd_policies.setting_curves import STATIC_W, SUSTAINED_ERROR

MAX_FULL_SPEED_ITERATIONS = 24
"""The newest ones at full speed: the cost of a fit grows with the cube of its iterations."""
LOWEST_RATIO = 0.55
"""Lowest clock of an instruction, as a share of the maximum clock; lower ones cost more time than they save energy."""
BEND_RATIOS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.80)
"""Full-speed clocks tried, as shares of the maximum clock."""
_BEND_SIGMA = 0.12
"""Of the log of that share: measured ones are 0.84 to 1."""
_SUSTAINED_RATIOS = (1.06, 1.03, 1.0, 0.97, 0.94)
"""Full-speed clocks tried where a GPU is at its power limit, as shares of the clock that it sustains on average: kinds
of instructions differ in power."""
_WAITING_SIGMA_RATIO = 0.1
_ASSUMED_WAITING_SIGMA_RATIO = 0.3
_WAITING_EXPONENT, _WAITING_EXPONENT_SIGMA = 0.5, 0.5
"""Waiting power falls with the clock on a V100 (84 W at 1530 MHz, 52 W at 945), and was published as constant."""
_WAITING_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class LearnedProfile:
    """The profile of a job's curves, what calls cost it, and the belief that other probable profiles are drawn from."""

    profile: PipelineProfile
    calls: CallCost
    curves: FittedCurves
    learned: LearnedCurves | None
    """What the job itself has shown, for later jobs."""
    num_past_jobs: int
    """Past jobs of the same model, whether they agree with this one or not."""

    @property
    def past_jobs_text(self) -> str:
        """Whether a past job of the same model counts, as the end of a sentence; empty without any."""
        if not self.num_past_jobs:
            return ""
        if self.curves.past is None:
            return f"; {count_text(self.num_past_jobs, 'past job')} of the same model contradicted"
        return "; with the curves of a past job of the same model"


def learned_profile(
    at_full_speed: Sequence[IterationObservation],
    planned: Sequence[IterationObservation],
    gpus: Sequence[GpuView],
    past_jobs: Sequence[PastJob] = (),
    curves_before: LearnedCurves | None = None,
) -> LearnedProfile:
    """Return the profile from iterations at full speed and under plans; `gpus[r]` belongs to rank r.

    Past jobs that agree with it are evidence too, and so are its own curves before it changed.

    Raises:
        NotEnoughDataError: a class has no time at full speed, or a rank no energy.
    """
    everything = sorted([*at_full_speed, *planned], key=lambda observation: observation.iteration_index)
    waits = waits_seen(everything, gpus)
    classes = _classes_at_full_speed(at_full_speed, gpus, waits)
    times = [own for own in times_seen(everything) if own.key in {c.key for c in classes}]
    model_name = gpus[0].model_name if len({gpu.model_name for gpu in gpus}) == 1 else ""
    prior = prior_for(model_name)
    of_time = CurveModel(prior.time, TIME, are_sizes_estimated=False)
    energies = energies_seen(everything, waits)
    waiting = replace(_waiting(at_full_speed, gpus), phases=tuple(waits.values()))
    times = without_outliers(times, _with_every_bend(classes), of_time, calls_sigma_s=CALLS_SIGMA_S)
    plain = _with_bends(classes, times, of_time)
    calls = call_cost(plain, times, of_time)
    fit = partial(
        fit_curves,
        prior=prior,
        times=times,
        energies=energies,
        waiting=waiting,
        calls_sigma_s=(0.0, 0.0) if calls == CallCost.none() else CALLS_SIGMA_S,
    )
    alone = fit(plain)
    learned = summary_of(alone, times, gpus)
    power_w = fmean(alone.reference_w[rank] / gpu.num_gpus for rank, gpu in enumerate(gpus))
    uuids = {gpu.gpu_uuid for gpu in gpus}
    past = of_same_model(past_jobs, classes, model_name, power_w, uuids, curves_before=curves_before)
    curves = fit(plain, past=past).within_reach_of(alone) if past else alone
    return LearnedProfile(curves.profile(), calls, curves, learned, len(past))


def newest_at_full_speed(view: JobView) -> list[IterationObservation]:
    """Return the newest timed iterations of a job at full speed and in its own order of instructions."""
    others = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE or plan.orders}
    full_speed = [o for o in view.observations if o.is_regular and o.is_timed and o.plan_id not in others]
    return full_speed[-MAX_FULL_SPEED_ITERATIONS:]


def _classes_at_full_speed(
    observations: Sequence[IterationObservation], gpus: Sequence[GpuView], waits: Collection[InstructionClass]
) -> list[ClassAtFullSpeed]:
    times_s: dict[InstructionClass, list[float]] = {}
    clocks_mhz: dict[InstructionClass, list[int]] = {}
    for sample in (s for o in observations if o.is_regular for s in o.instruction_samples):
        if sample.instruction_class in waits:
            continue
        times_s.setdefault(sample.instruction_class, []).append(sample.time_s)
        clocks_mhz.setdefault(sample.instruction_class, []).append(sample.main_share.sm_clock_mhz)
    missing = sorted(set(range(len(gpus))) - {key.pp_rank for key in times_s})
    if missing:
        raise NotEnoughDataError(f"ranks {missing} have no timed instructions")
    found, sustained = [], sustained_clocks(observations)
    for key, own_s in sorted(times_s.items()):
        clocks, reached_mhz = gpus[key.pp_rank].supported_sm_clocks_mhz, float(median_low(clocks_mhz[key]))
        own, most_mhz = sustained.get(key.pp_rank), reached_mhz
        if own is not None and own.holds_all_work:
            most_mhz = min(reached_mhz, max(_sustained_by_kind_mhz(own)))
            reached_mhz = min(reached_mhz, own.sm_clock_mhz)
        # Clocks that the GPU does not reach are one setting: the maximum, so that it is faster as soon as it can be.
        usable = tuple(c for c in clocks if c >= LOWEST_RATIO * clocks[0] and (c < most_mhz or c == clocks[0]))
        found.append(ClassAtFullSpeed(key, usable, median(own_s), reached_mhz, own))
    return found


def _with_bends(
    classes: list[ClassAtFullSpeed], times: Sequence[TimeSeen], of_time: CurveModel
) -> list[ClassAtFullSpeed]:
    """Return the classes with the most probable full-speed clock of each kind, where the maximum was reported."""
    if all(clock >= classes[0].clocks_mhz[0] for seen in times for clock, _ in seen.shares):
        return classes
    rows = time_rows(classes, times, has_calls=True)
    chosen = dict.fromkeys(map(_bend_group, classes), 0)
    score = cache(lambda *bends: _score(_bent(classes, dict(zip(chosen, bends, strict=True))), rows, of_time))
    for group in chosen:
        members = [own for own in classes if _bend_group(own) == group]
        scores = [
            score(*{**chosen, group: k}.values()) - max(_penalty(own, k) for own in members)
            for k in range(len(BEND_RATIOS))
        ]
        chosen[group] = int(np.argmax(scores))
    return _bent(classes, chosen)


def _with_every_bend(classes: Sequence[ClassAtFullSpeed]) -> list[list[ClassAtFullSpeed]]:
    groups = set(map(_bend_group, classes))
    return [_bent(classes, dict.fromkeys(groups, k)) for k in range(len(BEND_RATIOS))]


def _bend_group(own: ClassAtFullSpeed) -> tuple[InstructionKind, int, bool]:
    """Return which classes bend alike: those of one kind, of stages at their power limits or of the others."""
    return own.key.kind, own.key.chunk_index, own.sustained is not None


def _bends_mhz(own: ClassAtFullSpeed) -> list[float]:
    """Return the full-speed clocks to try, that without a power cap first."""
    max_mhz = float(own.clocks_mhz[0])
    if own.sustained is None:
        return [ratio * max_mhz for ratio in BEND_RATIOS]
    return [max_mhz, *(min(max_mhz, mhz) for mhz in _sustained_by_kind_mhz(own.sustained))]


def _sustained_by_kind_mhz(sustained: SustainedClock) -> list[float]:
    """Return the clocks that a kind of instructions may sustain: that of the GPU itself if it runs only one kind."""
    return [(ratio if sustained.num_kinds > 1 else 1.0) * sustained.sm_clock_mhz for ratio in _SUSTAINED_RATIOS]


def _penalty(own: ClassAtFullSpeed, bend: int) -> float:
    """Return how improbable a full-speed clock is before any time at lower clocks, as a negative log probability."""
    if own.sustained is None:
        off = float(np.log(BEND_RATIOS[bend])) / _BEND_SIGMA
    elif bend:
        off = float(np.log(_SUSTAINED_RATIOS[bend - 1])) / SUSTAINED_ERROR
    else:
        off = math.inf if own.sustained.holds_all_work else 0.0
    return 0.5 * off**2


def _bent(
    classes: Sequence[ClassAtFullSpeed], bend_of: Mapping[tuple[InstructionKind, int, bool], int]
) -> list[ClassAtFullSpeed]:
    bent = []
    for own in classes:
        bend_mhz = _bends_mhz(own)[bend_of[_bend_group(own)]]
        if own.sustained is None:
            bent.append(replace(own, full_speed_mhz=min(own.full_speed_mhz, bend_mhz)))
        else:
            clocks_mhz = own.clocks_mhz[:1] + tuple(clock for clock in own.clocks_mhz[1:] if clock < bend_mhz)
            bent.append(replace(own, clocks_mhz=clocks_mhz, full_speed_mhz=bend_mhz))
    return bent


def _score(classes: Sequence[ClassAtFullSpeed], rows: TimeRows, of_time: CurveModel) -> float:
    seen = time_evidence(classes, rows, of_time, calls_sigma_s=CALLS_SIGMA_S, num_rounds=2)
    return of_time.score(seen.observed, seen.evidence)


def _waiting(observations: Sequence[IterationObservation], gpus: Sequence[GpuView]) -> Waiting:
    """Return the published waiting power, else static power and a tenth of the rest of the mean power."""
    known = [gpu.blocking_power_w for gpu in gpus if gpu.blocking_power_w is not None]
    if len(known) == len(gpus):
        return Waiting(fmean(known), _WAITING_SIGMA_RATIO, _WAITING_EXPONENT, _WAITING_EXPONENT_SIGMA)
    ranks = [rank for observation in observations for rank in observation.ranks if rank.window_s > 0]
    powers_w = [rank.energy_j / rank.window_s for rank in ranks if rank.energy_j is not None]
    if not powers_w:
        raise NotEnoughDataError("no energy was measured at full speed")
    mean_w = fmean(powers_w)
    static_w = min(STATIC_W * fmean(gpu.num_gpus for gpu in gpus), 0.5 * mean_w)
    assumed_w = static_w + _WAITING_SHARE * (mean_w - static_w)
    return Waiting(assumed_w, _ASSUMED_WAITING_SIGMA_RATIO, _WAITING_EXPONENT, _WAITING_EXPONENT_SIGMA)
