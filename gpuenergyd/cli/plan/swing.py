"""Peak, trough and ramp of a plan's power, for `gpuenergyd plan --json`; does not import Rich, which is slow."""

from typing import Any

from gpuenergyd.core.pipeline.power_swing import PlannedSwing, SwingFigures


def swing_figures(swing: PlannedSwing) -> dict[str, Any]:
    """Return the part of the JSON document about swings."""
    return {
        "planned": _figures(swing.planned),
        "full_speed": _figures(swing.full_speed),
        "least_energy": _figures(swing.least_energy),
        "band_energy_against_least_energy_ratio": _change(swing.planned, swing.least_energy),
        "band_energy_against_full_speed_ratio": _change(swing.planned, swing.full_speed),
    }


def _figures(figures: SwingFigures) -> dict[str, float]:
    return {
        "peak_w": figures.peak_w,
        "trough_w": figures.trough_w,
        "mean_w": figures.mean_w,
        "ramp_w_per_s": figures.ramp_w_per_s,
        "band_energy_w2": figures.band_energy_w2,
        "band_rms_w": figures.band_rms_w,
    }


def _change(planned: SwingFigures, other: SwingFigures) -> float | None:
    return planned.band_energy_w2 / other.band_energy_w2 - 1.0 if other.band_energy_w2 else None
