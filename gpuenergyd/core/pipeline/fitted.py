"""A running pipeline as fitted by a policy: profile, latencies and target, from which it can be planned again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    Instruction,
    InstructionClass,
    InstructionKind,
    Schedule,
    dependency_graph,
)
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.timeline import makespan_s


@dataclass(frozen=True, slots=True)
class FittedRow:
    """Time and energy of a class of instructions at one SM clock."""

    pp_rank: int
    kind: InstructionKind
    chunk_index: int
    sm_clock_mhz: int
    time_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class FittedPipeline:
    """Model of a job fitted by a policy; its times are those of the graph, to which `bias_s` is added."""

    schedule: Schedule
    """The order in which the ranks registered."""
    rows: tuple[FittedRow, ...]
    blocking_power_w: float
    communication_latency_s: float
    launch_gap_s: float
    epilogues_s: tuple[float, ...]
    """Time of each rank after its last instruction."""
    bias_s: float
    """Measured iteration time at full speed minus that of the graph."""
    target_time_s: float
    """Iteration time that is permitted now."""

    @property
    def profile(self) -> PipelineProfile:
        """The fitted profile; raises ProfileError if a fitted value is out of range."""
        options: dict[InstructionClass, list[ClockOption]] = {}
        for row in self.rows:
            key = InstructionClass(row.pp_rank, row.kind, row.chunk_index)
            options.setdefault(key, []).append(ClockOption(row.sm_clock_mhz, row.time_s, row.energy_j))
        classes = {key: instruction_profile(options[key], where=f"{key.kind}@{key.pp_rank}") for key in sorted(options)}
        return PipelineProfile(classes, self.blocking_power_w)

    def graph_of(self, schedule: Schedule) -> DependencyGraph:
        """Return the graph of the ranks' instructions in a given order, with the measured latencies.

        Raises:
            ScheduleError: the order cannot run.
        """
        graph = dependency_graph(
            schedule, communication_latency_s=self.communication_latency_s, launch_gap_s=self.launch_gap_s
        )
        return graph.with_epilogues(self.epilogues_s)

    @property
    def deadline_s(self) -> float:
        """The target as a time of the graph; at least that of full speed, so that it is possible."""
        profile, graph = self.profile, self.graph_of(self.schedule)
        fastest_s = makespan_s(graph, [profile[i.instruction_class].fastest.time_s for i in graph.instructions])
        return max(self.target_time_s - self.bias_s, fastest_s)


def fitted_rows(profile: PipelineProfile) -> tuple[FittedRow, ...]:
    return tuple(
        FittedRow(key.pp_rank, key.kind, key.chunk_index, option.sm_clock_mhz, option.time_s, option.energy_j)
        for key, curve in sorted(profile.classes.items())
        for option in curve.options
    )


def with_clocks(profile: PipelineProfile, sm_clocks_mhz: Mapping[Instruction, int]) -> PipelineProfile:
    """Return a profile that also has options at the clocks of these instructions, interpolated if necessary."""
    wanted: dict[InstructionClass, set[int]] = {}
    for instruction, clock_mhz in sm_clocks_mhz.items():
        wanted.setdefault(instruction.instruction_class, set()).add(clock_mhz)
    classes = {}
    for key, curve in profile.classes.items():
        missing = wanted.get(key, set()) - {option.sm_clock_mhz for option in curve.options}
        added = [replace(curve.interpolated(clock_mhz), sm_clock_mhz=clock_mhz) for clock_mhz in missing]
        options = sorted((*curve.options, *added), key=lambda option: -option.sm_clock_mhz)
        classes[key] = replace(curve, options=tuple(options))
    return replace(profile, classes=classes)
