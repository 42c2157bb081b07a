"""Merges observations of ranks on several hosts: tensor-parallel siblings into stages, stages into the pipeline."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.timeline import makespan_s

MemberKey = tuple[int, int]
"""Pipeline rank and tensor-parallel rank of a pipeline member."""


def merge_siblings(siblings: Sequence[IterationObservation]) -> IterationObservation:
    """Return one observation of the tensor-parallel ranks of a stage, which execute every instruction together.

    The duration of an instruction is that of the slowest rank, the energy is the sum. Merged observations can be merged
    again: siblings are merged on each host before they are sent, and again if a stage spans hosts.
    """
    first = siblings[0]
    if len(siblings) == 1:
        return first
    plan_ids = {observation.plan_id for observation in siblings}
    return replace(
        first,
        plan_id=plan_ids.pop() if len(plan_ids) == 1 else None,
        instruction_samples=_slowest(siblings),
        ranks=(_energy(siblings),),
        turnarounds_s=(_turnaround_s(siblings),),
        is_regular=all(observation.is_regular for observation in siblings),
    )


def merge_observations(stages: Sequence[IterationObservation]) -> IterationObservation:
    """Return the observation of the whole pipeline from one per stage, in order; the first gives the iteration time.

    Waits between hosts are part of the iteration time but are not given separately, because instants on two hosts
    cannot be compared. The stages' launch gaps are dropped: a stage cannot distinguish a wait for a neighbour from the
    time between two instructions, and a plan with such gaps would raise clocks too late.
    """
    first = stages[0]
    plan_ids = {observation.plan_id for observation in stages}
    return IterationObservation(
        iteration_index=first.iteration_index,
        plan_id=plan_ids.pop() if len(plan_ids) == 1 else None,
        iteration_time_s=first.iteration_time_s,
        instruction_samples=tuple(
            replace(sample, pp_rank=pp_rank)
            for pp_rank, stage in enumerate(stages)
            for sample in stage.instruction_samples
        ),
        ranks=tuple(replace(stage.ranks[0], pp_rank=pp_rank) for pp_rank, stage in enumerate(stages)),
        call_samples=tuple(
            replace(sample, instruction_class=replace(sample.instruction_class, pp_rank=pp_rank))
            for pp_rank, stage in enumerate(stages)
            for sample in stage.call_samples
        ),
        turnarounds_s=tuple(next(iter(stage.turnarounds_s), None) for stage in stages),
        lead_s=first.lead_s,
        is_regular=all(stage.is_regular for stage in stages),
    )


def busy_s(
    whole: IterationObservation, graph: DependencyGraph, planned_mhz: Sequence[int | None] | None = None
) -> float | None:
    """Return the iteration time of the observed instructions without waits; None if a class was not observed.

    Samples hold the mean time of a class at a clock, not of single instructions. Each instruction is given the time of
    the sample nearest to its planned clock, or the mean of its class if it has no planned clock.

    Args:
        whole: the merged observation.
        graph: the pipeline.
        planned_mhz: clocks in the graph's node order, None for an instruction without one.
    """
    samples_of: dict[InstructionClass, list[InstructionSample]] = defaultdict(list)
    for sample in whole.instruction_samples:
        samples_of[sample.instruction_class].append(sample)
    samples = [samples_of.get(key) for key in graph.classes]
    if not all(samples):
        return None
    known = [sample for sample in samples if sample is not None]
    if planned_mhz is None:
        mean_s = [_mean_s(sample) for sample in known]
        return makespan_s(graph, [mean_s[key] for key in graph.class_of])
    planned = list(zip(graph.class_of, planned_mhz, strict=True))
    time_s = {(key, mhz): _time_s(known[key], mhz) for key, mhz in set(planned)}
    return makespan_s(graph, [time_s[slot] for slot in planned])


def _mean_s(samples: Sequence[InstructionSample]) -> float:
    return sum(s.time_s * s.count for s in samples) / sum(s.count for s in samples)


def _time_s(samples: Sequence[InstructionSample], sm_clock_mhz: int | None) -> float:
    return _mean_s(samples) if sm_clock_mhz is None else _at_nearest_clock(sm_clock_mhz, samples).time_s


def _at_nearest_clock(sm_clock_mhz: int, samples: Sequence[InstructionSample]) -> InstructionSample:
    return min(samples, key=lambda sample: abs(sample.main_share.sm_clock_mhz - sm_clock_mhz))


def _slowest(siblings: Sequence[IterationObservation]) -> tuple[InstructionSample, ...]:
    found: dict[tuple[InstructionKind, int, int], InstructionSample] = {}
    for sample in (s for observation in siblings for s in observation.instruction_samples):
        key = (sample.kind, sample.chunk_index, sample.main_share.sm_clock_mhz)
        if key not in found or sample.time_s > found[key].time_s:
            found[key] = sample
    return tuple(found.values())


def _turnaround_s(siblings: Sequence[IterationObservation]) -> float | None:
    """Return the longest turnaround of a stage's ranks; None if one is unknown."""
    seen_s = [s for observation in siblings for s in observation.turnarounds_s[:1] if s is not None]
    return max(seen_s) if len(seen_s) == len(siblings) else None


def _energy(siblings: Sequence[IterationObservation]) -> RankEnergy:
    own = [observation.ranks[0] for observation in siblings]
    energies_j = [rank.energy_j for rank in own if rank.energy_j is not None]
    return replace(own[0], energy_j=sum(energies_j) if len(energies_j) == len(own) else None)
