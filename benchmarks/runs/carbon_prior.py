"""Fits the pooled prior that ships with the policies: a ridge regression on traces of many zones.

    python benchmarks/runs/carbon_prior.py TRACES_FOLDER --out FILE.npz [--leave-out ZONE] [--until 2024-01-01]

TRACES_FOLDER holds `ZONE_SOURCE_YEAR.csv` files, hourly, `timestamp_utc,carbon_intensity_g_per_kwh`. --leave-out
excludes a zone, to measure the skill of the prior for zones that it was not fitted on.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from gpuenergyd_carbon.policy.history import (
    DAY_HOURS,
    NUM_TARGET_HOURS,
    WEEK_DAYS,
    WEEK_HOURS,
    Array,
    FilledHistory,
    targets,
)
from gpuenergyd_carbon.policy.pooled_prior import prior_features

CHUNK_ROWS = 4096
NUM_HIDDEN = 1500
PENALTY_RATIO = 1e-4
"""Penalty on a coefficient, relative to its feature's sum of squares."""
MARGIN_RATIO = 0.975
"""Quantile of the margins until a zone's own errors are known: those of other zones vary."""
SKIPPED_YEARS = {("KR", "2021")}
"""A year of nearly constant values, which would bias the fit towards persistence."""


def read_histories(folder: Path, until: datetime, leave_out: str | None) -> list[FilledHistory]:
    """Return one history per zone and source, since sources differ in the quantity they report."""
    rows: dict[tuple[str, str], dict[datetime, float]] = defaultdict(dict)
    for path in sorted(folder.glob("*_*_*.csv")):
        zone, source, year = path.stem.split("_")
        if zone == leave_out or (zone, year) in SKIPPED_YEARS:
            continue
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                at = datetime.fromisoformat(row["timestamp_utc"])
                at = at if at.tzinfo else at.replace(tzinfo=UTC)
                if at < until:
                    rows[zone, source][at] = float(row["carbon_intensity_g_per_kwh"])
    histories = []
    for hours in rows.values():
        values = np.array([hours[at] for at in sorted(hours)])
        histories.append(FilledHistory(min(hours), values))
    return histories


def random_projection() -> Array:
    """Return weights of hidden features: of the last two days, the mean day and the variation, with an offset each."""
    generator = np.random.default_rng(0)
    of_hours = np.zeros((WEEK_HOURS, NUM_HIDDEN))
    of_hours[-2 * DAY_HOURS :] = generator.normal(size=(2 * DAY_HOURS, NUM_HIDDEN))
    of_hours += np.tile(generator.normal(size=(DAY_HOURS, NUM_HIDDEN)), (WEEK_DAYS, 1)) / WEEK_DAYS
    of_variation = generator.normal(size=(1, NUM_HIDDEN))
    offsets = generator.uniform(-1.0, 1.0, (1, NUM_HIDDEN))
    of_weekdays = np.repeat(of_variation + offsets * np.sqrt(3 * DAY_HOURS), WEEK_DAYS, axis=0)
    weights = np.concatenate([of_hours, of_variation, of_weekdays])
    return np.asarray(weights / np.sqrt(3 * DAY_HOURS))


def samples(history: FilledHistory, projection: Array) -> Iterator[tuple[Array, Array]]:
    """Yield features, and corrections of the naive forecast, of parts of a history."""
    for begin in range(WEEK_HOURS, len(history.values) - NUM_TARGET_HOURS + 1, CHUNK_ROWS):
        origins = np.arange(begin, min(begin + CHUNK_ROWS, len(history.values) - NUM_TARGET_HOURS + 1))
        features, naive, spread = prior_features(history, origins, projection)
        yield features, (targets(history.values, origins) - naive) / spread


def fitted(histories: list[FilledHistory], projection: Array) -> Array:
    """Return the coefficients of a weighted ridge regression; weights by size approximate absolute errors."""
    gram, cross = np.zeros(()), np.zeros(())
    for history in histories:
        for features, corrections in samples(history, projection):
            size = np.abs(corrections[:, :DAY_HOURS]).mean(axis=1, keepdims=True)
            weighted = features / (size + 0.5 * size.mean())
            gram = gram + weighted.T @ features
            cross = cross + weighted.T @ corrections
    penalties = PENALTY_RATIO * np.diag(gram) + 1e-3
    return np.asarray(np.linalg.solve(gram + np.diag(penalties), cross), dtype=np.float64)


def usual_margins(histories: list[FilledHistory], projection: Array, coefficients: Array) -> Array:
    """Return quantiles of absolute errors by hour ahead, mean of the histories, in standard deviations of a week."""
    errors = [np.concatenate([y - x @ coefficients for x, y in samples(history, projection)]) for history in histories]
    return np.asarray(np.mean([np.quantile(np.abs(each), MARGIN_RATIO, axis=0) for each in errors], axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--leave-out")
    parser.add_argument("--until", default="2024-01-01")
    options = parser.parse_args()
    until = datetime.fromisoformat(options.until).replace(tzinfo=UTC)
    histories = read_histories(options.traces, until, options.leave_out)
    projection = random_projection().astype(np.float16).astype(np.float64)
    coefficients = fitted(histories, projection)
    np.savez_compressed(
        options.out,
        projection=projection.astype(np.float16, order="F"),  # in this order it compresses well
        coefficients=coefficients.astype(np.float16),
        usual_margins=usual_margins(histories, projection, coefficients).astype(np.float32),
    )
    print(f"{options.out}: {options.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
