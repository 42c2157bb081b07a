"""A host of a fleet: reports the power that it draws, and applies the leases that the coordinator hands out.

It applies them with `PUT /v1/power-budget`, as a site's own scheduler may. The daemon ends a lease by itself, so that
the host falls back to its share if it loses contact or this process ends.
"""

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd_fleet.decisions.leases import Lease
from gpuenergyd_fleet.store.rows import checked_curve
from gpuenergyd_fleet.store.store import HostReport

log = logging.getLogger(__name__)

PATH = "/v1/power-budget"
REASON = "fleet"


class BudgetClient(Protocol):
    """The daemon of this host."""

    def get(self, path: str) -> dict[str, Any]: ...

    def put(self, path: str, body: object) -> dict[str, Any]: ...


class LeaseStore(Protocol):
    """The store that takes reports and returns leases."""

    def report(self, host: str, report: HostReport) -> tuple[Lease | None, float]:
        """Store a report; return the newest lease and the seconds until its end."""
        ...

    def confirm(self, host: str, number: int) -> None: ...


@dataclass(slots=True)
class Follower:
    """Follows the leases of one host."""

    host: str
    store: LeaseStore
    daemon: BudgetClient
    number: int = 0
    """Number of the last applied lease."""
    _trouble: str | None = None

    def step(self) -> str | None:
        """Report once and apply a new lease; return what went wrong, or None."""
        try:
            self._exchange()
            trouble = None
        except GpuEnergyError as error:
            trouble = str(error)
        if trouble != self._trouble:
            log.warning("%s", trouble or "in contact again")
        self._trouble = trouble
        return trouble

    def _exchange(self) -> None:
        lease, left_s = self.store.report(self.host, host_report(self.daemon.get(PATH)))
        if lease is None or lease.number == self.number or left_s <= 0:
            return
        state = self.daemon.put(PATH, lease_request(lease, left_s))
        if state["power_budget_w"] is not None:
            self.store.confirm(self.host, lease.number)
            self.number = lease.number
            log.info("lease %d: %.0f W for %.0f s", lease.number, lease.power_w, left_s)


def host_report(state: dict[str, Any]) -> HostReport:
    """Return the report of a host from the state of its power budget.

    Raises:
        UsageError: the host has no share, or its daemon enforces no budget.
    """
    if state["share_w"] is None:
        raise UsageError("this host has no share: set power_budget_w in the daemon's settings, its share of the fleet")
    if state["power_budget_w"] is None:
        raise UsageError("the daemon of this host keeps to no budget: restart it with mode = 'control'")
    curve = checked_curve([(point["power_w"], point["speed"]) for point in state["curve"]])
    return HostReport(state["share_w"], state["mean_w"], state["speed"], curve)


def lease_request(lease: Lease, left_s: float) -> dict[str, Any]:
    """Return the request for a lease that ends `left_s` seconds from now."""
    now_s = lease.end_s - left_s
    fallback = [
        {"power_budget_w": part.power_w, "begin_s": part.start_s - now_s, "end_s": part.end_s - now_s}
        for part in lease.fallback
        if part.end_s > now_s
    ]
    return {"power_budget_w": lease.power_w, "lifetime_s": left_s, "reason": REASON, "fallback": fallback}
