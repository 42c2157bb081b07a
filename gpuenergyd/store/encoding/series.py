"""Samples and one-second rollups of one GPU, packed by minute: a few bytes per sample instead of a row.

A packed series is a zlib stream of one line of JSON (column names, number of points) followed by the columns. Values
are multiples of the column's unit, stored as differences between neighbours with bytes of equal significance grouped.
A column with missing values is preceded by a mask; missing values are read back as None.
"""

import json
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

from gpuenergyd.errors import StoreError

Value = float | int | None

RAW_TIER, SECOND_TIER = 0, 1
SERIES_UNITS: Mapping[int, Mapping[str, float]] = {
    RAW_TIER: {"at_s": 0.001, "power_w": 0.1, "total_energy_j": 0.1, "sm_clock_mhz": 1, "temperature_celsius": 1},
    SECOND_TIER: {
        "at_s": 1,
        "energy_j": 0.001,
        "mean_power_w": 0.1,
        "max_power_w": 0.1,
        "mean_sm_clock_mhz": 0.1,
        "num_samples": 1,
        "estimated_j": 0.001,
        "measured_s": 0.001,
        "estimated_s": 0.001,
        "missing_s": 0.001,
    },
}
"""The columns of each tier, and the unit to which values are rounded."""

_VERSION = 1
_WIDTH = 8
_LEVEL = 6


def series_points(tier: int, started_at: datetime, packed: bytes) -> Iterator[tuple[datetime, dict[str, Value]]]:
    """Yield (instant, values by name) of a packed minute; raise StoreError if the series is corrupt."""
    columns = unpack_series(packed)
    names = [name for name in SERIES_UNITS[tier] if name in columns and name != "at_s"]
    for at_s, *values in zip(columns["at_s"], *(columns[name] for name in names), strict=True):
        assert at_s is not None
        yield started_at + timedelta(seconds=at_s), dict(zip(names, values, strict=True))


def pack_series(columns: Mapping[str, Sequence[Value]], units: Mapping[str, float]) -> bytes:
    """Return columns of equal length as bytes; values are rounded to `units[name]`."""
    num_points = {len(column) for column in columns.values()}
    assert len(num_points) == 1
    header = {
        "version": _VERSION,
        "points": num_points.pop(),
        "columns": [[name, units[name], int(None in column)] for name, column in columns.items()],
    }
    parts = [json.dumps(header, separators=(",", ":")).encode() + b"\n"]
    for name, column in columns.items():
        if None in column:
            parts.append(bytes(value is not None for value in column))
        parts.append(_pack_column(column, units[name]))
    return zlib.compress(b"".join(parts), _LEVEL)


def unpack_series(packed: bytes) -> dict[str, list[Value]]:
    """Return the columns of a packed series.

    Raises:
        StoreError: the series is corrupt or was packed by a newer version.
    """
    try:
        line, _, body = zlib.decompress(packed).partition(b"\n")
        header = json.loads(line)
        if header["version"] != _VERSION:
            raise StoreError(f"packed series has version {header['version']}; this gpuenergyd reads version {_VERSION}")
        num_points, at = int(header["points"]), 0
        columns: dict[str, list[Value]] = {}
        for name, unit, has_mask in header["columns"]:
            mask = body[at : at + num_points] if has_mask else None
            at += num_points if has_mask else 0
            values = _unpack_column(body[at : at + _WIDTH * num_points], num_points, unit)
            at += _WIDTH * num_points
            columns[name] = [v if m else None for v, m in zip(values, mask, strict=True)] if mask else list(values)
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"packed series is corrupt: {error}") from None
    return columns


def _pack_column(column: Sequence[Value], unit: float) -> bytes:
    last, whole = 0, []
    for value in column:
        # A missing value repeats the previous one: a difference of zero compresses to almost nothing.
        last = last if value is None else round(value / unit)
        whole.append(last)
    raw = _little_endian(array("q", [whole[0], *(b - a for a, b in pairwise(whole))] if whole else [])).tobytes()
    return b"".join(raw[weight::_WIDTH] for weight in range(_WIDTH))


def _unpack_column(planes: bytes, num_points: int, unit: float) -> list[float]:
    raw = bytearray(_WIDTH * num_points)
    for weight in range(_WIDTH):
        raw[weight::_WIDTH] = planes[weight * num_points : (weight + 1) * num_points]
    differences = array("q")
    differences.frombytes(bytes(raw))
    total, values = 0, []
    for difference in _little_endian(differences):
        total += difference
        values.append(total * unit)
    return values


def _little_endian(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
