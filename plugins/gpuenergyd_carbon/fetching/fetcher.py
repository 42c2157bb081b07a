"""The fetcher process: fetches carbon intensities from the network and writes them to one file; nothing else.

It queries a provider as often as the provider has new values, waits longer after failures, and keeps values for
65 weeks. At the first start it also fetches past values, if there are any. The daemon works without the file, too.
"""

import json
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpuenergyd.core.carbon.intensity import EmissionFactor, IntensitySample, SampleStatus, SignalKind
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import CarbonDataError, CarbonSourceError, GpuEnergyError
from gpuenergyd.key_files import read_key
from gpuenergyd.log_lines import configure_logging
from gpuenergyd_carbon.fetched_file import Fetched, FetchState, FetchStatus, read_fetched, write_fetched
from gpuenergyd_carbon.fetching.past_values import PastValues, kept_samples
from gpuenergyd_carbon.sources.source import CarbonSource, SourceOptions, SourceReply, default_source_name, make_source
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem, Web

_LOG = logging.getLogger("gpuenergyd_carbon.fetching.fetcher")

BREAKER_FIRST_S = 15 * 60.0
BREAKER_LAST_S = 2 * 3600.0
REFUSED_S = 3600.0
"""Minimum pause after a rejected key; providers block keys that retry faster."""
JITTER_S = 120.0
_STEP_S = 30.0
_FIELDS = {"zone", "source", "key_path", "base_url", "kind", "factor", "path", "g_per_kwh", "out_path"}


@dataclass(frozen=True, slots=True)
class FetcherConfig:
    """Configuration of the fetcher: a JSON object on standard input, so that it is not visible in process lists."""

    zone: str
    out_path: Path
    source: str | None = None
    key_path: Path | None = None
    base_url: str | None = None
    kind: SignalKind | None = None
    factor: EmissionFactor | None = None
    path: Path | None = None
    g_per_kwh: float | None = None


def config_from_json(text: str) -> FetcherConfig:
    """Return the configuration.

    Raises:
        CarbonDataError: unknown or missing keys, or invalid values.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        unknown = set(raw) - _FIELDS
        if unknown:
            raise CarbonDataError(f"unknown fetcher setting {min(unknown)!r}; valid: {', '.join(sorted(_FIELDS))}")
        paths = {name: Path(raw[name]) for name in ("key_path", "path") if raw.get(name)}
        return FetcherConfig(
            zone=str(raw["zone"]),
            out_path=Path(raw["out_path"]),
            source=raw.get("source"),
            base_url=raw.get("base_url"),
            kind=SignalKind(raw["kind"]) if raw.get("kind") else None,
            factor=EmissionFactor(raw["factor"]) if raw.get("factor") else None,
            g_per_kwh=raw.get("g_per_kwh"),
            **paths,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CarbonDataError(f"invalid fetcher settings: {type(error).__name__}: {error}") from None


def source_of(config: FetcherConfig, web: Web | None = None) -> CarbonSource:
    """Return the configured source, or the default one of the zone; only zone GB has a default.

    Raises:
        CarbonDataError: the source is unknown, or its options or key file are invalid.
    """
    return make_source(
        config.source or default_source_name(config.zone),
        SourceOptions(
            zone=config.zone,
            web=web or Web(),
            key=read_key(config.key_path) if config.key_path is not None else None,
            base_url=config.base_url,
            kind=config.kind,
            factor=config.factor,
            path=config.path,
            g_per_kwh=config.g_per_kwh,
        ),
    )


def fetch_if_due(source: CarbonSource, known: Fetched, now_at: datetime, jitter: float = 0.0) -> Fetched:
    """Fetch once if it is due, and return the latest values; a failure of the source is part of their status.

    `jitter` (0..1) spreads the requests of many daemons over two minutes.
    """
    due_at = known.status.next_try_at
    # A clock that was set back must not delay the next fetch by more than the longest pause.
    if due_at is not None and now_at < due_at <= now_at + timedelta(seconds=BREAKER_LAST_S + 86_400):
        return known
    try:
        reply = source.fetch(now_at)
    except CarbonSourceError as error:
        return _after_failure(known, error, now_at)
    except Exception as error:  # noqa: BLE001  a third-party source may raise anything
        return _after_failure(known, CarbonSourceError(f"{type(error).__name__} in source"), now_at)
    return _after_reply(source, known, reply, now_at, jitter)


def _after_reply(source: CarbonSource, known: Fetched, reply: SourceReply, now_at: datetime, jitter: float) -> Fetched:
    notes = list(reply.rejected[:1]) + (["the newest value is older than a day"] if reply.is_stale else [])
    return Fetched(
        source.signal,
        samples=kept_samples(known.samples, reply.samples, now_at=now_at),
        forecast=reply.forecast or _ahead(known.forecast, now_at),
        status=FetchStatus(
            FetchState.DEGRADED if notes else FetchState.OK,
            problem="partly-unusable" if reply.rejected else "stale" if reply.is_stale else None,
            message="; ".join(notes)[:256] or None,
            fetched_at=now_at,
            next_try_at=_next_boundary(now_at, source.period_s) + timedelta(seconds=JITTER_S * jitter),
        ),
    )


def _after_failure(known: Fetched, error: CarbonSourceError, now_at: datetime) -> Fetched:
    num_failures = known.status.num_failures + 1
    pause_s = min(BREAKER_FIRST_S * 2.0 ** min(num_failures - 1, 10), BREAKER_LAST_S)
    problem = error.problem.value if isinstance(error, SourceError) else "failed"
    if isinstance(error, SourceError):
        if error.problem in {SourceProblem.UNAUTHORIZED, SourceProblem.FORBIDDEN, SourceProblem.SANDBOX}:
            pause_s = max(pause_s, REFUSED_S)
        pause_s = max(pause_s, error.retry_after_s or 0.0)
    status = replace(
        known.status,
        state=FetchState.FAILED,
        problem=problem,
        message=str(error)[:256],
        num_failures=num_failures,
        next_try_at=now_at + timedelta(seconds=pause_s),
    )
    if problem == SourceProblem.SANDBOX:  # an earlier version has stored values of this key, all marked as estimates
        measured = tuple(sample for sample in known.samples if sample.status is SampleStatus.MEASURED)
        return replace(known, samples=measured, forecast=(), status=status)
    return replace(known, forecast=_ahead(known.forecast, now_at), status=status)


def _ahead(forecast: tuple[IntensitySample, ...], now_at: datetime) -> tuple[IntensitySample, ...]:
    return tuple(sample for sample in forecast if sample.valid_to_at > now_at)


def _next_boundary(now_at: datetime, period_s: float) -> datetime:
    return datetime.fromtimestamp((now_at.timestamp() // period_s + 1) * period_s, tz=UTC)


def run(
    config: FetcherConfig,
    source: CarbonSource,
    stopped: threading.Event,
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(tz=UTC),
) -> None:
    """Fetch and write until stopped; start from the values of an earlier fetcher if its file holds the same signal."""
    known = Fetched(source.signal, (), (), FetchStatus())
    try:
        earlier = read_fetched(config.out_path)
    except CarbonSourceError:
        earlier = known
    if earlier.signal == source.signal:
        known = earlier
    jitter = random.random()  # noqa: S311  spreads load, hides nothing
    past = PastValues()
    while not stopped.is_set():
        latest = past.fetch_missing(source, fetch_if_due(source, known, clock(), jitter), clock())
        if latest is not known:
            if (latest.status.state, latest.status.problem) != (known.status.state, known.status.problem):
                outcome = latest.status.message or count_text(len(latest.samples), "sample")
                _LOG.info(
                    "source=%s zone=%s state=%s: %s", source.signal.source, config.zone, latest.status.state, outcome
                )
            known = latest
            try:
                write_fetched(config.out_path, known)
            except OSError as error:
                _LOG.warning("cannot write %s: %s", config.out_path, error.strerror)
        stopped.wait(_STEP_S)


def main() -> int:
    """Read the configuration from standard input and run until SIGTERM.

    An invalid configuration is reported in one line on standard output, which is not used for anything else.
    """
    configure_logging("gpuenergyd-carbon")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        config = config_from_json(sys.stdin.read(64 * 1024))
        source = source_of(config)
    except GpuEnergyError as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
        return error.exit_code
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a source may print
    run(config, source, stopped)
    return 0


if __name__ == "__main__":
    sys.exit(main())
