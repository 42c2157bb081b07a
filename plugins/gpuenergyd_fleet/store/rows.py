"""Converts rows of a fleet's tables to objects; other hosts wrote them, so invalid curves are treated as unknown."""

import json
import math
from itertools import pairwise
from typing import Any

from gpuenergyd_fleet.decisions.coordination import FleetHost
from gpuenergyd_fleet.decisions.division import HostDemand
from gpuenergyd_fleet.decisions.grid_event import GridEvent, LoadUnit
from gpuenergyd_fleet.decisions.leases import Fallback, HeldPower, Lease

_MAX_CURVE_POINTS = 64


def host_of(row: Any, leases: tuple[Lease, ...]) -> FleetHost:
    held = HeldPower(row.share_w, leases, row.confirmed)
    demand = HostDemand(row.share_w, checked_curve(_decoded(row.curve)))
    return FleetHost(row.host, row.reported_us / 1e6, held, demand, row.measured_w, row.speed)


def lease_of(row: Any) -> Lease:
    entries = tuple(Fallback(*map(float, part)) for part in _decoded(row.fallback))
    return Lease(row.number, row.power_w, row.end_us / 1e6, entries)


def event_of(row: Any) -> GridEvent:
    return GridEvent(
        event_id=row.grid_event_id, start_s=row.start_us / 1e6, end_s=row.end_us / 1e6, value=row.value,
        unit=LoadUnit(row.unit), reason=row.reason, is_cancelled=bool(row.cancelled), issued_s=row.issued_us / 1e6,
        source=row.source, baseline_w=row.baseline_w,
    )  # fmt: skip


def checked_curve(points: Any) -> tuple[tuple[float, float], ...]:
    """Return a host's reported curve; empty unless power and speed are finite, not negative, and rising."""
    try:
        curve = tuple((float(power_w), float(speed)) for power_w, speed in points[:_MAX_CURVE_POINTS])
    except (TypeError, ValueError, KeyError):
        return ()
    is_possible = all(math.isfinite(x) and x >= 0 for point in curve for x in point)
    is_rising = all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(curve))
    return curve if is_possible and is_rising else ()


def _decoded(text_json: str) -> Any:
    try:
        return json.loads(text_json)
    except ValueError:
        return []


def known_sum(values: list[float | None]) -> float | None:
    """Return a sum; None if a part is unknown."""
    return None if None in values else math.fsum(value for value in values if value is not None)


def microseconds(at_s: float) -> int:
    return round(at_s * 1e6)
