"""Daemon settings for a demo that follows a carbon trace, historical or synthetic, replayed faster than real time."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError

SYNTHETIC = "synthetic"
HISTORY_HOURS = 21 * 24
"""Hours of the trace before the demo that the forecaster may use, if the trace is long enough."""
LEAST_HISTORY_HOURS = 8 * 24
DEFAULT_BUDGET_RATIO = 0.1
"""Slowdown budget of the demo: large enough to cover profiling of a short job and to show in a table."""
_LEAST_ITERATIONS_PER_HOUR = 3
"""Least iterations per hour, since a plan for the next hour takes effect an iteration or two after it was made."""
_LEAST_TUNED_ITERATIONS = 40
"""Least iterations of profiling and tuning for a demo."""
_TRIAL_COST_ITERATIONS = 6.0
"""Budget for profiling: twice what the daemon requires before it permits it, since the budget has a reserve, too."""
_SYNTHETIC_ZONE = "SYNTHETIC-GB"
_FIRST_HOUR_AT = datetime(2030, 1, 1, tzinfo=UTC)
_MEAN_G_PER_KWH = 190.0


@dataclass(frozen=True, slots=True)
class DemoGrid:
    """Carbon trace of a demo; one of its hours takes `hour_s` seconds, and the budget covers `num_hours`."""

    trace: str
    hour_s: float
    num_hours: int

    def check_length(self, *, iteration_time_s: float, baseline_iterations: int, budget_ratio: float) -> None:
        """Check that a job of this length can be profiled and tuned, and that an hour has room for a plan.

        Raises:
            UsageError: it is too short; the message has the valid range.
        """
        least_hour_s = _LEAST_ITERATIONS_PER_HOUR * iteration_time_s
        if self.hour_s < least_hour_s:
            raise UsageError(
                f"--carbon-hour-s {self.hour_s:g}: an iteration takes about {iteration_time_s:.1f} s, and an hour of"
                f" the trace needs {_LEAST_ITERATIONS_PER_HOUR} of them: give {math.ceil(least_hour_s)} to 3600"
            )
        least_s = max(
            (baseline_iterations + _LEAST_TUNED_ITERATIONS) * iteration_time_s,
            _TRIAL_COST_ITERATIONS * iteration_time_s / budget_ratio,
        )
        if self.num_hours * self.hour_s < least_s:
            raise UsageError(
                f"--carbon-hours {self.num_hours} --carbon-hour-s {self.hour_s:g}: a job of"
                f" {self.num_hours * self.hour_s:g} s is too short to be profiled within a slowdown budget of"
                f" {100 * budget_ratio:g} % and tuned; give --carbon-hours {math.ceil(least_s / self.hour_s)} or more,"
                f" or --carbon-hour-s {math.ceil(least_s / self.num_hours)} or more"
            )

    def configuration(self, folder: Path, *, seed: int, budget_ratio: float) -> str:
        """Return the daemon's settings as TOML; a synthetic trace is written into the folder.

        Raises:
            UsageError: the trace cannot be read or is too short.
        """
        if self.trace == SYNTHETIC:
            path = folder / f"{_SYNTHETIC_ZONE}_synthetic_2030.csv"
            # Registration, baseline and profiling take some hours of the trace before the budget's window begins.
            _write_synthetic_trace(path, num_hours=HISTORY_HOURS + 10 * self.num_hours + 200, seed=seed)
        else:
            path = Path(self.trace).resolve()
        series = self._read(path)
        spare = len(series.values) - 3 * self.num_hours
        if spare < LEAST_HISTORY_HOURS:
            raise UsageError(
                f"--carbon-trace {path}: has {count_text(len(series.values), 'hour')}, needs at least"
                f" {LEAST_HISTORY_HOURS} before"
                f" and {3 * self.num_hours} during the demo"
            )
        begin_at = series.first_hour_at + min(HISTORY_HOURS, spare) * HOUR
        return "\n".join(
            (
                'target = "carbon"',
                f'carbon_signal = "{_escaped(path)}"',
                f"carbon_budget_ratio = {budget_ratio or DEFAULT_BUDGET_RATIO}",
                f"carbon_window_h = {float(self.num_hours)}",
                f'carbon_replay_from = "{begin_at:%Y-%m-%dT%H:%M:%SZ}"',
                f"carbon_replay_hour_s = {self.hour_s}",
                "",
            )
        )

    @property
    def job_hours(self) -> float:
        """Announced length of the job, in real hours at full speed."""
        return self.num_hours * self.hour_s / 3600.0

    def is_over(self, job: Mapping[str, Any]) -> bool:
        """Return whether the job has reached its announced length."""
        target = job.get("target")
        return target is not None and bool(target["is_length_reached"])

    def extra_time(self) -> timedelta:
        """Return the time allowed in addition to the demo's time limit."""
        return timedelta(seconds=2 * self.num_hours * self.hour_s)

    def _read(self, path: Path) -> HourlySeries:
        from gpuenergyd.errors import CarbonDataError  # noqa: PLC0415
        from gpuenergyd_carbon.signal_file import SignalFile, zone_of_file  # noqa: PLC0415  start fast

        try:
            return SignalFile(path, zone_of_file(path)).read()
        except CarbonDataError as error:
            raise UsageError(f"--carbon-trace {error}") from None


def _escaped(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def _write_synthetic_trace(path: Path, *, num_hours: int, seed: int) -> None:
    """Write a trace with an evening peak in demand and wind that varies over days."""
    draw = random.Random(seed)  # noqa: S311  not a secret
    wind = 0.0
    rows = ["timestamp_utc,carbon_intensity_g_per_kwh"]
    for hour in range(num_hours):
        wind = 0.98 * wind + draw.gauss(0.0, 0.07)
        day = 0.32 * math.sin(2 * math.pi * (hour - 11) / 24) + 0.12 * math.sin(4 * math.pi * (hour - 5) / 24)
        value = _MEAN_G_PER_KWH * math.exp(day + wind)
        at = _FIRST_HOUR_AT + timedelta(hours=hour)
        rows.append(f"{at:%Y-%m-%dT%H:%M:%SZ},{min(max(value, 20.0), 600.0):.1f}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
