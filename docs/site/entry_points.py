"""The entry points' reference: where plugins hook in, and what of ours is there."""

import tomllib
from pathlib import Path

from docs.site.markdown import code, page, table

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
GROUPS = {
    "gpuenergyd.policies": (
        "A class with `next_plan(view)`, see [ClockPolicy](python-api.md#clockpolicy): decides the clocks of one job."
    ),
    "gpuenergyd.targets": (
        "A class with `next_target(view)`, see [TargetPolicy](python-api.md#targetpolicy): decides what performance a"
        " job owes."
    ),
    "gpuenergyd.planners": (
        "A function from `OfflineRequest` to `OfflinePlan`, see [OfflinePlanner](python-api.md#offlineplanner): plans"
        " from tables, for `gpuenergyd plan --policy NAME`."
    ),
    "gpuenergyd.carbon_sources": (
        "A function from a `SourceRequest` to something with `signal` and `fetch`: asks somebody what the grid emits."
    ),
    "gpuenergyd.carbon": (
        "Computations behind `gpuenergyd carbon` and the carbon targets: `forecast`, `backtest` and `timing-value`, one"
        " of each."
    ),
    "gpuenergyd.launchers": (
        "A function from an environment to the environment that a program started by `gpuenergyd run` gets, so that it"
        " joins by itself."
    ),
}
"""What each group is for; a test compares it with pyproject.toml."""


def offered_entry_points() -> dict[str, dict[str, str]]:
    """Return what this project offers, by group."""
    found: dict[str, dict[str, str]] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    return found


def entry_points_page() -> str:
    """Return every group and what of ours is in it."""
    parts = [
        (
            "Plugins are found by entry point and by no other door; what ships with gpuenergyd uses the same ones."
            " `gpuenergyd policies` lists what is installed, by which package, and what is broken."
        ),
    ]
    for group, offers in offered_entry_points().items():
        rows = ((code(name), code(value)) for name, value in offers.items())
        parts += [f"## {group}", GROUPS[group], table(("name", "where"), rows)]
    return page("Entry points", *parts)
