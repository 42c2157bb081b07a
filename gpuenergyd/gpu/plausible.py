"""Which values of a driver can be right: a driver that reports success may still return anything.

Power is controlled as a mean over some milliseconds, so a reading may exceed the maximal power limit for a moment: half
above it is accepted. Energy over a longer time cannot exceed it. Clocks may be offset above the supported ones, by far
less than half; a GPU switches off long before 150 degrees.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.gpu.device import GpuDetails, GpuIdentity, GpuReading

_MOST_OF_ANY_GPU_W = 5_000.0
"""Above what any GPU or module may draw; bounds modules, and GPUs with an unknown or impossible maximal power limit."""
_MOST_TO_DEFAULT = 2.0
POWER_MARGIN = 1.5
_CLOCK_MARGIN = 1.5
_MOST_CLOCK_MHZ = 10_000
_CELSIUS = (-55.0, 150.0)
_MOST_ENERGY_J = 2.0**64 / 1000.0
"""The counter has 64 bits of mJ."""
_MOST_WATTS = 100_000.0
_SLACK_S = 1.0
"""A counter moves in steps: what two readings differ by may have been drawn in a longer time than the one between."""

_Record = TypeVar("_Record", GpuIdentity, GpuDetails)


def max_power_w(identity: GpuIdentity) -> float:
    """Return the most that a GPU may draw on average: its maximal power limit, which does not bound its module."""
    limit_w, default_w = identity.max_power_limit_w, identity.default_power_limit_w
    if identity.energy_scope is EnergyScope.MODULE:
        return _MOST_OF_ANY_GPU_W
    if limit_w is not None and 0 < limit_w <= _MOST_OF_ANY_GPU_W:
        return limit_w
    if default_w is not None and 0 < default_w <= _MOST_OF_ANY_GPU_W:
        return min(_MOST_TO_DEFAULT * default_w, _MOST_OF_ANY_GPU_W)
    return _MOST_OF_ANY_GPU_W


def refusals(reading: GpuReading, identity: GpuIdentity) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of each value of a reading that cannot be right."""
    most_w = POWER_MARGIN * max_power_w(identity)
    if not _is_within(reading.power_w, 0.0, most_w):
        limit = f"{most_w:g} W, {POWER_MARGIN:g} times the maximal power limit"
        yield "power_w", f"{_shown(reading.power_w)} W, not within 0 and {limit}"
    if not _is_within(reading.total_energy_j, 0.0, _MOST_ENERGY_J):
        yield "total_energy_j", f"{_shown(reading.total_energy_j)} J, not within 0 and {_MOST_ENERGY_J:g} J"
    most_mhz = _CLOCK_MARGIN * max(identity.supported_sm_clocks_mhz, default=_MOST_CLOCK_MHZ / _CLOCK_MARGIN)
    if not _is_within(reading.sm_clock_mhz, 0, most_mhz):
        yield "sm_clock_mhz", f"{_shown(reading.sm_clock_mhz)} MHz, not within 0 and {most_mhz:g} MHz"
    if not _is_within(reading.temperature_celsius, *_CELSIUS):
        low, high = _CELSIUS
        yield "temperature_celsius", f"{_shown(reading.temperature_celsius)} degrees, not within {low:g} and {high:g}"
    if not _is_within(reading.utilization_ratio, 0.0, 1.0):
        yield "utilization_ratio", f"{_shown(reading.utilization_ratio)}, not within 0 and 1"


def is_possible_rise(rise_j: float, elapsed_s: float, most_w: float) -> bool:
    """Return whether a GPU that draws at most this on average can have raised its energy counter by this."""
    return rise_j <= most_w * POWER_MARGIN * (elapsed_s + _SLACK_S)


def plausible(record: _Record) -> _Record:
    """Return an identity or details without watts and clocks that cannot be right."""
    changes: dict[str, Any] = {
        field.name: None
        for field in fields(record)
        if type(value := getattr(record, field.name)) in {float, int} and not _is_within(value, 0, _most(field.name))
    }
    return replace(record, **changes) if changes else record


def _most(name: str) -> float:
    return _MOST_WATTS if name.endswith("_w") else _MOST_CLOCK_MHZ if name.endswith("_mhz") else math.inf


def _is_within(value: object, low: float, high: float) -> bool:
    """Return whether a value is unknown or a number between two others; not a number is not."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.40}"
