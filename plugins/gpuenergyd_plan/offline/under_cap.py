"""Offline planning under a power cap: the fastest plan, a proven bound on its time, and the usual ways to stay below.

Theory of operation: the plans of the time-energy frontier already need less power than full speed, because whatever is
off the critical path runs slower. Each of them serves as a guide: instructions start as soon as they can, at the
guide's clock or the fastest lower one within the remaining power (`fitting_kernels.fit`). The best results are then
improved by local search. A cap on mean power over a window permits higher instantaneous power, found by bisection.

Bound: in an iteration of length T the GPUs use at most cap * T, and no plan of length T needs less than the energy
frontier's bound at T. That bound minus cap * T falls as T grows, because waiting itself must fit under the cap. So no
plan is faster than the T at which the difference becomes zero, nor than the critical path at full speed.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflineRequest, PowerCap, PowerFigures
from gpuenergyd.errors import TargetError
from gpuenergyd_plan.flat.plan import flat_plan
from gpuenergyd_plan.offline.fitting_kernels import CappedGraph, Fitting, PowerOptions, fit, improve
from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.frontier import Effort, SolvedPlan, solve
from gpuenergyd_policies.planning.plan_evaluation import baseline, rank_orders
from gpuenergyd_policies.planning.power_waves import WavePlan, fast_to_frugal, mean_power_w, wave_of

_SLOWDOWN_RATIOS = (0.0, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.17, 0.22, 0.3)
"""Slowdowns of the frontier plans tried as guides."""
_NUM_IMPROVED = 3
"""Number of guides improved by local search."""
SEARCH_STEPS = 60_000_000
"""Instructions placed by the local search for one plan; at most a few CPU seconds."""
_MAX_MOVES = 40_000
_WINDOW_TRIALS = 8
_BOUND_STEPS = 24
_SAME_RATIO = 1e-9
_SEED = 1


def plan_under_cap(request: OfflineRequest, cap: PowerCap) -> OfflinePlan:
    """Return the fastest plan found under a power cap, ignoring the request's target.

    Raises:
        TargetError: no plan needs so little power; the message names the lowest possible cap.
    """
    graph, profile = request.graph, request.profile
    problem = CappedProblem(graph, profile)
    found = problem.plan(cap.power_w, window_s=cap.window_s)
    reference, own = baseline(request.baseline_graph, profile), baseline(graph, profile)
    return OfflinePlan(
        orders=rank_orders(graph),
        sm_clocks_mhz={i: option.sm_clock_mhz for i, option in zip(graph.instructions, found.options, strict=True)},
        baseline_time_s=reference.iteration_time_s,
        baseline_energy_j=reference.energy_j,
        iteration_time_s=found.iteration_time_s,
        energy_j=found.wave.energy_j,
        lower_bound_j=problem.energy_bound_j(found.iteration_time_s),
        solve_cpu_s=0.0,
        own_order_time_s=own.iteration_time_s,
        own_order_energy_j=own.energy_j,
        stage_of_chunk=() if request.schedule is None else request.schedule.stage_of_chunk,
        power=PowerFigures(
            cap=cap,
            peak_w=found.wave.peak_mean_w(cap.window_s),
            mean_w=found.wave.mean_w,
            full_speed_peak_w=problem.full_speed.wave.peak_mean_w(cap.window_s),
            time_bound_s=problem.time_bound_s(cap.power_w),
            single_clock_time_s=_least_time_s(graph, profile, cap, _single_clocks(profile)),
            equal_limits_time_s=_least_time_s(graph, profile, cap, _equal_limits(graph, cap)),
        ),
    )


_Choice = Callable[[InstructionProfile], ClockOption | None]


def _single_clocks(profile: PipelineProfile) -> Iterator[_Choice]:
    """Yield, for each measured clock, the choice of that clock; classes not measured there are interpolated."""
    for sm_clock_mhz in sorted({option.sm_clock_mhz for curve in profile.classes.values() for option in curve.options}):
        yield lambda curve, sm_clock_mhz=sm_clock_mhz: curve.interpolated(sm_clock_mhz)  # type: ignore[misc]


def _equal_limits(graph: DependencyGraph, cap: PowerCap) -> Iterator[_Choice]:
    """Yield the choice of the fastest clock within an equal share of the cap for each GPU."""
    share_w = cap.power_w / graph.num_ranks

    def choose(own: InstructionProfile) -> ClockOption | None:
        fitting = [option for option in own.options if option.energy_j <= share_w * option.time_s]
        return min(fitting, key=lambda option: (option.time_s, option.energy_j), default=None)

    yield choose


def _least_time_s(
    graph: DependencyGraph, profile: PipelineProfile, cap: PowerCap, choices: Iterator[_Choice]
) -> float | None:
    """Return the shortest iteration time among these choices that stay within the cap."""
    times_s = []
    for choose in choices:
        chosen = {key: choose(profile[key]) for key in graph.classes}
        options = [chosen[graph.classes[number]] for number in graph.class_of]
        fitting = [option for option in options if option is not None]
        if len(fitting) == len(options):
            wave = wave_of(graph, profile, fitting)
            if wave.peak_mean_w(cap.window_s) <= cap.power_w:
                times_s.append(wave.iteration_time_s)
    return min(times_s, default=None)


class CappedProblem:
    """One pipeline under power caps."""

    def __init__(self, graph: DependencyGraph, profile: PipelineProfile, *, search_steps: int = SEARCH_STEPS) -> None:
        self.graph, self.profile, self._search_steps = graph, profile, search_steps
        by_class = {key: fast_to_frugal(profile[key].options) for key in graph.classes}
        self._options = [by_class[graph.classes[number]] for number in graph.class_of]
        self._nodes = _by_rank(graph)
        self._arrays = self._graph_arrays()
        self._tables = self._option_arrays()
        n, num_ranks = len(self._nodes), graph.num_ranks
        zeros = np.zeros(n, dtype=np.int64)
        self._work = Fitting(
            choice=ints(zeros),
            missing=ints(zeros),
            ready=floats(np.zeros(n)),
            at=ints(np.zeros(num_ranks, dtype=np.int64)),
            finish=floats(np.zeros(num_ranks)),
            base=floats(np.zeros(num_ranks)),
        )
        self.full_speed = self._plan([0] * n)
        """Every instruction at its fastest clock, without a cap."""
        self._frugal = self._plan([len(self._options[node]) - 1 for node in self._nodes])
        self._guides: dict[float, SolvedPlan] = {}

    @property
    def least_cap_w(self) -> float:
        """The lowest instantaneous cap under which a plan is found."""
        floors_w = [self._tables.floor[first] for first in self._arrays.first[:-1]]
        return min(float(sum(floors_w)), self._frugal.wave.peak_w)

    def plan(self, cap_w: float, *, window_s: float = 0.0) -> WavePlan:
        """Return the fastest plan found under a cap, and the cheapest if tied.

        The cap limits the total mean power of all GPUs over every window, or at every instant if `window_s` is 0.

        Raises:
            TargetError: no plan needs so little power; the message names the lowest possible cap.
        """
        least_w = min(self.least_cap_w, self._frugal.wave.peak_mean_w(window_s))
        if least_w > cap_w * (1 + _SAME_RATIO):
            raise TargetError(
                f"power cap {cap_w:g} W cannot be met: with every GPU at its clock of least power the pipeline needs"
                f" {least_w:.5g} W"
            )
        cap = PowerCap(cap_w, window_s)
        best = min(self._found(cap, cap_w, self._search_steps), key=_rank)
        if window_s <= 0:
            return best
        # The instantaneous cap that meets the window's cap lies between that cap and the peak at full speed.
        low_w, high_w = cap_w, max(cap_w, self.full_speed.wave.peak_w)
        rough = min(self._found(cap, cap_w, 0), key=_rank)
        for _ in range(_WINDOW_TRIALS):
            middle_w = 0.5 * (low_w + high_w)
            found = self._found(cap, middle_w, 0)
            if found and min(found, key=_rank).iteration_time_s <= rough.iteration_time_s:
                low_w, rough = middle_w, min(rough, *found, key=_rank)
            else:
                high_w = middle_w
        return min(best, rough, *self._found(cap, low_w, self._search_steps), key=_rank)

    def time_bound_s(self, cap_w: float) -> float:
        """Return a proven lower bound on the iteration time of any plan under a cap, for any window."""
        fastest_s = self._solved(0.0).min_time_s
        slowest_s = max(self._frugal.iteration_time_s, self._solved(0.0).slowest_time_s)
        if self.energy_bound_j(fastest_s) <= cap_w * fastest_s:
            return fastest_s
        low_s, high_s = fastest_s, slowest_s
        for _ in range(_BOUND_STEPS):
            middle_s = 0.5 * (low_s + high_s)
            if self.energy_bound_j(middle_s) > cap_w * middle_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return low_s

    def _found(self, cap: PowerCap, instant_w: float, search_steps: int) -> list[WavePlan]:
        """Return plans that meet the cap, made for an instantaneous cap; the best ones are improved by local search."""
        candidates, guides = [self._frugal], []
        floors_w = sum(self._tables.floor[first] for first in self._arrays.first[:-1])
        for ratio in _SLOWDOWN_RATIOS:
            guide = self._positions(self._solved(ratio))
            whole = self._plan(guide)
            candidates.append(whole)
            if floors_w <= instant_w:
                fitted = fit(self._arrays, self._tables, ints(guide), instant_w, self._work)
                guides.append((fitted, [int(position) for position in self._work.choice], guide))
            if _meets(whole, cap):
                break  # even slower plans would be slower under the cap too
        guides.sort(key=lambda one: one[0])
        for _, fitted_positions, guide in guides[:_NUM_IMPROVED]:
            candidates.append(self._plan(fitted_positions))
            if search_steps:
                candidates.append(self._plan(self._improved(guide, instant_w, search_steps // _NUM_IMPROVED)))
        return [plan for plan in candidates if _meets(plan, cap)]

    def _improved(self, guide: Sequence[int], instant_w: float, num_steps: int) -> list[int]:
        best = ints(guide)
        num_moves = min(_MAX_MOVES, num_steps // max(1, len(guide)))
        improve(self._arrays, self._tables, ints(guide), best, instant_w, self._work, num_moves, _SEED)
        return [int(position) for position in best]

    def _solved(self, slowdown_ratio: float) -> SolvedPlan:
        """Return the frontier plan at a slowdown relative to full speed."""
        if slowdown_ratio not in self._guides:
            deadline_s = self.full_speed.iteration_time_s * (1 + slowdown_ratio)
            self._guides[slowdown_ratio] = solve(
                self.graph, self.profile, deadline_s=deadline_s, forced=True, effort=Effort.QUICK
            )
        return self._guides[slowdown_ratio]

    def energy_bound_j(self, deadline_s: float) -> float:
        """Return a proven lower bound on the energy of any plan that meets a deadline, including waits up to it."""
        solved = solve(self.graph, self.profile, deadline_s=deadline_s, forced=True, effort=Effort.QUICK)
        idle_w = self.graph.num_ranks * self.profile.blocking_power_w
        return solved.lower_bound_j + idle_w * max(0.0, deadline_s - solved.iteration_time_s)

    def _plan(self, positions: Sequence[int]) -> WavePlan:
        """Return the plan with these options, which are listed by rank in program order."""
        options: list[ClockOption] = [self._options[0][0]] * len(self._nodes)
        for node, position in zip(self._nodes, positions, strict=True):
            options[node] = self._options[node][position]
        return WavePlan.of(self.graph, self.profile, options)

    def _positions(self, solved: SolvedPlan) -> list[int]:
        """Return, for each node, the fastest option that needs no more power than in the given plan."""
        found = []
        for node in self._nodes:
            power_w = solved.energies_j[node] / solved.durations_s[node]
            options = self._options[node]
            fitting = (k for k, option in enumerate(options) if mean_power_w(option) <= power_w * (1 + _SAME_RATIO))
            found.append(next(fitting, len(options) - 1))
        return found

    def _graph_arrays(self) -> CappedGraph:
        graph, nodes = self.graph, self._nodes
        position = np.empty(len(nodes), dtype=np.int64)
        position[nodes] = np.arange(len(nodes))
        after = [graph.successors[v] for v in nodes]
        lengths = np.bincount([graph.instructions[v].pp_rank for v in nodes], minlength=graph.num_ranks)
        spans = timeline(graph, [options[0].time_s for options in self._options])
        latest_s = [spans.iteration_time_s - span.slack_s - span.start_s for span in spans.spans]
        return CappedGraph(
            first=ints(np.concatenate(([0], np.cumsum(lengths)))),
            num_pred=ints([len(graph.predecessors[v]) for v in nodes]),
            succ=ints(np.cumsum([0] + [len(s) for s in after])),
            succ_node=ints(position[[v for s in after for v, _ in s]]),
            succ_latency=floats([latency for s in after for _, latency in s]),
            epilogue=floats([graph.epilogues_s[v] for v in nodes]),
            tail=floats([latest_s[v] for v in nodes]),
        )

    def _option_arrays(self) -> PowerOptions:
        options = [self._options[v] for v in self._nodes]
        blocking_w = self.profile.blocking_power_w
        floor, after = [0.0] * len(options), [0.0] * len(options)
        for first, end in zip(self._arrays.first[:-1], self._arrays.first[1:], strict=True):
            needed_w = blocking_w
            for k in reversed(range(int(first), int(end))):
                after[k] = needed_w
                needed_w = floor[k] = max(needed_w, mean_power_w(options[k][-1]))
        return PowerOptions(
            start=ints(np.cumsum([0] + [len(choices) for choices in options])),
            times=floats([option.time_s for choices in options for option in choices]),
            powers=floats([mean_power_w(option) for choices in options for option in choices]),
            energies=floats([option.energy_j for choices in options for option in choices]),
            floor=floats(floor),
            after=floats(after),
            blocking=blocking_w,
        )


def _meets(plan: WavePlan, cap: PowerCap) -> bool:
    return plan.wave.peak_mean_w(cap.window_s) <= cap.power_w * (1 + _SAME_RATIO)


def _rank(plan: WavePlan) -> tuple[float, float]:
    """Return the sort key of plans: time, then energy."""
    return plan.wave.iteration_time_s, plan.wave.energy_j


def _by_rank(graph: DependencyGraph) -> list[int]:
    """Return the nodes rank by rank in program order."""
    return sorted(range(len(graph.instructions)), key=lambda v: (graph.instructions[v].pp_rank, v))


def compile_kernels(graph: DependencyGraph, profile: PipelineProfile, solved: SolvedPlan) -> None:
    """Call every kernel of this plugin with a plan of a tiny pipeline, as an entry point of `gpuenergyd.kernels`."""
    flat_plan(graph, profile, solved, search_steps=100)
    CappedProblem(graph, profile, search_steps=100).plan(15.0)
