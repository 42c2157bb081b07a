"""Orders of pipelines with several stages per GPU: known schedules, and one-stage orders split into chunks.

Theory of operation. Which stages share a GPU is part of the choice. Consecutive stages make one large stage, whose
orders are searched as for one stage per GPU and then run chunk by chunk. Distant stages shorten the fill, as in
interleaved 1F1B, or end where they began, as in ZBV; these orders are known, and each is also tried with backwards
split in place. Orders that fit in memory are solved with real clocks, and the cheapest plan is chosen.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, Schedule
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.schedules import SCHEDULES, in_a_row, make_schedule
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError, TargetError
from gpuenergyd_plan.offline.load_bound import load_bound_j, shared_load
from gpuenergyd_plan.offline.order_choice import candidates
from gpuenergyd_policies.planning.frontier import Effort
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan, OrderTask
from gpuenergyd_policies.planning.orders.search import FINALISTS


def plan_chunk_order(plain: Schedule, task: OrderTask) -> OrderPlan:
    """Return the cheapest order found for a pipeline with several stages per GPU, with its profile by chunk.

    `plain` is the order whose chunks the task's profile refers to. The profile has input and weight gradients and full
    backwards of every stage. For the memory limits, a chunk is the corresponding fraction of a microbatch.

    Raises:
        TargetError: no known order is fast enough within the limits, which does not prove that none is.
    """
    profile, num_ranks = task.profile, plain.num_ranks
    by_stage = {
        (plain.stage_index(key.pp_rank, key.chunk_index), key.kind): curve for key, curve in profile.classes.items()
    }
    found: list[OrderPlan] = []
    for schedule in dict.fromkeys(_schedules(plain, task)):
        if any(schedule.peak_inflight(r) > limit * schedule.num_chunks for r, limit in enumerate(task.limits)):
            continue
        own = replace(profile, classes=_classes(schedule, by_stage))
        with suppress(TargetError):
            found.append(task.solved(schedule, own, effort=Effort.QUICK))
    if not found:
        raise TargetError(
            f"iteration time {task.deadline_s:.6g} s: no order with {count_text(plain.num_chunks, 'stage')} per GPU was"
            f" found that is that fast with at most {', '.join(map(str, task.limits))} microbatches held per GPU"
        )
    found.sort(key=task.charged_j)
    best = min((task.solved(option.schedule, option.profile) for option in found[:FINALISTS]), key=task.charged_j)
    load = shared_load(profile, num_ranks, plain.num_microbatches)
    bound_j = load_bound_j([load], profile.blocking_power_w * num_ranks, task.deadline_s, forced=task.forced)
    return replace(best, any_order_j=bound_j)


def _schedules(plain: Schedule, task: OrderTask) -> Iterator[Schedule]:
    """Yield orders that may be worth solving; some do not fit in memory."""
    num_ranks, num_chunks = plain.num_ranks, plain.num_chunks
    yield plain
    merged = _merged(plain, task.profile)
    if merged is not None:
        yield from (in_a_row(schedule, num_chunks) for schedule in candidates(replace(task, profile=merged)))
    for name, family in SCHEDULES.items():
        if num_chunks == 1 or not (family.takes_any_num_chunks or family.default_num_chunks == num_chunks):
            continue
        try:
            schedule = make_schedule(name, num_ranks, plain.num_microbatches, num_chunks)
        except ScheduleError:  # too few microbatches, or a number that the schedule does not support
            continue
        if schedule.sent_after or any(i.kind is InstructionKind.FB for order in schedule.orders for i in order):
            # Profiles have no times of overlapped instructions, so only the added waits of such orders would count.
            continue
        yield schedule
        yield _split_in_place(schedule)


def _split_in_place(schedule: Schedule) -> Schedule:
    """Return the order with each full backward replaced by its input gradient and its weight gradient."""
    halves = (InstructionKind.I, InstructionKind.W)
    orders = tuple(
        tuple(
            part
            for i in order
            for part in ([replace(i, kind=kind) for kind in halves] if i.kind is InstructionKind.B else [i])
        )
        for order in schedule.orders
    )
    return replace(schedule, orders=orders)


def _merged(plain: Schedule, profile: PipelineProfile) -> PipelineProfile | None:
    """Return the profile of each GPU's chunks as one stage; None if they were not measured at the same clocks."""
    classes: dict[InstructionClass, InstructionProfile] = {}
    for key in {replace(key, chunk_index=0) for key in profile.classes}:
        parts = [profile[replace(key, chunk_index=chunk)].options for chunk in range(plain.num_chunks)]
        common = set.intersection(*({option.sm_clock_mhz for option in options} for options in parts))
        if not common:
            return None
        classes[key] = InstructionProfile(
            tuple(
                ClockOption(mhz, sum(o.time_s for o in same), sum(o.energy_j for o in same))
                for mhz in sorted(common, reverse=True)
                for same in [[o for options in parts for o in options if o.sm_clock_mhz == mhz]]
            )
        )
    return replace(profile, classes=classes)


def _classes(
    schedule: Schedule, by_stage: dict[tuple[int, InstructionKind], InstructionProfile]
) -> dict[InstructionClass, InstructionProfile]:
    """Return the profile of each chunk in the placement of a schedule."""
    kinds = {kind for _, kind in by_stage}
    return {
        InstructionClass(r, kind, chunk): by_stage[schedule.stage_index(r, chunk), kind]
        for r in range(schedule.num_ranks)
        for chunk in range(schedule.num_chunks)
        for kind in sorted(kinds)
    }
