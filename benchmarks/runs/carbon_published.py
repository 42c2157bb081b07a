"""Scores forecasts as published forecasters do: MAPE and coverage of 95 % intervals, on zones and months of CarbonCast.

    python benchmarks/runs/carbon_published.py [TRACES_FOLDER] [--json]

CarbonCast's protocol, which EnsembleCI and CarbonX repeat: life-cycle intensities from the generation mix, known until
June 2021, judged from July to December 2021, a forecast each day at 00 UTC for the days after it. The shipped prior has
seen these months, so a prior is fitted here to the traces before July 2021 alone. TRACES_FOLDER holds
`ZONE_carboncast_YEAR.csv`; zones that are missing there are not judged.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import numpy as np
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from carbon import SHARED

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd_carbon.lab.files import read_traces
from gpuenergyd_carbon.lab.replay import issue_forecasts
from gpuenergyd_carbon.policy.history import filled_history
from gpuenergyd_carbon.policy.pooled_prior import PooledPrior, read_prior

FROM_AT = datetime(2021, 7, 1, tzinfo=UTC)
UNTIL_AT = datetime(2022, 1, 1, tzinfo=UTC)
DAYS = 3
COVERAGE_RATIOS = (0.93, 0.97)
"""Target: the share of hours inside the 95 % intervals, in every zone."""


def fit_prior(traces: Path) -> PooledPrior:
    """Fit a prior to what was known before the first forecast."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prior.npz")
        program = Path(__file__).with_name("carbon_prior.py")
        arguments = [str(traces), "--out", str(path), "--until", f"{FROM_AT:%Y-%m-%d}"]
        subprocess.run([sys.executable, str(program), *arguments], check=True, stdout=subprocess.DEVNULL)
        return read_prior(path)


def score(trace: HourlySeries, prior: PooledPrior) -> dict[str, object]:
    """Return MAPE by day ahead and the coverage of the intervals of the first day."""
    whole = filled_history(trace)
    assert whole is not None
    history = whole.part(0, (UNTIL_AT - whole.first_hour_at) // HOUR)
    first = (FROM_AT - history.first_hour_at) // HOUR
    issued = issue_forecasts(history, first, prior=prior)
    mape = []
    for day in range(DAYS):
        origins = np.arange(first, len(history.values) - 24 * (day + 1) + 1, 24)
        truth = history.values[origins[:, None] + np.arange(24 * day, 24 * (day + 1))]
        forecast = issued.rows[origins - first][:, 24 * day : 24 * (day + 1)]
        mape.append(float(np.mean(np.abs(forecast - truth) / truth)))
    yesterday = history.values[np.arange(first, len(history.values)) - 24]
    naive = np.abs(yesterday - history.values[first:]) / history.values[first:]
    return {
        "zone": trace.zone,
        "known_months": round(first / 730.5),
        "mape_ratio_by_day": mape,
        "mape_yesterday_ratio": float(naive.mean()),
        "interval_coverage_ratio": issued.interval_coverage_ratio(history.values),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="?", default=SHARED / "carbon")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    paths = sorted(options.traces.glob("*_carboncast_*.csv"))
    traces = [trace for trace in read_traces(paths) if trace.index_of(UNTIL_AT - HOUR) < len(trace.values)]
    if not traces:
        print(f"no traces ZONE_carboncast_YEAR.csv in {options.traces}", file=sys.stderr)
        return 1
    prior = fit_prior(options.traces)
    with threadpool_limits(1):
        zones = [score(trace, prior) for trace in traces]
    if options.json:
        print(json.dumps({"zones": zones}))
    else:
        for zone in zones:
            print(zone)
    least, most = COVERAGE_RATIOS
    return 0 if all(least <= cast("float", zone["interval_coverage_ratio"]) <= most for zone in zones) else 1


if __name__ == "__main__":
    sys.exit(main())
