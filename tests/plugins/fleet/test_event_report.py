"""The report of a grid event: what was delivered is counted from samples, and what is missing stays unknown."""

from dataclasses import replace

import pytest

from gpuenergyd_fleet.decisions.event_report import FleetSample, event_report
from gpuenergyd_fleet.decisions.grid_event import GridEvent, LoadUnit, least_limit_w

START_S, END_S = 10_000.0, 10_600.0
EVENT = GridEvent("e", START_S, END_S, 70.0, LoadUnit.PERCENT)


def _samples(*, reached_after: int = 3, rebound_w: float = 0.0) -> list[FleetSample]:
    """Return a load of 1000 W that falls to 690 W, and comes back with a rebound of a minute."""
    found = []
    for k in range(-300, 1200):
        is_low = reached_after <= k < 600
        measured_w = 690.0 if is_low else 1000.0 + (rebound_w if 600 <= k < 660 else 0.0)
        found.append(FleetSample(START_S + k, 1000.0, measured_w, 24.0 if is_low else 30.0, 4))
    return found


def test_a_report_states_what_was_asked_delivered_and_lost() -> None:
    report = event_report(EVENT, _samples(), 1100.0)
    assert (report.baseline_w, report.limit_w, report.asked_reduction_w) == pytest.approx((1000.0, 700.0, 300.0))
    assert report.delivered_reduction_w == pytest.approx(310.0)
    assert report.reached_s == 3.0
    assert (report.over_limit_s, report.highest_w, report.rebound_w, report.missing_s) == (0.0, 690.0, 0.0, 0.0)
    assert report.saved_energy_kwh == pytest.approx(597 * 310.0 / 3.6e6)
    assert report.lost_work_gpu_h == pytest.approx(597 * 6.0 / 3600)
    assert report.lost_work_ratio == pytest.approx(597 * 6.0 / (600 * 30.0))
    assert (report.num_hosts, report.num_silent_hosts) == (4, 0)


def test_a_rebound_and_time_above_the_limit_are_reported() -> None:
    samples = _samples(rebound_w=80.0)
    k = next(k for k, own in enumerate(samples) if own.at_s == START_S + 100)
    samples[k : k + 5] = [replace(own, measured_w=900.0) for own in samples[k : k + 5]]
    report = event_report(EVENT, samples, 1100.0)
    assert report.rebound_w == pytest.approx(80.0)
    assert (report.over_limit_s, report.highest_w) == (5.0, 900.0)


def test_a_limit_that_is_never_reached_is_reported() -> None:
    report = event_report(EVENT, _samples(reached_after=10_000), 1100.0)
    assert (report.reached_s, report.over_limit_s, report.mean_w, report.delivered_reduction_w) == (None,) * 4


def test_what_was_not_measured_is_missing_and_never_zero() -> None:
    unknown = [replace(own, measured_w=None, speed=None, num_silent=1) for own in _samples()]
    for samples in ([], unknown):
        report = event_report(EVENT, samples, 1100.0)
        assert report.baseline_w is None
        assert report.limit_w == pytest.approx(0.7 * 1100.0)
        assert (report.delivered_reduction_w, report.rebound_w, report.saved_energy_kwh) == (None, None, None)
        assert (report.lost_work_gpu_h, report.lost_work_ratio, report.missing_s) == (None, None, 600.0)


def test_a_gap_counts_as_missing() -> None:
    samples = [own for own in _samples() if not START_S + 100 <= own.at_s < START_S + 200]
    report = event_report(EVENT, samples, 1100.0)
    assert report.missing_s == pytest.approx(96.0)


def test_of_overlapping_events_the_least_counts_and_cancelled_ones_do_not() -> None:
    events = [
        GridEvent("a", 0.0, 100.0, 2.0, LoadUnit.KW),
        GridEvent("b", 50.0, 150.0, 50.0, LoadUnit.PERCENT),
        GridEvent("c", 0.0, 200.0, 1.0, LoadUnit.W, is_cancelled=True),
        GridEvent("d", 60.0, 70.0, 0.0005, LoadUnit.MW),
    ]
    limits_w = [least_limit_w(events, at_s, 3000.0) for at_s in (0.0, 55.0, 65.0, 100.0, 150.0)]
    assert limits_w == [2000.0, 1500.0, 500.0, 1500.0, float("inf")]
