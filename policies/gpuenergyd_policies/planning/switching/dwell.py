"""Keeps clocks in force long enough: short segments of a plan are merged into faster ones.

A plan that may change the clock at every instruction can change it more often than the driver or the GPU can follow.
Each segment that is too short is merged with the neighbour for which that costs least, at the higher clock of the two.
No instruction becomes slower, so the plan is not later than before, and there are fewer changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.profile import PipelineProfile


@dataclass(slots=True)
class _DwellSegment:
    """Successive instructions of a rank at one clock."""

    sm_clock_mhz: int
    instructions: list[Instruction]


def with_longer_dwells(
    graph: DependencyGraph, profile: PipelineProfile, clock_of: Mapping[Instruction, int], least_s: Sequence[float]
) -> dict[Instruction, int]:
    """Return clocks whose segments within an iteration last at least `least_s[r]` seconds on rank r.

    Durations are those of the instructions, without waits. The first and the last segment of a rank may be shorter,
    because they may continue in the iterations before and after.
    """
    merged: dict[Instruction, int] = {}
    for pp_rank in range(graph.num_ranks):
        own = [instruction for instruction in graph.instructions if instruction.pp_rank == pp_rank]
        for segment in _merge(_segments(own, clock_of), profile, least_s[pp_rank]):
            merged |= dict.fromkeys(segment.instructions, segment.sm_clock_mhz)
    return merged


def _segments(instructions: Sequence[Instruction], clock_of: Mapping[Instruction, int]) -> list[_DwellSegment]:
    segments: list[_DwellSegment] = []
    for instruction in instructions:
        clock_mhz = clock_of[instruction]
        if not segments or segments[-1].sm_clock_mhz != clock_mhz:
            segments.append(_DwellSegment(clock_mhz, []))
        segments[-1].instructions.append(instruction)
    return segments


def _merge(segments: list[_DwellSegment], profile: PipelineProfile, least_s: float) -> list[_DwellSegment]:
    """Merge the shortest inner segment until none is too short."""
    segments = list(segments)
    while len(segments) > 1:
        durations_s = [
            sum(profile[i.instruction_class].interpolated(segment.sm_clock_mhz).time_s for i in segment.instructions)
            for segment in segments[1:-1]
        ]
        if not durations_s or min(durations_s) >= least_s:
            break
        k = 1 + durations_s.index(min(durations_s))
        _merge_at(segments, min((k - 1, k), key=lambda left: _extra_energy_j(segments, left, profile)))
    return segments


def _merge_at(segments: list[_DwellSegment], left: int) -> None:
    """Merge a segment with the next one, and with further neighbours that then have the same clock."""
    one, other = segments[left], segments.pop(left + 1)
    one.sm_clock_mhz = max(one.sm_clock_mhz, other.sm_clock_mhz)
    one.instructions += other.instructions
    if left + 1 < len(segments) and segments[left + 1].sm_clock_mhz == one.sm_clock_mhz:
        one.instructions += segments.pop(left + 1).instructions
    if left > 0 and segments[left - 1].sm_clock_mhz == one.sm_clock_mhz:
        segments[left - 1].instructions += segments.pop(left).instructions


def _extra_energy_j(segments: Sequence[_DwellSegment], left: int, profile: PipelineProfile) -> float:
    """Return the energy added by a merge: some instructions run faster, and the rank then waits longer."""
    slower = min(segments[left], segments[left + 1], key=lambda segment: segment.sm_clock_mhz)
    clock_mhz = max(segments[left].sm_clock_mhz, segments[left + 1].sm_clock_mhz)
    waiting_w = profile.blocking_power_w
    return sum(
        profile[i.instruction_class].interpolated(clock_mhz).effective_energy_j(waiting_w)
        - profile[i.instruction_class].interpolated(slower.sm_clock_mhz).effective_energy_j(waiting_w)
        for i in slower.instructions
    )
