"""A fleet in virtual time, real from the coordinator to the backstop: events, lost hosts, and dead coordinators.

`benchmarks/runs/grid_event.py` runs whole events of ten minutes with jobs of measured tables.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd_fleet.decisions.event_report import event_report
from gpuenergyd_fleet.decisions.grid_event import GridEvent, LoadUnit
from gpuenergyd_fleet.store.store import FleetStore
from tests.plugins.fleet.powered_fleet import Clock, PoweredFleet
from tests.plugins.power.powered_host import PoweredHost
from tests.plugins.power.rules.test_powered_host import IDLE_W, law_job


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PoweredFleet]:
    clock = Clock()
    jobs = law_job("pipeline", 2, 4, 1.0), law_job("loop", 1, 1, 8.0)
    hosts = tuple(PoweredHost([job.begun_anew() for job in jobs], num_gpus=4, idle_w=IDLE_W) for _ in range(2))
    store = FleetStore(tmp_path / "history.sqlite3", clock)
    shares_w = tuple(1.1 * host.draw_w() for host in hosts)
    store.set_budget(sum(shares_w), "test")
    yield PoweredFleet(store, hosts, shares_w, clock)
    store.close()


def _event(fleet: PoweredFleet, begin_s: float, length_s: float) -> GridEvent:
    start_s = fleet.clock.now_s + begin_s
    event = GridEvent("e", start_s, start_s + length_s, 75.0, LoadUnit.PERCENT, issued_s=start_s)
    fleet.store.put_event(event)
    return event


def _means_w(fleet: PoweredFleet, since_s: float, until_s: float) -> list[float]:
    return [w for at_s, w in fleet.means_w(1.0) if since_s <= at_s < until_s]


def test_an_event_is_followed_and_left_without_a_rebound(fleet: PoweredFleet) -> None:
    fleet.run(15.0)
    event = _event(fleet, 0.0, 25.0)
    fleet.run(25.0 + 20.0)
    before_w = max(_means_w(fleet, event.start_s - 10, event.start_s))
    assert max(_means_w(fleet, event.start_s + 5, event.end_s)) <= 1.02 * 0.75 * before_w
    assert max(_means_w(fleet, event.end_s, event.end_s + 20)) <= 1.005 * before_w
    assert min(_means_w(fleet, event.end_s + 10, event.end_s + 20)) >= 0.97 * before_w
    stored = fleet.store.event("e")
    assert stored is not None
    report = event_report(stored, fleet.store.samples(stored), 1e4)
    assert report.reached_s is not None
    assert report.reached_s <= 6.0
    assert report.lost_work_ratio is not None
    assert 0.0 < report.lost_work_ratio < 0.25


def test_an_announced_event_holds_although_the_coordinator_died_and_one_host_lost_contact(fleet: PoweredFleet) -> None:
    fleet.run(10.0)
    event = _event(fleet, 12.0, 15.0)
    fleet.run(6.0)
    fleet.is_coordinated, fleet.cut_off = False, {0}
    fleet.run(6.0 + 15.0)
    before_w = max(_means_w(fleet, event.start_s - 20, event.start_s - 12))
    assert max(_means_w(fleet, event.start_s + 2, event.end_s)) <= 1.02 * 0.75 * before_w
