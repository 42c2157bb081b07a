"""Packed minutes are read back rounded to their units; missing values stay missing."""

import zlib
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.errors import StoreError
from gpuenergyd.store import open_history
from gpuenergyd.store.encoding.series import Value, pack_series, unpack_series
from gpuenergyd.store.records import RollupRecord, SampleRecord
from tests.support.stored_history import write_records

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
VALUE = st.none() | st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(st.tuples(VALUE, VALUE), max_size=80), st.sampled_from((0.001, 0.1, 1.0)))
def test_a_series_is_read_back_rounded_to_its_units(rows: list[tuple[Value, Value]], unit: float) -> None:
    columns = {"a": [a for a, _ in rows], "b": [b for _, b in rows]}

    back = unpack_series(pack_series(columns, {"a": unit, "b": unit}))

    for name, values in columns.items():
        assert [v is None for v in back[name]] == [v is None for v in values]
        for was, now in zip(values, back[name], strict=True):
            assert was is None or now == pytest.approx(was, abs=0.500001 * unit, rel=1e-12)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"rubbish",
        zlib.compress(b"{}\n"),
        zlib.compress(b'{"version":9}\n'),
        pack_series({"a": [1]}, {"a": 1})[:-9],
    ],
)
def test_a_corrupt_series_raises_a_store_error(packed: bytes) -> None:
    with pytest.raises(StoreError):
        unpack_series(packed)


def sample(at_s: float, power_w: float | None = 250.0) -> SampleRecord:
    return SampleRecord("GPU-a", START + timedelta(seconds=at_s), power_w, 1000.0 + 25 * at_s, 1410, 55.0)


def second(at_s: float, job_id: str = "j", energy_j: float | None = 250.0) -> RollupRecord:
    return RollupRecord(
        1, "GPU-a", START + timedelta(seconds=at_s), job_id, energy_j, 250.0, 260.0, 1410.0, 10, measured_s=1.0
    )


def test_samples_are_read_back_in_order_across_minutes(place: str) -> None:
    times_s = [0.1 * k for k in range(1500)]
    write_records(place, *(sample(at_s, None if k % 7 == 0 else 200.0 + k) for k, at_s in enumerate(times_s)))

    with open_history(place) as history:
        samples = history.samples("GPU-a")
        within = history.samples("GPU-a", since=START + timedelta(seconds=70), until=START + timedelta(seconds=80))
    assert [(s.at - START).total_seconds() for s in samples] == pytest.approx(times_s, abs=0.001)
    assert [s.power_w for s in samples[:3]] == [None, pytest.approx(201.0), pytest.approx(202.0)]
    assert len(within) == 100


def test_a_minute_that_another_daemon_started_is_continued(place: str) -> None:
    write_records(place, *(second(k) for k in range(20)))
    write_records(place, *(second(k) for k in range(30, 50)))

    with open_history(place) as history:
        seconds = [(r.started_at - START).total_seconds() for r in history.rollups(bucket_s=1)]
    assert seconds == [*range(20), *range(30, 50)]


def test_two_parts_of_one_second_become_one_rollup(place: str) -> None:
    write_records(place, second(3, energy_j=100.0), second(3.4, energy_j=50.0), second(3.2, "other"))

    with open_history(place) as history:
        buckets = sorted(history.rollups(bucket_s=1), key=lambda bucket: bucket.job_id)
    assert [(b.job_id, b.started_at, b.num_samples) for b in buckets] == [
        ("j", START + timedelta(seconds=3), 20),
        ("other", START + timedelta(seconds=3), 10),
    ]
    assert [b.energy_j for b in buckets] == pytest.approx([150.0, 250.0])


def test_nan_is_stored_as_missing_without_affecting_other_values(place: str) -> None:
    write_records(place, sample(1, float("nan")), sample(2, float("inf")), sample(3, 100.0))

    with open_history(place) as history:
        assert [s.power_w for s in history.samples("GPU-a")] == [None, None, pytest.approx(100.0)]
