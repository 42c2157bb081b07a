"""Plans whose power swings least, for `bubble-aware:flattest=true`: a plugin makes them, found by entry point."""

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from gpuenergyd.errors import UsageError
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan
from gpuenergyd_policies.planning.power_waves import WavePlan


class FlatPlanner(Protocol):
    """Entry point of the group `gpuenergyd.flat_planners`: an object, or a module, with these two functions."""

    flat_plan: Callable[..., WavePlan]
    """Takes a graph, its profile and the solved plan; returns the flattest plan of that time and nearly that energy."""
    flattest_order: Callable[..., tuple[OrderPlan, WavePlan]]
    """Takes the cheapest order; returns the order, of it and those near it, in which the flattest plan was found."""


@cache
def flat_planner() -> FlatPlanner:
    """Return the installed planner of flat plans.

    Raises:
        UsageError: there is none.
    """
    for point in entry_points(group="gpuenergyd.flat_planners"):
        found: FlatPlanner = point.load()
        return found
    raise UsageError("bubble-aware:flattest=true: its plugin gpuenergyd_plan is not installed")
