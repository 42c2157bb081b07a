"""Replay of past traces without look-ahead: the value of timing, and the share of it that forecasts capture.

Every hour, a forecast is issued from the hours before it; models are refitted once a day. Jobs then run with the
daemon's controller on these forecasts. For comparison, they also run on yesterday's values, on the 7-day mean, by
Chase's rule, and on a perfect forecast.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.lab.results import Choice, ReplayedJob, ReplayMethod, ReplayRequest, ZoneReplay
from gpuenergyd_carbon.policy.budget import SLOT_S, Array, SpeedHull, speed_hull
from gpuenergyd_carbon.policy.forecast import ZoneForecaster, skill_against_naive
from gpuenergyd_carbon.policy.history import DAY_HOURS, FilledHistory, Origins, filled_history, same_hour_means
from gpuenergyd_carbon.policy.jobs import JobRun, TraceJob
from gpuenergyd_carbon.policy.pooled_prior import TRAINED_UNTIL_AT, TRAINED_ZONES, PooledPrior

CHASE_ETA = 0.24
"""Published weight of carbon against time in Chase's rule."""
CHASE_MAX_INTENSITY_G_PER_KWH = 750.0
TRAINING_DATA_NOTE = (
    f"skill before {TRAINED_UNTIL_AT:%Y-%m-%d} is not a test: the pooled prior was trained on {{zone}} until then"
)


@dataclass(frozen=True, slots=True)
class IssuedTable:
    """All forecasts of a replay, and the longest CPU times of a refit and of a forecast."""

    first_origin: int
    rows: Array
    lows: Array
    highs: Array
    """Bounds of the 95 % intervals of the forecasts issued once a day, after the refit."""
    refit_s_max: float
    forecast_s_max: float

    def interval_coverage_ratio(self, values: Array) -> float:
        """Return the share of hours, over whole days, that are inside the interval issued before their day."""
        num_days = (len(values) - self.first_origin) // DAY_HOURS
        truth = values[self.first_origin :][: num_days * DAY_HOURS].reshape(num_days, DAY_HOURS)
        lows, highs = (bounds[:num_days, :DAY_HOURS] for bounds in (self.lows, self.highs))
        return float(((lows <= truth) & (truth <= highs)).mean())


def replay(request: ReplayRequest) -> Sequence[ZoneReplay]:
    """Return one result for each trace, in order.

    Raises:
        CarbonDataError: a trace, the frontier or a start is invalid; the message names it.
    """
    if not (math.isfinite(request.max_slowdown_ratio) and request.max_slowdown_ratio >= 0):
        raise CarbonDataError(
            f"slowdown budget {request.max_slowdown_ratio} must be a ratio >= 0, e.g. 0.025 for 2.5 %"
        )
    if not (math.isfinite(request.job_hours) and request.job_hours > 0):
        raise CarbonDataError(f"job length {request.job_hours} h must be > 0")
    hull = speed_hull(request.frontier, request.host_power_w)
    with threadpool_limits(1):  # more threads do not speed up such small matrices
        return [_replay_zone(request, trace, hull) for trace in request.traces]


def issue_forecasts(
    history: FilledHistory, first_origin: int, *, prior: PooledPrior | None = None, history_days: int | None = None
) -> IssuedTable:
    """Return the forecasts issued at every hour from `first_origin` on, each from the history before it."""
    num = len(history.values)
    rows, lows, highs, refits_s, forecasts_s = [], [], [], [0.0], [0.0]
    forecaster = ZoneForecaster(prior=prior)
    for day in range(first_origin, num, DAY_HOURS):
        begin = 0
        if history_days is not None:
            begin, forecaster = max(0, day - history_days * DAY_HOURS), ZoneForecaster(prior=prior)
        seen, origin = history.part(begin, min(day + DAY_HOURS, num)), day - begin
        started_s = time.process_time()
        forecaster.refit(seen, origin)
        refitted_s = time.process_time()
        first = forecaster.predict(seen, np.array([origin]))
        low, high = forecaster.bounds(seen, origin, first[0])
        forecasts_s.append(time.process_time() - refitted_s)
        refits_s.append(refitted_s - started_s)
        rows += [first, forecaster.predict(seen, np.arange(origin + 1, len(seen.values)))]
        lows.append(low)
        highs.append(high)
    return IssuedTable(
        first_origin, np.concatenate(rows), np.array(lows), np.array(highs), max(refits_s), max(forecasts_s)
    )


def chase_speeds(hull: SpeedHull, intensities_g_per_kwh: Array) -> Array:
    """Return the speed of each slot by Chase's rule: a fixed weight of carbon against time, without look-ahead.

    Each slot runs at the point that minimizes `eta * P(T) * c + (1 - eta) * MAXPOWER * CI_MAX` per unit of speed.
    Source: ml-energy/zeus, branch `chase`, and the abstract of the paper.
    """
    kappa = float(hull.powers_w[-1]) * CHASE_MAX_INTENSITY_G_PER_KWH * (1.0 - CHASE_ETA) / CHASE_ETA
    costs_per_iteration = (intensities_g_per_kwh[:, None] * hull.powers_w + kappa) / hull.speeds_per_s
    speeds: Array = hull.speeds_per_s[np.argmin(costs_per_iteration, axis=1)]
    return speeds


def _compare(history: FilledHistory, start: int, job: TraceJob, issued: IssuedTable) -> dict[str, JobRun]:
    """Return one job's result with each method."""
    num_slots = len(job.slot_lengths_s)
    origins = np.arange(start, start + num_slots)
    fallback = same_hour_means(history.values, origins, num_slots)
    yesterday = history.values[origins[:, None] + np.arange(-DAY_HOURS, 0)]
    return {
        "forecast": job.controlled(issued.rows[origins - issued.first_origin], fallback),
        "yesterday": job.controlled(yesterday, fallback),
        "7-day-mean": job.controlled(fallback, fallback),
        "chase": job.run(chase_speeds(job.hull, job.truth)),
        "perfect": job.oracle(),
    }


def _replay_zone(request: ReplayRequest, trace: HourlySeries, hull: SpeedHull) -> ZoneReplay:
    history = filled_history(trace)
    if history is None:
        raise CarbonDataError(f"zone {trace.zone}: the trace has no value")
    first = (request.train_until_at - history.first_hour_at) // HOUR
    if first < 8 * DAY_HOURS:
        begins = f"it begins at {history.first_hour_at:%Y-%m-%d %H:%M}"
        raise CarbonDataError(f"zone {trace.zone}: 8 days before {request.train_until_at} are needed; {begins}")
    if first + DAY_HOURS >= len(history.values):
        raise CarbonDataError(f"zone {trace.zone}: a day after {request.train_until_at} is needed in the trace")
    job_s = request.job_hours * SLOT_S
    starts = _starts(request, trace, history, first)
    issued = issue_forecasts(history, first, history_days=request.history_days)
    jobs = [TraceJob(hull, history.values[start:], job_s, request.max_slowdown_ratio) for start in starts]
    compared = [_compare(history, int(start), job, issued) for start, job in zip(starts, jobs, strict=True)]
    full_g = np.array([job.constant_g(job_s) for job in jobs])
    constant = float((1.0 - np.array([job.constant_g(job.permitted_s) for job in jobs]) / full_g).mean())
    oracle = float((1.0 - np.array([runs["perfect"].carbon_g for runs in compared]) / full_g).mean())
    gain = oracle - constant
    methods = tuple(_method(name, [runs[name] for runs in compared], full_g, gain, jobs[0]) for name in compared[0])
    issued_origins = np.arange(first, len(history.values) - DAY_HOURS + 1)
    times_s = sorted({time_s for time_s, _ in request.frontier})
    is_training_data = trace.zone in TRAINED_ZONES and request.train_until_at < TRAINED_UNTIL_AT
    return ZoneReplay(
        zone=trace.zone,
        num_jobs=len(jobs),
        constant_saving_ratio=constant,
        oracle_saving_ratio=oracle,
        timing_gain_ratio=gain,
        achieved_saving_ratio=methods[0].saving_ratio,
        captured_ratio=(methods[0].saving_ratio - constant) / gain if gain > 0 else 0.0,
        time_used_ratio_max=methods[0].time_used_ratio_max,
        skill=skill_against_naive(history.values, issued_origins, issued.rows[: len(issued_origins)]),
        interval_coverage_ratio=issued.interval_coverage_ratio(history.values),
        methods=methods,
        refit_s_max=issued.refit_s_max,
        forecast_s_max=issued.forecast_s_max,
        jobs=tuple(
            ReplayedJob(history.first_hour_at + int(start) * HOUR, choices=_choices(hull, runs["forecast"], times_s))
            for start, runs in zip(starts, compared, strict=True)
        ),
        first_issued_at=history.first_hour_at + first * HOUR,
        forecasts=tuple(map(tuple, issued.rows[:, :DAY_HOURS].tolist())) if request.want_forecasts else (),
        notes=(TRAINING_DATA_NOTE.format(zone=trace.zone),) if is_training_data else (),
    )


def _method(name: str, runs: Sequence[JobRun], full_g: Array, gain_ratio: float, job: TraceJob) -> ReplayMethod:
    savings = 1.0 - np.array([run.carbon_g for run in runs]) / full_g
    beyond_constant = np.array([run.constant_g - run.carbon_g for run in runs]) / full_g
    times_s = np.array([run.time_s for run in runs])
    return ReplayMethod(
        name=name,
        saving_ratio=float(savings.mean()),
        captured_ratio=float(beyond_constant.mean()) / gain_ratio if gain_ratio > 0 else 0.0,
        worst_job_ratio=float(beyond_constant.min()),
        time_used_ratio_max=float(times_s.max()) / job.permitted_s,
        mean_slowdown_ratio=float(times_s.mean()) / job.job_s - 1.0,
    )


def _starts(request: ReplayRequest, trace: HourlySeries, history: FilledHistory, first: int) -> Origins:
    """Return the positions of the hours at which jobs start."""
    last = len(history.values) - math.ceil(request.job_hours * (1.0 + request.max_slowdown_ratio) - 1e-9)
    named = request.starts_at.get(trace.zone) if request.starts_at is not None else None
    if named is None:
        candidates = np.arange(first, last - DAY_HOURS)
        if not 1 <= request.num_starts <= len(candidates):
            raise CarbonDataError(
                f"zone {trace.zone}: number of starts {request.num_starts} is out of range; valid: 1 to "
                f"{len(candidates)} (hours after {request.train_until_at} that leave room for a job)"
            )
        return np.random.default_rng(request.seed).choice(candidates, request.num_starts, replace=False)
    if not named:
        raise CarbonDataError(f"zone {trace.zone}: the list of starts is empty")
    begin, end = (history.first_hour_at + k * HOUR for k in (first, last))
    for start in named:
        if not begin <= start <= end or (start - begin) % HOUR:
            raise CarbonDataError(
                f"zone {trace.zone}: start {start} is invalid; it must be a full hour from {begin} to {end}"
            )
    return np.array([first + (start - begin) // HOUR for start in named], dtype=np.int64)


def _choices(hull: SpeedHull, run: JobRun, frontier_times_s: Sequence[float]) -> tuple[Choice, ...]:
    """Return the operating point of each hour as iteration times of the frontier."""
    choices: list[Choice] = []
    for speed in run.speeds_per_s[: math.ceil(run.time_s / SLOT_S - 1e-9)]:
        mix = tuple((min(frontier_times_s, key=lambda t: abs(t - time_s)), share) for time_s, share in hull.mix(speed))
        choices.append(mix[0][0] if len(mix) == 1 else mix)
    return tuple(choices)
