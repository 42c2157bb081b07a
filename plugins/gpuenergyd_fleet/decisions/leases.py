"""Leases of watts: what a host may draw at most at any instant, from everything that it was ever handed.

A host follows the last lease that reached it until its end, and then its fallback: its share, the budget in its
settings, lowered by the entries that the lease brought along. Whether a lease arrived is known only when the host has
confirmed it, so until then the largest of all possibilities counts. Instants are seconds since 1970 UTC; the clocks
of hosts and coordinator may differ by up to `margin_s`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fallback:
    """A budget for some of the time after a lease; it only lowers the host's share."""

    start_s: float
    end_s: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Lease:
    """So many watts for a host until an instant, and what holds after it."""

    number: int
    """Rises with each lease of a host."""
    power_w: float
    end_s: float
    fallback: tuple[Fallback, ...] = ()

    def most_w(self, at_s: float, share_w: float, margin_s: float) -> float:
        """Return the most that a host with this lease, and no other, draws at an instant."""
        if at_s < self.end_s - margin_s:
            return self.power_w
        after_w = least_w(self.fallback, at_s, share_w, margin_s)
        return max(self.power_w, after_w) if at_s < self.end_s + margin_s else after_w


def least_w(fallback: Sequence[Fallback], at_s: float, share_w: float, margin_s: float) -> float:
    """Return what a host falls back to at an instant: entries count where they hold whatever its clock shows."""
    entries = (own.power_w for own in fallback if own.start_s + margin_s <= at_s < own.end_s - margin_s)
    return min((share_w, *entries))


@dataclass(frozen=True, slots=True)
class HeldPower:
    """All leases that a host may follow: the one that it confirmed last, and those handed out since."""

    share_w: float
    leases: tuple[Lease, ...] = ()
    confirmed: int = 0
    """Number of the lease that the host confirmed last; 0 for none."""

    @property
    def newest(self) -> Lease | None:
        """The lease that was handed out last."""
        return max(self.leases, key=lambda lease: lease.number, default=None)

    @property
    def possible(self) -> tuple[Lease, ...]:
        """The leases that may be in force."""
        return tuple(lease for lease in self.leases if lease.number >= self.confirmed)

    def most_w(self, at_s: float, margin_s: float) -> float:
        """Return the most that the host draws at an instant, if it keeps to what it was handed."""
        found = [lease.most_w(at_s, self.share_w, margin_s) for lease in self.possible]
        is_without = not any(lease.number == self.confirmed for lease in self.possible)
        return max((*found, self.share_w) if is_without else found)

    def instants(self, margin_s: float) -> set[float]:
        """Return all instants at which the most may change."""
        found = set()
        for lease in self.possible:
            found |= {lease.end_s - margin_s, lease.end_s + margin_s}
            for own in lease.fallback:
                found |= {own.start_s + margin_s, own.end_s - margin_s}
        return found
