"""Inputs of the carbon commands: operating points, instants, and the forecaster and backtest by entry point."""

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
from gpuenergyd.cli.plan.inputs import PlanOptions, load_planner, plan_input
from gpuenergyd.core.carbon.replay import Forecast, Replay
from gpuenergyd.errors import CarbonDataError, UnknownPolicyError

_CARBON_GROUP = "gpuenergyd.carbon"
_PLANNER = "bubble-aware"


def load_backtest() -> Replay:
    """Return the function that replays a trace.

    Raises:
        UnknownPolicyError: no installed package provides it.
    """
    backtest: Replay = _load("backtest")
    return backtest


def load_forecaster() -> Forecast:
    """Return the function that forecasts carbon intensity.

    Raises:
        UnknownPolicyError: no installed package provides it.
    """
    forecaster: Forecast = _load("forecast")
    return forecaster


def frontier_points(
    frontier: Path | None, profiles: Sequence[Path], *, schedule: str | None = None, microbatches: int | None = None
) -> Points:
    """Return the operating points: from a file, from power-limit profiles, or planned from a pipeline profile.

    Raises:
        CarbonDataError: neither or both are given, or a file is invalid.
    """
    if (frontier is None) == (not profiles):
        raise CarbonDataError("give either --frontier FILE or --profile FILE")
    if frontier is not None:
        return read_frontier(frontier)
    if all(is_power_limit_profile(path) for path in profiles):
        return read_power_limit_profiles(profiles)
    if len(profiles) > 1:
        raise CarbonDataError("several profiles: each must be a power-limit profile of one GPU of the job")
    options = PlanOptions(schedule=schedule, microbatches=microbatches, want_frontier=True)
    planned = load_planner(_PLANNER)(plan_input(profiles[0], options).request)
    return tuple((point.iteration_time_s, point.energy_j) for point in planned.frontier)


def checked_instant(option: str, text: str) -> datetime:
    """Return the instant given as an option.

    Raises:
        CarbonDataError: the text is not a date or time.
    """
    try:
        return utc_instant(text)
    except ValueError:
        raise CarbonDataError(
            f"{option} {text!r}: must be a date or time, e.g. 2024-01-01 or 2024-01-01T06:00Z"
        ) from None


def utc_now() -> datetime:
    """Return the current time."""
    return datetime.now(tz=UTC)


def _load(name: str) -> Any:
    point = next(iter(entry_points(group=_CARBON_GROUP, name=name)), None)
    if point is None:
        raise UnknownPolicyError(f"no entry point {name!r} in group {_CARBON_GROUP}; reinstall gpuenergyd")
    return point.load()
