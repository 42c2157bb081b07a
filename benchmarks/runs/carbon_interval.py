"""Measures the coverage of forecast intervals by zone and by single month, beside an interval that does not adapt.

    python benchmarks/runs/carbon_interval.py [TRACES_FOLDER] [--json]

Judged on months that chose nothing of the interval (its constants are from 2022 and 2023 of Electricity Maps): 2024 of
Electricity Maps' zones with the shipped prior, and July 2021 to December 2022 of CarbonCast's with a prior fitted to
earlier months. A forecast is issued each day at 00 UTC; its first 24 hours count. The reference is the interval before:
quantiles of three months of errors in units of the last week's standard deviation, 5 % wider. A calibrated interval in
hindsight, the reference times the one factor with which it contains 95 % of a zone's hours, shows what single months
scatter by: as they follow each other, and with the days drawn in random order, so that only days stay together.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from carbon import SHARED, TEST_FROM_AT, zones_in
from carbon_published import COVERAGE_RATIOS, fit_prior
from carbon_published import FROM_AT as CARBONCAST_FROM_AT

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd_carbon.lab.files import read_traces
from gpuenergyd_carbon.lab.replay import IssuedTable, issue_forecasts
from gpuenergyd_carbon.policy.forecast import RECORD_HOURS
from gpuenergyd_carbon.policy.history import WEEK_HOURS, Array, FilledHistory, Origins, filled_history
from gpuenergyd_carbon.policy.pooled_prior import PooledPrior

TAIL_RATIOS = (0.025, 0.975)
LEAST_MONTH_DAYS = 27
NUM_SHUFFLES = 200
MOST_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Interval:
    """One kind of interval on the judged days of a zone: bounds and truth, one row of 24 hours a day."""

    low: Array
    high: Array
    truth: Array

    @property
    def is_inside(self) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (self.low <= self.truth) & (self.truth <= self.high)
        return inside

    @property
    def width(self) -> float:
        return float((self.high - self.low).mean())

    @property
    def score(self) -> float:
        """Mean interval score: the width, and 40 times the distance of hours outside; lower is better."""
        outside = np.maximum(self.low - self.truth, 0.0) + np.maximum(self.truth - self.high, 0.0)
        return self.width + 2.0 / (1.0 - 0.95) * float(outside.mean())


def evaluated(history: FilledHistory, first: int, issued: IssuedTable) -> tuple[Interval, Interval, Interval, Origins]:
    """Return the issued, the reference and the calibrated interval, and the first hours of the judged days."""
    days = np.arange(first, len(history.values) - 23, 24)
    truth = history.values[days[:, None] + np.arange(24)]
    place = (days - issued.first_origin) // 24
    adapted = Interval(issued.lows[place, :24], issued.highs[place, :24], truth)
    low, high = reference_margins(history.values, days, issued)
    predicted = issued.rows[days - issued.first_origin, :24]

    def scaled(factor: float) -> Interval:
        return Interval(np.maximum(predicted + factor * low, 0.0), predicted + factor * high, truth)

    factors = np.arange(0.25, MOST_FACTOR, 0.005)
    calibrated = next((k for k in map(scaled, factors) if k.is_inside.mean() >= 0.95), scaled(MOST_FACTOR))
    return adapted, scaled(1.0), calibrated, days


def reference_margins(values: Array, days: Origins, issued: IssuedTable) -> tuple[Array, Array]:
    """Return the margins of the interval that does not adapt, from three months of forecasts before each day."""
    origins = issued.first_origin + np.arange(len(issued.rows) - 24)
    errors = values[origins[:, None] + np.arange(24)] - issued.rows[: len(origins), :24]
    spreads = np.lib.stride_tricks.sliding_window_view(values, WEEK_HOURS)[origins - WEEK_HOURS].std(axis=1)
    relative = errors / spreads[:, None]
    lows, highs = [], []
    for day in days:
        end = day - issued.first_origin
        low, high = np.quantile(relative[max(0, end - RECORD_HOURS) : end - 23], TAIL_RATIOS, axis=0)
        spread = float(values[day - WEEK_HOURS : day].std())
        lows.append(1.05 * np.minimum(low, 0.0) * spread)
        highs.append(1.05 * np.maximum(high, 0.0) * spread)
    return np.array(lows), np.array(highs)


def month_ratios(interval: Interval, months: Sequence[str], *, order: Origins | None = None) -> dict[str, float]:
    """Return the coverage of each whole month; of days in another order, if one is given."""
    of_day = interval.is_inside.mean(axis=1)
    if order is not None:
        of_day = of_day[order]
    names = np.array(months)
    whole = [month for month in sorted(set(months)) if (names == month).sum() >= LEAST_MONTH_DAYS]
    return {month: float(of_day[names == month].mean()) for month in whole}


def later_days(history: FilledHistory, days: Origins, issued: IssuedTable) -> list[float]:
    """Return the coverage of the second and the third day ahead."""
    found = []
    for day in (1, 2):
        known = days[days + 24 * (day + 1) <= len(history.values)]
        hours = np.arange(24 * day, 24 * (day + 1))
        truth, place = history.values[known[:, None] + hours], (known - issued.first_origin) // 24
        found.append(float(((issued.lows[place][:, hours] <= truth) & (truth <= issued.highs[place][:, hours])).mean()))
    return found


def measure(trace: HourlySeries, source: str, from_at: datetime, prior: PooledPrior | None) -> dict[str, object]:
    """Return the figures of one zone from an instant to the end of its trace."""
    history = filled_history(trace)
    assert history is not None
    first = (from_at - history.first_hour_at) // HOUR
    issued = issue_forecasts(history, first - RECORD_HOURS, prior=prior)
    adapted, reference, calibrated, days = evaluated(history, first, issued)
    months = [f"{history.first_hour_at + timedelta(hours=int(day)):%Y-%m}" for day in days]
    generator = np.random.default_rng(0)
    shuffled = [
        list(month_ratios(calibrated, months, order=generator.permutation(len(days))).values())
        for _ in range(NUM_SHUFFLES)
    ]
    kinds = {"adapted": adapted, "reference": reference, "calibrated": calibrated}
    return {
        "zone": trace.zone,
        "source": source,
        "from": f"{from_at:%Y-%m}",
        "num_days": len(days),
        "coverage_ratio": {name: float(each.is_inside.mean()) for name, each in kinds.items()},
        "later_days_ratio": later_days(history, days, issued),
        "width_g_per_kwh": {name: each.width for name, each in kinds.items()},
        "interval_score_g_per_kwh": {name: each.score for name, each in kinds.items()},
        "months": {name: month_ratios(each, months) for name, each in kinds.items()},
        "shuffled_months": shuffled,
    }


def summary(ratios: Iterable[float]) -> dict[str, float]:
    """Return how many months are inside the target, their standard deviation, and the extremes."""
    found = np.array(list(ratios))
    least, most = COVERAGE_RATIOS
    return {
        "num_months": len(found),
        "num_inside": int(((found >= least) & (found <= most)).sum()),
        "deviation_ratio": float(found.std()),
        "least_ratio": float(found.min()),
        "most_ratio": float(found.max()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="?", default=SHARED / "carbon")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    newer = zones_in(options.traces, None)
    older = list(read_traces(sorted(options.traces.glob("*_carboncast_*.csv"))))
    if not newer or not older:
        print(f"no traces in {options.traces}", file=sys.stderr)
        return 1
    prior = fit_prior(options.traces)
    with threadpool_limits(1):
        zones = [measure(trace, "Electricity Maps", TEST_FROM_AT, None) for trace in newer]
        zones += [measure(trace, "CarbonCast", CARBONCAST_FROM_AT, prior) for trace in older]
    of_zone = [cast("dict[str, dict[str, float]]", zone["months"]) for zone in zones]
    months = {name: summary(r for found in of_zone for r in found[name].values()) for name in of_zone[0]}
    shuffles = [cast("list[list[float]]", zone.pop("shuffled_months")) for zone in zones]
    drawn = [summary(r for zone in shuffles for r in zone[k]) for k in range(NUM_SHUFFLES)]
    shuffled = {name: float(np.mean([each[name] for each in drawn])) for name in drawn[0]}
    found = {"zones": zones, "months": months, "shuffled_months": shuffled}
    if options.json:
        print(json.dumps(found))
    else:
        for zone in zones:
            print(zone)
        print(months, shuffled)
    least, most = COVERAGE_RATIOS
    covered = [cast("dict[str, float]", zone["coverage_ratio"])["adapted"] for zone in zones]
    return 0 if all(least <= ratio <= most for ratio in covered) else 1


if __name__ == "__main__":
    sys.exit(main())
