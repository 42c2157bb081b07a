"""Audit the pinned dependencies for known vulnerabilities.

    python -m tools.release.audit PIP_AUDIT             query the package index with pip-audit
    python -m tools.release.audit --advisories FOLDER   read a copy of the PyPA's advisory database

Exit status: 0 no vulnerability known, 1 some found, 3 not every package could be checked (pip-audit itself reports
success
for packages that it skipped).
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
    """Result of an audit."""

    checked: tuple[str, ...]
    not_checked: tuple[str, ...]
    found: tuple[str, ...]
    """`name version: id, fixed in versions`."""
    as_of: str = ""
    """Date of a local copy of the database."""

    @property
    def exit_status(self) -> int:
        """0 only if every package was checked and none is vulnerable."""
        return 1 if self.found else 3 if self.not_checked or not self.checked else 0

    def __str__(self) -> str:
        lines = [f"vulnerable: {line}" for line in self.found]
        if self.not_checked:
            some = ", ".join(self.not_checked[:SHOWN]) + (", ..." if len(self.not_checked) > SHOWN else "")
            lines.append(f"not checked: {len(self.not_checked)} packages ({some})")
        when = f", as of {self.as_of}" if self.as_of else ""
        lines.append(f"checked {len(self.checked)} packages: {len(self.found)} known vulnerabilities{when}")
        return "\n".join(lines)


def read_report(report: dict[str, Any]) -> Audit:
    """Parse a JSON report of pip-audit."""
    checked, not_checked, found = [], [], []
    for one in report["dependencies"]:
        if "skip_reason" in one:
            not_checked.append(one["name"])
            continue
        checked.append(one["name"])
        for vulnerability in one["vulns"]:
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
            found.append(f"{one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}")
    return Audit(tuple(checked), tuple(not_checked), tuple(found))


def audit(pip_audit: str, locks: tuple[Path, ...]) -> Audit:
    """Check every pin of these files with pip-audit.

    Raises:
        SystemExit: pip-audit printed no report; the message ends with its last line.
    """
    files = [part for lock in locks if lock.exists() for part in ("--requirement", str(lock))]
    command = [pip_audit, *files, "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if not done.stdout.lstrip().startswith("{"):
        words = done.stderr.strip().splitlines()
        raise SystemExit(f"pip-audit printed no report: {words[-1] if words else f'exit status {done.returncode}'}")
    return read_report(json.loads(done.stdout))


def audit_offline(folder: Path, locks: tuple[Path, ...]) -> Audit:
    """Check every pin of these files against a copy of the PyPA's database.

    Raises:
        SystemExit: the folder is not such a copy.
    """
    advisories = AdvisoryFolder(folder)
    checked, found = [], []
    for pin in read_pins(lock for lock in locks if lock.exists()):
        checked.append(pin.name)
        for name, fixes in advisories.vulnerabilities(pin):
            found.append(f"{pin.name} {pin.version}: {name}, fixed in {', '.join(fixes) or 'no version yet'}")
    return Audit(tuple(checked), (), tuple(found), as_of=f"{advisories.newest():%Y-%m-%d}")


def main() -> int:
    """Run the audit, print the result and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pip_audit", nargs="?", default="pip-audit", help="path of pip-audit")
    parser.add_argument("--advisories", type=Path, help="a copy of the PyPA's advisory database to read instead")
    options = parser.parse_args()
    result = audit_offline(options.advisories, LOCKS) if options.advisories else audit(options.pip_audit, LOCKS)
    print(result)  # noqa: T201  a command's answer
    return result.exit_status


if __name__ == "__main__":
    sys.exit(main())
