"""Settings that are the same on all GPUs of a job: which there are, and plans that run with one."""

import math
from dataclasses import dataclass
from typing import assert_never

from gpuenergyd.core.measurement.sustained_clock import sustained_clocks
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.policy_api.policy import JobView, Lever

_LIMIT_STEP_W = 5
"""Distance of the power limits that are tried: power scatters by about as much between runs."""
_LIMITED_BELOW_RATIO = 1.1
"""Power limits above the mean power at full speed by more than this change nothing: bursts last too short."""
_LOWEST_CLOCK_RATIO = 0.4
"""Share of the highest clock below which time grows faster than power falls on every GPU measured so far."""
_SUSTAINED_STEPS = 100


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


def settings_of(view: JobView, *, with_limits: bool = False) -> tuple[Setting, ...]:
    """Return the settings that may be chosen: those of one lever from full speed down, then those of the other.

    Power limits are only among them where clocks may not be set, or where `with_limits` asks for both.
    """
    found: list[Setting] = []
    if view.can_set_clocks and (clocks_mhz := common_clocks_mhz(view)):
        top_mhz = max(mhz for gpu in view.gpus for mhz in gpu.supported_sm_clocks_mhz)
        reached_mhz = top_mhz * sustained_ratio(view)
        slower_mhz = [mhz for mhz in clocks_mhz if _LOWEST_CLOCK_RATIO * top_mhz <= mhz < reached_mhz]
        if slower_mhz:
            found += [Setting(Lever.CLOCKS, mhz) for mhz in (top_mhz, *slower_mhz)]
    if with_limits or not view.can_set_clocks:
        limits_w = common_power_limits_w(view)
        if len(limits_w) > 1:
            found += [Setting(Lever.POWER_LIMITS, limit_w) for limit_w in limits_w]
    return tuple(found)


def sustained_ratio(view: JobView) -> float:
    """Return the clock at full speed as a share of the highest one: less than 1 where power limits hold all GPUs.

    It is that of the fastest GPU, rounded up, so that a few more readings do not change it.
    """
    others = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    sustained = sustained_clocks(seen for seen in view.observations if seen.plan_id not in others)
    if len(sustained) < len(view.gpus) or not all(clock.holds_all_work for clock in sustained.values()):
        return 1.0
    reached_mhz = max(clock.sm_clock_mhz for clock in sustained.values())
    top_mhz = max(mhz for gpu in view.gpus for mhz in gpu.supported_sm_clocks_mhz)
    return min(1.0, math.ceil(_SUSTAINED_STEPS * reached_mhz / top_mhz) / _SUSTAINED_STEPS)


def setting_plan(view: JobView, setting: Setting, purpose: PlanPurpose, *, policy: str, reason: str) -> ClockPlan:
    """Return a plan that runs all ranks at one clock, or at full speed under one power limit or power profile."""
    is_clock, is_limit = setting.lever is Lever.CLOCKS, setting.lever is Lever.POWER_LIMITS
    limit_w = setting.value if is_limit else None
    profile = setting.value if setting.lever is Lever.POWER_PROFILES else None
    ranks = []
    for pp_rank, order in enumerate(view.schedule.orders):
        if is_clock or view.can_set_clocks:  # a clock lock of the plan before must not stay
            mhz = setting.value if is_clock else max(view.gpus[pp_rank].supported_sm_clocks_mhz)
            clocks, changes = (mhz,) * len(order), constant_clock_changes(order, mhz)
            ranks.append(RankClocks(pp_rank, clocks, changes, limit_w, profile))
        else:
            ranks.append(RankClocks(pp_rank, (None,) * len(order), (), limit_w, profile))
    plan_id = view.plan_id(f"{policy}-{purpose}-{setting.value}{'-watts' if is_limit else ''}")
    return ClockPlan(plan_id=plan_id, purpose=purpose, ranks=tuple(ranks), reason=reason)


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
