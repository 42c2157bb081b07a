"""Power waves of plans: the power of all GPUs of a pipeline over an iteration, from the clocks of its instructions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.power_swing import PowerWave, power_wave
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd_policies.planning.frontier import SolvedPlan


@dataclass(frozen=True, slots=True)
class WavePlan:
    """Clock options of every node with their power wave."""

    options: tuple[ClockOption, ...]
    wave: PowerWave

    @classmethod
    def of(cls, graph: DependencyGraph, profile: PipelineProfile, options: Iterable[ClockOption]) -> "WavePlan":
        chosen = tuple(options)
        return cls(chosen, wave_of(graph, profile, chosen))

    @property
    def iteration_time_s(self) -> float:
        return self.wave.iteration_time_s

    def as_solved(self, solved: SolvedPlan) -> SolvedPlan:
        """Return this plan as if a solver had found it for the same deadline, with the same bound."""
        return replace(
            solved,
            sm_clocks_mhz=tuple(option.sm_clock_mhz for option in self.options),
            durations_s=tuple(option.time_s for option in self.options),
            energies_j=tuple(option.energy_j for option in self.options),
            iteration_time_s=self.wave.iteration_time_s,
            energy_j=self.wave.energy_j,
        )


def wave_of(graph: DependencyGraph, profile: PipelineProfile, options: Sequence[ClockOption]) -> PowerWave:
    """Return the power wave of an iteration whose node i runs with the i-th option as early as possible."""
    planned = timeline(graph, [option.time_s for option in options])
    return power_wave(planned, [mean_power_w(option) for option in options], profile.blocking_power_w)


def mean_power_w(option: ClockOption) -> float:
    return option.energy_j / option.time_s


def fast_to_frugal(options: Sequence[ClockOption]) -> tuple[ClockOption, ...]:
    """Return the options that no other option beats in both time and power, fastest first."""
    kept: list[ClockOption] = []
    for option in sorted(options, key=lambda o: (o.time_s, mean_power_w(o))):
        if not kept or mean_power_w(option) < mean_power_w(kept[-1]):
            kept.append(option)
    return tuple(kept)
