"""The daemon's packages stay few and small: what the extra `daemon` installs, computed from the installed metadata."""

from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAX_PACKAGES, MAX_BYTES = 50, 350 * 10**6
FOR_PLUGINS_AND_DRAWINGS = {"cryptography", "greenlet", "matplotlib", "openleadr", "pillow", "psycopg", "torch"}


def required(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield what a distribution requires on this platform."""
    for requirement in map(Requirement, distribution(name).requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


def packages_of(extra: str) -> dict[str, Distribution]:
    """Return the distributions that an extra installs, without this one, by name."""
    found: dict[str, Distribution] = {}
    open_requirements = [*required("gpuenergyd", frozenset({extra}))]
    seen = set()
    while open_requirements:
        requirement = open_requirements.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key not in seen:
            seen.add(key)
            found[key[0]] = distribution(key[0])
            open_requirements += required(*key)
    found.pop("gpuenergyd", None)
    return found


def num_bytes(package: Distribution) -> int:
    """Return the size of a distribution's files, bytecode included."""
    paths = [Path(str(path.locate())) for path in package.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_the_daemon_installs_at_most_350_mb() -> None:
    packages = packages_of("daemon")

    sizes = {name: num_bytes(package) for name, package in packages.items()}

    assert FOR_PLUGINS_AND_DRAWINGS.isdisjoint(sizes)
    assert len(sizes) <= MAX_PACKAGES, sorted(sizes)
    assert sum(sizes.values()) <= MAX_BYTES, sorted(sizes.items(), key=lambda item: -item[1])


def test_a_plugin_with_packages_of_its_own_has_an_extra() -> None:
    daemon = packages_of("daemon").keys()

    assert packages_of("prove").keys() - daemon == {"cffi", "cryptography", "pycparser"}
    assert "openleadr" in packages_of("openadr").keys() - daemon
