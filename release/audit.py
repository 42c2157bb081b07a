"""`python -m release.audit PIP_AUDIT`: known vulnerabilities of the locked packages; 0 none, 1 some, 3 not all asked.

pip-audit ends well, too, where no database could be asked about a package; here that is told and is no success.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    @property
    def exit_status(self) -> int:
        """0 only when every package was asked about and none is known to be vulnerable."""
        return 1 if self.found else 3 if self.not_asked or not self.asked else 0

    def __str__(self) -> str:
        lines = [f"vulnerable: {line}" for line in self.found]
        if self.not_asked:
            some = ", ".join(self.not_asked[:SHOWN]) + (", ..." if len(self.not_asked) > SHOWN else "")
            lines.append(f"could not be asked about: {len(self.not_asked)} packages ({some})")
        lines.append(f"asked about {len(self.asked)} packages: {len(self.found)} known vulnerabilities")
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


if __name__ == "__main__":
    result = audit(sys.argv[1] if len(sys.argv) > 1 else "pip-audit", LOCKS)
    print(result)  # noqa: T201  a command's answer
    sys.exit(result.exit_status)
