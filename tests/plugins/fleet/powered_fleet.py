"""Hosts in virtual time under one fleet budget: real coordinator, store and followers, and the daemon's budget rules.

Simulated are the GPUs (`PoweredHost`), the clock, and the requests to daemons, which take no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_fleet.decisions.coordination import decide
from gpuenergyd_fleet.follower import Follower
from gpuenergyd_fleet.store.store import FleetStore
from gpuenergyd_power.messages import PowerBudgetRequest
from gpuenergyd_power.requested import requested_budget
from gpuenergyd_power.rules.budget import PowerBudget, budget_in_force
from tests.plugins.power.powered_host import SAMPLE_S, PoweredHost

EXCHANGE_S = 1.0
_MAX_BYTES = 2**16


@dataclass(slots=True)
class Clock:
    """Virtual seconds since 1970."""

    now_s: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class VirtualBudgetDaemon:
    """The part of a daemon that decides which budget is in force; its host has simulated GPUs."""

    host: PoweredHost
    share_w: float
    clock: Clock
    requested: PowerBudget | None = None

    @property
    def now_at(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now_s, tz=UTC)

    @property
    def budget_w(self) -> float:
        budget = budget_in_force(self.share_w, self.requested, (), self.now_at)
        assert budget is not None
        return budget.budget_w

    def get(self, path: str) -> dict[str, Any]:
        """Return the state, as far as a follower reads it."""
        del path
        decision, excess_w = self.host.decision, max(0.0, self.host.control.trim.excess_w)
        points = decision.curve if decision is not None else ()
        return {
            "share_w": self.share_w,
            "power_budget_w": self.budget_w,
            "mean_w": self.host.control.mean_w,
            "speed": self.host.speed(),
            "curve": [{"power_w": point.power_w + excess_w, "speed": point.speed} for point in points],
        }

    def put(self, path: str, body: object) -> dict[str, Any]:
        """Set a request, through the wire format."""
        request = decode(encode(body), PowerBudgetRequest, max_bytes=_MAX_BYTES)
        self.requested = requested_budget(request, self.now_at)
        return self.get(path)


@dataclass
class PoweredFleet:
    """Hosts of a fleet; their exchanges and the coordinator's cycles are spread over each second."""

    store: FleetStore
    hosts: tuple[PoweredHost, ...]
    shares_w: tuple[float, ...]
    clock: Clock
    is_coordinated: bool = True
    cut_off: set[int] = field(default_factory=set)
    """Hosts without contact to the store."""
    trace: list[tuple[float, float]] = field(default_factory=list)
    """Instant at which each sample begins, and true power of all hosts."""
    _budgets: list[tuple[float, ...]] = field(default_factory=list)
    _ticks: int = 0

    @cached_property
    def daemons(self) -> tuple[VirtualBudgetDaemon, ...]:
        pairs = zip(self.hosts, self.shares_w, strict=True)
        return tuple(VirtualBudgetDaemon(host, share_w, self.clock) for host, share_w in pairs)

    @cached_property
    def followers(self) -> tuple[Follower, ...]:
        return tuple(Follower(f"host-{k}", self.store, daemon) for k, daemon in enumerate(self.daemons))

    @property
    def num_gpus(self) -> int:
        return sum(job.num_gpus for host in self.hosts for job in host.jobs)

    def run(self, seconds: float) -> None:
        period = round(EXCHANGE_S / SAMPLE_S)
        for _ in range(round(seconds / SAMPLE_S)):
            for k, follower in enumerate(self.followers):
                if self._ticks % period == (2 * k) % period and k not in self.cut_off:
                    follower.step()
            if self._ticks % period == period // 2 and self.is_coordinated:
                self.store.cycle(decide, least_period_s=EXCHANGE_S / 2)
            budgets_w = tuple(daemon.budget_w for daemon in self.daemons)
            self._budgets.append(budgets_w)
            for host, budget_w in zip(self.hosts, budgets_w, strict=True):
                host.run(SAMPLE_S, budget_w)
            self.trace.append((self.clock.now_s, sum(host.trace[-1][1] for host in self.hosts)))
            self.clock.now_s += SAMPLE_S
            self._ticks += 1

    def work(self) -> float:
        """Return the iterations done so far, in seconds of a GPU at full speed."""
        return sum(job.iterations * job.full_speed.time_s * job.num_gpus for host in self.hosts for job in host.jobs)

    def budgets_w(self, host: int, last_s: float = 60.0) -> set[float]:
        """Return the budgets that a host had in the last seconds."""
        return {own[host] for own in self._budgets[-round(last_s / SAMPLE_S) :]}

    def means_w(self, seconds: float) -> Sequence[tuple[float, float]]:
        """Return the means of the fleet's power over so many seconds, with the instant at which each begins."""
        length = round(seconds / SAMPLE_S)
        found = []
        for k in range(0, len(self.trace) - length + 1, length):
            part = self.trace[k : k + length]
            found.append((part[0][0], sum(w for _, w in part) / length))
        return found
