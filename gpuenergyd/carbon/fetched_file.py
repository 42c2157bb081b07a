"""File of fetched values between fetcher and daemon: replaced atomically, validated when read."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuenergyd.core.carbon.intensity import (
    CarbonSignal,
    EmissionFactor,
    IntensitySample,
    SampleStatus,
    SignalKind,
    checked_intensity,
)
from gpuenergyd.errors import CarbonSourceError

VERSION = 1
MAX_BYTES = 8 * 2**20
MAX_SAMPLES = 20_000


class FetchState(StrEnum):
    """Outcome of the last fetch."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FetchStatus:
    """Status of a source: outcome and reason of the last fetch, time of the next one."""

    state: FetchState = FetchState.NEVER
    problem: str | None = None
    message: str | None = None
    num_failures: int = 0
    """Consecutive failures; 0 after a success."""
    fetched_at: datetime | None = None
    next_try_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Latest values of one source with its status."""

    signal: CarbonSignal
    samples: tuple[IntensitySample, ...]
    forecast: tuple[IntensitySample, ...]
    status: FetchStatus


def write_fetched(path: Path, fetched: Fetched) -> None:
    """Replace the file atomically, also across crashes.

    The file is world-readable: the daemon reads it as another user, and the values are public.

    Raises:
        OSError: the folder cannot be written.
    """
    text = json.dumps(_plain(fetched), separators=(",", ":"), allow_nan=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)  # independent of the umask
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_fetched(path: Path) -> Fetched:
    """Return the validated content of the file.

    Raises:
        CarbonSourceError: the file is missing or invalid.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CarbonSourceError(f"fetched values {path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise CarbonSourceError(f"fetched values {path}: larger than {MAX_BYTES} bytes")
    try:
        return _fetched(json.loads(content))
    except CarbonSourceError as error:
        raise CarbonSourceError(f"fetched values {path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CarbonSourceError(f"fetched values {path}: invalid content ({type(error).__name__})") from None


def _plain(fetched: Fetched) -> dict[str, Any]:
    signal, status = fetched.signal, fetched.status
    return {
        "version": VERSION,
        "signal": {
            "zone": signal.zone,
            "source": signal.source,
            "kind": signal.kind.value,
            "factor": signal.factor.value,
        },
        "samples": [_row(sample) for sample in fetched.samples],
        "forecast": [_row(sample) for sample in fetched.forecast],
        "status": {
            "state": status.state.value,
            "problem": status.problem,
            "message": status.message,
            "num_failures": status.num_failures,
            "fetched_at": _stamp(status.fetched_at),
            "next_try_at": _stamp(status.next_try_at),
        },
    }


def _row(sample: IntensitySample) -> list[Any]:
    return [
        sample.valid_from_at.timestamp(),
        sample.valid_to_at.timestamp(),
        sample.carbon_intensity_g_per_kwh,
        sample.status.value,
    ]


def _fetched(document: Mapping[str, Any]) -> Fetched:
    if document["version"] != VERSION:
        raise CarbonSourceError(f"unsupported version {document['version']!r:.20}; expected {VERSION}")
    raw = document["signal"]
    kind = SignalKind(raw["kind"])
    signal = CarbonSignal(_text(raw["zone"]), _text(raw["source"]), kind, EmissionFactor(raw["factor"]))
    if len(document["samples"]) + len(document["forecast"]) > MAX_SAMPLES:
        raise CarbonSourceError(f"more than {MAX_SAMPLES} samples")
    status = document["status"]
    return Fetched(
        signal,
        samples=tuple(_sample(row, kind) for row in document["samples"]),
        forecast=tuple(_sample(row, kind) for row in document["forecast"]),
        status=FetchStatus(
            FetchState(status["state"]),
            problem=None if status["problem"] is None else _text(status["problem"]),
            message=None if status["message"] is None else _text(status["message"]),
            num_failures=int(status["num_failures"]),
            fetched_at=_instant(status["fetched_at"]),
            next_try_at=_instant(status["next_try_at"]),
        ),
    )


def _sample(row: list[Any], kind: SignalKind) -> IntensitySample:
    begin_s, end_s, value, status = row
    begin, end = _instant(begin_s), _instant(end_s)
    if begin is None or end is None or not begin < end <= begin + timedelta(days=1):
        raise CarbonSourceError("interval of a sample must be between 0 and 24 h long")
    return IntensitySample(begin, end, checked_intensity(value, kind), SampleStatus(status))


def _instant(seconds: object) -> datetime | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise CarbonSourceError(f"{seconds!r:.20} is not a time in seconds")
    return datetime.fromtimestamp(seconds, tz=UTC)


def _stamp(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 256:
        raise CarbonSourceError(f"{value!r:.40} is not a text of at most 256 characters")
    return value
