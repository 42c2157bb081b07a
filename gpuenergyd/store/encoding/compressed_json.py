"""Timelines, plans, forecasts and frontiers as compressed JSON, because they are always read as a whole.

Decoding invalid data raises StoreError.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from gpuenergyd.core.carbon.intensity import ForecastHour
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.core.pipeline.plan import ClockChange, RankClocks
from gpuenergyd.errors import StoreError
from gpuenergyd.printable import printable_line

MAX_DECOMPRESSED_BYTES = 64 * 2**20
_NS_PER_S = 1e9


def encode_tags(tags: Sequence[tuple[str, str]]) -> str | None:
    """Return tags as uncompressed JSON text, None without tags."""
    return json.dumps(dict(tags), separators=(",", ":"), ensure_ascii=False) if tags else None


def decode_tags(text: str | None) -> tuple[tuple[str, str], ...]:
    """Return the tags in a text, sorted by name."""
    if text is None:
        return ()
    with _decoding("tags"):
        return tuple(
            sorted((printable_line(str(name)), printable_line(str(value))) for name, value in json.loads(text).items())
        )


def encode_spans(spans: Sequence[ObservedSpan]) -> bytes:
    """Return the spans of a timeline as bytes, with times in whole nanoseconds."""
    return _compress(
        [
            [s.pp_rank, s.kind, s.microbatch_index, s.chunk_index, _ns(s.start_s), _ns(s.end_s), s.mean_sm_clock_mhz]
            for s in spans
        ]
    )


def decode_spans(blob: bytes) -> tuple[ObservedSpan, ...]:
    with _decoding("timeline"):
        return tuple(
            ObservedSpan(rank, InstructionKind(kind), microbatch, chunk, start / _NS_PER_S, end / _NS_PER_S, clock)
            for rank, kind, microbatch, chunk, start, end, clock in _decompress(blob)
        )


def encode_clocks(ranks: Sequence[RankClocks]) -> bytes:
    return _compress(
        [[rank.pp_rank, rank.sm_clocks_mhz, [_change(c) for c in rank.changes], *_settings(rank)] for rank in ranks]
    )


def _settings(rank: RankClocks) -> list[float | None]:
    """Return the power limit and workload power profile, if the rank has them."""
    if rank.power_profile is not None:
        return [rank.power_limit_w, rank.power_profile]
    return [] if rank.power_limit_w is None else [rank.power_limit_w]


def decode_clocks(blob: bytes) -> tuple[RankClocks, ...]:
    with _decoding("plan"):
        return tuple(
            RankClocks(
                pp_rank,
                tuple(clocks),
                tuple(
                    ClockChange(Instruction(pp_rank, InstructionKind(kind), microbatch, chunk), offset_s, clock)
                    for kind, microbatch, chunk, offset_s, clock in changes
                ),
                float(settings[0]) if settings and settings[0] is not None else None,
                int(settings[1]) if len(settings) > 1 else None,
            )
            for pp_rank, clocks, changes, *settings in _decompress(blob)
        )


def encode_hours(hours: Sequence[ForecastHour]) -> bytes:
    return _compress(
        [[h.target_at.timestamp(), h.carbon_intensity_g_per_kwh, h.low_g_per_kwh, h.high_g_per_kwh] for h in hours]
    )


def decode_hours(blob: bytes) -> tuple[ForecastHour, ...]:
    with _decoding("forecast"):
        return tuple(
            ForecastHour(datetime.fromtimestamp(at, tz=UTC), float(value), float(low), float(high))
            for at, value, low, high in _decompress(blob)
        )


def encode_points(points: Sequence[tuple[float, float]]) -> bytes:
    """Return the (time, energy) points of a frontier as bytes."""
    return _compress([list(point) for point in points])


def decode_points(blob: bytes) -> tuple[tuple[float, float], ...]:
    """Return the (time, energy) points of a frontier."""
    with _decoding("frontier"):
        return tuple((float(time_s), float(energy_j)) for time_s, energy_j in _decompress(blob))


def _change(change: ClockChange) -> list[Any]:
    of = change.instruction
    return [of.kind, of.microbatch_index, of.chunk_index, change.offset_s, change.sm_clock_mhz]


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)


def _compress(value: object) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def _decompress(blob: bytes) -> Any:
    stream = zlib.decompressobj()
    text = stream.decompress(blob, MAX_DECOMPRESSED_BYTES)
    if not stream.eof:
        raise ValueError(f"compressed data is truncated or larger than {MAX_DECOMPRESSED_BYTES} bytes")
    return json.loads(text)


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, AttributeError, OverflowError, zlib.error) as error:
        raise StoreError(f"invalid {what} in the history: {error}") from None
