"""Bounds on time and energy over all orders of whole forwards and backwards, with any number of microbatches in flight.

Theory of operation. A stage's first instruction is a forward, which waits for one forward on each stage before it; its
last is a backward, after which one backward on each stage before it still has to run. So a stage has the iteration less
one fastest forward and backward of each stage before it, and in that time runs every microbatch forward and backward.
What that costs at least is read off the lower hulls of its two classes, as if clocks could be mixed at will.
"""

import math
from collections.abc import Iterable
from itertools import pairwise

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile


def any_order_bound_j(profile: PipelineProfile, num_stages: int, num_microbatches: int, time_s: float) -> float:
    """Return a lower bound on the energy of iterations of exactly this time, infinity if no order is that fast."""
    total_j = profile.blocking_power_w * num_stages * time_s
    before_s = 0.0
    for stage in range(num_stages):
        hulls = _hulls(profile, stage)
        total_j += _least_effective_j(hulls, num_microbatches, time_s - before_s, profile.blocking_power_w)
        before_s += sum(hull[0].time_s for hull in hulls)
    return total_j


def any_order_min_time_s(profile: PipelineProfile, num_stages: int, num_microbatches: int) -> float:
    """Return a lower bound on the iteration time over all orders of whole forwards and backwards."""
    least_s, before_s = 0.0, 0.0
    for stage in range(num_stages):
        once_s = sum(hull[0].time_s for hull in _hulls(profile, stage))
        least_s = max(least_s, before_s + num_microbatches * once_s)
        before_s += once_s
    return least_s


def _hulls(profile: PipelineProfile, stage: int) -> tuple[tuple[ClockOption, ...], ...]:
    kinds = (InstructionKind.F, InstructionKind.B)
    return tuple(profile[InstructionClass(stage, kind)].lower_hull(profile.blocking_power_w) for kind in kinds)


def _least_effective_j(
    hulls: Iterable[tuple[ClockOption, ...]], num_times: int, available_s: float, blocking_power_w: float
) -> float:
    """Return the least effective energy of `num_times` instructions of each hull within a time."""
    energy_j, left_s = 0.0, available_s
    steps = []
    for hull in hulls:
        left_s -= num_times * hull[0].time_s
        energy_j += num_times * hull[0].effective_energy_j(blocking_power_w)
        for fast, slow in pairwise(hull):
            width_s = slow.time_s - fast.time_s
            change_j = slow.effective_energy_j(blocking_power_w) - fast.effective_energy_j(blocking_power_w)
            steps.append((change_j / width_s, num_times * width_s))
    if left_s < -1e-9 * available_s:
        return math.inf
    for slope_w, width_s in sorted(steps):
        taken_s = min(width_s, max(0.0, left_s))
        energy_j += min(0.0, slope_w) * taken_s
        left_s -= taken_s
    return energy_j
