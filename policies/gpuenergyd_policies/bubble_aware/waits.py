"""Phases of a plain loop that wait: their times are those of late, since no clock explains a change of them.

How far ahead of a wait's end its clock has to be raised shows afterwards: what follows ran at a low clock, or did not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass, Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView

_RECENT = 16
"""Iterations whose waits count."""
_QUANTILE = 0.25
"""Waits for other ranks come on top of the usual time, and the clock must be high again before a wait ends."""
_READING_RATIO = 1.05
"""Readings of a clock vary by less."""


def is_flat(key: InstructionClass, profile: InstructionProfile) -> bool:
    """Return whether a phase is a wait that takes the same time at every clock."""
    return key.kind.is_wait and len({option.time_s for option in profile.options}) == 1


def with_recent_waits(profile: PipelineProfile, view: JobView) -> PipelineProfile:
    """Return a profile whose waits take as long as in the last iterations, at the same power."""
    waits = {key: own for key, own in profile.classes.items() if is_flat(key, own)}
    if not waits:
        return profile
    recent = [observation for observation in view.observations if observation.is_regular][-_RECENT:]
    classes = dict(profile.classes)
    for key, own in waits.items():
        seen_s = [
            sample.time_s
            for observation in recent
            for sample in observation.instruction_samples
            if sample.instruction_class == key
        ]
        if seen_s:
            time_s = float(np.quantile(seen_s, _QUANTILE))
            ratio = time_s / own.at_max_clock.time_s
            options = (replace(o, time_s=time_s, energy_j=o.energy_j * ratio) for o in own.options)
            classes[key] = InstructionProfile(tuple(options))
    return PipelineProfile(classes, profile.blocking_power_w)


def lowers_waits(plan: ClockPlan, schedule: Schedule) -> bool:
    """Return whether a plan lowers the clock of a phase that waits."""
    return any(key.kind.is_wait for key in _lowered(plan, schedule))


def lowers_waits_alone(plan: ClockPlan, schedule: Schedule) -> bool:
    """Return whether a plan lowers the clock of phases that wait, and of no work."""
    lowered = _lowered(plan, schedule)
    return bool(lowered) and all(key.kind.is_wait for key in lowered)


def _lowered(plan: ClockPlan, schedule: Schedule) -> list[InstructionClass]:
    """Return what runs at a lower clock than the highest of its rank in the plan."""
    clocks_mhz = _lowest_clocks_mhz(plan, schedule)
    top_mhz: dict[int, int] = {}
    for key, mhz in clocks_mhz.items():
        top_mhz[key.pp_rank] = max(mhz, top_mhz.get(key.pp_rank, 0))
    return [key for key, mhz in clocks_mhz.items() if mhz < top_mhz[key.pp_rank]]


def late_after_waits_s(
    plan: ClockPlan, schedule: Schedule, observations: Sequence[IterationObservation]
) -> tuple[float, ...]:
    """Return, for each iteration under a plan, the time lost by work that still ran at the clocks of waits.

    It is an upper estimate: as if all work took time in proportion to 1 / clock.
    """
    clocks_mhz = _lowest_clocks_mhz(plan, schedule)
    of_waits_mhz: dict[int, float] = {}
    for key in _lowered(plan, schedule):
        if key.kind.is_wait:
            mhz = _READING_RATIO * clocks_mhz[key]
            of_waits_mhz[key.pp_rank] = max(mhz, of_waits_mhz.get(key.pp_rank, 0.0))
    return tuple(_lost_s(observation, clocks_mhz, of_waits_mhz) for observation in observations)


def _lost_s(
    observation: IterationObservation,
    clocks_mhz: Mapping[InstructionClass, int],
    of_waits_mhz: Mapping[int, float],
) -> float:
    lost_s = 0.0
    for sample in observation.instruction_samples:
        planned_mhz = clocks_mhz.get(sample.instruction_class, 0)
        limit_mhz = min(of_waits_mhz.get(sample.pp_rank, 0.0), planned_mhz / _READING_RATIO)
        if not sample.kind.is_wait:
            late = [share for share in sample.shares if share.sm_clock_mhz <= limit_mhz]
            lost_s += sample.count * sum(share.time_s * (1 - share.sm_clock_mhz / planned_mhz) for share in late)
    return lost_s


def _lowest_clocks_mhz(plan: ClockPlan, schedule: Schedule) -> dict[InstructionClass, int]:
    """Return the lowest clock that a plan gives each class of instructions; empty for schedules without such phases."""
    found: dict[InstructionClass, int] = {}
    if not any(instruction.kind.is_wait for order in schedule.orders for instruction in order):
        return found  # a plan may have another order of its own
    for rank in plan.ranks:
        for instruction, mhz in zip(schedule.orders[rank.pp_rank], rank.sm_clocks_mhz, strict=True):
            if mhz is not None:
                key = instruction.instruction_class
                found[key] = min(mhz, found.get(key, mhz))
    return found
