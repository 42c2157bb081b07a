"""Synthetic carbon trace for the demo: hourly intensities of a windy grid, from a seed."""

import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

ZONE = "SYNTHETIC-GB"
FIRST_HOUR_AT = datetime(2030, 1, 1, tzinfo=UTC)
_MEAN_G_PER_KWH = 190.0


def write_synthetic_trace(path: Path, *, num_hours: int, seed: int) -> None:
    """Write a trace with an evening peak in demand and wind that varies over days."""
    draw = random.Random(seed)  # noqa: S311  not a secret
    wind = 0.0
    rows = ["timestamp_utc,carbon_intensity_g_per_kwh"]
    for hour in range(num_hours):
        wind = 0.98 * wind + draw.gauss(0.0, 0.07)
        day = 0.32 * math.sin(2 * math.pi * (hour - 11) / 24) + 0.12 * math.sin(4 * math.pi * (hour - 5) / 24)
        value = _MEAN_G_PER_KWH * math.exp(day + wind)
        at = FIRST_HOUR_AT + timedelta(hours=hour)
        rows.append(f"{at:%Y-%m-%dT%H:%M:%SZ},{min(max(value, 20.0), 600.0):.1f}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
