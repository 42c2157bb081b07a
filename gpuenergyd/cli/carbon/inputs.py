"""From the carbon commands' options to what they ask: the machinery behind, a frontier, a source, a history."""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gpuenergyd.cli.carbon.files import (
    Points,
    is_power_limit_profile,
    read_frontier,
    read_power_limit_profiles,
    utc_instant,
)
from gpuenergyd.cli.plan.inputs import PlanOptions, plan_input
from gpuenergyd.core.carbon.replay import Forecast, Replay
from gpuenergyd.core.policy_api.policy import OfflinePlanner
from gpuenergyd.errors import CarbonDataError, UnknownPolicyError

CARBON_GROUP = "gpuenergyd.carbon"
PLANNER_GROUP = "gpuenergyd.planners"
PLANNER = "bubble-aware"


def replay_machinery() -> Replay:
    """Return what replays a trace.

    Raises:
        UnknownPolicyError: no installed package offers it.
    """
    machinery: Replay = _loaded(CARBON_GROUP, "backtest")
    return machinery


def forecast_machinery() -> Forecast:
    """Return what forecasts.

    Raises:
        UnknownPolicyError: no installed package offers it.
    """
    machinery: Forecast = _loaded(CARBON_GROUP, "forecast")
    return machinery


def frontier_points(
    frontier: Path | None, profiles: Sequence[Path], *, schedule: str | None = None, microbatches: int | None = None
) -> Points:
    """Return the points to choose from: given, measured under power limits, or planned from a pipeline's profile.

    Raises:
        CarbonDataError: neither or both are given, or a file cannot be used.
    """
    if (frontier is None) == (not profiles):
        raise CarbonDataError("give either --frontier FILE or --profile FILE")
    if frontier is not None:
        return read_frontier(frontier)
    if all(is_power_limit_profile(path) for path in profiles):
        return read_power_limit_profiles(profiles)
    if len(profiles) > 1:
        raise CarbonDataError("several profiles: each must be a power-limit profile of one GPU of the same job")
    options = PlanOptions(schedule=schedule, microbatches=microbatches, want_frontier=True)
    planner: OfflinePlanner = _loaded(PLANNER_GROUP, PLANNER)
    planned = planner(plan_input(profiles[0], options).request)
    return tuple((point.iteration_time_s, point.energy_j) for point in planned.frontier)


def checked_instant(option: str, text: str) -> datetime:
    """Return an option's instant.

    Raises:
        CarbonDataError: it is none.
    """
    try:
        return utc_instant(text)
    except ValueError:
        raise CarbonDataError(f"{option} {text!r} is no date or time, e.g. 2024-01-01 or 2024-01-01T06:00Z") from None


def utc_now() -> datetime:
    """Return the instant of now."""
    return datetime.now(tz=UTC)


def _loaded(group: str, name: str) -> Any:
    point = next(iter(entry_points(group=group, name=name)), None)
    if point is None:
        raise UnknownPolicyError(f"no installed package offers {name!r} in {group}; gpuenergyd's own policies do")
    return point.load()
