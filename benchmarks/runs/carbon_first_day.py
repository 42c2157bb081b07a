"""Compares forecasts of a first day, from past hours fetched once, with those of a forecaster that has run for years.

    python benchmarks/runs/carbon_first_day.py [TRACES_FOLDER] [--zones GB,DE] [--every-days 20] [--json]

For every 20th day of 2024 a new forecaster is fitted to the past that a provider may offer, and forecasts each hour of
that day. The warm forecaster has been fitted to all data since 2021, and to each day of 2024 once it was over. Both are
judged on the same hours, by the skill against the best naive forecast and by the hours inside the 95 % interval issued
at the beginning of the day. Intervals of the mean difference are from resampled days. TRACES_FOLDER as in carbon.py.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import cast

import numpy as np
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from carbon import SHARED, TEST_FROM_AT, zones_in

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd_carbon.fetched_file import KEPT_HISTORY
from gpuenergyd_carbon.policy.forecast import ZoneForecaster, naive_forecasts
from gpuenergyd_carbon.policy.history import Array, FilledHistory, Origins, filled_history, targets
from gpuenergyd_carbon.policy.pooled_prior import PooledPrior, shipped_prior

FETCHED_DAYS = (KEPT_HISTORY.days, 35, 8)
"""The first is what is asked for; providers may have less."""
NUM_EVALUATED_HOURS = 24
NUM_RESAMPLES = 1000
MAX_LOSS_RATIO = 0.02
"""Target: in no zone, and at no horizon, does a first day lose more skill."""
HORIZONS = ("skill_1h_ratio", "skill_6h_ratio", "skill_24h_mean_ratio")


Differences = dict[str, tuple[float, float, float]]
"""By horizon: the skill on first days less the warm one, and the 95 % interval over days."""


class RememberingPrior:
    """The shipped prior, asked once for each hour of a zone: its forecast depends on the week before alone."""

    def __init__(self) -> None:
        self._rows: dict[datetime, Array] = {}
        self.usual_margins = shipped_prior().usual_margins

    def predict(self, history: FilledHistory, origins: Origins) -> Array:
        """Return 72 hours for each origin, as PooledPrior does."""
        instants = [history.first_hour_at + int(origin) * HOUR for origin in origins]
        missing = [k for k, at in enumerate(instants) if at not in self._rows]
        if missing:
            rows = shipped_prior().predict(history, origins[missing])
            self._rows |= {instants[k]: row for k, row in zip(missing, rows, strict=True)}
        return np.stack([self._rows[at] for at in instants])


def first_days(history: FilledHistory, first: int, every_days: int) -> Origins:
    """Return the hours at which each evaluated day begins; its forecasts' last hours are known."""
    return np.arange(first, len(history.values) - 2 * NUM_EVALUATED_HOURS + 1, 24 * every_days)


@dataclass(slots=True)
class IssuedDays:
    """What one kind of forecaster issued on the evaluated days."""

    rows: list[Array] = field(default_factory=list)
    num_inside: int = 0
    """Hours inside the interval issued at the beginning of their day."""

    def add(self, forecaster: ZoneForecaster, seen: FilledHistory, origin: int) -> None:
        """Forecast each hour of a day; `seen` ends with that day."""
        rows = forecaster.predict(seen, np.arange(origin, origin + NUM_EVALUATED_HOURS))
        low, high = forecaster.bounds(seen, origin, rows[0, :NUM_EVALUATED_HOURS])
        truth = seen.values[origin : origin + NUM_EVALUATED_HOURS]
        self.rows.append(rows)
        self.num_inside += int(((low <= truth) & (truth <= high)).sum())


def issue_warm(history: FilledHistory, first: int, days: Origins, prior: PooledPrior) -> IssuedDays:
    """Forecast the days by a forecaster that is refitted every day, as in issue_forecasts."""
    issued, forecaster = IssuedDays(), ZoneForecaster(prior=prior)
    for day in range(first, int(days[-1]) + 1, 24):
        seen = history.part(0, day + NUM_EVALUATED_HOURS)
        forecaster.refit(seen, day)
        if day in days:
            issued.add(forecaster, seen, day)
    return issued


def issue_first_days(history: FilledHistory, days: Origins, fetched_days: int, prior: PooledPrior) -> IssuedDays:
    """Forecast each day by a forecaster that is new on it and knows `fetched_days` before."""
    issued = IssuedDays()
    for day in days:
        begin = max(0, int(day) - 24 * fetched_days)
        seen, origin = history.part(begin, int(day) + NUM_EVALUATED_HOURS), int(day) - begin
        forecaster = ZoneForecaster(prior=prior)
        forecaster.refit(seen, origin)
        issued.add(forecaster, seen, origin)
    return issued


def daily_errors(history: FilledHistory, days: Origins, issued: Sequence[Array]) -> Array:
    """Return mean absolute errors of 24 hours ahead by day: of the forecasts, then of each naive one."""
    found = []
    for day, rows in zip(days, issued, strict=True):
        origins = np.arange(day, day + NUM_EVALUATED_HOURS)
        truth = targets(history.values, origins, 24)
        tables = [rows[:, :24], *naive_forecasts(history.values, origins).values()]
        found.append([np.abs(table - truth).mean(axis=0) for table in tables])
    return np.array(found)


def skills(errors: Array) -> dict[str, float]:
    """Return the skill over days, as skill_against_naive does."""
    means = errors.mean(axis=0)
    hours = {"skill_1h_ratio": means[:, 0], "skill_6h_ratio": means[:, 5], "skill_24h_mean_ratio": means.mean(axis=1)}
    return {name: float(1.0 - of[0] / of[1:].min()) for name, of in hours.items()}


def compare(trace: HourlySeries, every_days: int) -> tuple[dict[str, object], dict[str, Array]]:
    """Return the figures of a zone, and daily errors of the warm forecaster and of the new one that fetched most."""
    history = filled_history(trace)
    assert history is not None
    first = trace.index_of(TEST_FROM_AT)
    days = first_days(history, first, every_days)
    prior = cast("PooledPrior", RememberingPrior())
    issued = {"warm": issue_warm(history, first, days, prior)}
    issued |= {str(fetched): issue_first_days(history, days, fetched, prior) for fetched in FETCHED_DAYS}
    errors = {name: daily_errors(history, days, of.rows) for name, of in issued.items()}
    found = {
        "zone": trace.zone,
        "num_days": len(days),
        "skill": {name: skills(of) for name, of in errors.items()},
        "interval_coverage_ratio": {
            name: of.num_inside / (NUM_EVALUATED_HOURS * len(days)) for name, of in issued.items()
        },
    }
    return found, {name: errors[name] for name in ("warm", str(FETCHED_DAYS[0]))}


def mean_differences(zones: Sequence[dict[str, Array]]) -> Differences:
    """Return the skill on first days less the warm one, mean of the zones."""
    generator = np.random.default_rng(0)

    def differences(picked: Sequence[Origins]) -> Array:
        rows = []
        for zone, days in zip(zones, picked, strict=True):
            warm, new = (skills(of[days]) for of in zone.values())
            rows.append([new[name] - warm[name] for name in HORIZONS])
        return np.asarray(np.mean(rows, axis=0), dtype=np.float64)

    numbers = [len(zone["warm"]) for zone in zones]
    mean = differences([np.arange(number) for number in numbers])
    drawn = [differences([generator.integers(0, num, num) for num in numbers]) for _ in range(NUM_RESAMPLES)]
    lows, highs = np.quantile(np.array(drawn), (0.025, 0.975), axis=0)
    return {name: (float(mean[k]), float(lows[k]), float(highs[k])) for k, name in enumerate(HORIZONS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="?", default=SHARED / "carbon")
    parser.add_argument("--zones", help="comma-separated zones; all by default")
    parser.add_argument("--every-days", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.every_days < 1:
        parser.error(f"--every-days {options.every_days} must be at least 1")
    traces = zones_in(options.traces, options.zones.split(",") if options.zones else None)
    if not traces:
        print(f"no traces in {options.traces}", file=sys.stderr)
        return 1
    with threadpool_limits(1):
        compared = [compare(trace, options.every_days) for trace in traces]
    zones = [zone | {"difference": mean_differences([errors])} for zone, errors in compared]
    mean = mean_differences([errors for _, errors in compared])
    if options.json:
        found = {"every_days": options.every_days, "fetched_days": FETCHED_DAYS, "zones": zones, "difference": mean}
        print(json.dumps(found))
    else:
        print_zones(zones, mean)
    worst = min(points for zone in zones for points, *_ in cast("Differences", zone["difference"]).values())
    return 0 if worst >= -MAX_LOSS_RATIO else 1


def print_zones(zones: Sequence[dict[str, object]], mean: Differences) -> None:
    for zone in zones:
        print(f"{zone['zone']}, {zone['num_days']} first days")
        for name, skill in cast("dict[str, dict[str, float]]", zone["skill"]).items():
            print(f"  {name:>5} " + " ".join(f"{100 * skill[each]:6.1f}" for each in HORIZONS))
        print_differences(cast("Differences", zone["difference"]))
    print("mean of the zones")
    print_differences(mean)


def print_differences(differences: Differences) -> None:
    for name, (mean, low, high) in differences.items():
        print(f"  {name}: {100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points")


if __name__ == "__main__":
    sys.exit(main())
