"""One iteration of a pipeline across hosts, put together from what each rank's own daemon observed of it alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from gpuenergyd.core.observation import InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline import DependencyGraph, InstructionClass, InstructionKind
from gpuenergyd.core.timeline import makespan_s

Place = tuple[int, int]
"""Pipeline rank and tensor-parallel rank."""


def merge_parts(parts: Mapping[Place, IterationObservation]) -> IterationObservation:
    """Return the whole iteration, seen from the rank at (0, 0).

    Tensor-parallel ranks of a stage do every instruction together: it lasts as long as on the slowest of them, and
    costs what all of them spend. Waits between hosts are in the iteration's time, but in no figure of their own:
    instants of two hosts cannot be compared.
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
        is_regular=all(observation.is_regular for observation in parts.values()),
        launch_gap_s=first.launch_gap_s,
    )


def busy_s(whole: IterationObservation, graph: DependencyGraph) -> float | None:
    """Return how long the instructions take that an iteration showed, put into the pipeline's order without waits.

    None when an instruction of the pipeline was not seen.
    """
    times_s: dict[InstructionClass, list[float]] = defaultdict(list)
    for sample in whole.instruction_samples:
        key = InstructionClass(sample.pp_rank, sample.kind, sample.chunk_index)
        times_s[key] += [sample.time_s] * sample.count
    if not all(instruction.instruction_class in times_s for instruction in graph.instructions):
        return None
    return makespan_s(graph, [mean(times_s[i.instruction_class]) for i in graph.instructions])


def _slowest(pp_rank: int, members: Sequence[IterationObservation]) -> list[InstructionSample]:
    if len(members) == 1:
        return [replace(sample, pp_rank=pp_rank) for sample in members[0].instruction_samples]
    found: dict[tuple[InstructionKind, int, int], InstructionSample] = {}
    for sample in (s for member in members for s in member.instruction_samples):
        mostly_mhz = max(sample.shares, key=lambda share: share.time_s).sm_clock_mhz if sample.shares else 0
        key = (sample.kind, sample.chunk_index, mostly_mhz)
        if key not in found or sample.time_s > found[key].time_s:
            found[key] = replace(sample, pp_rank=pp_rank)
    return list(found.values())


def _energy(pp_rank: int, members: Sequence[IterationObservation]) -> RankEnergy:
    own = [observation.ranks[0] for observation in members]
    energies_j = [rank.energy_j for rank in own if rank.energy_j is not None]
    return replace(own[0], pp_rank=pp_rank, energy_j=sum(energies_j) if len(energies_j) == len(own) else None)
