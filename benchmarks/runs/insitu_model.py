"""Model of one published iteration for replay_insitu.py: our timeline and energy, and what they leave out.

Left out by the timeline are communication, loading of microbatches, and the optimizer step: `Overhead`, a time per
iteration and one per microbatch, in which GPUs wait. Left out by an energy per clock is the board's power limit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile
from gpuenergyd.core.pipeline.timeline import Span, Timeline, timeline

BLOCKING_POWER_W = {"A100": 83.64, "A40": 70.38}
"""Power of a waiting GPU, measured by the authors of the trainings (SOSP'24)."""
POWER_LIMIT_W = {"A100": 300.0, "A40": 300.0}
"""Board power limits of A100 PCIe 80 GB and A40 by NVIDIA's data sheets."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Time that the timeline leaves out, in seconds per iteration and per microbatch."""

    per_iteration_s: float = 0.0
    per_microbatch_s: float = 0.0

    def of(self, num_microbatches: int) -> float:
        """Return the seconds of one iteration."""
        return self.per_iteration_s + self.per_microbatch_s * num_microbatches


@dataclass(frozen=True, slots=True)
class KnownOverhead:
    """The overhead of a training that has run: seconds in an iteration, of iterations that take `iteration_time_s`."""

    num_microbatches: int
    overhead_s: float
    iteration_time_s: float


def learned_overhead(known: Sequence[KnownOverhead]) -> Overhead:
    """Return the overhead with the least sum of absolute errors relative to the iterations; none without trainings.

    Neither part is negative. A least absolute deviation passes through one training per free parameter, so that all
    candidates can be compared; one training that is unlike the others does not move it.
    """
    return min(_candidates(known), key=lambda overhead: _error(overhead, known), default=Overhead())


def _candidates(known: Sequence[KnownOverhead]) -> Iterator[Overhead]:
    for a in known:
        yield Overhead(per_iteration_s=max(0.0, a.overhead_s))
        yield Overhead(per_microbatch_s=max(0.0, a.overhead_s) / a.num_microbatches)
    for a, b in combinations(known, 2):
        if a.num_microbatches != b.num_microbatches:
            slope_s = (b.overhead_s - a.overhead_s) / (b.num_microbatches - a.num_microbatches)
            rest_s = a.overhead_s - slope_s * a.num_microbatches
            if slope_s >= 0 and rest_s >= 0:
                yield Overhead(rest_s, slope_s)


def _error(overhead: Overhead, known: Sequence[KnownOverhead]) -> float:
    return sum(abs(overhead.of(own.num_microbatches) - own.overhead_s) / own.iteration_time_s for own in known)


@dataclass(frozen=True, slots=True)
class PredictedIteration:
    """Predicted time of one iteration in seconds and energy of each GPU in joules."""

    time_s: float
    rank_energies_j: tuple[float, ...]

    @property
    def energy_j(self) -> float:
        """Energy of all GPUs."""
        return sum(self.rank_energies_j)


@dataclass(frozen=True, slots=True)
class PlannedIteration:
    """One iteration under given clocks: its timeline and the options that its instructions ran at."""

    planned: Timeline
    options: tuple[ClockOption, ...]
    num_interpolated: int
    """Instructions at a clock that was not measured."""

    def predicted(
        self, *, overhead_s: float, num_microbatches: int, blocking_power_w: float, power_limit_w: float | None
    ) -> PredictedIteration:
        """Return time and energy with this overhead, and with or without a power limit per board."""
        time_s = self.planned.iteration_time_s + overhead_s
        energies_j = []
        first = 0
        for rank in range(self.planned.num_ranks):
            spans = self.planned.rank_spans(rank)
            own = self.options[first : first + len(spans)]
            first += len(spans)
            waiting_j = blocking_power_w * (time_s - sum(span.duration_s for span in spans))
            energy_j = sum(option.energy_j for option in own) + waiting_j
            if power_limit_w is not None:
                per_pair_s = overhead_s / num_microbatches
                energy_j -= _above_limit_j(spans, own, self.planned, blocking_power_w, power_limit_w, per_pair_s)
            energies_j.append(energy_j)
        return PredictedIteration(time_s, tuple(energies_j))


def _above_limit_j(
    spans: Sequence[Span],
    options: Sequence[ClockOption],
    planned: Timeline,
    blocking_power_w: float,
    power_limit_w: float,
    per_pair_s: float,
) -> float:
    """Return the energy above the limit, over pairs of instructions with the waits after them.

    A board holds its mean power over some tenths of a second, about a forward with a backward; where the table's
    powers would exceed the limit, the clock drops, which the measured times contain and the fitted powers do not.
    """
    total_j = 0.0
    for first in range(0, len(spans), 2):
        pair = range(first, min(first + 2, len(spans)))
        end_s = spans[pair.stop].start_s if pair.stop < len(spans) else planned.iteration_time_s
        duration_s = end_s - spans[first].start_s + per_pair_s
        busy_s = sum(spans[k].duration_s for k in pair)
        used_j = sum(options[k].energy_j for k in pair) + blocking_power_w * (duration_s - busy_s)
        total_j += max(0.0, used_j - power_limit_w * duration_s)
    return total_j


def graph_of(num_stages: int, num_microbatches: int) -> DependencyGraph:
    """Return the graph of a plain 1F1B pipeline."""
    return dependency_graph(one_forward_one_backward(num_stages, num_microbatches))


def planned_iteration(
    graph: DependencyGraph, profile: PipelineProfile, clocks_mhz: Sequence[Sequence[int]]
) -> PlannedIteration:
    """Return the iteration in which stage s runs its k-th instruction at `clocks_mhz[s][k]`."""
    options, num_interpolated = [], 0
    for instruction, mhz in zip(graph.instructions, (mhz for own in clocks_mhz for mhz in own), strict=True):
        option = profile[instruction.instruction_class].interpolated(mhz)
        num_interpolated += option.sm_clock_mhz != mhz or option not in profile[instruction.instruction_class].options
        options.append(option)
    return PlannedIteration(timeline(graph, [o.time_s for o in options]), tuple(options), num_interpolated)
