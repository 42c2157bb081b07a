"""A job's measured figures for the program's own log, as the daemon last sent them; reading them asks nobody.

docs/how-to/show-energy-in-a-tracker.md describes each; a value is None until it has been measured. Trackers draw only
numbers, so `numbers_of` gives the state as the position of its name in `STATES`.
"""

from operator import attrgetter
from typing import TypeAlias

from gpuenergyd.wire.messages import JobFigures

Metrics: TypeAlias = dict[str, float | str | None]

STATES = ("joining", "warmup", "baseline", "trial", "tuned", "fallback", "paused", "ended")
_J_PER_KWH = 3.6e6
_NAMES = tuple(name for name in JobFigures.__dataclass_fields__ if name != "phase")
_values = attrgetter(*_NAMES)
_PREFIX = "gpuenergyd/"
_LOGGED_NAMES = tuple(_PREFIX + name for name in _NAMES)


def metrics_of(figures: JobFigures | None, *, price_per_kwh: float | None = None) -> Metrics:
    """Return all figures by name."""
    found = figures or JobFigures()
    metrics: Metrics = {"state": found.phase or None, **dict(zip(_NAMES, _values(found), strict=True)), "cost": None}
    if price_per_kwh is not None and found.energy_j is not None:
        metrics["cost"] = price_per_kwh * found.energy_j / _J_PER_KWH
    return metrics


def numbers_of(figures: JobFigures | None, *, price_per_kwh: float | None = None) -> dict[str, float]:
    """Return the known figures as a tracker logs them, with the prefix `gpuenergyd/`; callbacks do it within a step."""
    if figures is None:
        return {}
    numbers = dict(zip(_LOGGED_NAMES, _values(figures), strict=True))
    if None in numbers.values():
        numbers = {name: value for name, value in numbers.items() if value is not None}
    if price_per_kwh is not None and figures.energy_j is not None:
        numbers[_PREFIX + "cost"] = price_per_kwh * figures.energy_j / _J_PER_KWH
    if figures.phase in STATES:
        numbers[_PREFIX + "state"] = STATES.index(figures.phase)
    return numbers
