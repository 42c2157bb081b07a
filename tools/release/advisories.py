"""Known vulnerabilities of pinned packages, from a local copy of the PyPA's advisory database.

The format is OSV's (https://ossf.github.io/osv-schema/), one file an advisory, in `vulns/<package>/`
(https://github.com/pypa/advisory-database). The result is as old as the copy; its date is reported.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)")


@dataclass(frozen=True, slots=True)
class Pin:
    """A package at the version that a lock file pins."""

    name: str
    version: Version


def read_pins(locks: Iterable[Path]) -> tuple[Pin, ...]:
    """Return the distinct pins of these files."""
    pins: dict[Pin, None] = {}
    for lock in locks:
        for line in lock.read_text(encoding="utf-8").splitlines():
            if match := _PIN.match(line):
                pins[Pin(canonicalize_name(match[1]), Version(match[2]))] = None
    return tuple(pins)


class AdvisoryFolder:
    """A local copy of the advisory database."""

    def __init__(self, folder: Path) -> None:
        self._vulns = folder / "vulns"
        if not self._vulns.is_dir():
            message = f"{folder} is not a copy of the PyPA's advisory database: it has no folder 'vulns'"
            raise SystemExit(message)

    def newest(self) -> datetime:
        """Return when the newest advisory changed, which tells the age of the copy.

        Raises:
            SystemExit: the folder contains no advisory.
        """
        changed = re.compile(r"^modified: ['\"]?([0-9T:.-]+)", re.MULTILINE)
        found = [match[1] for path in self._files() if (match := changed.search(path.read_text(encoding="utf-8")))]
        if not found:
            message = f"{self._vulns} contains no advisories"
            raise SystemExit(message)
        return max(datetime.fromisoformat(text[:19]) for text in found)

    def vulnerabilities(self, pin: Pin) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the id of each advisory that affects this version, and the versions that fix it."""
        for path in self._files(pin.name):
            advisory = yaml.safe_load(path.read_text(encoding="utf-8"))
            if "withdrawn" in advisory:
                continue
            for affected in advisory.get("affected", ()):
                if canonicalize_name(affected["package"]["name"]) == pin.name and is_affected(pin.version, affected):
                    yield str(advisory["id"]), tuple(_fixes(affected))
                    break

    def _files(self, name: str = "*") -> Iterator[Path]:
        return self._vulns.glob(f"{name}/*.yaml")


def is_affected(version: Version, affected: dict[str, Any]) -> bool:
    """Return whether an advisory lists the version or a version range that contains it; commit ranges are ignored."""
    if str(version) in {str(one) for one in affected.get("versions", ())}:
        return True
    return any(
        _is_within(version, one["events"])
        for one in affected.get("ranges", ())
        if one["type"] in {"ECOSYSTEM", "SEMVER"}
    )


def _is_within(version: Version, events: Iterable[dict[str, Any]]) -> bool:
    is_within = False
    for event in events:
        for what, text in event.items():
            bound = _version(text)
            if bound is None:
                continue
            if what == "introduced" and version >= bound:
                is_within = True
            elif (what in {"fixed", "limit"} and version >= bound) or (what == "last_affected" and version > bound):
                is_within = False
    return is_within


def _fixes(affected: dict[str, Any]) -> Iterator[str]:
    for one in affected.get("ranges", ()):
        if one["type"] in {"ECOSYSTEM", "SEMVER"}:
            yield from (str(event["fixed"]) for event in one["events"] if "fixed" in event)


def _version(text: object) -> Version | None:
    try:
        return Version(str(text))
    except InvalidVersion:  # an invalid version in the advisory
        return None
