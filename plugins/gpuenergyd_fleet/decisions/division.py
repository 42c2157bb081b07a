"""Division of a fleet's power among hosts: each watt goes to the host whose jobs gain the most speed from it.

Every host has a concave curve of weighted speed against power, which starts at the least power at which each of its
jobs runs at the minimum speed. Filling the segments of all curves in order of speed per watt is optimal, as within a
host. Power left over when all jobs run at full speed is divided by shares, so that new jobs find some power.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class HostDemand:
    """The speed that a host's jobs reach with a given power."""

    share_w: float
    """The host's part of the fleet's power when it has no lease."""
    curve: tuple[tuple[float, float], ...] = ()
    """Points of power in W and weighted speed in units of one GPU at full speed, both rising; empty while unknown."""


def divided(power_w: float, demands: Mapping[str, HostDemand]) -> dict[str, float]:
    """Return the power of each host in watts; the sum is at most `power_w`.

    A host without a curve gets at most its share. If there is too little for all hosts' minimum powers, each gets the
    same ratio of its minimum.
    """
    least_w = {host: demand.curve[0][0] if demand.curve else demand.share_w for host, demand in demands.items()}
    total_w = sum(least_w.values())
    if total_w >= power_w:
        ratio = max(0.0, power_w) / total_w if total_w > 0 else 0.0
        return {host: ratio * own_w for host, own_w in least_w.items()}
    found, left_w = dict(least_w), power_w - total_w
    segments = [
        ((high - low) / (high_w - low_w), host, high_w - low_w)
        for host, demand in demands.items()
        for (low_w, low), (high_w, high) in pairwise(demand.curve)
        if high_w > low_w
    ]
    segments.sort(key=lambda segment: (-segment[0], segment[1]))
    for _, host, segment_w in segments:
        part_w = min(segment_w, left_w)
        found[host] += part_w
        left_w -= part_w
    shares_w = sum(demand.share_w for demand in demands.values())
    if left_w > 0 and shares_w > 0:
        for host, demand in demands.items():
            found[host] += left_w * demand.share_w / shares_w
    return found
