"""Power leases: computes the most power that a host may draw at any instant, given all its leases.

A host follows the last lease that reached it until the lease ends, and then its fallback: its share, which is the
budget in its settings, lowered by the entries in the lease. Whether a lease has arrived is known only when the host has
confirmed it; until then, the largest of all possibilities is assumed. Instants are seconds since 1970 UTC; the clocks
of hosts and coordinator may differ by up to `margin_s`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fallback:
    """A budget for a period after a lease; it can only lower the host's share."""

    start_s: float
    end_s: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Lease:
    """A host's power budget until an instant, and its fallback after that."""

    number: int
    """Rises with each lease of a host."""
    power_w: float
    end_s: float
    fallback: tuple[Fallback, ...] = ()

    def most_w(self, at_s: float, share_w: float, margin_s: float) -> float:
        """Return the most power that a host with only this lease draws at an instant."""
        if at_s < self.end_s - margin_s:
            return self.power_w
        after_w = least_w(self.fallback, at_s, share_w, margin_s)
        return max(self.power_w, after_w) if at_s < self.end_s + margin_s else after_w


def least_w(fallback: Sequence[Fallback], at_s: float, share_w: float, margin_s: float) -> float:
    """Return a host's fallback power at an instant, using entries that are in force by any clock within the margin."""
    entries = (part.power_w for part in fallback if part.start_s + margin_s <= at_s < part.end_s - margin_s)
    return min((share_w, *entries))


@dataclass(frozen=True, slots=True)
class HeldPower:
    """All leases that a host may follow: the last one that it confirmed, and those handed out since."""

    share_w: float
    leases: tuple[Lease, ...] = ()
    confirmed: int = 0
    """Number of the last lease that the host confirmed; 0 if none."""

    @property
    def newest(self) -> Lease | None:
        return max(self.leases, key=lambda lease: lease.number, default=None)

    @property
    def possible(self) -> tuple[Lease, ...]:
        """The leases that may be in force."""
        return tuple(lease for lease in self.leases if lease.number >= self.confirmed)

    def most_w(self, at_s: float, margin_s: float) -> float:
        """Return the most power that the host draws at an instant if it follows its leases."""
        found = [lease.most_w(at_s, self.share_w, margin_s) for lease in self.possible]
        is_without = not any(lease.number == self.confirmed for lease in self.possible)
        return max((*found, self.share_w) if is_without else found)

    def instants(self, margin_s: float) -> set[float]:
        """Return all instants at which `most_w` may change."""
        found = set()
        for lease in self.possible:
            found |= {lease.end_s - margin_s, lease.end_s + margin_s}
            for part in lease.fallback:
                found |= {part.start_s + margin_s, part.end_s - margin_s}
        return found
