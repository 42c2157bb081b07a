"""`gpuenergyd --version`: versions of gpuenergyd, Python, the optional dependencies and third-party plugins."""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points

from gpuenergyd import __version__

_DEPENDENCIES = {
    "daemon": ("aiohttp", "alembic", "apscheduler", "msgspec", "nvidia-ml-py", "prometheus-client", "sqlalchemy"),
    "policies": ("numpy", "scikit-learn", "scipy"),
    "fast planning": ("numba",),
    "trainers": ("torch",),
    "reports": ("jinja2",),
    "PostgreSQL": ("psycopg",),
}
"""Distributions that each part of the project needs."""

_VERSION = re.compile(r"^Version: (\S+)$", re.MULTILINE)


def print_versions() -> int:
    """Print the versions; return the exit code."""
    sys.stdout.write("\n".join(version_lines()) + "\n")
    return 0


def version_lines() -> tuple[str, ...]:
    """Return one line each for gpuenergyd, Python and every optional part, and one line for all third-party plugins."""
    lines = [f"gpuenergyd {__version__}", f"Python {sys.version.split()[0]} ({sys.executable})"]
    width = max(map(len, _DEPENDENCIES)) + 1
    for part, names in _DEPENDENCIES.items():
        lines.append(f"{part + ':':{width}} {_dependency_text({name: _version_of(name) for name in names})}")
    plugins = sorted(f"{d.name} {d.version}" for d in _plugin_distributions())
    if plugins:
        lines.append(f"{'plugins:':{width}} {', '.join(plugins)}")
    return tuple(lines)


def _dependency_text(versions: Mapping[str, str | None]) -> str:
    installed = ", ".join(f"{name} {number}" for name, number in versions.items() if number is not None)
    missing = ", ".join(name for name, number in versions.items() if number is None)
    if not missing:
        return installed
    return f"{installed}; missing: {missing}" if installed else f"not installed ({missing})"


def _version_of(name: str) -> str | None:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    # Parsing the whole file with the e-mail parser would take longer than everything else here.
    stated = _VERSION.search(found.read_text("METADATA") or "")
    return stated[1] if stated is not None else found.version


def _plugin_distributions() -> tuple[Distribution, ...]:
    """Return all other distributions that provide plugins."""
    installed = entry_points()  # one search for all groups
    groups = [group for group in installed.groups if group.startswith("gpuenergyd.")]
    providers = {point.dist for group in groups for point in installed.select(group=group)}
    return tuple(dist for dist in providers if dist is not None and dist.name != "gpuenergyd")
