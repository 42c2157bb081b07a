"""What `gpuenergyd --version` says: this version, what it runs on, and which of its optional parts are installed."""

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points, version

from gpuenergyd import __version__

_PARTS = {
    "daemon": ("aiohttp", "alembic", "apscheduler", "msgspec", "nvidia-ml-py", "prometheus-client", "sqlalchemy"),
    "policies": ("numpy", "scikit-learn", "scipy"),
    "fast planning": ("numba",),
    "trainers": ("torch",),
    "reports": ("jinja2", "matplotlib"),
    "PostgreSQL": ("psycopg",),
}
"""What each part of the project stands on, by distribution."""

_PLUGIN_GROUPS = ("gpuenergyd.policies", "gpuenergyd.targets", "gpuenergyd.planners", "gpuenergyd.carbon_sources")


def version_lines() -> tuple[str, ...]:
    """Return the version on the first line, then a line for Python, each part and every plugin of somebody else's."""
    lines = [f"gpuenergyd {__version__}", f"Python {platform.python_version()} ({sys.executable})"]
    width = max(map(len, _PARTS)) + 1
    for part, names in _PARTS.items():
        found = {name: _version_of(name) for name in names}
        lines.append(f"{part + ':':{width}} {_part_text(found)}")
    others = sorted(f"{d.name} {d.version}" for d in _plugin_distributions())
    if others:
        lines.append(f"{'plugins:':{width}} {', '.join(others)}")
    return tuple(lines)


def _part_text(found: Mapping[str, str | None]) -> str:
    there = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
    missing = ", ".join(name for name, number in found.items() if number is None)
    if not missing:
        return there
    return f"{there}; without {missing}" if there else f"not installed ({missing})"


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plugin_distributions() -> tuple[Distribution, ...]:
    """Return the distributions other than this one that offer plugins."""
    names = {
        point.dist.name
        for group in _PLUGIN_GROUPS
        for point in entry_points(group=group)
        if point.dist is not None and point.dist.name != "gpuenergyd"
    }
    return tuple(distribution(name) for name in names)
