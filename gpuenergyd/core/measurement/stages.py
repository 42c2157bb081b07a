"""Merges the reports of a pipeline stage's ranks: times of instructions, clocks, energy.

Tensor-, context- and expert-parallel ranks run each instruction together, and wait for each other inside it. A stage is
therefore as late as its latest rank and as slow as its slowest GPU, and its energy is that of all its GPUs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuenergyd.core.measurement.observation import CapReadings
from gpuenergyd.core.measurement.telemetry import (
    ClockIntervals,
    ClockRecord,
    EnergyEstimate,
    EnergyRecord,
    MeasuredInstruction,
    RankIteration,
)
from gpuenergyd.core.pipeline.graph import Instruction


def stage_iteration(reports: Sequence[RankIteration]) -> RankIteration:
    """Return the iteration of a stage from the reports of its ranks, which ran the same instructions.

    Each instruction has the times measured by the rank that ended it last. The stage begins, ends and begins its next
    iteration with its latest rank.
    """
    first = reports[0]
    if len(reports) == 1:
        return first
    latest: dict[Instruction, MeasuredInstruction] = {}
    for measured in (measured for report in reports for measured in report.instructions):
        known = latest.get(measured.instruction)
        if known is None or measured.end_ns > known.end_ns:
            latest[measured.instruction] = measured
    next_begins_ns = [report.next_begin_ns for report in reports]
    return replace(
        first,
        begin_ns=max(report.begin_ns for report in reports),
        end_ns=max(report.end_ns for report in reports),
        next_begin_ns=max(next_begins_ns) if all(next_begins_ns) else 0,
        instructions=_one_after_the_other(sorted(latest.values(), key=lambda measured: measured.end_ns)),
        launched_iteration_index=max(report.launched_iteration_index for report in reports),
        stage_rank=0,
        client_cost_s=max((rank.client_cost_s for rank in reports if rank.client_cost_s is not None), default=None),
    )


def stage_clocks(histories: Sequence[ClockRecord]) -> ClockRecord:
    """Return the clock of a stage over time: the lowest among its GPUs."""
    return histories[0] if len(histories) == 1 else StageClocks(tuple(histories))


def stage_energy(counters: Sequence[EnergyRecord]) -> EnergyRecord:
    """Return the energy of a stage: the sum over its GPUs."""
    return counters[0] if len(counters) == 1 else StageEnergy(tuple(counters))


@dataclass(frozen=True, slots=True)
class StageClocks:
    """The clock of a stage over time: the lowest among its GPUs, because each waits for the slowest."""

    gpus: tuple[ClockRecord, ...]

    def clocks_between(self, begin_ns: int, end_ns: int) -> ClockIntervals:
        of_gpus = [gpu.clocks_between(begin_ns, end_ns) for gpu in self.gpus]
        if all(len(intervals) == 1 for intervals in of_gpus):
            return ((min(intervals[0][0] for intervals in of_gpus), end_ns - begin_ns),) if begin_ns < end_ns else ()
        left = [list(reversed(intervals)) for intervals in of_gpus]
        merged: list[tuple[int, int]] = []
        while all(left):
            duration_ns = min(intervals[-1][1] for intervals in left)
            clock_mhz = min(intervals[-1][0] for intervals in left)
            if merged and merged[-1][0] == clock_mhz:
                merged[-1] = clock_mhz, merged[-1][1] + duration_ns
            else:
                merged.append((clock_mhz, duration_ns))
            for intervals in left:
                own_mhz, own_ns = intervals.pop()
                if own_ns > duration_ns:
                    intervals.append((own_mhz, own_ns - duration_ns))
        return merged

    def num_calls_between(self, begin_ns: int, end_ns: int) -> int:
        """Return how many changes of the stage's clock began: the maximum number of driver calls on any of its GPUs."""
        return max(gpu.num_calls_between(begin_ns, end_ns) for gpu in self.gpus)

    def cap_between(self, begin_ns: int, end_ns: int) -> CapReadings | None:
        """Return the readings of the slowest GPU that its power limit holds; without one, those of the first GPU."""
        known = [reading for gpu in self.gpus if (reading := gpu.cap_between(begin_ns, end_ns)) is not None]
        capped = [reading for reading in known if reading.num_capped]
        return min(capped, key=lambda reading: reading.capped_sm_clock_mhz) if capped else next(iter(known), None)


@dataclass(frozen=True, slots=True)
class StageEnergy:
    """The energy of a stage: the sum over its GPUs."""

    gpus: tuple[EnergyRecord, ...]

    def energy_j(self, begin_ns: int, end_ns: int) -> float | None:
        total_j = 0.0
        for gpu in self.gpus:
            energy_j = gpu.energy_j(begin_ns, end_ns)
            if energy_j is None:
                return None
            total_j += energy_j
        return total_j

    def estimate(self, begin_ns: int, end_ns: int) -> EnergyEstimate | None:
        known = [energy for gpu in self.gpus if (energy := gpu.estimate(begin_ns, end_ns)) is not None]
        if len(known) < len(self.gpus):
            return None
        total_j = sum(energy.energy_j for energy in known)
        return EnergyEstimate(
            total_j,
            total_j - math.hypot(*(energy.energy_j - energy.low_j for energy in known)),
            total_j + math.hypot(*(energy.high_j - energy.energy_j for energy in known)),
            is_estimated=any(energy.is_estimated for energy in known),
        )

    def phase(self, at_ns: int) -> tuple[float, float] | None:
        """Return period and phase of the first GPU's counter; errors of GPUs with other phases partly cancel."""
        return self.gpus[0].phase(at_ns)


def _one_after_the_other(measured: Sequence[MeasuredInstruction]) -> tuple[MeasuredInstruction, ...]:
    """Return instructions in order of their ends, each beginning only after the one before has ended."""
    in_order: list[MeasuredInstruction] = []
    for part in measured:
        begin_ns = max(part.begin_ns, in_order[-1].end_ns) if in_order else part.begin_ns
        in_order.append(part if begin_ns == part.begin_ns else replace(part, begin_ns=begin_ns))
    return tuple(in_order)
