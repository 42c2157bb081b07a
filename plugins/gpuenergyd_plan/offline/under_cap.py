"""Offline planning under a power cap, compared with the usual ways to stay below it."""

from collections.abc import Callable, Iterator

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflineRequest, PowerCap, PowerFigures
from gpuenergyd_plan.offline.capped_problem import CappedProblem
from gpuenergyd_policies.planning.plan_evaluation import baseline, rank_orders
from gpuenergyd_policies.planning.power_waves import wave_of


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
    for sm_clock_mhz in sorted({option.sm_clock_mhz for own in profile.classes.values() for option in own.options}):
        yield lambda own, sm_clock_mhz=sm_clock_mhz: own.interpolated(sm_clock_mhz)  # type: ignore[misc]


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
