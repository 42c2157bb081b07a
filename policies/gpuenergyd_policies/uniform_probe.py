"""Probing uniform settings: plans with one clock, power limit or power profile on all GPUs, and what they measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import assert_never

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.policy_api.policy import JobView, Lever

ITERATIONS_PER_CLOCK = 2
"""Undisturbed iterations that a measurement of one clock or power limit needs."""
_LIMIT_STEP_W = 5
"""Distance of the power limits that are tried: power scatters by about as much between runs."""
_LIMITED_BELOW_RATIO = 1.1
"""Power limits above the mean power at full speed by more than this change nothing: bursts last too short."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value on all GPUs of a job: an SM clock in MHz, a power limit in watts, or a workload power profile."""

    lever: Lever
    value: int

    def __str__(self) -> str:
        """Return the value with its unit."""
        match self.lever:
            case Lever.CLOCKS:
                return f"{self.value} MHz"
            case Lever.POWER_LIMITS:
                return f"a limit of {self.value} W"
            case Lever.POWER_PROFILES:
                return f"workload power profile {self.value}"
            case _:
                assert_never(self.lever)


@dataclass(frozen=True, slots=True)
class ClockMeasurement:
    """Time and energy of the iterations with all ranks at one clock; None for energies not measured.

    The time is that of the fastest iteration, because a disturbance only makes an iteration longer; others are medians.
    """

    iteration_time_s: float
    energy_j: float | None
    rank_energies_j: tuple[float | None, ...]
    times_s: Mapping[InstructionClass, float]
    median_time_s: float
    """Median time of an iteration, as baselines have it."""
    num_iterations: int


def common_clocks_mhz(view: JobView) -> list[int]:
    """Return the clocks that all GPUs of a job support, in descending order."""
    return sorted(set.intersection(*(set(gpu.supported_sm_clocks_mhz) for gpu in view.gpus)), reverse=True)


def common_power_limits_w(view: JobView) -> list[int]:
    """Return the power limits worth trying on all GPUs of a job, in descending order.

    The first one is the default and stands for full speed; empty if the power of a GPU cannot be limited.
    """
    ranges_w = [gpu.power_limit_range_w for gpu in view.gpus]
    known_w = [range_w for range_w in ranges_w if range_w is not None]
    if not view.can_set_power_limits or len(known_w) < len(ranges_w):
        return []
    low_w, high_w = max(low for low, _ in known_w), min(high for _, high in known_w)
    top_w, baseline = high_w - 1, view.baseline
    if len(view.gpus) == 1 and baseline.energy_j is not None:
        mean_w = baseline.energy_j / baseline.iteration_time_s / view.gpus[0].num_gpus
        top_w = min(top_w, _LIMITED_BELOW_RATIO * mean_w)
    steps = range(math.floor(top_w / _LIMIT_STEP_W), math.ceil(low_w / _LIMIT_STEP_W) - 1, -1)
    return [math.floor(high_w), *(step * _LIMIT_STEP_W for step in steps)]


def setting_plan(view: JobView, setting: Setting, purpose: PlanPurpose, *, policy: str, reason: str) -> ClockPlan:
    """Return a plan that runs all ranks at one clock, or at full speed under one power limit or power profile."""
    if setting.lever is Lever.CLOCKS:
        return uniform_plan(view, setting.value, purpose, policy=policy, reason=reason)
    is_limit = setting.lever is Lever.POWER_LIMITS
    limit_w, profile = (setting.value, None) if is_limit else (None, setting.value)
    ranks = []
    for pp_rank, order in enumerate(view.schedule.orders):
        if view.can_set_clocks:  # a clock lock of the plan before must not stay
            top_mhz = max(view.gpus[pp_rank].supported_sm_clocks_mhz)
            clocks, changes = (top_mhz,) * len(order), constant_clock_changes(order, top_mhz)
            ranks.append(RankClocks(pp_rank, clocks, changes, limit_w, profile))
        else:
            ranks.append(RankClocks(pp_rank, (None,) * len(order), (), limit_w, profile))
    plan_id = view.plan_id(f"{policy}-{purpose}-{setting.value}{'-watts' if is_limit else ''}")
    return ClockPlan(plan_id=plan_id, purpose=purpose, ranks=tuple(ranks), reason=reason)


def uniform_plan(view: JobView, sm_clock_mhz: int, purpose: PlanPurpose, *, policy: str, reason: str) -> ClockPlan:
    """Return a plan that runs all ranks at one clock."""
    return ClockPlan(
        plan_id=view.plan_id(f"{policy}-{purpose}-{sm_clock_mhz}"),
        purpose=purpose,
        ranks=tuple(
            RankClocks(pp_rank, (sm_clock_mhz,) * len(order), constant_clock_changes(order, sm_clock_mhz))
            for pp_rank, order in enumerate(view.schedule.orders)
        ),
        reason=reason,
    )


def clock_measurements(view: JobView) -> dict[int, ClockMeasurement]:
    """Return the measurements by clock, for clocks with enough undisturbed iterations."""
    return lever_measurements(view, Lever.CLOCKS)


def lever_measurements(view: JobView, lever: Lever) -> dict[int, ClockMeasurement]:
    """Return the measurements by the values of one lever."""
    found = setting_measurements(view)
    return {setting.value: measured for setting, measured in found.items() if setting.lever is lever}


def setting_measurements(view: JobView) -> dict[Setting, ClockMeasurement]:
    """Return the measurements of all settings with enough undisturbed iterations."""
    settings = {plan.plan_id: setting for plan in view.issued_plans if (setting := setting_of(plan)) is not None}
    by_setting: dict[Setting, list[IterationObservation]] = {}
    for seen in view.observations:
        if seen.is_regular and seen.plan_id in settings:
            by_setting.setdefault(settings[seen.plan_id], []).append(seen)
    return {
        setting: _measurement(setting.value if setting.lever is Lever.CLOCKS else None, iterations, len(view.gpus))
        for setting, iterations in by_setting.items()
        if len(iterations) >= ITERATIONS_PER_CLOCK
    }


def setting_of(plan: ClockPlan) -> Setting | None:
    """Return the one clock, power limit or power profile of a plan on all its ranks."""
    profiles = {rank.power_profile for rank in plan.ranks}
    if profiles - {None}:
        profile = profiles.pop() if len(profiles) == 1 else None
        return None if profile is None else Setting(Lever.POWER_PROFILES, profile)
    limits_w = {rank.power_limit_w for rank in plan.ranks}
    clocks_mhz = {mhz for rank in plan.ranks for mhz in rank.sm_clocks_mhz}
    if limits_w == {None}:
        clock_mhz = clocks_mhz.pop() if len(clocks_mhz) == 1 else None
        return None if clock_mhz is None else Setting(Lever.CLOCKS, clock_mhz)
    limit_w = limits_w.pop() if len(limits_w) == 1 else None
    return None if limit_w is None else Setting(Lever.POWER_LIMITS, round(limit_w))


def _measurement(sm_clock_mhz: int | None, iterations: list[IterationObservation], num_ranks: int) -> ClockMeasurement:
    rank_energies: list[list[float]] = [[] for _ in range(num_ranks)]
    times: dict[InstructionClass, list[float]] = {}
    for seen in iterations:
        for rank in seen.ranks:
            if rank.energy_j is not None:
                rank_energies[rank.pp_rank].append(rank.energy_j)
        for sample in seen.instruction_samples:
            if sample.main_share.sm_clock_mhz == sm_clock_mhz:
                times.setdefault(sample.instruction_class, []).append(sample.time_s)
    energies = [seen.energy_j for seen in iterations if seen.energy_j is not None]
    return ClockMeasurement(
        min(seen.own_time_s for seen in iterations),
        median(energies) if energies else None,
        tuple(median(known) if known else None for known in rank_energies),
        {key: median(known) for key, known in times.items()},
        median(seen.own_time_s for seen in iterations),
        len(iterations),
    )
