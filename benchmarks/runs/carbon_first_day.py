"""Compares forecasts of a first day, from past hours fetched once, with those of a forecaster that has run for years.

    python benchmarks/runs/carbon_first_day.py [TRACES_FOLDER] [--zones GB,DE] [--every-days 20] [--json]

For every 20th day of 2024 a new forecaster is fitted to the past that a provider may offer, and forecasts each hour of
that day. The warm forecaster has been fitted to all data since 2021, and to each day of 2024 once it was over. Both are
judged on the same hours, by the skill against the best naive forecast. TRACES_FOLDER as in carbon.py.
"""

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import cast

import numpy as np
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from carbon import SHARED, TEST_FROM_AT, zones_in

from gpuenergyd.carbon.fetched_file import KEPT_HISTORY
from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd_policies.carbon.features import Array, FilledHistory, Origins, filled_history
from gpuenergyd_policies.carbon.forecast import ZoneForecaster, skill_against_naive
from gpuenergyd_policies.carbon.pooled_prior import PooledPrior, shipped_prior
from gpuenergyd_policies.carbon.replay import issue_forecasts

FETCHED_DAYS = (KEPT_HISTORY.days, 365, 35, 8)
"""The first is what is asked for; providers may have less."""
NUM_EVALUATED_HOURS = 24
HORIZONS = ("skill_1h_ratio", "skill_6h_ratio", "skill_24h_mean_ratio")


class RememberingPrior:
    """The shipped prior, asked once for each hour of a zone: its forecast depends on the week before alone."""

    def __init__(self) -> None:
        self._rows: dict[datetime, Array] = {}

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


def first_day_forecasts(history: FilledHistory, day: int, fetched_days: int, prior: PooledPrior) -> Array:
    """Return the forecasts of each hour of a day, by a forecaster that is new on it and knows `fetched_days` before."""
    begin = max(0, day - 24 * fetched_days)
    seen = FilledHistory(
        history.first_hour_at + begin * HOUR, history.values[begin : day + 24], history.is_filled[begin : day + 24]
    )
    forecaster = ZoneForecaster(prior=prior)
    forecaster.refit(seen, day - begin)
    return forecaster.predict(seen, np.arange(day - begin, day - begin + NUM_EVALUATED_HOURS))


def compare(trace: HourlySeries, every_days: int) -> dict[str, object]:
    """Return the skills of the warm forecaster and of the new ones, in a zone."""
    history = filled_history(trace)
    assert history is not None
    first = trace.index_of(TEST_FROM_AT)
    days = first_days(history, first, every_days)
    origins = np.concatenate([np.arange(day, day + NUM_EVALUATED_HOURS) for day in days])
    prior = cast("PooledPrior", RememberingPrior())
    warm = issue_forecasts(history, first, prior=prior).rows[origins - first]
    tables = {"warm": warm} | {
        str(fetched): np.concatenate([first_day_forecasts(history, int(day), fetched, prior) for day in days])
        for fetched in FETCHED_DAYS
    }
    skills = {name: skill_against_naive(history.values, origins, rows) for name, rows in tables.items()}
    return {
        "zone": trace.zone,
        "num_days": len(days),
        "skill": {name: {each: getattr(skill, each) for each in HORIZONS} for name, skill in skills.items()},
    }


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
        zones = [compare(trace, options.every_days) for trace in traces]
    if options.json:
        print(json.dumps({"every_days": options.every_days, "fetched_days": FETCHED_DAYS, "zones": zones}))
        return 0
    for zone in zones:
        print(f"{zone['zone']}, {zone['num_days']} first days")
        skills = zone["skill"]
        assert isinstance(skills, dict)
        for name, skill in skills.items():
            print(f"  {name:>5} " + " ".join(f"{100 * skill[each]:6.1f}" for each in HORIZONS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
