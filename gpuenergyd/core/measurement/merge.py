"""One iteration of a pipeline across hosts, put together from what each rank's own daemon observed of it alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.timeline import makespan_s

Place = tuple[int, int]
"""Pipeline rank and tensor-parallel rank."""


def merge_observations(parts: Mapping[Place, IterationObservation]) -> IterationObservation:
    """Return the whole iteration, seen from the rank at (0, 0).

    Tensor-parallel ranks of a stage do every instruction together: it lasts as long as on the slowest of them, and
    costs what all of them spend. Waits between hosts are in the iteration's time, but in no figure of their own:
    instants of two hosts cannot be compared. What a part takes for its launch gap is one of those waits: alone, it
    cannot tell a wait for a neighbour from the time between two instructions. Nothing of it counts here: planned for
    as if it came between every two instructions, it moved every raise of a clock too late.
    """
    first = parts[0, 0]
    stages: dict[int, list[IterationObservation]] = defaultdict(list)
    for (pp_rank, _), observation in sorted(parts.items()):
        stages[pp_rank].append(observation)
    plan_ids = {observation.plan_id for observation in parts.values()}
    return IterationObservation(
        iteration_index=first.iteration_index,
        plan_id=plan_ids.pop() if len(plan_ids) == 1 else None,
        iteration_time_s=first.iteration_time_s,
        instruction_samples=tuple(s for pp_rank, members in stages.items() for s in _slowest(pp_rank, members)),
        ranks=tuple(_energy(pp_rank, members) for pp_rank, members in stages.items()),
        turnarounds_s=tuple(_turnaround_s(members) for members in stages.values()),
        lead_s=first.lead_s,
        is_regular=all(observation.is_regular for observation in parts.values()),
    )


def busy_s(
    whole: IterationObservation, graph: DependencyGraph, planned_mhz: Mapping[Instruction, int] | None = None
) -> float | None:
    """Return how long the instructions take that an iteration showed, put into the pipeline's order without waits.

    Samples say how long instructions of a class took at a clock, and not which of them: each counts as those did whose
    clock is next to the one that was planned for it, without a plan as their mean. None when an instruction of the
    pipeline was not seen.
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
            durations_s.append(_next_to(wanted_mhz, samples).time_s)
    return makespan_s(graph, durations_s)


def _next_to(sm_clock_mhz: int, samples: Sequence[InstructionSample]) -> InstructionSample:
    return min(samples, key=lambda sample: abs(sample.main_share.sm_clock_mhz - sm_clock_mhz))


def _slowest(pp_rank: int, members: Sequence[IterationObservation]) -> list[InstructionSample]:
    if len(members) == 1:
        return [replace(sample, pp_rank=pp_rank) for sample in members[0].instruction_samples]
    found: dict[tuple[InstructionKind, int, int], InstructionSample] = {}
    for sample in (s for member in members for s in member.instruction_samples):
        key = (sample.kind, sample.chunk_index, sample.main_share.sm_clock_mhz)
        if key not in found or sample.time_s > found[key].time_s:
            found[key] = replace(sample, pp_rank=pp_rank)
    return list(found.values())


def _turnaround_s(members: Sequence[IterationObservation]) -> float | None:
    """Return the turnaround of the last of a stage's ranks, each of which observed itself alone."""
    seen_s = [s for observation in members for s in observation.turnarounds_s[:1] if s is not None]
    return max(seen_s) if len(seen_s) == len(members) else None


def _energy(pp_rank: int, members: Sequence[IterationObservation]) -> RankEnergy:
    own = [observation.ranks[0] for observation in members]
    energies_j = [rank.energy_j for rank in own if rank.energy_j is not None]
    return replace(own[0], pp_rank=pp_rank, energy_j=sum(energies_j) if len(energies_j) == len(own) else None)
