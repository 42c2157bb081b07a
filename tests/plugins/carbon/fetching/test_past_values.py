"""Past weeks: asked for once, the newest first, and only where they are missing and the provider has them."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.carbon.intensity import HOUR, CarbonSignal, IntensitySample
from gpuenergyd_carbon.fetched_file import KEPT_HISTORY, Fetched, FetchState, FetchStatus
from gpuenergyd_carbon.fetching.past_values import PastValues, kept_samples
from gpuenergyd_carbon.sources.source import CarbonSource, SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem
from tests.plugins.carbon.sources.documented import HOUR_AT, NOW_AT
from tests.support.examples import examples

SIGNAL = CarbonSignal("GB", "scripted")
WEEK = timedelta(days=7)
NUM_WINDOWS = KEPT_HISTORY // WEEK


def hours(begin_at: datetime, end_at: datetime, value: float = 100.0) -> tuple[IntensitySample, ...]:
    num = (end_at - begin_at) // HOUR
    return tuple(IntensitySample(begin_at + k * HOUR, begin_at + (k + 1) * HOUR, value) for k in range(num))


@dataclass(slots=True)
class WithPast:
    """Has every past hour since `first_at`, or raises."""

    first_at: datetime = NOW_AT - KEPT_HISTORY - WEEK
    error: Exception | None = None
    signal: CarbonSignal = SIGNAL
    period_s: float = 3600.0
    past_window: timedelta = WEEK
    asked: list[tuple[datetime, datetime]] = field(default_factory=list)

    def fetch(self, now_at: datetime) -> SourceReply:
        """Fail, since only past values may be asked for."""
        raise AssertionError(f"the newest values of {now_at} were asked for")

    def fetch_past(self, begin_at: datetime, end_at: datetime) -> SourceReply:
        self.asked.append((begin_at, end_at))
        if self.error is not None:
            raise self.error
        if end_at <= self.first_at:
            raise SourceError(SourceProblem.EMPTY, "scripted: no values")
        return SourceReply(hours(max(begin_at, self.first_at), end_at))


class WithoutPast:
    """A provider of the last day only."""

    signal = SIGNAL
    period_s = 3600.0

    def fetch(self, now_at: datetime) -> SourceReply:
        """Fail, since only past values may be asked for."""
        raise AssertionError(f"the newest values of {now_at} were asked for")


def known(*samples: IntensitySample, state: FetchState = FetchState.OK) -> Fetched:
    return Fetched(SIGNAL, samples, (), FetchStatus(state, fetched_at=NOW_AT))


def filled(source: CarbonSource, fetched: Fetched, *, num_steps: int = NUM_WINDOWS + 8) -> Fetched:
    past = PastValues()
    for k in range(num_steps):
        fetched = past.fetch_missing(source, fetched, NOW_AT + k * timedelta(seconds=30))
    return fetched


def test_a_first_start_knows_more_than_a_year_after_one_request_for_each_week() -> None:
    source = WithPast()

    fetched = filled(source, known(*hours(HOUR_AT - 24 * HOUR, HOUR_AT, 7.0)))

    assert [end_at for _, end_at in source.asked] == [HOUR_AT - k * WEEK for k in range(NUM_WINDOWS)]
    assert len(fetched.samples) >= (KEPT_HISTORY - timedelta(hours=1)) // HOUR
    assert [sample.carbon_intensity_g_per_kwh for sample in fetched.samples[-24:]] == [7.0] * 24  # newer values stay
    assert list(fetched.samples) == sorted(fetched.samples, key=lambda sample: sample.valid_from_at)


def test_a_known_week_is_not_asked_for() -> None:
    source = WithPast()

    filled(source, known(*hours(HOUR_AT - 2 * WEEK, HOUR_AT - WEEK)))

    assert (HOUR_AT - 2 * WEEK, HOUR_AT - WEEK) not in source.asked
    assert len(source.asked) == NUM_WINDOWS - 1


@pytest.mark.parametrize(
    ("error", "num_asked"),
    [
        (SourceError(SourceProblem.FORBIDDEN, "scripted: no"), 1),
        (SourceError(SourceProblem.UNAUTHORIZED, "scripted: no"), 1),
        (SourceError(SourceProblem.EMPTY, "scripted: no"), NUM_WINDOWS),
        (RuntimeError("bug of a stranger's source"), 1),
    ],
)
def test_what_a_provider_refuses_or_lacks_is_not_asked_for_again(error: Exception, num_asked: int) -> None:
    source = WithPast(error=error)
    before = known(*hours(HOUR_AT - 24 * HOUR, HOUR_AT))

    assert filled(source, before) == before
    assert len(source.asked) == num_asked


def test_nothing_is_asked_after_a_failed_fetch_or_of_a_source_without_a_past() -> None:
    source = WithPast()
    failed = known(state=FetchState.FAILED)

    assert filled(source, failed) == failed
    assert source.asked == []
    assert filled(WithoutPast(), known()) == known()


@settings(max_examples=examples(10))
@given(num_days=st.integers(0, 500))
def test_no_window_is_asked_for_twice_and_values_only_grow(num_days: int) -> None:
    source = WithPast(first_at=HOUR_AT - timedelta(days=num_days))
    past, fetched = PastValues(), known(*hours(HOUR_AT - 24 * HOUR, HOUR_AT))
    for _ in range(NUM_WINDOWS + 8):
        again = past.fetch_missing(source, fetched, NOW_AT)
        assert len(again.samples) >= len(fetched.samples)
        fetched = again

    assert len(set(source.asked)) == len(source.asked) <= NUM_WINDOWS


def test_old_values_are_kept_as_hourly_means_and_new_ones_as_sent() -> None:
    five_min = timedelta(minutes=5)
    begin_at = HOUR_AT - timedelta(days=30)
    sent = [IntensitySample(begin_at + k * five_min, begin_at + (k + 1) * five_min, float(k)) for k in range(24)]
    recent = [IntensitySample(HOUR_AT + k * five_min, HOUR_AT + (k + 1) * five_min, 1.0) for k in range(2)]
    ancient = hours(NOW_AT - KEPT_HISTORY - HOUR, NOW_AT - KEPT_HISTORY)

    kept = kept_samples([*ancient, *sent], recent, now_at=NOW_AT)

    assert [sample.valid_from_at for sample in kept[:2]] == [begin_at, begin_at + HOUR]
    assert [sample.carbon_intensity_g_per_kwh for sample in kept[:2]] == pytest.approx([5.5, 17.5])
    assert kept[2:] == tuple(recent)
    assert kept_samples(kept, (), now_at=NOW_AT) == kept
