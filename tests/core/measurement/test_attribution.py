"""Energy attribution: slices of jobs and idle time add up to the counter, and missing energy is never zero."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.attribution import EnergyAttribution, EnergySlice
from gpuenergyd.core.measurement.telemetry import EnergyCounter

NS_PER_S = 1_000_000_000
START = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)


def at(mono_ns: int) -> datetime:
    return START + timedelta(microseconds=mono_ns // 1000)


class Host:
    """One GPU with an exact counter, whose truth is kept beside what the attribution says."""

    def __init__(self) -> None:
        self.attribution, self.counter = EnergyAttribution(), EnergyCounter()
        self.mono_ns = 0
        self.total_j = 500.0
        self.wall_offset = timedelta()
        self.slices: list[EnergySlice] = []

    def step(
        self, seconds: float, power_w: float, job_id: str = "", *, is_read: bool = True, has_counter: bool = True
    ) -> None:
        """Let time pass at a power, and read what there is to read."""
        self.mono_ns += round(seconds * NS_PER_S)
        self.total_j += power_w * seconds
        if not is_read:
            return
        if has_counter:
            self.counter.record(self.mono_ns, self.total_j)
        self.attribution.add_sample(
            mono_ns=self.mono_ns,
            at=at(self.mono_ns) + self.wall_offset,
            job_id=job_id,
            power_w=power_w,
            sm_clock_mhz=1410,
        )
        self.slices += self.attribution.completed_slices(self.mono_ns, self.counter)

    def finish(self) -> None:
        """Let the counter pass the end of what was measured."""
        self.step(1.5, 50.0)
        self.step(5.0, 50.0)


STEP = st.tuples(
    st.sampled_from((0.1, 0.1, 0.1, 0.35, 1.0, 2.7, 75.0, 900.0)),
    st.floats(20.0, 400.0),
    st.sampled_from(("", "a", "a", "b")),
    st.booleans(),
)


@given(st.lists(STEP, min_size=1, max_size=60), st.lists(st.integers(-40, 40), max_size=3))
def test_energy_of_jobs_and_idle_time_adds_up_to_the_counter(
    steps: list[tuple[float, float, str, bool]], jumps_s: list[int]
) -> None:
    host = Host()
    host.step(0.1, 100.0)
    for number, (seconds, power_w, job_id, is_read) in enumerate(steps):
        if jumps_s and number % 20 == 19:
            host.wall_offset += timedelta(seconds=jumps_s.pop())
        host.step(seconds, power_w, job_id, is_read=is_read)
    host.finish()

    counted_j = host.counter.energy_j(host.slices[0].begin_mono_ns, host.slices[-1].end_mono_ns)
    reported_j = fsum((p.energy_j or 0.0) + (p.estimated_j or 0.0) for p in host.slices)
    assert counted_j == pytest.approx(reported_j, rel=1e-9)
    assert all(earlier.end_mono_ns == later.begin_mono_ns for earlier, later in pairwise(host.slices))


@given(st.lists(st.tuples(STEP, st.booleans(), st.sampled_from((False,) * 8 + (True,))), min_size=1, max_size=60))
def test_measured_estimated_and_missing_time_add_up_to_the_length_of_a_slice(
    steps: list[tuple[tuple[float, float, str, bool], bool, bool]],
) -> None:
    host = Host()
    for (seconds, power_w, job_id, is_read), has_counter, is_reset in steps:
        if is_reset:
            host.total_j = 0.0
        host.step(seconds, power_w, job_id, is_read=is_read, has_counter=has_counter)
    host.finish()

    for piece in host.slices:
        length_s = (piece.end_mono_ns - piece.begin_mono_ns) / NS_PER_S
        assert sorted((piece.measured_s, piece.estimated_s, piece.missing_s)) == pytest.approx([0, 0, length_s])
        assert (piece.energy_j is not None) == (piece.measured_s > 0)
        assert (piece.estimated_j is not None) == (piece.estimated_s > 0)


def test_a_change_of_owner_ends_a_slice_within_a_second() -> None:
    host = Host()
    for _ in range(5):
        host.step(0.1, 100.0, "a")
    for _ in range(5):
        host.step(0.1, 300.0, "b")
    host.finish()

    first, second = host.slices[:2]
    assert (first.job_id, second.job_id) == ("a", "b")
    assert (first.energy_j, second.energy_j) == pytest.approx((70.0, 45.0))


def test_energy_of_a_gap_that_the_counter_spans_is_estimated_and_spread_evenly() -> None:
    host = Host()
    host.step(0.1, 100.0, "a")
    host.step(10.0, 200.0, "a", is_read=False)
    host.step(0.1, 100.0, "a")
    host.finish()

    estimated = [p for p in host.slices if p.estimated_j is not None and p.begin_mono_ns < 10 * NS_PER_S]
    assert len(estimated) >= 9
    assert all(p.num_samples == 0 and p.energy_j is None for p in estimated)
    assert all(p.estimated_j == pytest.approx(200.0 * p.estimated_s, rel=0.02) for p in estimated)


def test_across_a_counter_reset_energy_is_estimated_from_power() -> None:
    host = Host()
    for _ in range(20):
        host.step(0.1, 100.0)
    host.total_j = 0.0
    for _ in range(20):
        host.step(0.1, 100.0)
    host.finish()

    across = [p for p in host.slices if p.energy_j is None and p.num_samples]
    assert len(across) == 1
    assert across[0].estimated_j == pytest.approx(100.0 * across[0].estimated_s)


def test_without_counter_and_power_energy_is_missing_not_zero() -> None:
    attribution, counter = EnergyAttribution(), EnergyCounter()
    for k in range(1, 50):
        attribution.add_sample(
            mono_ns=k * NS_PER_S // 5, at=at(k * NS_PER_S // 5), job_id="", power_w=None, sm_clock_mhz=None
        )
    slices = attribution.completed_slices(60 * NS_PER_S, counter)

    assert len(slices) > 5
    assert all(p.energy_j is None and p.estimated_j is None and p.missing_s > 0 for p in slices)


def test_out_of_order_samples_are_ignored() -> None:
    host = Host()
    host.step(0.5, 100.0)
    host.step(0.5, 100.0)
    host.attribution.add_sample(mono_ns=1, at=at(1), job_id="x", power_w=1.0, sm_clock_mhz=1)
    host.step(0.5, 100.0)
    host.finish()

    assert {p.job_id for p in host.slices} == {""}


def test_every_sample_is_counted_in_one_piece() -> None:
    host = Host()
    for _ in range(25):
        host.step(0.1, 100.0, "a")

    host.finish()

    open_piece = 1
    assert sum(piece.num_samples for piece in host.slices) == 25 + 2 - open_piece
    assert max(piece.num_samples for piece in host.slices) == 10


@pytest.mark.parametrize(
    ("gap_s", "longest_s"), [(60.0, 1.0), (119.5, 1.0), (121.0, 60.0), (130.0, 60.0), (7300.0, 3600.0), (3e6, 86_400.0)]
)
def test_a_long_gap_is_cut_into_minutes_hours_or_days(gap_s: float, longest_s: float) -> None:
    host = Host()
    host.step(0.1, 100.0)
    host.step(gap_s, 100.0)
    host.finish()

    lengths_s = [(piece.end_mono_ns - piece.begin_mono_ns) / NS_PER_S for piece in host.slices]

    assert max(lengths_s) == pytest.approx(longest_s, rel=0.5)


def closed(*samples: tuple[float, str, float | None]) -> list[EnergySlice]:
    """Return the slices of samples (second, job, watts) without a counter, from a full second on."""
    attribution, whole = EnergyAttribution(), START.replace(microsecond=0)
    for second, job_id, power_w in samples:
        attribution.add_sample(
            mono_ns=round((5 + second) * NS_PER_S),
            at=whole + timedelta(seconds=second),
            job_id=job_id,
            power_w=power_w,
            sm_clock_mhz=None if power_w is None else round(10 * power_w),
        )
    return list(attribution.completed_slices(10**15, EnergyCounter()))


def test_a_slice_begins_and_ends_with_its_wall_clock_second() -> None:
    slices = closed((0.25, "a", 100.0), (0.75, "a", 200.0), (1.5, "a", 400.0), (2.5, "a", 400.0))

    first, second = slices
    assert (first.begin_mono_ns, first.end_mono_ns) == (5_250_000_000, 6_000_000_000)
    assert (second.begin_mono_ns, second.end_mono_ns) == (6_000_000_000, 7_000_000_000)
    assert first.started_at == START
    assert second.started_at == START.replace(microsecond=0) + timedelta(seconds=1)
    assert (first.num_samples, first.mean_power_w, first.max_power_w, first.mean_sm_clock_mhz) == (
        2,
        150.0,
        200.0,
        1500,
    )
    assert (first.estimated_j, first.estimated_s, first.measured_s, first.missing_s) == (112.5, 0.75, 0.0, 0.0)


def test_the_slice_of_a_new_owner_begins_at_its_first_sample() -> None:
    slices = closed((0.25, "a", 100.0), (0.5, "b", 100.0), (1.5, "b", 100.0))

    assert [(p.job_id, p.begin_mono_ns, p.end_mono_ns) for p in slices] == [
        ("a", 5_250_000_000, 5_500_000_000),
        ("b", 5_500_000_000, 6_000_000_000),
    ]


def test_a_repeated_instant_counts_as_one_sample() -> None:
    slices = closed((0.25, "a", 100.0), (0.25, "a", 900.0), (1.25, "a", 100.0))

    assert (slices[0].num_samples, slices[0].max_power_w) == (1, 100.0)


def test_a_gap_of_three_seconds_is_three_slices_of_the_previous_owner() -> None:
    slices = closed((0.5, "a", 100.0), (4.5, "b", 100.0), (5.5, "b", 100.0))

    assert [(p.job_id, (p.end_mono_ns - p.begin_mono_ns) / NS_PER_S, p.num_samples) for p in slices] == [
        ("a", 0.5, 1),
        ("a", 1.0, 0),
        ("a", 1.0, 0),
        ("a", 1.0, 0),
        ("b", 1.0, 1),
    ]
    assert [p.missing_s for p in slices] == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert [p.started_at.second for p in slices] == [0, 1, 2, 3, 4]
    assert [p.started_at.microsecond for p in slices] == [500_000, 0, 0, 0, 0]


def test_a_slice_waits_two_seconds_for_a_counter_edge_after_its_end() -> None:
    attribution, counter = EnergyAttribution(), EnergyCounter()
    for second in (0, 1):
        at_ns = second * NS_PER_S + 1
        attribution.add_sample(mono_ns=at_ns, at=START.replace(microsecond=0) + timedelta(seconds=second), job_id="a",
                    power_w=1.0, sm_clock_mhz=None)  # fmt: skip

    assert attribution.completed_slices(3 * NS_PER_S, counter) == ()
    assert len(attribution.completed_slices(3 * NS_PER_S + 1, counter)) == 1


def test_a_slice_that_the_counter_covers_is_complete_at_once() -> None:
    attribution, counter = EnergyAttribution(), EnergyCounter()
    for second in (0, 1):
        at_ns = second * NS_PER_S + 1
        counter.record(at_ns, 100.0 * second)
        attribution.add_sample(mono_ns=at_ns, at=START.replace(microsecond=0) + timedelta(seconds=second), job_id="a",
                    power_w=1.0, sm_clock_mhz=None)  # fmt: skip

    (energy_slice,) = attribution.completed_slices(NS_PER_S + 1, counter)

    assert (energy_slice.energy_j, energy_slice.measured_s, energy_slice.estimated_j) == (100.0, 1.0, None)


@pytest.mark.parametrize(("gap_s", "num_slices"), [(120.0, 120), (121.0, 2), (7_200.0, 120), (7_260.0, 2)])
def test_a_gap_is_cut_into_at_most_120_slices(gap_s: float, num_slices: int) -> None:
    slices = closed((0.0, "a", 1.0), (gap_s, "a", 1.0), (gap_s + 1, "a", 1.0))

    assert sum(p.num_samples == 0 for p in slices) in {num_slices, num_slices - 1}
