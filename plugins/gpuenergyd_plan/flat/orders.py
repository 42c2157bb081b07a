"""The flattest plan among orders of nearly the least energy; which order is flattest also depends on the clocks."""

from gpuenergyd.core.pipeline.power_swing import band_energy_w2
from gpuenergyd_plan.flat.plan import EXTRA_ENERGY_RATIO, SEARCH_STEPS, flat_plan
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan
from gpuenergyd_policies.planning.power_waves import WavePlan


def flattest_order(
    cheapest: OrderPlan, *, extra_energy_ratio: float = EXTRA_ENERGY_RATIO, search_steps: int = SEARCH_STEPS
) -> tuple[OrderPlan, WavePlan]:
    """Return the flattest plan found among the cheapest order and those near it, after its order.

    A first search compares all of them; a second search of equal length improves the flattest. Each search places
    `search_steps` instructions.
    """
    limit_j = cheapest.solved.energy_j * (1 + extra_energy_ratio)

    def flattened(order: OrderPlan, steps: int) -> tuple[OrderPlan, WavePlan]:
        left_ratio = max(0.0, limit_j / order.solved.energy_j - 1)
        flat = flat_plan(order.graph, order.profile, order.solved, extra_energy_ratio=left_ratio, search_steps=steps)
        return order, flat

    if not cheapest.near:
        return flattened(cheapest, search_steps)
    orders = (cheapest, *cheapest.near)
    first = min((flattened(order, search_steps // len(orders)) for order in orders), key=_swing)
    return min((first, flattened(first[0], search_steps)), key=_swing)


def _swing(found: tuple[OrderPlan, WavePlan]) -> float:
    return band_energy_w2(found[1].wave)
