"""Forecasts of the carbon intensity of the next 72 hours, with 95 % intervals and a record of skill.

Theory of operation. A forecast is a weighted mean of two models: the pooled prior, which was trained on other zones and
uses the shape of the last week, and the zone model, whose weight grows with the zone's history. The last forecast error
corrects the next forecast as far as the zone's errors persist from hour to hour. With less than a week of history, the
forecast is the mean of the same hour over the known days; on the first day, the last value. Before each refit, the
forecasts for the hours since the last one are recorded; compared with the true values, they give the skill against
naive forecasts and the 95 % interval (`prediction_interval`), both on hours that the models had not seen.
"""

from datetime import datetime

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, ForecastHour, ForecastSkill, HourlySeries
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_policies.carbon.error_correction import USUAL_PERSISTENCE_RATIO, ErrorCorrection
from gpuenergyd_policies.carbon.features import (
    NUM_TARGET_HOURS,
    WEEK_HOURS,
    Array,
    FilledHistory,
    Origins,
    filled_history,
    same_hour_means,
    targets,
)
from gpuenergyd_policies.carbon.pooled_prior import PooledPrior, shipped_prior
from gpuenergyd_policies.carbon.prediction_interval import LEAST_ORIGINS, prediction_interval
from gpuenergyd_policies.carbon.zone_model import SEASON_HOURS, ZoneModel

ZONE_MODEL_FROM_HOURS = 42 * 24
ZONE_MODEL_FULL_HOURS = 300 * 24
ZONE_MODEL_SHARE = 0.7
"""Weight of the zone model from ZONE_MODEL_FULL_HOURS of history on; it is 0 at ZONE_MODEL_FROM_HOURS."""
RECORD_HOURS = 90 * 24
"""Recorded forecasts, for the interval; the newest of them tell the skill."""
SKILL_HOURS = 28 * 24
_FULL_REFIT_HOURS = 30 * 24
"""Interval of complete refits, in which the zone model sees revised values of the history."""


class ZoneForecaster:
    """Forecasts of one zone, refitted as its history grows."""

    def __init__(self, *, prior: PooledPrior | None = None) -> None:
        self._prior = prior or shipped_prior()
        self._zone_model: ZoneModel | None = None
        self._zone_model_share = 0.0
        self._end = 0
        self._floor = 0.0
        self._recorded_origins: Origins = np.zeros(0, dtype=np.int64)
        self._recorded: Array = np.zeros((0, NUM_TARGET_HOURS))
        self._errors: Array = np.zeros(0)
        """Errors of the first hour of each recorded forecast, before correction; NaN where the truth is unknown."""
        self._correction = ErrorCorrection(USUAL_PERSISTENCE_RATIO)

    def refit(self, history: FilledHistory, end: int) -> None:
        """Fit the models to the history before `end`; record the forecasts for the hours since the last refit."""
        self._floor = 0.5 * float(history.values[:end].min()) if end else 0.0
        if self._zone_model is None and end >= ZONE_MODEL_FROM_HOURS:
            self._zone_model = ZoneModel(with_season=end >= SEASON_HOURS)
            self._end = max(end - RECORD_HOURS, ZONE_MODEL_FROM_HOURS // 2)
            self._zone_model.update(history, self._end)
            self._recorded_origins = self._recorded_origins[:0]
            self._recorded, self._errors = self._recorded[:0], self._errors[:0]
        self._zone_model_share = self._share(end)
        usual_ratio = USUAL_PERSISTENCE_RATIO * (1.0 - self._zone_model_share)  # errors of the zone model persist less
        self._correction = ErrorCorrection.fitted(self._errors[-SKILL_HOURS:], usual_ratio)
        self._record(history, max(self._end, end - RECORD_HOURS), end)
        self._correction = ErrorCorrection.fitted(self._errors[-SKILL_HOURS:], usual_ratio)
        if self._zone_model is not None:
            self._zone_model.update(history, end)
        self._end = end

    def predict(self, history: FilledHistory, origins: Origins) -> Array:
        """Return forecasts of 72 hours for each origin, in the unit of the history."""
        early = origins < WEEK_HOURS
        result = np.empty((len(origins), NUM_TARGET_HOURS))
        for k in np.flatnonzero(early):
            result[k] = _from_few_days(history.values[: origins[k]])
        late = origins[~early]
        if len(late):
            predicted, last_errors = self._uncorrected(history, late)
            predicted += self._correction.expected(last_errors, NUM_TARGET_HOURS)
            result[~early] = np.maximum(predicted, self._floor)
        return result

    def _uncorrected(self, history: FilledHistory, origins: Origins) -> tuple[Array, Array]:
        """Return uncorrected forecasts, and the errors of those issued an hour before; origins are >= 168."""
        needed = np.union1d(origins, origins[origins > WEEK_HOURS] - 1)
        predicted = self._prior.predict(history, needed)
        if self._zone_model is not None and self._zone_model.is_fitted and self._zone_model_share > 0:
            predicted += self._zone_model_share * (self._zone_model.predict(history, needed) - predicted)
        errors = np.full(len(origins), np.nan)
        before = origins - 1
        has_error = (before >= WEEK_HOURS) & ~history.is_filled[before]
        before_predicted = predicted[np.searchsorted(needed, before[has_error]), 0]
        errors[has_error] = history.values[before[has_error]] - before_predicted
        return predicted[np.searchsorted(needed, origins)], errors

    def skill(self, history: FilledHistory, end: int) -> ForecastSkill | None:
        """Return the skill of the recorded forecasts that have come due; None while they are too few."""
        due = (self._recorded_origins <= end - 24) & (self._recorded_origins >= end - SKILL_HOURS)
        origins, predicted = self._recorded_origins[due], self._recorded[due]
        if len(origins) < LEAST_ORIGINS:
            return None
        return skill_against_naive(history.values, origins, predicted)

    def bounds(self, history: FilledHistory, origin: int, predicted: Array) -> tuple[Array, Array]:
        """Return the bounds of the 95 % interval of one forecast, from the errors of recorded ones."""
        return prediction_interval(
            history.values,
            origin,
            predicted,
            recorded_origins=self._recorded_origins,
            recorded=self._recorded,
        )

    def _share(self, end: int) -> float:
        grown = (end - ZONE_MODEL_FROM_HOURS) / (ZONE_MODEL_FULL_HOURS - ZONE_MODEL_FROM_HOURS)
        return ZONE_MODEL_SHARE * min(1.0, max(0.0, grown))

    def _record(self, history: FilledHistory, begin: int, end: int) -> None:
        origins = np.arange(max(begin, WEEK_HOURS), end)
        if not len(origins):
            return
        kept = self._recorded_origins >= end - RECORD_HOURS
        predicted, last_errors = self._uncorrected(history, origins)
        errors = np.where(history.is_filled[origins], np.nan, history.values[origins] - predicted[:, 0])
        predicted = np.maximum(predicted + self._correction.expected(last_errors, NUM_TARGET_HOURS), self._floor)
        self._recorded_origins = np.concatenate([self._recorded_origins[kept], origins])
        self._recorded = np.concatenate([self._recorded[kept], predicted])
        self._errors = np.concatenate([self._errors[kept], errors])


class Forecasts:
    """The entry point `forecast`: one forecaster per zone, kept between calls and refitted once a day."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[datetime, int, int, ZoneForecaster]] = {}

    def __call__(self, history: HourlySeries, *, num_hours: int = 24) -> CarbonForecast:
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
        kept = self._kept.get(zone)
        if kept is not None:
            first_at, fitted_at, refitted_at, forecaster = kept
            if first_at == known.first_hour_at and refitted_at <= end and end - fitted_at < _FULL_REFIT_HOURS:
                if end - refitted_at >= 24:
                    forecaster.refit(known, end)
                    self._kept[zone] = (first_at, fitted_at, end, forecaster)
                return forecaster
        forecaster = ZoneForecaster()
        forecaster.refit(known, end)
        self._kept[zone] = (known.first_hour_at, end, end, forecaster)
        return forecaster


forecast = Forecasts()


def naive_forecasts(values: Array, origins: Origins, num_hours: int = 24) -> dict[str, Array]:
    """Return naive forecasts by name; origins are >= 168."""
    hours = origins[:, None] + np.arange(num_hours)
    return {
        "persistence": np.repeat(values[origins - 1][:, None], num_hours, axis=1),
        "yesterday": values[hours - 24 * (1 + np.arange(num_hours) // 24)],
        "last-week": values[hours - WEEK_HOURS],
        "7-day-mean": same_hour_means(values, origins, num_hours),
    }


def skill_against_naive(values: Array, origins: Origins, predicted: Array) -> ForecastSkill:
    """Return the skill of forecasts against the best naive one, selected in hindsight for each horizon."""
    truth = targets(values, origins, 24)
    errors_by_hour = np.abs(predicted[:, :24] - truth).mean(axis=0)
    naive = [np.abs(table - truth).mean(axis=0) for table in naive_forecasts(values, origins).values()]
    best_mean = min(float(errors.mean()) for errors in naive)

    def ratio(error: float, naive_error: float) -> float:
        return 1.0 - error / naive_error if naive_error > 0 else 0.0

    return ForecastSkill(
        skill_1h_ratio=ratio(float(errors_by_hour[0]), min(float(errors[0]) for errors in naive)),
        skill_6h_ratio=ratio(float(errors_by_hour[5]), min(float(errors[5]) for errors in naive)),
        skill_24h_mean_ratio=ratio(float(errors_by_hour.mean()), best_mean),
        num_origins=len(origins),
    )


def _from_few_days(known: NDArray[np.float64]) -> Array:
    """Return the mean of the same hour over the known days; on the first day, the last value."""
    if len(known) < 24:
        return np.full(NUM_TARGET_HOURS, float(known[-1]) if len(known) else 0.0)
    whole_days = known[len(known) % 24 :].reshape(-1, 24).mean(axis=0)
    return np.tile(whole_days, NUM_TARGET_HOURS // 24)


def _model_name(num_hours: int) -> str:
    if num_hours < 24:
        return "persistence"
    if num_hours < WEEK_HOURS:
        return "same-hour-mean"
    return "pooled-prior" if num_hours < ZONE_MODEL_FROM_HOURS else "pooled-prior+zone-model"
