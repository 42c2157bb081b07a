"""Jobs whose truth is a measured table: what an iteration under given clocks would have shown, and what it is worth."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from benchmarks.worlds.learning_tables import TrueTable
from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation, baseline, evaluate_clocks

TIME_NOISE_RATIO = 0.004
ENERGY_NOISE_RATIO = 0.02
CLOCK_STEP_MHZ = 15
NUM_BASELINE_ITERATIONS = 10
MAX_MICROBATCHES = 32


@dataclass(frozen=True)
class LearningJob:
    """A pipeline on a table, whose stages differ by a spread in time, power and slope; noise by a seed."""

    table: TrueTable
    seed: int
    stage_spread_ratio: float = 0.01

    @cached_property
    def truth(self) -> PipelineProfile:
        """The true profile."""
        draw = np.random.default_rng([self.seed, 1])
        off = draw.standard_normal((self.table.num_stages, 3)) * self.stage_spread_ratio
        classes = {}
        for key, own in self.table.profile.classes.items():
            time_off, power_off, tilt = off[key.pp_rank]
            top = own.at_max_clock.sm_clock_mhz
            options = []
            for option in own.options:
                slower = math.exp(time_off + tilt * math.log(top / option.sm_clock_mhz))
                energy_j = option.energy_j * slower * math.exp(power_off)
                options.append(ClockOption(option.sm_clock_mhz, option.time_s * slower, energy_j))
            classes[key] = InstructionProfile(tuple(options))
        return PipelineProfile(classes, self.table.profile.blocking_power_w)

    @cached_property
    def graph(self) -> DependencyGraph:
        """1F1B with the table's stages, and its microbatches up to 32, as more change no figure but the time."""
        microbatches = min(self.table.num_microbatches, MAX_MICROBATCHES)
        return dependency_graph(one_forward_one_backward(self.table.num_stages, microbatches))

    @cached_property
    def baseline(self) -> PlanEvaluation:
        """The iteration at full speed."""
        return baseline(self.graph, self.truth)

    def result(self, sm_clocks_mhz: Sequence[int]) -> PlanEvaluation:
        """Return time and energy of clocks, one per node of the graph."""
        return evaluate_clocks(self.graph, self.truth, sm_clocks_mhz)

    def regret_ratio(self, result: PlanEvaluation) -> float:
        """Return the energy above the best plan of equal time; a plan faster than full speed has full speed's time."""
        if result.iteration_time_s <= self.baseline.iteration_time_s:
            return result.energy_j / self.best_j - 1
        best_j = self._later_best_j.get(result.iteration_time_s)
        if best_j is None:
            best_j = solve(self.graph, self.truth, deadline_s=result.iteration_time_s).energy_j
            self._later_best_j[result.iteration_time_s] = best_j
        return result.energy_j / min(best_j, self.best_j) - 1

    @cached_property
    def _later_best_j(self) -> dict[float, float]:
        """Energy of the best plan by its time, of plans that were judged before."""
        return {}

    @cached_property
    def best_j(self) -> float:
        """Energy of the best plan as fast as full speed."""
        deadline_s = max(self.baseline.iteration_time_s, min_iteration_time_s(self.graph, self.truth))
        return solve(self.graph, self.truth, deadline_s=deadline_s).energy_j

    @cached_property
    def classes(self) -> tuple[ClassAtFullSpeed, ...]:
        """What the baseline shows: times with their noise, and SM clocks in steps of the GPU."""
        draw = np.random.default_rng([self.seed, 2])
        found = []
        for key, own in self.truth.classes.items():
            top = own.at_max_clock
            noise = TIME_NOISE_RATIO / math.sqrt(NUM_BASELINE_ITERATIONS) * draw.standard_normal()
            reading = CLOCK_STEP_MHZ * round(self.table.full_speed_mhz[key] / CLOCK_STEP_MHZ)
            clocks = tuple(o.sm_clock_mhz for o in own.options)
            full = float(min(top.sm_clock_mhz, reading))
            found.append(ClassAtFullSpeed(key, clocks, top.time_s * math.exp(noise), full))
        return tuple(found)

    @cached_property
    def classes_at_all_clocks(self) -> tuple[ClassAtFullSpeed, ...]:
        """The same with all clocks of the GPU, as in a live job; tables have some of its clocks for each class."""
        clocks = tuple(sorted({clock for own in self.classes for clock in own.clocks_mhz}, reverse=True))
        return tuple(replace(own, clocks_mhz=clocks) for own in self.classes)

    def observed(
        self, result: PlanEvaluation, plan_id: str, number: int, draw: np.random.Generator | None
    ) -> IterationObservation:
        """Return what one iteration under a plan shows; the error of a time is of its class and clock.

        Without `draw`, errors follow from the iteration's number, class and clock, so that other plans share them.
        """
        durations_s: dict[tuple[InstructionClass, int], list[float]] = defaultdict(list)
        for instruction, clock in zip(self.graph.instructions, result.sm_clocks_mhz, strict=True):
            key = instruction.instruction_class
            durations_s[key, clock].append(self.truth[key].at_clock(clock).time_s)
        samples = []
        for (key, clock), own in sorted(durations_s.items()):
            error = self._common_error(number, key, clock) if draw is None else draw.standard_normal()
            noisy_s = own[0] * math.exp(TIME_NOISE_RATIO * error)
            samples.append(
                InstructionSample(key.pp_rank, key.kind, (ClockShare(clock, noisy_s),), len(own), key.chunk_index)
            )
        ranks = []
        for rank in range(self.graph.num_ranks):
            mine = {entry: own for entry, own in durations_s.items() if entry[0].pp_rank == rank}
            waiting_s = result.iteration_time_s - sum(map(sum, mine.values()))
            energy_j = self.truth.blocking_power_w * waiting_s
            energy_j += sum(len(own) * self.truth[key].at_clock(clock).energy_j for (key, clock), own in mine.items())
            time_at = [TimeAtClock(None, self.classes[0].clocks_mhz[0], waiting_s)]
            time_at += [TimeAtClock(key.kind, clock, sum(own), key.chunk_index) for (key, clock), own in mine.items()]
            error = self._common_error(number, rank) if draw is None else draw.standard_normal()
            noisy_j = energy_j * math.exp(ENERGY_NOISE_RATIO * error)
            ranks.append(RankEnergy(rank, result.iteration_time_s, noisy_j, tuple(time_at)))
        return IterationObservation(number, plan_id, result.iteration_time_s, tuple(samples), tuple(ranks))

    def _common_error(self, number: int, of: InstructionClass | int, clock: int = 0) -> float:
        """Return a standard normal value that depends on nothing but the job's seed and these."""
        if isinstance(of, InstructionClass):
            words = [of.pp_rank, 1 + list(InstructionKind).index(of.kind), of.chunk_index, clock]
        else:
            words = [of, 0, 0, 0]
        return float(np.random.default_rng([self.seed, 7, number, *words]).standard_normal())
