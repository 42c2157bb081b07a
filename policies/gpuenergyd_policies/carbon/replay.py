"""Replay of past traces without look-ahead: the value of timing, and the share of it that forecasts capture.

Every hour a forecast is issued from the hours before it; models are refitted once a day. Jobs then run with the
daemon's controller, and for comparison with yesterday's values, the 7-day mean, Chase's rule and a perfect forecast.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from threadpoolctl import threadpool_limits

from gpuenergyd.core.carbon.intensity import HOUR, ForecastSkill, HourlySeries
from gpuenergyd.core.carbon.replay import (
    Choice,
    IssuedForecasts,
    ReplayedJob,
    ReplayMethod,
    ReplayRequest,
    ZoneReplay,
)
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_policies.carbon.budget import Array, SpeedHull, speed_hull
from gpuenergyd_policies.carbon.chase import chase_speed
from gpuenergyd_policies.carbon.features import (
    FilledHistory,
    Origins,
    filled_history,
    same_hour_means,
)
from gpuenergyd_policies.carbon.forecast import ZoneForecaster, skill_against_naive
from gpuenergyd_policies.carbon.jobs import SLOT_S, JobRun, TraceJob
from gpuenergyd_policies.carbon.pooled_prior import TRAINED_UNTIL_AT, TRAINED_ZONES, PooledPrior

LEAST_HISTORY_HOURS = 8 * 24


@dataclass(frozen=True, slots=True)
class IssuedTable:
    """All forecasts of a replay, and the longest processor time of a refit and of a forecast."""

    first_origin: int
    rows: Array
    lows: Array
    highs: Array
    """Bounds of the 95 % intervals of the forecasts issued once a day, after the refit."""
    refit_s_max: float
    forecast_s_max: float

    def interval_coverage_ratio(self, values: Array) -> float | None:
        """Return the share of the next day's hours inside the interval issued before it; None without a whole day."""
        num_days = min(len(self.lows), (len(values) - self.first_origin) // 24)
        if num_days < 1:
            return None
        truth = values[self.first_origin : self.first_origin + num_days * 24].reshape(num_days, 24)
        is_inside = (self.lows[:num_days, :24] <= truth) & (truth <= self.highs[:num_days, :24])
        return float(is_inside.mean())


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
    rows, refit_s, forecast_s = [], [0.0], [0.0]
    bounds = []
    forecaster = ZoneForecaster(prior=prior)
    for day in range(first_origin, num, 24):
        until = min(day + 24, num)
        begin = max(0, day - history_days * 24) if history_days is not None else 0
        seen = FilledHistory(
            history.first_hour_at + begin * HOUR, history.values[begin:until], history.is_filled[begin:until]
        )
        if history_days is not None:
            forecaster = ZoneForecaster(prior=prior)
        started_s = time.process_time()
        forecaster.refit(seen, day - begin)
        refit_s.append(time.process_time() - started_s)
        started_s = time.process_time()
        first = forecaster.predict(seen, np.array([day - begin]))
        bounds.append(forecaster.bounds(seen, day - begin, first[0]))
        forecast_s.append(time.process_time() - started_s)
        rest = np.arange(day + 1 - begin, until - begin)
        rows += [first, forecaster.predict(seen, rest)] if len(rest) else [first]
    lows, highs = (np.array(each) for each in zip(*bounds, strict=True))
    return IssuedTable(first_origin, np.concatenate(rows), lows, highs, max(refit_s), max(forecast_s))


@dataclass(frozen=True, slots=True)
class _JobComparison:
    """One job with all methods, and its reference emissions."""

    full_g: float
    constant_g: float
    oracle_g: float
    runs: dict[str, JobRun]


def _compare(
    request: ReplayRequest, hull: SpeedHull, history: FilledHistory, start: int, issued: IssuedTable
) -> _JobComparison:
    longest = math.ceil(request.job_hours * (1.0 + request.max_slowdown_ratio) * 1.5)
    job = TraceJob(
        hull, history.values[start : start + longest], request.job_hours * SLOT_S, request.max_slowdown_ratio
    )
    num_slots = len(job.slot_lengths_s)
    origins = np.arange(start, start + num_slots)
    fallback = same_hour_means(history.values, origins, num_slots)
    rows = issued.rows[origins - issued.first_origin]
    yesterday = history.values[origins[:, None] + np.arange(-24, 0)]
    runs = {
        "forecast": job.controlled(rows, fallback),
        "yesterday": job.controlled(yesterday, fallback),
        "7-day-mean": job.controlled(fallback, fallback),
        "chase": job.run(np.array([chase_speed(hull, g_per_kwh) for g_per_kwh in job.truth])),
        "perfect": job.oracle(),
    }
    return _JobComparison(job.full_speed_g(), job.constant_g(job.permitted_s), runs["perfect"].carbon_g, runs)


def _replay_zone(request: ReplayRequest, trace: HourlySeries, hull: SpeedHull) -> ZoneReplay:
    history = filled_history(trace)
    if history is None:
        raise CarbonDataError(f"zone {trace.zone}: the trace has no value")
    first = (request.train_until_at - history.first_hour_at) // HOUR
    if first < LEAST_HISTORY_HOURS:
        begins = f"it begins at {history.first_hour_at:%Y-%m-%d %H:%M}"
        raise CarbonDataError(f"zone {trace.zone}: 8 days before {request.train_until_at} are needed; {begins}")
    if first + 24 >= len(history.values):
        raise CarbonDataError(f"zone {trace.zone}: a day after {request.train_until_at} is needed in the trace")
    starts = _starts(request, trace, history, first)
    issued = issue_forecasts(history, first, history_days=request.history_days)
    compared = [_compare(request, hull, history, int(start), issued) for start in starts]
    full_g = np.array([job.full_g for job in compared])
    constant = float((1.0 - np.array([job.constant_g for job in compared]) / full_g).mean())
    oracle = float((1.0 - np.array([job.oracle_g for job in compared]) / full_g).mean())
    gain = oracle - constant
    permitted_s = request.job_hours * SLOT_S * (1.0 + request.max_slowdown_ratio)
    methods = tuple(
        _method(name, [job.runs[name] for job in compared], full_g, gain, request.job_hours * SLOT_S, permitted_s)
        for name in compared[0].runs
    )
    forecast_method = methods[0]
    times_s = sorted({time_s for time_s, _ in request.frontier})
    return ZoneReplay(
        zone=trace.zone,
        num_jobs=len(compared),
        constant_saving_ratio=constant,
        oracle_saving_ratio=oracle,
        timing_gain_ratio=gain,
        achieved_saving_ratio=forecast_method.saving_ratio,
        captured_ratio=(forecast_method.saving_ratio - constant) / gain if gain > 0 else 0.0,
        time_used_ratio_max=forecast_method.time_used_ratio_max,
        skill=_skill(history, issued),
        interval_coverage_ratio=issued.interval_coverage_ratio(history.values),
        methods=methods,
        refit_s_max=issued.refit_s_max,
        forecast_s_max=issued.forecast_s_max,
        jobs=tuple(
            ReplayedJob(
                history.first_hour_at + int(start) * HOUR, choices=_choices(hull, job.runs["forecast"], times_s)
            )
            for start, job in zip(starts, compared, strict=True)
        ),
        forecasts=IssuedForecasts(
            history.first_hour_at + first * HOUR, rows=tuple(map(tuple, issued.rows[:, :24].tolist()))
        )
        if request.want_forecasts
        else None,
        notes=_notes(request, trace.zone),
    )


def _notes(request: ReplayRequest, zone: str) -> tuple[str, ...]:
    if zone not in TRAINED_ZONES or request.train_until_at >= TRAINED_UNTIL_AT:
        return ()
    return (
        f"skill before {TRAINED_UNTIL_AT:%Y-%m-%d} is not a test: the pooled prior was trained on {zone} until then",
    )


def _method(
    name: str, runs: Sequence[JobRun], full_g: Array, gain_ratio: float, job_s: float, permitted_s: float
) -> ReplayMethod:
    savings = 1.0 - np.array([run.carbon_g for run in runs]) / full_g
    beyond_constant = np.array([run.constant_g - run.carbon_g for run in runs]) / full_g
    times_s = np.array([run.time_s for run in runs])
    return ReplayMethod(
        name=name,
        saving_ratio=float(savings.mean()),
        captured_ratio=float(beyond_constant.mean()) / gain_ratio if gain_ratio > 0 else 0.0,
        worst_job_ratio=float(beyond_constant.min()),
        time_used_ratio_max=float(times_s.max()) / permitted_s,
        mean_slowdown_ratio=float(times_s.mean()) / job_s - 1.0,
    )


def _skill(history: FilledHistory, issued: IssuedTable) -> ForecastSkill:
    origins = np.arange(issued.first_origin, len(history.values) - 23)
    return skill_against_naive(history.values, origins, issued.rows[: len(origins)])


def _starts(request: ReplayRequest, trace: HourlySeries, history: FilledHistory, first: int) -> Origins:
    """Return the positions of the hours at which jobs start."""
    num = len(history.values)
    slots = math.ceil(request.job_hours * (1.0 + request.max_slowdown_ratio) - 1e-9)
    named = request.starts_at.get(trace.zone) if request.starts_at is not None else None
    if named is not None:
        positions = np.array([_position(trace, history, start, first, num - slots) for start in named], dtype=np.int64)
        if not len(positions):
            raise CarbonDataError(f"zone {trace.zone}: the list of starts is empty")
        return positions
    candidates = np.arange(first, num - slots - 24)
    if request.num_starts < 1 or request.num_starts > len(candidates):
        raise CarbonDataError(
            f"zone {trace.zone}: number of starts {request.num_starts} is out of range; valid: 1 to {len(candidates)} "
            f"(hours after {request.train_until_at} that leave room for a job)"
        )
    return np.random.default_rng(request.seed).choice(candidates, request.num_starts, replace=False)


def _position(trace: HourlySeries, history: FilledHistory, start: datetime, first: int, last: int) -> int:
    position = (start - history.first_hour_at) // HOUR
    if not first <= position <= last or (start - history.first_hour_at) % HOUR:
        begin, end = (history.first_hour_at + k * HOUR for k in (first, last))
        raise CarbonDataError(
            f"zone {trace.zone}: start {start} is invalid; it must be a full hour from {begin} to {end}"
        )
    return position


def _choices(hull: SpeedHull, run: JobRun, frontier_times_s: Sequence[float]) -> tuple[Choice, ...]:
    """Return the operating point of each hour as iteration times of the frontier."""
    choices: list[Choice] = []
    for speed in run.speeds_per_s[: math.ceil(run.time_s / SLOT_S - 1e-9)]:
        mix = tuple((min(frontier_times_s, key=lambda t: abs(t - time_s)), share) for time_s, share in hull.mix(speed))
        choices.append(mix[0][0] if len(mix) == 1 else mix)
    return tuple(choices)
