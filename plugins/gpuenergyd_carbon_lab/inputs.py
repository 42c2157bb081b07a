"""Inputs of the carbon commands: operating points and instants."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gpuenergyd.cli.plan.inputs import load_planner, plan_input
from gpuenergyd.cli.plan.tables import PlanOptions
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon_lab.files import (
    Points,
    is_power_limit_profile,
    read_frontier,
    read_power_limit_profiles,
    utc_instant,
)

_PLANNER = "bubble-aware"


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
    """Return the instant given as an option, or raise CarbonDataError if it is not a date or time."""
    try:
        return utc_instant(text)
    except ValueError:
        raise CarbonDataError(
            f"{option} {text!r}: must be a date or time, e.g. 2024-01-01 or 2024-01-01T06:00Z"
        ) from None
