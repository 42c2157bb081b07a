"""The fleet's tables: a coordinator's cycle is one transaction, on SQLite and PostgreSQL alike."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gpuenergyd.errors import StoreError, UsageError
from gpuenergyd_fleet.decisions.coordination import decide
from gpuenergyd_fleet.decisions.grid_event import GridEvent, LoadUnit
from gpuenergyd_fleet.store.rows import checked_curve
from gpuenergyd_fleet.store.store import FleetStore, HostReport
from tests.plugins.fleet.powered_fleet import Clock

NOW_S = 1_800_000_000.0
CURVE = ((400.0, 4.0), (800.0, 7.0))


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW_S)


@pytest.fixture
def store(place: str, clock: Clock) -> Iterator[FleetStore]:
    store = FleetStore(place, clock)
    yield store
    store.close()


def _event(event_id: str = "e", *, begin_s: float = 0.0, **changes: object) -> GridEvent:
    event = GridEvent(event_id, NOW_S + begin_s, NOW_S + begin_s + 600.0, 70.0, LoadUnit.PERCENT, issued_s=NOW_S)
    return replace(event, **changes)  # type: ignore[arg-type]


def _report(measured_w: float | None = 700.0) -> HostReport:
    return HostReport(1000.0, measured_w, 6.0, CURVE)


def _cycle(store: FleetStore) -> None:
    assert store.cycle(decide, least_period_s=0.5) is not None


def test_a_host_gets_a_lease_once_there_is_a_budget(store: FleetStore, clock: Clock) -> None:
    assert store.report("a", _report()) == (None, 0.0)
    assert store.cycle(decide, least_period_s=0.5) is None
    store.set_budget(2000.0, "contract")
    _cycle(store)
    lease, left_s = store.report("a", _report())
    assert lease is not None
    assert lease.number == 1
    assert lease.power_w == pytest.approx(2000.0)
    assert 0 < left_s <= 60.0
    store.confirm("a", 1)
    clock.now_s += 40.0
    store.report("a", _report())
    _cycle(store)
    clock.now_s += 1.0
    store.confirm("a", 2)
    _cycle(store)
    (host,) = store.state().hosts
    assert [lease.number for lease in host.held.leases] == [2]
    assert host.demand.curve == CURVE


def test_two_coordinators_decide_one_after_the_other(place: str, store: FleetStore, clock: Clock) -> None:
    other = FleetStore(place, clock)
    store.set_budget(2000.0, "")
    _cycle(store)
    assert other.cycle(decide, least_period_s=0.5) is None
    clock.now_s += 1.0
    _cycle(other)
    other.close()


def test_a_removed_host_frees_its_watts(store: FleetStore) -> None:
    store.set_budget(1000.0, "")
    store.report("a", _report())
    _cycle(store)
    assert store.remove_host("a")
    assert not store.remove_host("a")
    assert store.state().hosts == ()


def test_the_load_before_an_event_is_kept_from_its_begin_on(store: FleetStore, clock: Clock) -> None:
    store.set_budget(2000.0, "")
    for _ in range(10):
        store.report("a", _report(700.0))
        _cycle(store)
        clock.now_s += 1.0
    store.put_event(_event(begin_s=10.0))
    for measured_w in (500.0, 490.0):
        store.report("a", _report(measured_w))
        _cycle(store)
        clock.now_s += 1.0
    event = store.event("e")
    assert event is not None
    assert event.baseline_w == pytest.approx(700.0)
    # Right after one event, the load before it counts for the next.
    store.put_event(_event("next", begin_s=11.0))
    _cycle(store)
    later = store.event("next")
    assert later is not None
    assert later.baseline_w is not None
    assert later.baseline_w > 650.0


def test_samples_are_missing_while_a_host_is_silent(store: FleetStore, clock: Clock) -> None:
    store.set_budget(3000.0, "")
    store.report("a", _report(700.0))
    store.report("b", _report(300.0))
    _cycle(store)
    clock.now_s += 20.0
    store.report("a", _report(700.0))
    _cycle(store)
    first, second = store.samples(_event(begin_s=1.0))
    assert (first.measured_w, first.num_silent) == (1000.0, 0)
    assert (second.measured_w, second.num_silent, second.num_hosts) == (None, 1, 2)


def test_a_repeated_or_older_event_changes_nothing_and_a_newer_one_does(store: FleetStore) -> None:
    assert store.put_event(_event())
    assert not store.put_event(_event())
    assert not store.put_event(_event(value=10.0, issued_s=NOW_S - 1.0))
    assert store.put_event(_event(value=80.0, issued_s=NOW_S + 1.0))
    assert store.put_event(_event(value=80.0, issued_s=NOW_S + 2.0, is_cancelled=True))
    (event,) = store.events()
    assert event.is_cancelled
    assert store.event("other") is None


@pytest.mark.fault(32)
def test_a_flood_of_events_is_refused_beyond_a_number_that_is_kept(
    store: FleetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuenergyd_fleet.store.store.MAX_OPEN_EVENTS", 10)
    for k in range(10):
        assert store.put_event(_event(str(k)))
    with pytest.raises(UsageError, match="at most 10 are kept"):
        store.put_event(_event("one-more"))
    assert store.put_event(_event("7", issued_s=NOW_S + 1, is_cancelled=True))


@pytest.mark.parametrize(
    "points",
    [None, 5, [[1.0]], [["a", 1.0]], [[float("nan"), 1.0]], [[-1.0, 1.0]], [[5.0, 1.0], [4.0, 2.0]], [{}], {"a": 1}],
)
def test_an_impossible_curve_counts_as_unknown(points: object) -> None:
    assert checked_curve(points) == ()


def test_a_database_that_fails_is_reported_and_opened_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fleet") / "file"
    path.write_text("not a database at all, but long enough to be looked at\n" * 100)
    store = FleetStore(path)
    refused: Callable[[], object] = store.state
    with pytest.raises(StoreError):
        refused()
    path.unlink()
    assert store.state().hosts == ()
    store.close()
