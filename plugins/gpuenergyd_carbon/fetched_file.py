"""The file by which the carbon fetcher passes values to the daemon: replaced atomically, validated when read."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

import msgspec

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.core.carbon.intensity import CarbonSignal, IntensitySample
from gpuenergyd.errors import CarbonDataError, CarbonSourceError
from gpuenergyd_carbon.rules.hourly_values import checked_intensity

VERSION = 2
KEPT_HISTORY = timedelta(weeks=65)
"""How long values are kept in the file; with 400 days of them, a forecast knows the season from its first day on."""
KEPT_AS_SENT = timedelta(days=8)
"""Values older than this are kept as hourly means."""
MAX_BYTES = 8 * 2**20
MAX_SAMPLES = 20_000
MAX_TEXT_CHARS = 256
SANDBOX_PROBLEM = "sandbox"
"""Problem of a test key, for which a source returns invented values; stored estimates of that source are deleted."""


class FetchState(StrEnum):
    """Outcome of the last fetch."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FetchStatus:
    """Status of a source: outcome and reason of the last fetch, and time of the next one."""

    state: FetchState = FetchState.NEVER
    problem: str | None = None
    message: str | None = None
    num_failures: int = 0
    """Consecutive failures; 0 after a success."""
    fetched_at: datetime | None = None
    next_try_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Latest values of one source, with its status."""

    signal: CarbonSignal
    samples: tuple[IntensitySample, ...]
    forecast: tuple[IntensitySample, ...]
    status: FetchStatus


@dataclass(frozen=True, slots=True)
class _FetchedFile:
    version: int
    fetched: Fetched


_DECODER = msgspec.json.Decoder(_FetchedFile)


def write_fetched(path: Path, fetched: Fetched) -> None:
    """Replace the file atomically, so that it stays intact even if the host crashes.

    The file is world-readable: the daemon reads it as another user, and the values are public.

    Raises:
        OSError: the folder cannot be written.
    """
    content = msgspec.json.encode(_FetchedFile(VERSION, fetched))
    replace_file(path, content, mode=0o644, is_durable=True)


def read_fetched(path: Path) -> Fetched:
    """Return the validated content of the file, or raise CarbonSourceError if the file is missing or invalid."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CarbonSourceError(f"fetched values {path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise CarbonSourceError(f"fetched values {path}: larger than {MAX_BYTES} bytes")
    try:
        return _checked(_DECODER.decode(content))
    except (CarbonSourceError, CarbonDataError) as error:
        raise CarbonSourceError(f"fetched values {path}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CarbonSourceError(f"fetched values {path}: invalid content: {error}") from None


def _checked(content: _FetchedFile) -> Fetched:
    if content.version != VERSION:
        raise CarbonSourceError(f"unsupported version {content.version}; expected {VERSION}")
    fetched = content.fetched
    if len(fetched.samples) + len(fetched.forecast) > MAX_SAMPLES:
        raise CarbonSourceError(f"more than {MAX_SAMPLES} samples")
    signal, status = fetched.signal, fetched.status
    for text in (signal.zone, signal.source, status.problem, status.message):
        if text is not None and len(text) > MAX_TEXT_CHARS:
            raise CarbonSourceError(f"{text!r:.40} is not a text of at most {MAX_TEXT_CHARS} characters")
    if any(at is not None and at.tzinfo is None for at in (status.fetched_at, status.next_try_at)):
        raise CarbonSourceError(f"{status.fetched_at} or {status.next_try_at} has no time zone")
    for sample in (*fetched.samples, *fetched.forecast):
        if sample.valid_to_at - sample.valid_from_at > timedelta(days=1):
            raise CarbonSourceError("interval of a sample must be between 0 and 24 h long")
        checked_intensity(sample.carbon_intensity_g_per_kwh, signal.kind)
    return fetched
