"""Calibration of switch latencies: the clock changes to make on an idle GPU, and statistics of the measured ones.

Latency depends on the direction and mostly on the target clock. A calibration therefore walks at random between a few
clocks of each region until every (direction, target) has been measured often enough; start clocks vary along the walk.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gpuenergyd.core.pipeline.switching import (
    LATE_QUANTILE,
    Direction,
    ObservedSwitch,
    direction_of,
    latency_quantiles_s,
)

_CLOCK_RATIOS = (1.0, 0.92, 0.85, 0.78, 0.68, 0.55)
"""Shares of the maximum clock: two in each region (high, middle, low), as low as plans usually go."""
_LEAST_STEP_MHZ = 30
"""Smaller changes cannot be distinguished from the noise of the clock reading."""


@dataclass(frozen=True, slots=True)
class CalibratedTarget:
    """Measured latencies of changes to one clock in one direction; a time is None if too few of them took effect.

    `late_s` is the 90th percentile. Of the `num_changes`, `num_unseen` were not seen to take effect while they were
    watched; `longest_s` is then a lower bound. `call_s` is the median duration of the driver call.
    """

    direction: Direction
    sm_clock_mhz: int
    num_changes: int
    num_unseen: int
    median_s: float | None
    late_s: float | None
    longest_s: float
    call_s: float


def calibration_clocks_mhz(supported_sm_clocks_mhz: Sequence[int]) -> tuple[int, ...]:
    """Return the clocks that a calibration switches between, highest first; fewer than two if there are no others."""
    chosen: list[int] = []
    for ratio in _CLOCK_RATIOS:
        wanted_mhz = ratio * max(supported_sm_clocks_mhz, default=0)
        nearest_mhz = min(supported_sm_clocks_mhz, key=lambda clock: abs(clock - wanted_mhz), default=None)
        if nearest_mhz is not None and all(known - nearest_mhz >= _LEAST_STEP_MHZ for known in chosen):
            chosen.append(nearest_mhz)
    return tuple(chosen)


def calibration_walk_mhz(clocks_mhz: Sequence[int], *, num_changes: int, seed: int) -> tuple[int, ...]:
    """Return the sequence of clocks to set, starting from the highest.

    The walk reaches each clock in each direction at least `num_changes` times. `clocks_mhz` are two or more, highest
    first. The same seed gives the same walk.
    """
    draw = random.Random(seed)  # noqa: S311  reproducible, not secret
    missing = {(Direction.RAISE, clock): num_changes for clock in clocks_mhz[:-1]}
    missing |= {(Direction.LOWER, clock): num_changes for clock in clocks_mhz[1:]}
    at_mhz, walk = clocks_mhz[0], []
    while any(left > 0 for left in missing.values()):
        others = [clock for clock in clocks_mhz if clock != at_mhz]
        weights = [max(0, missing[direction_of(at_mhz, clock), clock]) for clock in others]
        next_mhz = draw.choices(others, weights if any(weights) else None)[0]
        missing[direction_of(at_mhz, next_mhz), next_mhz] -= 1
        walk.append(next_mhz)
        at_mhz = next_mhz
    return tuple(walk)


def calibrated_targets(switches: Sequence[ObservedSwitch]) -> tuple[CalibratedTarget, ...]:
    """Return the statistics of measured changes by direction and target clock: raises first, highest clock first."""
    groups: dict[tuple[Direction, int], list[ObservedSwitch]] = {}
    for switch in switches:
        groups.setdefault((switch.direction, switch.to_sm_clock_mhz), []).append(switch)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] is not Direction.RAISE, -item[0][1]))
    return tuple(_target(direction, sm_clock_mhz, measured) for (direction, sm_clock_mhz), measured in ordered)


def _target(direction: Direction, sm_clock_mhz: int, switches: Sequence[ObservedSwitch]) -> CalibratedTarget:
    median_s, late_s = latency_quantiles_s(switches, (0.5, LATE_QUANTILE))
    return CalibratedTarget(
        direction,
        sm_clock_mhz,
        num_changes=len(switches),
        num_unseen=sum(switch.settle_high_s is None for switch in switches),
        median_s=median_s,
        late_s=late_s,
        longest_s=max(switch.latency_s for switch in switches),
        call_s=median(switch.call_s for switch in switches),
    )
