"""Forecasts of the carbon intensity of the next 72 hours, with 95 % intervals and a record of skill.

Theory of operation. A forecast is a weighted mean of two models: the pooled prior, which was trained on other zones and
uses the shape of the last week, and the zone model, whose weight grows with the zone's history. With less than a week
of history, the forecast is the mean of the same hour over the known days; on the first day, the last value. Before each
refit, the forecasts for the hours since the last refit are recorded. Compared with the true values, they give the skill
against naive forecasts and the 95 % interval (`prediction_interval`), both on hours that the models had not seen.
"""

from datetime import datetime

import numpy as np
from threadpoolctl import threadpool_limits

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, ForecastHour, ForecastSkill, HourlySeries
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.policy.history import (
    DAY_HOURS,
    NUM_TARGET_HOURS,
    WEEK_HOURS,
    Array,
    FilledHistory,
    Origins,
    filled_history,
    same_hour_means,
    targets,
)
from gpuenergyd_carbon.policy.pooled_prior import PooledPrior, shipped_prior
from gpuenergyd_carbon.policy.prediction_interval import LEAST_ORIGINS, prediction_interval
from gpuenergyd_carbon.policy.zone_model import SEASON_HOURS, ZoneModel

ZONE_MODEL_FROM_HOURS = 42 * DAY_HOURS
ZONE_MODEL_FULL_HOURS = 300 * DAY_HOURS
ZONE_MODEL_SHARE = 0.8
"""Weight of the zone model with at least ZONE_MODEL_FULL_HOURS of history; it is 0 at ZONE_MODEL_FROM_HOURS."""
RECORD_HOURS = 90 * DAY_HOURS
"""Period of recorded forecasts used for the interval; the newest ones are used for the skill."""
SKILL_HOURS = 4 * WEEK_HOURS


class ZoneForecaster:
    """Forecasts of one zone, refitted as its history grows."""

    def __init__(self, *, prior: PooledPrior | None = None) -> None:
        self._prior = prior or shipped_prior()
        self._zone_model: ZoneModel | None = None
        self._share = 0.0
        """Weight of the zone model."""
        self._end = 0
        self._recorded_origins: Origins = np.zeros(0, dtype=np.int64)
        self._recorded: Array = np.zeros((0, NUM_TARGET_HOURS))

    def refit(self, history: FilledHistory, end: int) -> None:
        """Fit the models to the history before `end`; record the forecasts for the hours since the last refit."""
        if self._zone_model is None and end >= ZONE_MODEL_FROM_HOURS:
            self._zone_model = ZoneModel(with_season=end >= SEASON_HOURS)
            self._end = max(end - RECORD_HOURS, ZONE_MODEL_FROM_HOURS // 2)
            self._zone_model.update(history, self._end)
            self._recorded_origins, self._recorded = self._recorded_origins[:0], self._recorded[:0]
        self._share = float(np.interp(end, (ZONE_MODEL_FROM_HOURS, ZONE_MODEL_FULL_HOURS), (0.0, ZONE_MODEL_SHARE)))
        origins = np.arange(max(self._end, end - RECORD_HOURS, WEEK_HOURS), end)
        kept = self._recorded_origins >= end - RECORD_HOURS
        self._recorded = np.concatenate([self._recorded[kept], self.predict(history, origins)])
        self._recorded_origins = np.concatenate([self._recorded_origins[kept], origins])
        if self._zone_model is not None:
            self._zone_model.update(history, end)
        self._end = end

    def predict(self, history: FilledHistory, origins: Origins) -> Array:
        """Return forecasts of 72 hours for each origin, in the unit of the history."""
        result = np.empty((len(origins), NUM_TARGET_HOURS))
        is_early = origins < WEEK_HOURS
        for k in np.flatnonzero(is_early):
            result[k] = _from_few_days(history.values[: origins[k]])
        late = origins[~is_early]
        if len(late):
            predicted = self._prior.predict(history, late)
            if self._zone_model is not None:
                predicted += self._share * (self._zone_model.predict(history, late) - predicted)
            lowest = float(history.values[: late.min()].min())
            result[~is_early] = np.maximum(predicted, 0.5 * lowest)
        return result

    def skill(self, history: FilledHistory, end: int) -> ForecastSkill | None:
        """Return the skill of the recorded forecasts whose day has passed; None while there are too few."""
        due = (self._recorded_origins <= end - DAY_HOURS) & (self._recorded_origins >= end - SKILL_HOURS)
        origins, predicted = self._recorded_origins[due], self._recorded[due]
        if len(origins) < LEAST_ORIGINS:
            return None
        return skill_against_naive(history.values, origins, predicted)

    def bounds(self, history: FilledHistory, origin: int, predicted: Array) -> tuple[Array, Array]:
        """Return the bounds of one forecast's 95 % interval, from the errors of recorded forecasts."""
        return prediction_interval(
            history.values,
            origin,
            predicted,
            recorded_origins=self._recorded_origins,
            recorded=self._recorded,
            usual_margins=self._prior.usual_margins,
        )


class Forecasts:
    """The entry point `forecast`: one forecaster per zone, reused for a day."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[datetime, int, ZoneForecaster]] = {}

    def __call__(self, history: HourlySeries, *, num_hours: int = DAY_HOURS) -> CarbonForecast:
        """Return the forecast issued at the end of a history."""
        if not 1 <= num_hours <= NUM_TARGET_HOURS:
            raise CarbonDataError(f"num_hours {num_hours} is out of range; valid: 1 to {NUM_TARGET_HOURS}")
        known = filled_history(history)
        if known is None:
            raise CarbonDataError(f"zone {history.zone}: cannot forecast, the history has no value")
        end = len(known.values)
        with threadpool_limits(1):  # a forecast uses one core
            forecaster = self._forecaster(history.zone, known, end)
            predicted = forecaster.predict(known, np.array([end]))[0, :num_hours]
            low, high = forecaster.bounds(known, end, predicted)
        hours = tuple(
            ForecastHour(history.end_at + k * HOUR, float(predicted[k]), float(low[k]), float(high[k]))
            for k in range(num_hours)
        )
        return CarbonForecast(
            zone=history.zone,
            issued_at=history.end_at,
            model=_model_name(end),
            hours=hours,
            unit=history.unit,
            skill=forecaster.skill(known, end),
        )

    def _forecaster(self, zone: str, known: FilledHistory, end: int) -> ZoneForecaster:
        if zone in self._kept:
            first_at, fitted_end, forecaster = self._kept[zone]
            if first_at == known.first_hour_at and 0 <= end - fitted_end < DAY_HOURS:
                return forecaster
        forecaster = ZoneForecaster()
        forecaster.refit(known, end)
        self._kept[zone] = (known.first_hour_at, end, forecaster)
        return forecaster


forecast = Forecasts()


def naive_forecasts(values: Array, origins: Origins, num_hours: int = DAY_HOURS) -> dict[str, Array]:
    hours = origins[:, None] + np.arange(num_hours)
    return {
        "persistence": np.repeat(values[origins - 1][:, None], num_hours, axis=1),
        "yesterday": values[hours - DAY_HOURS * (1 + np.arange(num_hours) // DAY_HOURS)],
        "last-week": values[hours - WEEK_HOURS],
        "7-day-mean": same_hour_means(values, origins, num_hours),
    }


def skill_against_naive(values: Array, origins: Origins, predicted: Array) -> ForecastSkill:
    """Return the skill of forecasts against the best naive one, chosen in hindsight for each horizon."""
    truth = targets(values, origins, DAY_HOURS)
    errors = np.abs(predicted[:, :DAY_HOURS] - truth).mean(axis=0)
    naive = np.array([np.abs(table - truth).mean(axis=0) for table in naive_forecasts(values, origins).values()])
    own = np.array([errors[0], errors[5], errors.mean()])
    best = np.append(naive.min(axis=0)[[0, 5]], naive.mean(axis=1).min())
    skill = 1.0 - np.divide(own, best, out=np.ones_like(own), where=best > 0)
    at_1h, at_6h, mean = skill.tolist()
    return ForecastSkill(at_1h, at_6h, mean, num_origins=len(origins))


def _from_few_days(known: Array) -> Array:
    """Return the mean of the same hour over the known days; on the first day, the last value."""
    if len(known) < DAY_HOURS:
        return np.full(NUM_TARGET_HOURS, known[-1])
    whole_days = known[len(known) % DAY_HOURS :].reshape(-1, DAY_HOURS).mean(axis=0)
    return np.tile(whole_days, NUM_TARGET_HOURS // DAY_HOURS)


def _model_name(num_hours: int) -> str:
    if num_hours < DAY_HOURS:
        return "persistence"
    if num_hours < WEEK_HOURS:
        return "same-hour-mean"
    return "pooled-prior" if num_hours < ZONE_MODEL_FROM_HOURS else "pooled-prior+zone-model"
