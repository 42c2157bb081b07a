"""Stored results of benchmarks: figures, circumstances and the reason of a failed attempt."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("gpuenergyd", "numpy", "torch", "lowtime")
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Circumstances:
    """When, where and how figures were measured."""

    measured_at: str
    """UTC, to the minute."""
    duration_s: float
    command: str
    architecture: str
    num_cores: int
    python: str
    versions: Mapping[str, str]
    load_before: float
    load_after: float
    """One-minute averages; the second includes the benchmark itself."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that failed."""

    at: str
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """The last figures of a benchmark and the attempt that failed since then, each None without."""

    name: str
    figures: Any = None
    """The JSON that the benchmark printed; for a benchmark that prints tables: {heading: {columns, rows}}."""
    circumstances: Circumstances | None = None
    is_met: bool = True
    """Whether all targets were met, according to the exit status of the benchmark."""
    failed: Attempt | None = None


def circumstances(command: str, begun_at: datetime, duration_s: float, load_before: float) -> Circumstances:
    """Return the circumstances of a run that has just ended."""
    return Circumstances(
        measured_at=utc_text(begun_at),
        duration_s=round(duration_s, 1),
        command=command,
        architecture=platform.machine(),
        num_cores=os.cpu_count() or 0,
        python=platform.python_version(),
        versions=dict(installed_versions()),
        load_before=load_before,
        load_after=round(os.getloadavg()[0], 1),
    )


def installed_versions() -> list[tuple[str, str]]:
    """Return the versions of the benchmarked packages."""
    found = []
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found


def utc_text(at: datetime) -> str:
    """Return an instant in the format of results and page."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def read_result(name: str, folder: Path = RESULTS) -> Result:
    """Return the stored result of a benchmark; without figures if it has never succeeded."""
    path = folder / f"{name}.json"
    if not path.exists():
        return Result(name)
    kept = json.loads(path.read_text(encoding="utf-8"))
    given, failed = kept["circumstances"], kept["failed"]
    return Result(
        name,
        kept["figures"],
        Circumstances(**given) if given else None,
        kept["is_met"],
        Attempt(**failed) if failed else None,
    )


def with_failure(result: Result, attempt: Attempt) -> Result:
    """Return a result with the same figures and a failed attempt."""
    return replace(result, failed=attempt)


def write_result(result: Result, folder: Path = RESULTS) -> None:
    """Store a result atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(result), indent=1) + "\n"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(folder / f"{result.name}.json")
