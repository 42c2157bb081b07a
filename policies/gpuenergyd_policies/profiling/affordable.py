"""Fits a design point into what the job's time account can pay: in instructions that wait anyway, it costs nothing.

Theory of operation. Clocks are lowered kind by kind, in turns that begin with another rank in each iteration, and each
turn may use its share of what is affordable in the worst case. Of a kind, those instructions come first that wait
longest at full speed; as many are lowered as can be paid. If not even one can, a milder level is tried.
"""

from collections.abc import Callable, Collection

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, dependency_graph
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.pipeline.worst_case import ClockTimes, RankSpeed, WorstCase
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.profiling.design import DesignPoint

_SPENT_RATIO = 0.25
"""Share of what is affordable that one design point may cost: later ones are to be affordable, too."""

PlanOfPoint = Callable[[DesignPoint, Collection[Instruction]], ClockPlan]
"""Returns the plan of a point, with some instructions at the highest level."""


def affordable_plan(
    view: JobView, point: DesignPoint, plan_of: PlanOfPoint, *, first_turn: int, held_ranks: Collection[int] = ()
) -> ClockPlan:
    """Return the plan of a design point, as far as it can be paid; all of it if nothing limits what it may cost."""
    whole = plan_of(point, ())
    worst = worst_case_of(view)
    if view.affordable_s is None or worst.extra_s(whole) <= _SPENT_RATIO * view.affordable_s:
        return whole
    queues = _by_slack(worst)
    if queues is None:
        return whole
    turns = [(rank, kind) for rank, levels in enumerate(point.levels) for kind in levels]
    turns = turns[first_turn % len(turns) :] + turns[: first_turn % len(turns)]
    levels = [dict.fromkeys(own, 0) for own in point.levels]
    fast: set[Instruction] = set()
    for turn, (rank, kind) in enumerate(turns, 1):
        limit_s = _SPENT_RATIO * view.affordable_s * turn / len(turns)
        queue = queues[rank, kind]

        def cost_s(level: int, num_lowered: int) -> float:
            levels[rank][kind] = level  # noqa: B023  called in this turn only
            kept = fast.union(queue[num_lowered:])  # noqa: B023
            return worst.extra_s(plan_of(DesignPoint(tuple(levels)), kept))

        fewest = len(queue) if rank in held_ranks else 1
        wanted = point.levels[rank][kind]
        level = next((k for k in range(wanted, 0, -1) if cost_s(k, fewest) <= limit_s), 0)
        levels[rank][kind] = level
        if level:
            fast.update(queue[_most_lowered(lambda n: cost_s(level, n) <= limit_s, fewest, len(queue)) :])  # noqa: B023
            levels[rank][kind] = level
    return plan_of(DesignPoint(tuple(levels)), fast)


def worst_case_of(view: JobView) -> WorstCase:
    """Return what plans may cost a job in the worst case, from what it has measured."""
    times = ClockTimes()
    purposes = {plan.plan_id: plan.purpose for plan in view.issued_plans}
    for seen in view.observations:
        if seen.is_regular:
            is_full_speed = purposes.get(seen.plan_id or "", PlanPurpose.BASELINE) is PlanPurpose.BASELINE
            times.add(seen, is_full_speed=is_full_speed)
    ranks = tuple(
        RankSpeed(max(gpu.supported_sm_clocks_mhz), gpu.switch_latency_s, (gpu.power_limit_range_w or (0.0, None))[1])
        for gpu in view.gpus
    )
    return WorstCase(dependency_graph(view.schedule), times, ranks, view.baseline.iteration_time_s)


def _by_slack(worst: WorstCase) -> dict[tuple[int, InstructionKind], list[Instruction]] | None:
    """Return the instructions of each kind on each rank, those that wait longest first; None without their times."""
    graph = worst.graph
    times_s = [worst.times.full_speed_s(own) for own in graph.classes]
    if None in times_s:
        return None
    spans = timeline(graph, [times_s[k] or 0.0 for k in graph.class_of]).spans
    queues: dict[tuple[int, InstructionKind], list[Instruction]] = {}
    for span in sorted(spans, key=lambda own: -own.slack_s):
        queues.setdefault((span.instruction.pp_rank, span.instruction.kind), []).append(span.instruction)
    return queues


def _most_lowered(is_affordable: Callable[[int], bool], fewest: int, most: int) -> int:
    """Return the largest number that is affordable, which `fewest` is, by bisection."""
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if is_affordable(middle):
            fewest = middle
        else:
            most = middle - 1
    return fewest
