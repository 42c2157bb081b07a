"""A host of a fleet: it follows the newest lease by the same request that a site's own scheduler may send."""

from dataclasses import dataclass, field
from typing import Any

from gpuenergyd.errors import DaemonNotRunningError, StoreError
from gpuenergyd_fleet.decisions.leases import Fallback, Lease
from gpuenergyd_fleet.follower import Follower, host_report, lease_request
from gpuenergyd_fleet.store.store import HostReport

STATE: dict[str, Any] = {
    "share_w": 1000.0,
    "power_budget_w": 1000.0,
    "mean_w": 700.0,
    "speed": 6.0,
    "curve": [{"power_w": 400.0, "speed": 4.0}, {"power_w": 800.0, "speed": 7.0}],
}
LEASE = Lease(3, 900.0, 1060.0, (Fallback(1100.0, 1200.0, 500.0), Fallback(0.0, 900.0, 1.0)))


@dataclass
class Daemon:
    """Keeps requests."""

    state: dict[str, Any] = field(default_factory=lambda: dict(STATE))
    requests: list[Any] = field(default_factory=list)

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/v1/power-budget"
        return self.state

    def put(self, path: str, body: object) -> dict[str, Any]:
        self.get(path)
        self.requests.append(body)
        return self.state


@dataclass
class Store:
    """Hands out one lease."""

    lease: Lease | None = None
    left_s: float = 60.0
    reports: list[HostReport] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    problem: str | None = None

    def report(self, host: str, report: HostReport) -> tuple[Lease | None, float]:
        if self.problem is not None:
            raise StoreError(self.problem)
        assert host == "a"
        self.reports.append(report)
        return self.lease, self.left_s

    def confirm(self, host: str, number: int) -> None:
        assert host == "a"
        self.confirmed.append(number)


def test_a_lease_is_set_once_and_confirmed() -> None:
    daemon, store = Daemon(), Store()
    follower = Follower("a", store, daemon)
    assert follower.step() is None
    assert daemon.requests == []
    store.lease = LEASE
    assert [follower.step(), follower.step()] == [None, None]
    assert daemon.requests == [lease_request(LEASE, 60.0)]
    assert store.confirmed == [3]
    assert store.reports[0] == HostReport(1000.0, 700.0, 6.0, ((400.0, 4.0), (800.0, 7.0)))


def test_a_request_counts_from_now_and_leaves_out_what_is_over() -> None:
    assert lease_request(LEASE, 60.0) == {
        "power_budget_w": 900.0,
        "lifetime_s": 60.0,
        "reason": "fleet",
        "fallback": [{"power_budget_w": 500.0, "begin_s": 100.0, "end_s": 200.0}],
    }


def test_a_lease_that_is_over_is_not_set() -> None:
    daemon, store = Daemon(), Store(LEASE, left_s=0.0)
    assert Follower("a", store, daemon).step() is None
    assert daemon.requests == []
    assert store.confirmed == []


def test_lost_contact_is_reported_and_survived() -> None:
    daemon, store = Daemon(), Store(LEASE, problem="no server")
    follower = Follower("a", store, daemon)
    assert follower.step() == "no server"
    store.problem = None
    assert follower.step() is None
    assert store.confirmed == [3]


def test_a_host_without_a_share_or_without_control_reports_nothing() -> None:
    for key, wrong in (("share_w", "no share"), ("power_budget_w", "keeps to no budget")):
        daemon, store = Daemon(STATE | {key: None}), Store(LEASE)
        assert wrong in (Follower("a", store, daemon).step() or "")
        assert store.reports == []


def test_a_daemon_that_does_not_answer_is_reported() -> None:
    class Dead(Daemon):
        def get(self, path: str) -> dict[str, Any]:
            raise DaemonNotRunningError(path)

    store = Store(LEASE)
    assert Follower("a", store, Dead()).step() is not None
    assert store.reports == []


def test_an_impossible_curve_is_not_reported() -> None:
    assert host_report(STATE | {"curve": [{"power_w": 5.0, "speed": -1.0}]}).curve == ()
