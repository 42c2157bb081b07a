"""Probing uniform clocks: plans with one clock on all GPUs of a job, and the measurements made under them."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.policy_api.policy import JobView

ITERATIONS_PER_CLOCK = 2
"""Undisturbed iterations that a measurement of one clock needs."""


@dataclass(frozen=True, slots=True)
class ClockMeasurement:
    """Time and energy of the iterations with all ranks at one clock; None for energies not measured.

    The time is that of the fastest iteration, because a disturbance only makes an iteration longer; others are medians.
    """

    iteration_time_s: float
    energy_j: float | None
    rank_energies_j: tuple[float | None, ...]
    times_s: Mapping[InstructionClass, float]


def common_clocks_mhz(view: JobView) -> list[int]:
    """Return the clocks that all GPUs of a job support, in descending order."""
    return sorted(set.intersection(*(set(gpu.supported_sm_clocks_mhz) for gpu in view.gpus)), reverse=True)


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
    clock_of_plan: dict[str, int] = {}
    for plan in view.issued_plans:
        clocks = {mhz for rank in plan.ranks for mhz in rank.sm_clocks_mhz}
        clock = clocks.pop() if len(clocks) == 1 else None
        if clock is not None:
            clock_of_plan[plan.plan_id] = clock
    by_clock: dict[int, list[IterationObservation]] = {}
    for seen in view.observations:
        if seen.is_regular and seen.plan_id in clock_of_plan:
            by_clock.setdefault(clock_of_plan[seen.plan_id], []).append(seen)
    return {
        clock: _measurement(clock, iterations, len(view.gpus))
        for clock, iterations in by_clock.items()
        if len(iterations) >= ITERATIONS_PER_CLOCK
    }


def _measurement(sm_clock_mhz: int, iterations: list[IterationObservation], num_ranks: int) -> ClockMeasurement:
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
    )
