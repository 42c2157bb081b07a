"""Limits a profiling plan to what the job's time account can pay, by lowering instructions with slack first.

Theory of operation. Clocks are lowered kind by kind, in turns that begin with another rank in each iteration, and each
turn may use its share of what is affordable in the worst case. Of a kind, those instructions come first that wait
longest at full speed; as many are lowered as can be paid. If not even one can, a milder level is tried.
"""

from collections.abc import Callable, Collection

from gpuenergyd.core.measurement.worst_case import ClockTimes, RankSpeed, WorstCase
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, dependency_graph
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.timeline import timeline
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
    queues = _queues(worst, held_ranks, from_begin=first_turn % 2 == 0)
    if queues is None:
        return whole
    turns = list(queues)[first_turn % len(queues) :] + list(queues)[: first_turn % len(queues)]
    levels = [dict.fromkeys(own, 0) for own in point.levels]
    fast: set[Instruction] = set()
    for number, (rank, kinds) in enumerate(turns, 1):
        limit_s = _SPENT_RATIO * view.affordable_s * number / len(turns)
        queue = queues[rank, kinds]

        def cost_s(mildest: int, num_lowered: int) -> float:
            for kind in kinds:  # noqa: B023  called in this turn only
                levels[rank][kind] = min(mildest, point.levels[rank][kind])  # noqa: B023
            kept = fast.union(queue[num_lowered:])  # noqa: B023
            return worst.extra_s(plan_of(DesignPoint(tuple(levels)), kept))

        wanted, fewest = max(point.levels[rank][kind] for kind in kinds), len(kinds)
        mildest = next((k for k in range(wanted, 0, -1) if cost_s(k, fewest) <= limit_s), 0)
        num_lowered = _most_lowered(lambda n: cost_s(mildest, n) <= limit_s, fewest, len(queue)) if mildest else 0  # noqa: B023
        cost_s(mildest, num_lowered)
        fast.update(queue[num_lowered:])
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


_Turn = tuple[int, tuple[InstructionKind, ...]]
"""A rank, and the kinds of instruction whose clocks are lowered at once."""


def _queues(
    worst: WorstCase, held_ranks: Collection[int], *, from_begin: bool
) -> dict[_Turn, list[Instruction]] | None:
    """Return the instructions to lower in each turn, first those that wait longest; None without their times.

    Where clocks are held, those at the begin of the iteration come first, or those at its end: that takes two calls.
    """
    graph = worst.graph
    times_s = [worst.times.full_speed_s(own) for own in graph.classes]
    if None in times_s:
        return None
    spans = timeline(graph, [times_s[k] or 0.0 for k in graph.class_of]).spans_of_ranks()
    queues: dict[_Turn, list[Instruction]] = {}
    for rank, own in enumerate(spans):
        kinds = tuple(dict.fromkeys(span.instruction.kind for span in own))
        if rank in held_ranks:
            queues[rank, kinds] = [span.instruction for span in (own if from_begin else reversed(own))]
            continue
        for span in sorted(own, key=lambda one: -one.slack_s):
            queues.setdefault((rank, (span.instruction.kind,)), []).append(span.instruction)
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
