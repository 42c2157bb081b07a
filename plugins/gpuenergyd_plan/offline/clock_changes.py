"""Clock changes of tables' plans: waits with and without switch latency, and requests as instructions begin."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.switching import constant_latency
from gpuenergyd.core.pipeline.timeline import Timeline
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd.core.policy_api.policy import LoweredWait
from gpuenergyd_policies.planning.switching.requests import Latency
from gpuenergyd_policies.planning.switching.simulation import SimulatedIteration, simulate_switching
from gpuenergyd_policies.planning.switching.waits import WaitRules, lowered_wait, waits_of, with_lowered_waits

_ROUNDING = 1e-9
MARGIN_RATIOS = (0.0, 0.05, 0.15, 0.4)
"""Share of a wait by which the clock is restored before the planned start of the next instruction."""


@dataclass(frozen=True, slots=True)
class PlannedWaits:
    """Energy of a plan's waits at the clock in force and with lowered clocks, and the waits that are lowered."""

    in_force_j: float
    lowered_j: float
    total_s: float
    lowered: tuple[LoweredWait, ...]


def planned_waits(planned: Timeline, sm_clocks_mhz: Mapping[Instruction, int], power: WaitingPower) -> PlannedWaits:
    """Return the waits of a plan on its timeline, for GPUs whose clocks change instantly."""
    in_force_j = lowered_j = total_s = 0.0
    lowered: list[LoweredWait] = []
    for rank in range(planned.num_ranks):
        for wait in waits_of(planned, rank):
            before_mhz, after_mhz = (sm_clocks_mhz[span.instruction] for span in (wait.before, wait.after))
            total_s += wait.duration_s
            kept_j = power.at(before_mhz) * wait.duration_s
            in_force_j += kept_j
            found = lowered_wait(wait, before_mhz, after_mhz, power, constant_latency(0.0), WaitRules())
            if found is None:
                lowered_j += kept_j
            else:
                lowered.append(found)
                lowered_j += power.least_w * wait.duration_s
    return PlannedWaits(in_force_j, lowered_j, total_s, tuple(lowered))


def lowered_waits(
    graph: DependencyGraph,
    profile: PipelineProfile,
    planned: Timeline,
    changes: tuple[tuple[ClockChange, ...], ...],
    simulated: SimulatedIteration,
    *,
    latency: Latency,
) -> tuple[tuple[tuple[ClockChange, ...], ...], SimulatedIteration, tuple[LoweredWait, ...]]:
    """Return changes, simulated iteration and lowered waits; unchanged and without waits if lowering costs time.

    An instruction that begins earlier than planned would find its clock still low, so several margins are tried.
    """
    assert profile.waiting_power is not None
    best: tuple[tuple[tuple[ClockChange, ...], ...], SimulatedIteration, tuple[LoweredWait, ...]]
    best = changes, simulated, ()
    for margin_ratio in MARGIN_RATIOS:
        with_waits, lowered = with_lowered_waits(
            planned, changes, profile.waiting_power, latency=latency, rules=WaitRules(margin_ratio)
        )
        again = simulate_switching(graph, profile, with_waits, latency=latency)
        is_late = again.iteration_time_s > simulated.iteration_time_s * (1 + _ROUNDING)
        if not is_late and again.energy_j < best[1].energy_j:
            best = with_waits, again, lowered
    return best


def naive_changes(
    graph: DependencyGraph, sm_clocks_mhz: Mapping[Instruction, int]
) -> tuple[tuple[ClockChange, ...], ...]:
    """Return, per rank, a change at the start of each instruction whose clock differs; each is late by its latency."""
    changes: list[list[ClockChange]] = [[] for _ in range(graph.num_ranks)]
    for instruction in graph.instructions:
        rank_changes = changes[instruction.pp_rank]
        if not rank_changes or rank_changes[-1].sm_clock_mhz != sm_clocks_mhz[instruction]:
            rank_changes.append(ClockChange(instruction, 0.0, sm_clocks_mhz[instruction]))
    return tuple(tuple(rank_changes) for rank_changes in changes)
