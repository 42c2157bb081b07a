"""Choice of another order for a running 1F1B job, with its clocks: which order, under which memory, at what saving.

Theory of operation. Only orders that keep 1F1B's communication and sums of gradients are searched: backwards split, and
weight gradients later (`gpuenergyd.core.pipeline.reorder`). The times of input and weight gradients are shares of the
whole backward: measured in a few iterations with backwards split in place, or else assumed to be half each. Clocks are
taken to act on both as on the whole backward, which the corrections of a plan make up for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.reorder import (
    SPLIT_IN_PLACE,
    OrderAdvice,
    Orders,
    RankMemory,
    check_orders,
    order_name,
    split_in_place,
)
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.errors import ScheduleError, TargetError
from gpuenergyd_policies.bubble_aware.figures import Figure
from gpuenergyd_policies.bubble_aware.flat_plans import flat_planner
from gpuenergyd_policies.bubble_aware.model import PipelineModel
from gpuenergyd_policies.bubble_aware.outcome import PlanOutcome
from gpuenergyd_policies.bubble_aware.planning import plan_from_model
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.observed_pipeline import graph_in_order
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan, OrderTask
from gpuenergyd_policies.planning.orders.search import ranked_shapes
from gpuenergyd_policies.planning.orders.shape import shaped_schedule
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_policies.planning.problem import Effort

_INPUT_SHARE, _WEIGHT_SHARE = "input_share_of_rank_{}", "weight_share_of_rank_{}"
"""Names of the figures in which a plan keeps the shares that it was made with."""
MIN_SHARE = 1e-4
"""Shares are at least this: the first stage of a torch pipeline computes everything in its weight gradients."""


@dataclass(frozen=True, slots=True)
class SplitShares:
    """Times of input and weight gradients on each rank, as shares of its whole backward at the maximum clock."""

    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    is_measured: bool

    @classmethod
    def assumed(cls, num_ranks: int) -> "SplitShares":
        """Return half and half, without a cost of splitting."""
        return cls((0.5,) * num_ranks, (0.5,) * num_ranks, is_measured=False)

    @classmethod
    def of(cls, plan: ClockPlan, num_ranks: int) -> "SplitShares":
        inputs, weights = (
            tuple(plan.figure(name.format(r)) or MIN_SHARE for r in range(num_ranks))
            for name in (_INPUT_SHARE, _WEIGHT_SHARE)
        )
        return cls(inputs, weights, is_measured=True)

    @property
    def figures(self) -> tuple[tuple[str, float], ...]:
        return tuple(
            (name.format(r), share)
            for name, shares in ((_INPUT_SHARE, self.inputs), (_WEIGHT_SHARE, self.weights))
            for r, share in enumerate(shares)
        )


def measured_shares(
    probed: Sequence[IterationObservation], profile: PipelineProfile, num_ranks: int
) -> SplitShares | None:
    """Return the shares in iterations at full speed with backwards split; None if a rank ran none."""
    times_s: dict[InstructionClass, list[float]] = {}
    for observation in probed:
        for sample in observation.instruction_samples:
            times_s.setdefault(sample.instruction_class, []).append(sample.time_s)
    shares: dict[InstructionKind, list[float]] = {InstructionKind.I: [], InstructionKind.W: []}
    for pp_rank in range(num_ranks):
        whole_s = profile[InstructionClass(pp_rank, InstructionKind.B)].at_max_clock.time_s
        for kind, own in shares.items():
            found = times_s.get(InstructionClass(pp_rank, kind))
            if not found:
                return None
            own.append(max(MIN_SHARE, float(median(found) / whole_s)))
    return SplitShares(tuple(shares[InstructionKind.I]), tuple(shares[InstructionKind.W]), is_measured=True)


def with_shares(profile: PipelineProfile, shares: SplitShares) -> PipelineProfile:
    """Return a profile that also has input and weight gradients, as shares of the whole backwards."""
    classes: dict[InstructionClass, InstructionProfile] = dict(profile.classes)
    for kind, own in ((InstructionKind.I, shares.inputs), (InstructionKind.W, shares.weights)):
        for pp_rank, share in enumerate(own):
            whole = profile[InstructionClass(pp_rank, InstructionKind.B)]
            options = [ClockOption(o.sm_clock_mhz, o.time_s * share, o.energy_j * share) for o in whole.options]
            key = InstructionClass(pp_rank, kind)
            classes[key] = instruction_profile(options, where=f"{kind} on rank {pp_rank}")
    return PipelineProfile(classes, profile.blocking_power_w)


# --- memory ---


def spare_microbatches(memory: RankMemory) -> int:
    """Return how many more microbatches fit into a rank's memory, less a margin, than 1F1B holds."""
    margin_bytes = TUNING.memory_margin_ratio * memory.capacity_bytes
    return int((memory.free_bytes - margin_bytes) // max(1, memory.microbatch_bytes))


def memory_refusal(memory: Sequence[RankMemory | None], num_ranks: int) -> str:
    """Return why no order may be tried with this memory; empty if one may.

    A split backward keeps the gradients between its two halves, which is taken to need as much as a microbatch.
    """
    known = [own for own in memory if own is not None and own.microbatch_bytes > 0]
    if len(known) < num_ranks:
        return "not tried, since the free memory of the GPUs is not known"
    tight = [r for r, own in enumerate(known) if spare_microbatches(own) < 1]
    if tight:
        return f"not tried, since it might not fit into the memory of rank {tight[0]}"
    for r, own in enumerate(known):
        left_bytes = own.free_in_order_bytes
        if left_bytes is not None and left_bytes < TUNING.memory_margin_ratio / 2 * own.capacity_bytes:
            return f"not used, since too little memory was left on rank {r}"
    return ""


def memory_limits(memory: Sequence[RankMemory | None], num_ranks: int) -> tuple[int, ...]:
    """Return how many microbatches each rank may hold: 1F1B's number, and more where memory is known to be free."""
    limits = []
    for r in range(num_ranks):
        own = memory[r] if r < len(memory) else None
        extra = 0 if own is None or own.microbatch_bytes <= 0 else max(0, spare_microbatches(own) - 1)
        limits.append(min(num_ranks - r + extra, 2 * num_ranks))
    return tuple(limits)


# --- order and clocks ---


def choose_order(view: JobView, model: PipelineModel, plain: ClockPlan, shares: SplitShares) -> ClockPlan | None:
    """Return the order and clocks that save most within the memory; None if no order meets the target.

    If the flattest plan is wanted, it is the flattest order of those that save nearly as much.
    """
    limits = memory_limits(view.reorder.memory, view.schedule.num_ranks)
    caution_ratio = caution_of_order(view, plain)
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    profile = with_shares(model.profile, shares)
    task = OrderTask(
        view.schedule.num_microbatches,
        profile,
        target_s - model.bias_s,
        limits,
        view.target.fills_time,
        view.communication_latency_s,
        keeps_exchange=True,
    )
    found = []
    for schedule in _candidates(view, task):
        graph = _model_in(view, model, schedule, profile).graph
        try:
            solved = solve(graph, profile, deadline_s=task.deadline_s, forced=task.forced, effort=Effort.QUICK)
        except TargetError:
            continue
        found.append(OrderPlan(schedule, graph, solved, profile))
    if not found:
        return None
    best = min(found, key=lambda order: order.solved.energy_j)
    if view.is_flattest and len(best.graph.instructions) <= TOO_LARGE:
        best = _flattest(best, found)
    why = f"{order_name(best.schedule.orders)}: order and clocks chosen together"
    return plan_in_order(view, model, best.schedule.orders, shares, caution_ratio=caution_ratio, plain=plain, why=why)


def no_better_order(view: JobView, plain: ClockPlan) -> OrderAdvice:
    """Return the advice where no other order meets the target."""
    predicted = plain.predicted
    saving_ratio = 0.0
    if predicted is not None and predicted.baseline_energy_j:
        saving_ratio = float(1 - predicted.energy_j / predicted.baseline_energy_j)
    held = tuple(view.schedule.peak_inflight(r) for r in range(view.schedule.num_ranks))
    return OrderAdvice(SPLIT_IN_PLACE, saving_ratio, saving_ratio, 0.0, held, 0, is_split_measured=False)


def caution_of_order(view: JobView, plain: ClockPlan) -> float:
    """Return the caution of a first plan in another order: more than in 1F1B, or than in an earlier slow one."""
    caution_ratio = (plain.figure(Figure.CAUTION) or 0.0) + TUNING.extra_caution_of_orders
    earlier = [plan for plan in view.issued_plans if plan.orders and plan.purpose is PlanPurpose.TUNED]
    if not earlier:
        return caution_ratio
    slow = PlanOutcome.of(view, earlier[-1])
    late_ratio = max(0.0, slow.late_s / slow.target_s) if slow.measured_s else 0.0
    slow_ratio = slow.caution_ratio + TUNING.caution_gain * min(late_ratio, TUNING.outlier_ratio)
    return max(caution_ratio, float(slow_ratio))


def _flattest(cheapest: OrderPlan, found: Sequence[OrderPlan]) -> OrderPlan:
    """Return the order of the flattest plan among those of nearly the least energy."""
    most_j = cheapest.solved.energy_j * (1 + TUNING.flat_extra_ratio)
    near = tuple(order for order in found if order is not cheapest and order.solved.energy_j <= most_j)
    return flat_planner().flattest_order(
        replace(cheapest, near=near), extra_energy_ratio=TUNING.flat_extra_ratio, search_steps=TUNING.flat_search_steps
    )[0]


def _candidates(view: JobView, task: OrderTask) -> list[Schedule]:
    """Return split in place and the most promising orders of the search that the ranks may take."""
    plain, num_finalists = view.schedule, TUNING.flat_order_finalists if view.is_flattest else TUNING.order_finalists
    ranked = ranked_shapes(task, try_whole=True, most_work=TUNING.order_search_instructions)
    found = [split_in_place(plain)]
    for shape, _ in ranked[:num_finalists]:
        schedule = replace(plain, orders=shaped_schedule(shape, plain.num_microbatches).orders)
        try:
            check_orders(schedule.orders, plain)
        except ScheduleError:
            continue
        if schedule.orders != plain.orders:
            found.append(schedule)
    return list(dict.fromkeys(found))


def plan_in_order(
    view: JobView,
    model: PipelineModel,
    orders: Orders,
    shares: SplitShares,
    *,
    caution_ratio: float,
    plain: ClockPlan | None,
    why: str,
    number: int | None = None,
) -> ClockPlan:
    """Return the plan for known orders, with its advice; `plain` is the plan in 1F1B that it is compared with."""
    ordered_view = replace(view, schedule=replace(view.schedule, orders=orders))
    profile = with_shares(model.profile, shares)
    ordered = _model_in(view, model, ordered_view.schedule, profile)
    if number is None:
        number = view.num_issued(PlanPurpose.TUNED) + 1
    plan = plan_from_model(ordered_view, ordered, caution_ratio=caution_ratio, number=number, why=why)
    assert plan.predicted is not None
    own_full_speed_j = ordered.bias_energy_j + baseline(ordered.graph, ordered.profile).energy_j
    saving_ratio, own_saving_ratio = (
        float(1 - plan.predicted.energy_j / energy_j) for energy_j in (model.baseline_energy_j, own_full_speed_j)
    )
    plain_j = model.baseline_energy_j if plain is None or plain.predicted is None else plain.predicted.energy_j
    held = tuple(ordered_view.schedule.peak_inflight(r) for r in range(view.schedule.num_ranks))
    advice = OrderAdvice(
        name=order_name(orders),
        saving_ratio=saving_ratio,
        plain_saving_ratio=float(1 - plain_j / model.baseline_energy_j),
        own_order_saving_ratio=own_saving_ratio,
        held_microbatches=held,
        extra_microbatches=max(own - view.schedule.peak_inflight(r) for r, own in enumerate(held)),
        is_split_measured=shares.is_measured,
    )
    decided_after = (Figure.DECIDED_AFTER, view.observations[-1].iteration_index)
    figures = (*plan.figures, decided_after, *shares.figures)
    return replace(plan, orders=orders, figures=figures, order_advice=advice)


def _model_in(view: JobView, model: PipelineModel, schedule: Schedule, profile: PipelineProfile) -> PipelineModel:
    """Return the model of the same pipeline in another order."""
    graph = graph_in_order(replace(view, schedule=schedule), profile, model.bias_s)
    return replace(model, profile=profile, graph=graph)
