"""Spans and plans as compressed JSON: read whole or not at all, so columns would only cost space."""

import json
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gpuenergyd.core.carbon.intensity import ForecastHour
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.core.pipeline.plan import ClockChange, RankClocks
from gpuenergyd.errors import StoreError

MAX_BLOB_BYTES = 64 * 2**20
_NS_PER_S = 1e9


def encode_tags(tags: Sequence[tuple[str, str]]) -> str | None:
    """Return tags as text; nothing for none."""
    return json.dumps(dict(tags), separators=(",", ":"), ensure_ascii=False) if tags else None


def decode_tags(text: str | None) -> tuple[tuple[str, str], ...]:
    """Return the tags in a text, by name.

    Raises:
        StoreError: it holds something else.
    """
    if text is None:
        return ()
    try:
        return tuple(sorted((str(name), str(value)) for name, value in json.loads(text).items()))
    except (ValueError, AttributeError) as error:
        raise StoreError(f"damaged tags in the history: {error}") from None


def encode_spans(spans: Sequence[ObservedSpan]) -> bytes:
    """Return spans as bytes; times are kept to the nanosecond."""
    return _pack(
        [
            [s.pp_rank, s.kind, s.microbatch_index, s.chunk_index, _ns(s.start_s), _ns(s.end_s), s.mean_sm_clock_mhz]
            for s in spans
        ]
    )


def decode_spans(blob: bytes) -> tuple[ObservedSpan, ...]:
    """Return the spans in a blob.

    Raises:
        StoreError: it holds something else.
    """
    try:
        return tuple(
            ObservedSpan(rank, InstructionKind(kind), microbatch, chunk, start / _NS_PER_S, end / _NS_PER_S, clock)
            for rank, kind, microbatch, chunk, start, end, clock in _unpack(blob)
        )
    except (ValueError, TypeError) as error:
        raise StoreError(f"damaged timeline in the history: {error}") from None


def encode_clocks(ranks: Sequence[RankClocks]) -> bytes:
    """Return a plan's clocks as bytes."""
    return _pack(
        [
            [
                rank.pp_rank,
                rank.sm_clocks_mhz,
                [
                    [
                        c.instruction.kind,
                        c.instruction.microbatch_index,
                        c.instruction.chunk_index,
                        c.offset_s,
                        c.sm_clock_mhz,
                    ]
                    for c in rank.changes
                ],
            ]
            for rank in ranks
        ]
    )


def decode_clocks(blob: bytes) -> tuple[RankClocks, ...]:
    """Return a plan's clocks.

    Raises:
        StoreError: the blob holds something else.
    """
    try:
        return tuple(
            RankClocks(
                pp_rank,
                tuple(clocks),
                tuple(
                    ClockChange(Instruction(pp_rank, InstructionKind(kind), microbatch, chunk), offset_s, clock)
                    for kind, microbatch, chunk, offset_s, clock in changes
                ),
            )
            for pp_rank, clocks, changes in _unpack(blob)
        )
    except (ValueError, TypeError) as error:
        raise StoreError(f"damaged plan in the history: {error}") from None


def encode_hours(hours: Sequence[ForecastHour]) -> bytes:
    """Return the hours of a forecast as bytes."""
    return _pack(
        [[h.target_at.timestamp(), h.carbon_intensity_g_per_kwh, h.low_g_per_kwh, h.high_g_per_kwh] for h in hours]
    )


def decode_hours(blob: bytes) -> tuple[ForecastHour, ...]:
    """Return the hours of a forecast.

    Raises:
        StoreError: the blob holds something else.
    """
    try:
        return tuple(
            ForecastHour(datetime.fromtimestamp(at, tz=UTC), float(value), float(low), float(high))
            for at, value, low, high in _unpack(blob)
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise StoreError(f"damaged forecast in the history: {error}") from None


def encode_points(points: Sequence[tuple[float, float]]) -> bytes:
    """Return a frontier's points as bytes."""
    return _pack([list(point) for point in points])


def decode_points(blob: bytes) -> tuple[tuple[float, float], ...]:
    """Return a frontier's points.

    Raises:
        StoreError: the blob holds something else.
    """
    try:
        return tuple((float(time_s), float(energy_j)) for time_s, energy_j in _unpack(blob))
    except (ValueError, TypeError) as error:
        raise StoreError(f"damaged frontier in the history: {error}") from None


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)


def _pack(value: object) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def _unpack(blob: bytes) -> Any:
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(blob, MAX_BLOB_BYTES)
        if not stream.eof:
            raise StoreError("damaged entry in the history: cut short or too large")
        return json.loads(text)
    except zlib.error as error:
        raise StoreError(f"damaged entry in the history: {error}") from None
