"""Numbers as text for people: with units chosen by size, ratios as percentages, and a dash for missing values."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuenergyd.core.job.measurements.savings import Interval

JOULES_PER_KWH = 3.6e6
MISSING = "-"
"""Shown for values that were not measured; never 0."""


def replica_name_of(job: Mapping[str, Any]) -> str:
    """Return the name of a job in a status, with its rank if the training has several jobs of this name."""
    return str(job.get("replica_name") or job["job_name"])  # older daemons have none


def time_text(time_s: float | None) -> str:
    """Return a duration: 12.3 ms, 1.234 s, 2 min 5 s."""
    if time_s is None:
        return MISSING
    if time_s < 0.9995:
        return f"{time_s * 1e3:.1f} ms"
    if time_s < 100.0:
        return f"{time_s:.3f} s" if time_s < 10.0 else f"{time_s:.1f} s"
    minutes, seconds = divmod(round(time_s), 60)
    if minutes < 100:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def energy_text(energy_j: float | None) -> str:
    """Return an energy: 812.3 J, 12.4 kJ, 3.1 kWh."""
    if energy_j is None:
        return MISSING
    if abs(energy_j) < 10_000:
        return f"{energy_j:.1f} J"
    if abs(energy_j) < JOULES_PER_KWH:
        return f"{energy_j / 1e3:.1f} kJ"
    return f"{energy_j / JOULES_PER_KWH:.2f} kWh"


def grams_text(carbon_g: float | None) -> str:
    """Return emissions: 1.23 mg, 12.3 g, 4.56 kg; negative savings keep their sign."""
    if carbon_g is None:
        return MISSING
    size = abs(carbon_g)
    if size >= 1000:
        return f"{carbon_g / 1000:.2f} kg"
    return f"{carbon_g:.3g} g" if size >= 0.1 or size == 0 else f"{1000 * carbon_g:.3g} mg"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio as a percentage with sign: +12.3 %, -0.4 %."""
    if ratio is None:
        return MISSING
    percent = round(ratio * 100, 1) + 0.0  # avoids -0.0
    return f"{percent:+.1f} %"


def estimate(interval: "Interval | None") -> float | None:
    """Return the estimate of an interval; None if it was not measured."""
    return None if interval is None else interval.estimate


def fit_error_text(measured_j: float | None, lower_bound_j: float | None) -> str:
    """Return why a measured energy is below a lower bound, which is proven only for the fitted profile; else empty."""
    if measured_j is None or lower_bound_j is None or measured_j >= lower_bound_j:
        return ""
    below = 100 * (1 - measured_j / lower_bound_j)
    return f"measured energy is {below:.1f} % below the fitted lower bound: the fit overestimates it by at least that"


def skill_text(skill_1h_ratio: float, skill_6h_ratio: float, skill_24h_mean_ratio: float) -> str:
    """Return the skill of forecasts; positive is better, as in JSON and metrics."""
    return (
        f"forecast skill (error reduced against the best naive forecast): 1 h {ratio_text(skill_1h_ratio)},"
        f" 6 h {ratio_text(skill_6h_ratio)}, mean of 24 h {ratio_text(skill_24h_mean_ratio)}"
    )


def difference_text(energy_j: float | None) -> str:
    """Return an energy difference in words: 12.3 J more, 14.1 kJ less."""
    if energy_j is None:
        return MISSING
    return f"{energy_text(abs(energy_j))} {'less' if energy_j < 0 else 'more'}"


def cost_text(cost: float | None, currency: str | None = None) -> str:
    """Return an amount of money, with its currency if given: 12.34, 0.000123 EUR."""
    if cost is None:
        return MISSING
    amount = f"{cost:.2f}" if abs(cost) >= 0.995 or cost == 0 else f"{cost:.3g}"
    return f"{amount} {currency}" if currency else amount


def pricing_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return, in one line, what emissions and costs in a report include; empty if it has none."""
    has_emissions, has_cost = (any(row.get(name) for row in rows) for name in ("carbon_g", "cost"))
    pue = max((row.get("pue") or 1.0 for row in rows), default=1.0)
    notes = ["emissions are location-based"] if has_emissions else []
    if pue != 1.0 and (has_emissions or has_cost):
        what = "emissions and cost" if has_emissions and has_cost else "emissions" if has_emissions else "cost"
        notes.append(f"{what} with PUE {pue:g}")
    return "; ".join(notes)


MODULE_NOTE = ", energy of modules (GPU, processor and memory), not of GPUs alone"


def power_text(power_w: float | None) -> str:
    return MISSING if power_w is None else f"{power_w:.0f} W"


def clock_text(sm_clock_mhz: float | None) -> str:
    return MISSING if sm_clock_mhz is None else f"{sm_clock_mhz:.0f} MHz"


def temperature_text(temperature_celsius: float | None) -> str:
    return MISSING if temperature_celsius is None else f"{temperature_celsius:.0f} °C"


def age_text(age_s: float | None) -> str:
    if age_s is None:
        return MISSING
    return f"{age_s:.1f} s" if age_s < 10 else f"{age_s:.0f} s" if age_s < 100 else time_text(age_s)
