"""Known vulnerabilities of the locked packages; ends with 0 for none, 1 for some, 3 where not all could be asked about.

    python -m tools.release.audit PIP_AUDIT             asks the index, by pip-audit
    python -m tools.release.audit --advisories FOLDER   reads a copy of the PyPA's advisory database

pip-audit ends well, too, where no database could be asked about a package; here that is told and is no success.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.release.advisories import AdvisoryFolder, read_pins

LOCKS = (Path("constraints.txt"), Path("constraints-frameworks.txt"))
LIMIT_S = 900.0
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Audit:
    """What a database of vulnerabilities said."""

    asked: tuple[str, ...]
    not_asked: tuple[str, ...]
    found: tuple[str, ...]
    """`name version: id, fixed in versions`."""
    as_of: str = ""
    """The day of the database, where it is a copy."""

    @property
    def exit_status(self) -> int:
        """0 only when every package was asked about and none is known to be vulnerable."""
        return 1 if self.found else 3 if self.not_asked or not self.asked else 0

    def __str__(self) -> str:
        lines = [f"vulnerable: {line}" for line in self.found]
        if self.not_asked:
            some = ", ".join(self.not_asked[:SHOWN]) + (", ..." if len(self.not_asked) > SHOWN else "")
            lines.append(f"could not be asked about: {len(self.not_asked)} packages ({some})")
        when = f", by what was known on {self.as_of}" if self.as_of else ""
        lines.append(f"asked about {len(self.asked)} packages: {len(self.found)} known vulnerabilities{when}")
        return "\n".join(lines)


def read_report(report: dict[str, Any]) -> Audit:
    """Return what a report of pip-audit says."""
    asked, not_asked, found = [], [], []
    for one in report["dependencies"]:
        if "skip_reason" in one:
            not_asked.append(one["name"])
            continue
        asked.append(one["name"])
        for hole in one["vulns"]:
            fixed = ", ".join(hole["fix_versions"]) or "no version yet"
            found.append(f"{one['name']} {one['version']}: {hole['id']}, fixed in {fixed}")
    return Audit(tuple(asked), tuple(not_asked), tuple(found))


def audit(pip_audit: str, locks: tuple[Path, ...]) -> Audit:
    """Ask about every pin of these files.

    Raises:
        SystemExit: pip-audit gave no report; with its last line.
    """
    files = [part for lock in locks if lock.exists() for part in ("--requirement", str(lock))]
    command = [pip_audit, *files, "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if not done.stdout.lstrip().startswith("{"):
        words = done.stderr.strip().splitlines()
        raise SystemExit(f"pip-audit gave no report: {words[-1] if words else f'exit status {done.returncode}'}")
    return read_report(json.loads(done.stdout))


def audit_offline(folder: Path, locks: tuple[Path, ...]) -> Audit:
    """Look every pin of these files up in a copy of the PyPA's database.

    Raises:
        SystemExit: it is no such copy.
    """
    advisories = AdvisoryFolder(folder)
    asked, found = [], []
    for pin in read_pins(lock for lock in locks if lock.exists()):
        asked.append(pin.name)
        for name, fixes in advisories.holes(pin):
            found.append(f"{pin.name} {pin.version}: {name}, fixed in {', '.join(fixes) or 'no version yet'}")
    return Audit(tuple(asked), (), tuple(found), as_of=f"{advisories.newest():%Y-%m-%d}")


def main() -> int:
    """Ask, print and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pip_audit", nargs="?", default="pip-audit", help="the program")
    parser.add_argument("--advisories", type=Path, help="a copy of the PyPA's advisory database to read instead")
    options = parser.parse_args()
    result = audit_offline(options.advisories, LOCKS) if options.advisories else audit(options.pip_audit, LOCKS)
    print(result)  # noqa: T201  a command's answer
    return result.exit_status


if __name__ == "__main__":
    sys.exit(main())
