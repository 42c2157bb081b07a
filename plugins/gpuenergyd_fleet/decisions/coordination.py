"""The fleet coordinator's decision which power leases to hand out now: a pure function without memory.

Theory of operation. The limit of a fleet is a step function of time: its budget, lowered by grid events. For every
host, `HeldPower` gives the most power that it may draw at each future instant. A new lease is handed out only if the
sum over all hosts stays within the limit at all these instants, even if hosts lose contact from now on, or this
coordinator dies. Lowering a host is always safe; the power that it gives up is free for others once the host has
confirmed. Ahead of an event, every host gets its part of the event's limit as fallback, and no larger lease reaches
into the event. The event thus takes effect even without a coordinator. Silent hosts are counted with the most power
that they may draw, and the others share what is left.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuenergyd_fleet.decisions.division import HostDemand, divided
from gpuenergyd_fleet.decisions.grid_event import GridEvent, least_limit_w
from gpuenergyd_fleet.decisions.leases import Fallback, HeldPower, Lease

_TOLERANCE_RATIO = 1e-9
_COMMON_S = 5.0
_MAX_ANNOUNCED = 12
"""Most events announced in a lease; later leases announce later events."""
_LEAST_W = 1.0
"""Smallest budget of a host, since budgets must be above 0."""


@dataclass(frozen=True, slots=True)
class FleetRules:
    """When leases end and when they are renewed."""

    lease_s: float = 60.0
    renew_s: float = 30.0
    """A lease with less time left is renewed."""
    least_lease_s: float = 5.0
    margin_s: float = 1.0
    """Sum of the largest clock difference between hosts and the time until a lease is in force."""
    silent_s: float = 10.0
    """Time without a report after which a host is out of contact."""
    step_ratio: float = 0.01
    """Changes smaller than this ratio of a host's share cause no new lease."""
    announced_s: float = 86_400.0
    """How long before its start hosts learn of an event."""
    recovery_s: float = 600.0
    """Time after an event during which the load must not exceed the load measured before it."""


@dataclass(frozen=True, slots=True)
class FleetHost:
    """What the coordinator knows about one host."""

    host: str
    reported_s: float
    held: HeldPower
    demand: HostDemand
    measured_w: float | None = None
    speed: float | None = None
    """Total speed of its jobs, in units of one GPU at full speed; None while unknown."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything that the coordinator knows."""

    budget_w: float
    hosts: tuple[FleetHost, ...]
    events: tuple[GridEvent, ...] = ()
    """Events, with the load before them if measured; without it, a percentage is relative to the budget."""


@dataclass(frozen=True, slots=True)
class FleetDecision:
    """New leases by host, and the power that the fleet may draw."""

    leases: Mapping[str, Lease]
    limit_w: float
    """The lowest of the budget and the limits of the active events."""
    silent: tuple[str, ...] = ()
    trouble: str | None = None


def decide(view: FleetView, now_s: float, rules: FleetRules | None = None) -> FleetDecision:
    return _Decision(view, now_s, rules or FleetRules()).made()


@dataclass(slots=True)
class _Decision:
    """One decision; `_most_w` holds, by future instant, the most power of all hosts, including new leases."""

    view: FleetView
    now_s: float
    rules: FleetRules
    leases: dict[str, Lease] = field(default_factory=dict)
    _most_w: dict[float, float] = field(default_factory=dict)
    _limits_w: dict[float, float] = field(default_factory=dict)

    def made(self) -> FleetDecision:
        rules, hosts = self.rules, self.view.hosts
        connected = [host for host in hosts if self.now_s - host.reported_s <= rules.silent_s]
        silent = [host for host in hosts if self.now_s - host.reported_s > rules.silent_s]
        end_s = self._next_end_s()
        self._record_instants(end_s)
        held_w = self._most_w[self.now_s]
        wanted = self._wanted(connected, silent)
        is_over = held_w > self._limits_w[self.now_s] * (1 + _TOLERANCE_RATIO)
        # Lowered hosts first, since lowering is always possible and frees power once they have confirmed.
        for host in sorted(connected, key=lambda h: wanted[h.host] - h.held.most_w(self.now_s, rules.margin_s)):
            self._hand_out(host, wanted[host.host], end_s, self._fallback(host, connected, silent), is_over=is_over)
        limit_w = self._limits_w[self.now_s]
        return FleetDecision(self.leases, limit_w, tuple(host.host for host in silent), self._trouble(silent, limit_w))

    # --- the limit over time ---

    def _limit_w(self, at_s: float) -> float:
        return min(self.view.budget_w, least_limit_w(self.view.events, at_s, self.view.budget_w))

    def _starts_s(self) -> list[float]:
        """Return the start times of future events, before which leases must end."""
        lead_s = self.rules.least_lease_s
        return [e.start_s for e in self.view.events if not e.is_cancelled and e.start_s > self.now_s + lead_s]

    def _next_end_s(self) -> float:
        margin_s = self.rules.margin_s
        # Common end times, so that there are fewer instants to check.
        end_s = (self.now_s + self.rules.lease_s) // _COMMON_S * _COMMON_S
        return min([end_s, *(start_s - margin_s for start_s in self._starts_s())])

    def _record_instants(self, end_s: float) -> None:
        rules = self.rules
        instants = {self.now_s, end_s - rules.margin_s, end_s + rules.margin_s}
        for event in self.view.events:
            edges = {event.start_s, event.end_s, event.end_s + rules.recovery_s}
            instants |= edges | {edge + sign * rules.margin_s for edge in edges for sign in (-1, 1)}
        for host in self.view.hosts:
            instants |= host.held.instants(rules.margin_s)
        # A shortened lease ends one margin before an instant, or by a fast clock two margins before it.
        for at_s in sorted(instants | {at_s - 2 * rules.margin_s for at_s in instants}):
            if at_s >= self.now_s:
                self._most_w[at_s] = math.fsum(host.held.most_w(at_s, rules.margin_s) for host in self.view.hosts)
                self._limits_w[at_s] = self._limit_w(at_s)

    # --- what each host should have ---

    def _wanted(self, connected: Sequence[FleetHost], silent: Sequence[FleetHost]) -> dict[str, float]:
        """Return the power of each host in contact, from the lowest limit until the next leases can be in force."""
        soon_s = self.now_s + self.rules.least_lease_s
        limit_w = min(w for at_s, w in self._limits_w.items() if at_s <= soon_s)
        limit_w = min(limit_w, self._recovery_w())
        margin_s = self.rules.margin_s
        kept_w = math.fsum(
            max(host.held.most_w(at_s, margin_s) for at_s in self._most_w if at_s <= soon_s) for host in silent
        )
        found = divided(limit_w - kept_w, {host.host: host.demand for host in connected})
        return {host: max(_LEAST_W, own_w) for host, own_w in found.items()}

    def _recovery_w(self) -> float:
        """Return the load before recently ended events, which must not be exceeded for some time after them."""
        recent = (
            event.baseline_w
            for event in self.view.events
            if not event.is_cancelled and event.end_s <= self.now_s < event.end_s + self.rules.recovery_s
        )
        return min((w for w in recent if w is not None), default=math.inf)

    def _announced(self) -> list[GridEvent]:
        """Return the next events to announce to hosts, and those from which the fleet still recovers."""
        until_s = self.now_s + self.rules.announced_s
        recovery_s = self.rules.recovery_s
        known = [
            event
            for event in self.view.events
            if not event.is_cancelled and event.start_s < until_s and event.end_s + recovery_s > self.now_s
        ]
        return sorted(known, key=lambda event: event.start_s)[:_MAX_ANNOUNCED]

    def _fallback(
        self, host: FleetHost, connected: Sequence[FleetHost], silent: Sequence[FleetHost]
    ) -> tuple[Fallback, ...]:
        """Return the host's fallback: its share, scaled down at times when all shares together exceed a limit."""
        margin_s, budget_w = self.rules.margin_s, self.view.budget_w
        share_w = host.held.share_w
        shares_w = math.fsum(other.held.share_w for other in connected)
        hour_s = self.now_s // 3600 * 3600
        spans = [(hour_s, hour_s + self.rules.announced_s + 3600, budget_w)]
        for event in self._announced():
            spans.append((event.start_s, event.end_s, event.limit_w(budget_w)))
            if event.baseline_w is not None:
                spans.append((event.end_s, event.end_s + self.rules.recovery_s, event.baseline_w))
        found = []
        for start_s, end_s, limit_w in spans:
            if end_s <= self.now_s:
                continue
            at_s = max(start_s, self.now_s)
            left_w = limit_w - math.fsum(other.held.most_w(at_s, margin_s) for other in silent)
            ratio = max(0.0, left_w) / shares_w if shares_w > 0 else 0.0
            if ratio < 1:
                least_w = max(_LEAST_W, ratio * share_w)
                # A lease ends one margin before an event, by a clock that may be one margin fast.
                found.append(Fallback(start_s - 3 * margin_s, end_s + 2 * margin_s, least_w))
        return tuple(found)

    # --- leases ---

    def _hand_out(
        self, own: FleetHost, wanted_w: float, end_s: float, fallback: tuple[Fallback, ...], *, is_over: bool
    ) -> None:
        """Hand out a lease, unless the host's newest lease is as good."""
        rules, before = self.rules, own.held.newest
        number = 1 + max(own.held.confirmed, before.number if before is not None else 0)
        if before is not None:
            step_w = rules.step_ratio * own.held.share_w
            is_lower = is_over and wanted_w < before.power_w
            has_changed = is_lower or abs(wanted_w - before.power_w) > step_w or self._differs(before, fallback, own)
            if not has_changed:
                wanted_w = min(before.power_w, wanted_w) if is_over else before.power_w
                if before.end_s - self.now_s > min(rules.renew_s, 0.5 * (end_s - self.now_s)):
                    return
        possible = self._possible(own, number, wanted_w, end_s, fallback)
        lease = next((lease for lease in possible if self._fits(own, lease)), None)
        if lease is None:
            return
        if before is not None and not is_over and lease.end_s < before.end_s + 1.0:
            is_same = abs(lease.power_w - before.power_w) <= rules.step_ratio * own.held.share_w
            if is_same and not self._differs(before, lease.fallback, own):
                return
        self._add(own, lease)

    def _possible(
        self, own: FleetHost, number: int, wanted_w: float, end_s: float, fallback: tuple[Fallback, ...]
    ) -> Iterator[Lease]:
        """Yield leases, best first: by power, up to the wanted power, then by the latest end."""
        margin_s, before = self.rules.margin_s, own.held.newest
        free_w = {
            at_s: own.held.most_w(at_s, margin_s) + max(0.0, self._limits_w[at_s] - most_w)
            for at_s, most_w in self._most_w.items()
        }
        earliest_s = self.now_s + self.rules.least_lease_s
        ends = {end_s, *(at_s - margin_s for at_s in free_w if earliest_s <= at_s - margin_s < end_s)}
        found = sorted(((self._free_until(free_w, chosen_s, wanted_w), chosen_s) for chosen_s in ends), reverse=True)
        for entries in (fallback, self._cautious(before, fallback)):
            for power_w, chosen_s in found:
                yield Lease(number, power_w, chosen_s, entries)

    def _cautious(self, before: Lease | None, fallback: tuple[Fallback, ...]) -> tuple[Fallback, ...]:
        """Return a fallback that never exceeds what the host has now, since others may rely on that.

        It is needed, for instance, while other hosts' leases use the power that this host gave up.
        """
        if before is None:
            return fallback
        known = (part for part in before.fallback if part.end_s > self.now_s)
        margin_s = self.rules.margin_s
        kept = Fallback(self.now_s - 2 * margin_s, before.end_s + 2 * margin_s, before.power_w)
        return tuple(dict.fromkeys((*known, *fallback, kept)))

    def _free_until(self, free_w: Mapping[float, float], end_s: float, wanted_w: float) -> float:
        return min([wanted_w, *(w for at_s, w in free_w.items() if at_s < end_s + self.rules.margin_s)])

    def _fits(self, own: FleetHost, lease: Lease) -> bool:
        """Return whether the fleet stays within its limit at all instants, whether or not the lease arrives."""
        for at_s, most_w in self._most_w.items():
            more_w = self._more_w(own, lease, at_s)
            if more_w > 0 and most_w + more_w > self._limits_w[at_s] * (1 + _TOLERANCE_RATIO):
                return False
        return True

    def _more_w(self, own: FleetHost, lease: Lease, at_s: float) -> float:
        margin_s = self.rules.margin_s
        return max(0.0, lease.most_w(at_s, own.held.share_w, margin_s) - own.held.most_w(at_s, margin_s))

    def _add(self, own: FleetHost, lease: Lease) -> None:
        self.leases[own.host] = lease
        for at_s in self._most_w:
            self._most_w[at_s] += self._more_w(own, lease, at_s)

    def _differs(self, before: Lease, fallback: tuple[Fallback, ...], own: FleetHost) -> bool:
        margin_s, share_w = self.rules.margin_s, own.held.share_w
        tolerance_w = self.rules.step_ratio * share_w
        known, new = Lease(0, 0.0, -math.inf, before.fallback), Lease(0, 0.0, -math.inf, fallback)
        return any(
            abs(known.most_w(at_s, share_w, margin_s) - new.most_w(at_s, share_w, margin_s)) > tolerance_w
            for at_s in self._most_w
            if at_s < self.now_s + 0.9 * self.rules.announced_s
        )

    def _trouble(self, silent: Sequence[FleetHost], limit_w: float) -> str | None:
        """Return why the fleet may exceed its limit; None if it does not."""
        kept_w = math.fsum(host.held.most_w(self.now_s, self.rules.margin_s) for host in silent)
        if kept_w > limit_w:
            return f"hosts out of contact may draw {kept_w:.0f} W, more than the limit of {limit_w:.0f} W"
        shares_w = math.fsum(host.held.share_w for host in self.view.hosts)
        if shares_w > self.view.budget_w * (1 + _TOLERANCE_RATIO):
            return (
                f"the shares of all hosts add up to {shares_w:.0f} W, more than the fleet's budget of"
                f" {self.view.budget_w:.0f} W: lower power_budget_w in their settings"
            )
        return None
