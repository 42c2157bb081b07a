"""Merges the observations of single ranks, each from its own host's daemon, into one of the whole pipeline."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.timeline import makespan_s

MemberKey = tuple[int, int]
"""Pipeline rank and tensor-parallel rank of a pipeline member."""


def merge_observations(members: Mapping[MemberKey, IterationObservation]) -> IterationObservation:
    """Return the observation of the whole pipeline, timed by the member at (0, 0).

    Tensor-parallel ranks of a stage execute every instruction together: its duration is that of the slowest rank, its
    energy the sum. Waits between hosts are part of the iteration time but have no figure of their own, because instants
    of two hosts cannot be compared. The members' launch gaps are dropped: a single member cannot distinguish a wait for
    a neighbour from the time between two instructions, and a plan with such gaps requests raises too late.
    """
    first = members[0, 0]
    stages: dict[int, list[IterationObservation]] = defaultdict(list)
    for (pp_rank, _), observation in sorted(members.items()):
        stages[pp_rank].append(observation)
    plan_ids = {observation.plan_id for observation in members.values()}
    return IterationObservation(
        iteration_index=first.iteration_index,
        plan_id=plan_ids.pop() if len(plan_ids) == 1 else None,
        iteration_time_s=first.iteration_time_s,
        instruction_samples=tuple(s for pp_rank, ranks in stages.items() for s in _slowest(pp_rank, ranks)),
        ranks=tuple(_energy(pp_rank, ranks) for pp_rank, ranks in stages.items()),
        call_samples=tuple(
            replace(sample, instruction_class=replace(sample.instruction_class, pp_rank=pp_rank))
            for pp_rank, ranks in stages.items()
            for sample in ranks[0].call_samples
        ),
        turnarounds_s=tuple(_turnaround_s(ranks) for ranks in stages.values()),
        lead_s=first.lead_s,
        is_regular=all(observation.is_regular for observation in members.values()),
    )


def busy_s(
    whole: IterationObservation, graph: DependencyGraph, planned_mhz: Mapping[Instruction, int] | None = None
) -> float | None:
    """Return the iteration time of the observed instructions without waits; None if a class was not observed.

    Samples hold the mean time of a class at a clock, not of single instructions. Each instruction counts with the
    sample whose clock is nearest to its planned clock, or with the mean of its class without a plan.
    """
    samples_of: dict[InstructionClass, list[InstructionSample]] = defaultdict(list)
    for sample in whole.instruction_samples:
        samples_of[sample.instruction_class].append(sample)
    planned_mhz = planned_mhz or {}
    durations_s = []
    for instruction in graph.instructions:
        samples = samples_of.get(instruction.instruction_class)
        if not samples:
            return None
        wanted_mhz = planned_mhz.get(instruction)
        if wanted_mhz is None:
            durations_s.append(sum(s.time_s * s.count for s in samples) / sum(s.count for s in samples))
        else:
            durations_s.append(_at_nearest_clock(wanted_mhz, samples).time_s)
    return makespan_s(graph, durations_s)


def _at_nearest_clock(sm_clock_mhz: int, samples: Sequence[InstructionSample]) -> InstructionSample:
    return min(samples, key=lambda sample: abs(sample.main_share.sm_clock_mhz - sm_clock_mhz))


def _slowest(pp_rank: int, ranks: Sequence[IterationObservation]) -> list[InstructionSample]:
    if len(ranks) == 1:
        return [replace(sample, pp_rank=pp_rank) for sample in ranks[0].instruction_samples]
    found: dict[tuple[InstructionKind, int, int], InstructionSample] = {}
    for sample in (s for rank in ranks for s in rank.instruction_samples):
        key = (sample.kind, sample.chunk_index, sample.main_share.sm_clock_mhz)
        if key not in found or sample.time_s > found[key].time_s:
            found[key] = replace(sample, pp_rank=pp_rank)
    return list(found.values())


def _turnaround_s(ranks: Sequence[IterationObservation]) -> float | None:
    """Return the longest turnaround of a stage's ranks; None if one is unknown."""
    seen_s = [s for observation in ranks for s in observation.turnarounds_s[:1] if s is not None]
    return max(seen_s) if len(seen_s) == len(ranks) else None


def _energy(pp_rank: int, ranks: Sequence[IterationObservation]) -> RankEnergy:
    own = [observation.ranks[0] for observation in ranks]
    energies_j = [rank.energy_j for rank in own if rank.energy_j is not None]
    return replace(own[0], pp_rank=pp_rank, energy_j=sum(energies_j) if len(energies_j) == len(own) else None)
