"""The demo on a grid: a past or made-up trace lived again at speed, so that a day of it passes in minutes."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpuenergyd.cli.demo.synthetic_grid import ZONE, write_synthetic_trace
from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd.errors import UsageError

SYNTHETIC = "synthetic"
HISTORY_HOURS = 21 * 24
"""What the forecaster may have seen before the demo begins, where the trace holds so much."""
LEAST_HISTORY_HOURS = 8 * 24
DEFAULT_BUDGET_RATIO = 0.1
"""A demo's: large enough to be seen in a table, and to hold what profiling takes of so short a job."""


@dataclass(frozen=True, slots=True)
class DemoGrid:
    """What the demo's daemon follows: an hour of the trace in `hour_s`, and a budget over `num_hours`."""

    trace: str
    hour_s: float
    num_hours: int

    def configuration(self, folder: Path, *, seed: int, budget_ratio: float) -> str:
        """Return the daemon's settings for it, as TOML; a made-up trace is written into the folder.

        Raises:
            UsageError: the trace cannot be read, or is too short.
        """
        if self.trace == SYNTHETIC:
            path = folder / f"{ZONE}_made-up_2030.csv"
            # Joining, the baseline and profiling take some of its hours before the budget's window begins.
            write_synthetic_trace(path, num_hours=HISTORY_HOURS + 10 * self.num_hours + 200, seed=seed)
        else:
            path = Path(self.trace).resolve()
        series = self._read(path)
        spare = len(series.values) - 3 * self.num_hours
        if spare < LEAST_HISTORY_HOURS:
            raise UsageError(
                f"--carbon-trace {path}: {len(series.values)} hours; {LEAST_HISTORY_HOURS} before the demo and"
                f" {3 * self.num_hours} for it are needed"
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
        """How long the job says it will be, in real hours at full speed."""
        return self.num_hours * self.hour_s / 3600.0

    def is_over(self, job: Mapping[str, Any]) -> bool:
        """Return whether the job has done all that it said it would."""
        target = job.get("target")
        return target is not None and bool(target["is_length_reached"])

    def patience(self) -> timedelta:
        """Return how long the demo may take beyond its usual limit."""
        return timedelta(seconds=2 * self.num_hours * self.hour_s)

    def _read(self, path: Path) -> HourlySeries:
        from gpuenergyd.carbon.signal_file import SignalFile, zone_of_file  # noqa: PLC0415  start fast
        from gpuenergyd.errors import CarbonDataError  # noqa: PLC0415

        try:
            return SignalFile(path, zone_of_file(path)).read()
        except CarbonDataError as error:
            raise UsageError(f"--carbon-trace {error}") from None


def _escaped(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')
