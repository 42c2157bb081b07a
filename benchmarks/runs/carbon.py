"""Measures the skill of forecasts against naive ones, per zone, and the captured share of the timing gain.

    python benchmarks/runs/carbon.py [TRACES_FOLDER] [--zones GB,DE] [--frontier FILE | --instances FILE]
                                      [--cold] [--json]

TRACES_FOLDER holds `ZONE_electricitymaps24_YEAR.csv`, hourly. Models are fitted to data up to 2023 before the first
forecast of 2024, and to each day of 2024 after it. With --cold they use the last 8 days only. The shipped pooled prior
was fitted on these zones up to 2023, so figures for an unknown zone need `carbon_prior.py --leave-out` and --prior.
"""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
from scipy.interpolate import PchipInterpolator

from gpuenergyd.core.carbon.intensity import HourlySeries
from gpuenergyd_carbon.lab.files import read_frontier, read_traces
from gpuenergyd_carbon.lab.replay import issue_forecasts, replay
from gpuenergyd_carbon.lab.results import ReplayRequest, ZoneReplay
from gpuenergyd_carbon.policy.forecast import skill_against_naive
from gpuenergyd_carbon.policy.history import filled_history
from gpuenergyd_carbon.policy.pooled_prior import read_prior

TEST_FROM_AT = datetime(2024, 1, 1, tzinfo=UTC)
SOURCE = "electricitymaps24"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
INSTANCE = "s8m32_1f1b_a100"
FLAT_YEARS = {("KR", "2021")}
A40_LIMITS_W = (300, 275, 250, 225, 200, 175, 150, 125, 100)
A40_TIMES_S = (24.0116, 24.0622, 24.1632, 24.5480, 25.1853, 27.9389, 36.8502, 56.4756, 69.3627)
A40_ENERGIES_J = (6224.89, 6122.30, 5915.57, 5499.97, 5017.51, 4867.48, 5512.15, 7071.86, 8033.57)
"""ResNet-50 on an A40 under power limits, as measured by the Zeus project (tests/profile_data, Apache-2.0)."""


def zones_in(folder: Path, wanted: list[str] | None) -> list[HourlySeries]:
    """Return the traces of a folder, joined over the years."""
    paths = [
        path
        for path in sorted(folder.glob(f"*_{SOURCE}_*.csv"))
        if (path.stem.split("_")[0], path.stem.split("_")[2]) not in FLAT_YEARS
        and (wanted is None or path.stem.split("_")[0] in wanted)
    ]
    return list(read_traces(paths))


def pipeline_frontier(path: Path) -> tuple[tuple[float, float], ...]:
    """Return the exact frontier of a synthetic pipeline, up to its point of least energy."""
    bounds = json.loads(path.read_text(encoding="utf-8"))[INSTANCE]
    return tuple(
        (point["T_s"], point["E_fractional_J"])
        for point in bounds["points"]
        if point["T_s"] <= bounds["T_min_energy_s"] * (1 + 1e-4)
    )


def a40_curve() -> tuple[tuple[float, float], ...]:
    """Return the power-limit curve in steps of 5 W."""
    limits = np.arange(A40_LIMITS_W[-1], A40_LIMITS_W[0] + 1, 5.0)
    times, energies = (
        PchipInterpolator(A40_LIMITS_W[::-1], column[::-1])(limits) for column in (A40_TIMES_S, A40_ENERGIES_J)
    )
    return tuple(zip(times.tolist(), energies.tolist(), strict=True))


def print_skill(zones: list[ZoneReplay]) -> None:
    print(f"{'zone':8} {'1 h':>6} {'6 h':>6} {'24 h mean':>10} {'refit s':>8} {'forecast ms':>12}")
    rows = []
    for zone in zones:
        skill = zone.skill
        row = (100 * skill.skill_1h_ratio, 100 * skill.skill_6h_ratio, 100 * skill.skill_24h_mean_ratio)
        rows.append(row)
        cost = f"{zone.refit_s_max:8.2f} {1e3 * zone.forecast_s_max:12.1f}"
        print(f"{zone.zone:8} {row[0]:6.1f} {row[1]:6.1f} {row[2]:10.1f} {cost}")
    for name, of in (("median", median), ("worst", min)):
        figures = [of(column) for column in zip(*rows, strict=True)]
        print(f"{name:8} {figures[0]:6.1f} {figures[1]:6.1f} {figures[2]:10.1f}")


def print_captured(title: str, zones: list[ZoneReplay]) -> None:
    names = [method.name for method in zones[0].methods]
    print(f"\n{title}: captured share of the perfect-forecast gain in %, worst job against constant in points")
    print(
        f"{'zone':8} {'constant':>9} {'gain':>6} " + " ".join(f"{name:>17}" for name in names) + f" {'time used':>10}"
    )
    for zone in zones:
        cells = " ".join(
            f"{f'{100 * m.captured_ratio:8.1f} ({100 * m.worst_job_ratio:+5.2f})':>17}" for m in zone.methods
        )
        gain = f"{100 * zone.constant_saving_ratio:9.2f} {100 * zone.timing_gain_ratio:6.2f}"
        print(f"{zone.zone:8} {gain} {cells} {zone.time_used_ratio_max:10.7f}")
    for name, of in (("median", median), ("worst", min)):
        columns = zip(*[[100 * method.captured_ratio for method in zone.methods] for zone in zones], strict=True)
        print(f"{name:8} {'':16} " + " ".join(f"{of(column):17.1f}" for column in columns))


def skill_figures(zone: ZoneReplay) -> dict[str, float | str | None]:
    skill = zone.skill
    return {
        "zone": zone.zone,
        "skill_1h_ratio": skill.skill_1h_ratio,
        "skill_6h_ratio": skill.skill_6h_ratio,
        "skill_24h_mean_ratio": skill.skill_24h_mean_ratio,
        "interval_coverage_ratio": zone.interval_coverage_ratio,
        "refit_s_max": zone.refit_s_max,
        "forecast_s_max": zone.forecast_s_max,
    }


def captured_figures(zone: ZoneReplay) -> dict[str, object]:
    return {
        "zone": zone.zone,
        "constant_saving_ratio": zone.constant_saving_ratio,
        "timing_gain_ratio": zone.timing_gain_ratio,
        "time_used_ratio_max": zone.time_used_ratio_max,
        "captured_ratio": {method.name: method.captured_ratio for method in zone.methods},
        "worst_job_ratio": {method.name: method.worst_job_ratio for method in zone.methods},
    }


def print_cold(traces: list[HourlySeries], priors: Path | None) -> None:
    print(f"{'zone':8} {'1 h':>6} {'6 h':>6} {'24 h mean':>10}   from 8 days of history alone")
    rows = []
    for trace in traces:
        history = filled_history(trace)
        assert history is not None
        first = trace.index_of(TEST_FROM_AT)
        prior = read_prior(priors / f"without-{trace.zone}.npz") if priors is not None else None
        issued = issue_forecasts(history, first, prior=prior, history_days=8)
        origins = np.arange(first, len(history.values) - 23)
        skill = skill_against_naive(history.values, origins, issued.rows[: len(origins)])
        rows.append((100 * skill.skill_1h_ratio, 100 * skill.skill_6h_ratio, 100 * skill.skill_24h_mean_ratio))
        print(f"{trace.zone:8} {rows[-1][0]:6.1f} {rows[-1][1]:6.1f} {rows[-1][2]:10.1f}", flush=True)
    for name, of in (("median", median), ("worst", min)):
        figures = [of(column) for column in zip(*rows, strict=True)]
        print(f"{name:8} {figures[0]:6.1f} {figures[1]:6.1f} {figures[2]:10.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="?", default=SHARED / "carbon")
    parser.add_argument("--zones", help="comma-separated zones; all by default")
    parser.add_argument(
        "--frontier",
        type=Path,
        action="append",
        default=[],
        help="frontier CSV, in addition to an A40's curve and the pipeline's",
    )
    parser.add_argument("--instances", type=Path, default=SHARED / "instances" / "bounds.json")
    parser.add_argument("--starts", type=int, default=240)
    parser.add_argument("--cold", action="store_true", help="use only 8 days of history for each forecast")
    parser.add_argument("--priors", type=Path, help="with --cold: folder of priors without-ZONE.npz")
    parser.add_argument("--json", action="store_true", help="print JSON; not with --cold")
    options = parser.parse_args()
    traces = zones_in(options.traces, options.zones.split(",") if options.zones else None)
    if not traces:
        print(f"no traces ZONE_{SOURCE}_YEAR.csv in {options.traces}", file=sys.stderr)
        return 1
    if options.cold:
        print_cold(traces, options.priors)
        return 0
    frontiers = {"a40": a40_curve()} | {path.stem: read_frontier(path) for path in options.frontier}
    if options.instances.exists():
        frontiers[INSTANCE] = pipeline_frontier(options.instances)
    started_s = time.perf_counter()
    found: dict[str, object] = {"starts": options.starts, "captured": (captured := {})}
    for number, (name, frontier) in enumerate(frontiers.items()):
        request = ReplayRequest(tuple(traces), frontier, TEST_FROM_AT, num_starts=options.starts)
        zones = list(replay(request))
        if options.json:
            captured[name] = [captured_figures(zone) for zone in zones]
            found["skill"] = [skill_figures(zone) for zone in zones]
            continue
        if number == 0:
            print("forecast skill in %, against the best naive forecast of each zone and horizon")
            print_skill(zones)
        print_captured(name, zones)
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"\n{time.perf_counter() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
