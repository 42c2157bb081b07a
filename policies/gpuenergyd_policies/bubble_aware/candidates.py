"""Candidates for a tuned plan: clocks that may change at every instruction, and few segments of one clock each.

Where each call that sets a clock stops the work of its GPU, or a raise may come far too late, few changes may be best,
and one clock for the whole iteration costs no call. Of candidates of nearly the same energy, the one with the fewest
changes is taken: each change may be late, and changes on one host queue up.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.power_swing import PowerWave, band_energy_w2
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import Timeline, timeline
from gpuenergyd_policies.bubble_aware.flat_plans import flat_planner
from gpuenergyd_policies.bubble_aware.model import PipelineModel
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.planning.frontier import SolvedPlan, min_iteration_time_s, solve
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.power_waves import wave_of
from gpuenergyd_policies.planning.problem import Effort
from gpuenergyd_policies.planning.switching.dwell import with_longer_dwells
from gpuenergyd_policies.planning.switching.requests import clock_changes, expected_late_s
from gpuenergyd_policies.planning.switching.segments import SegmentedPlan, SegmentSearch
from gpuenergyd_policies.planning.switching.simulation import SimulatedIteration, simulate_switching

_Changes = tuple[tuple[ClockChange, ...], ...]
_Clocks = tuple[dict[Instruction, int], _Changes, Timeline]
"""Clocks, the changes that set them, and the timeline that these are tied to."""
_ROUNDS_WITH_PRICE = 3
ON_TIME_RATIO = 1e-4
"""Share of the deadline by which a plan may be late: rounding of the simulation."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Clocks, the clock changes that set them, and the simulated iteration with switch latencies."""

    clock_of: dict[Instruction, int]
    changes: _Changes
    simulated: SimulatedIteration
    """With typical latencies."""
    late_s: float
    """What rare long latencies are expected to add to its time."""
    planned: Timeline
    """The timeline that its changes are tied to."""

    @property
    def num_changes(self) -> int:
        """Clock changes in one iteration, all ranks."""
        return sum(len(own) for own in self.changes)

    @property
    def excess_of_calls(self) -> float:
        """How far it exceeds the limits of the driver's time and of the time between changes; at most 1 is permitted.

        A limit on time between changes is one on how often clocks may change.
        """
        driver_busy_ratio = self.simulated.driver_busy_s / self.simulated.iteration_time_s
        dwell_ratio = self.simulated.shortest_dwell_ratio
        excess_of_dwell = TUNING.min_dwell_ratio / dwell_ratio if dwell_ratio > 0 else math.inf
        return max(driver_busy_ratio / TUNING.max_driver_busy_ratio, excess_of_dwell)


def candidate_of(
    model: PipelineModel, clock_of: dict[Instruction, int], changes: _Changes, planned: Timeline
) -> Candidate:
    """Return clocks and their changes as a candidate: simulated on the model's profile."""
    simulated = simulate_switching(model.graph, model.profile, changes, latency=model.latencies)
    late_s = expected_late_s(changes, model.profile, model.latencies)
    return Candidate(clock_of, changes, simulated, late_s, planned)


def wave_of_clocks(model: PipelineModel, clock_of: Mapping[Instruction, int]) -> PowerWave:
    """Return the predicted power wave of all GPUs of a pipeline, each clock in effect in time."""
    instructions, profile = model.graph.instructions, model.profile
    return wave_of(model.graph, profile, [profile[i.instruction_class].at_clock(clock_of[i]) for i in instructions])


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates for one deadline: that of `solved`, which is the optimum without latencies, on the cautious profile.

    No plan for the deadline needs less than `lower_bound_j()`, which takes a while in large pipelines. If the iteration
    is forced to last as long as the deadline anyway, `is_forced`, waiting costs nothing extra.
    """

    model: PipelineModel
    cautious: PipelineProfile
    solved: SolvedPlan
    lower_bound_j: Callable[[], float]
    is_forced: bool
    search_share: float
    """Share of the usual search for segments."""
    is_flattest: bool = False
    """Whether of the candidates of nearly the least energy the one whose power swings least is wanted."""

    def best(self, max_segments: Sequence[int] | None = None) -> Candidate:
        """Return the candidate with the fewest clock changes, or the least swing, among those of nearly least energy.

        With `max_segments`, only plans with so many segments per rank and iteration are considered.
        """
        found = list(self._segmented(max_segments) if max_segments else self._all())
        if max_segments is None and all(c.excess_of_calls > 1.0 for c in found):
            found += self._segmented(TUNING.max_segments_of_many_calls)
        if self._needs_time_for_calls(found):
            found += self._segmented(max_segments or TUNING.max_segments_of_priced_calls, is_far=True)
        if not found:
            found = [candidate_of(self.model, *self._unlimited(self.solved.sm_clocks_mhz))]
        if max_segments is None:
            found += [merged for c in found if c.excess_of_calls > 1.0 for merged in self._with_longer_dwells(c)]
        least_excess = max(1.0, min(c.excess_of_calls for c in found))
        found = [c for c in found if c.excess_of_calls <= least_excess]
        max_late_s = max(TUNING.max_expected_late_ratio * self.solved.iteration_time_s, min(c.late_s for c in found))
        priced = [(self._price_j(c), c) for c in found if c.late_s <= max_late_s]
        least_j = min(price_j for price_j, _ in priced)
        good = [
            (c.num_changes, price_j, c)
            for price_j, c in priced
            if price_j <= (1 + TUNING.fewer_switches_ratio) * least_j
        ]
        if self.is_flattest:
            return min(good, key=lambda own: (band_energy_w2(wave_of_clocks(self.model, own[2].clock_of)), *own[:2]))[2]
        return min(good, key=lambda own: own[:2])[2]

    def _price_j(self, candidate: Candidate) -> float:
        """Return the energy of a candidate, and a price for its expected lateness."""
        mean_power_w = self.solved.energy_j / self.solved.iteration_time_s
        return candidate.simulated.energy_j + TUNING.price_of_lateness * mean_power_w * candidate.late_s

    @property
    def _have_calls_a_price(self) -> bool:
        return any(latency.stall_s or latency.excess_s for latency in self.model.latencies)

    def _latest_s(self, *, is_far: bool = False) -> float:
        """Return by when a plan with its calls has to be done.

        Calls on the critical path take time. Where no slowdown is permitted there is none, not even for a single call,
        and only full speed would be on time.
        """
        late_ratio = TUNING.far_late_of_calls_ratio if is_far else TUNING.late_after_long_ratio
        return self.solved.iteration_time_s * (1 + (late_ratio if self._have_calls_a_price else 0.0))

    def _needs_time_for_calls(self, found: Sequence[Candidate]) -> bool:
        """Return whether calls take more of what is saved without them than they leave."""
        if not self._have_calls_a_price or len(self.model.graph.instructions) > TOO_LARGE:
            return False
        full_speed_j = self.model.baseline_energy_j - self.model.bias_energy_j
        least_j = min((candidate.simulated.energy_j for candidate in found), default=full_speed_j)
        return least_j - self.solved.energy_j > full_speed_j - least_j

    def _all(self) -> Iterator[Candidate]:
        have_price = self._have_calls_a_price
        unlimited = self._unlimited_on_time() if have_price else self._unlimited(self.solved.sm_clocks_mhz)
        if unlimited is not None:
            yield candidate_of(self.model, *unlimited)
        if self.is_flattest and (flat := self._flat()) is not None:
            yield candidate_of(self.model, *flat)
        if len(self.model.graph.instructions) <= TOO_LARGE:  # else the search finds no plan in the time there is
            yield from self._segmented(TUNING.max_segments_of_priced_calls if have_price else TUNING.max_segments)

    def _flat(self) -> _Clocks | None:
        """Return the flattest clocks found in the solved plan's time; None if their changes would make them late."""
        graph, deadline_s = self.model.graph, self.solved.iteration_time_s
        if len(graph.instructions) > TOO_LARGE:
            return None
        flat = flat_planner().flat_plan(
            graph,
            self.cautious,
            self.solved,
            extra_energy_ratio=TUNING.flat_extra_ratio,
            search_steps=TUNING.flat_search_steps,
        )
        found = self._unlimited(flat.as_solved(self.solved).sm_clocks_mhz)
        return found if self._cautious_time_s(found[1]) <= (1 + ON_TIME_RATIO) * deadline_s else None

    def _segmented(self, max_segments: Sequence[int], *, is_far: bool = False) -> Iterator[Candidate]:
        """Return plans with few segments, until one is as good as any plan with more could be; see `_latest_s`."""
        search = SegmentSearch(self.model.graph, self.cautious, latency=self.model.latencies)
        for limit in sorted(max_segments):
            plan = search.best(
                self.solved,
                deadline_s=self._latest_s(is_far=is_far),
                max_segments=limit,
                forced=self.is_forced,
                steps=round(self.search_share * TUNING.segment_search_steps),
            )
            if plan is not None:
                yield (candidate := self._of_segments(plan))
                if candidate.simulated.energy_j <= (1 + TUNING.fewer_switches_ratio) * self.lower_bound_j():
                    return

    def _with_longer_dwells(self, candidate: Candidate) -> Iterator[Candidate]:
        """Return the plan with its short segments merged, as few as bring its calls within the limits; none if late."""
        graph, latencies = self.model.graph, self.model.latencies
        search = SegmentSearch(graph, self.cautious, latency=latencies)
        for factor in TUNING.merged_dwells:
            least_s = [factor * max(own.typical_raise_s or own.raise_s, own.lower_s) for own in latencies]
            plan = search.plan_at(with_longer_dwells(graph, self.cautious, candidate.clock_of, least_s))
            merged = self._of_segments(plan)
            is_on_time = plan.simulated.iteration_time_s <= (1 + ON_TIME_RATIO) * self.solved.iteration_time_s
            if merged.excess_of_calls <= 1.0 and is_on_time:
                yield merged
                return

    def _of_segments(self, plan: SegmentedPlan) -> Candidate:
        clock_of = dict(zip(self.model.graph.instructions, plan.sm_clocks_mhz, strict=True))
        return candidate_of(self.model, clock_of, plan.changes, plan.planned)

    def _unlimited(self, sm_clocks_mhz: Sequence[int]) -> _Clocks:
        """Return these clocks of all nodes, with a change wherever they differ."""
        graph = self.model.graph
        clock_of = dict(zip(graph.instructions, sm_clocks_mhz, strict=True))
        nodes = list(zip(graph.class_of, sm_clocks_mhz, strict=True))
        time_s = {(c, mhz): self.cautious[graph.classes[c]].interpolated(mhz).time_s for c, mhz in set(nodes)}
        planned = timeline(graph, [time_s[node] for node in nodes])
        changes = clock_changes(planned, clock_of, latency=self.model.latencies, profile=self.cautious)
        return clock_of, changes, planned

    def _cautious_time_s(self, changes: _Changes) -> float:
        """Return the iteration time on the profile with caution."""
        latencies = self.model.latencies
        return simulate_switching(self.model.graph, self.cautious, changes, latency=latencies).iteration_time_s

    def _unlimited_on_time(self) -> _Clocks | None:
        """Return clocks without a limit that meet the deadline with all calls; None if they cannot.

        The solver knows no price of calls. So it solves again for deadlines that leave more and more time for them.
        """
        graph, deadline_s, late_s, solved = self.model.graph, self._latest_s(), 0.0, self.solved
        for _ in range(_ROUNDS_WITH_PRICE):
            found = self._unlimited(solved.sm_clocks_mhz)
            over_s = self._cautious_time_s(found[1]) - deadline_s
            if over_s <= ON_TIME_RATIO * deadline_s:
                return found
            late_s += over_s
            earlier_s = max(deadline_s - late_s, min_iteration_time_s(graph, self.cautious))
            solved = solve(graph, self.cautious, deadline_s=earlier_s, forced=self.is_forced, effort=Effort.QUICK)
        return None
