"""Power of a GPU that waits for its peers, by SM clock."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from gpuenergyd.errors import ProfileError


@dataclass(frozen=True, slots=True)
class WaitingPower:
    """Power of a waiting GPU at some SM clocks, lowest first; linear between them, constant beyond them."""

    clocks_mhz: tuple[int, ...]
    powers_w: tuple[float, ...]
    is_assumed: bool = False
    """Whether the power was derived from assumptions instead of measured."""

    def at(self, sm_clock_mhz: float) -> float:
        k = bisect_left(self.clocks_mhz, sm_clock_mhz)
        if k == 0:
            return self.powers_w[0]
        if k == len(self.clocks_mhz):
            return self.powers_w[-1]
        below, above = self.clocks_mhz[k - 1], self.clocks_mhz[k]
        share = (sm_clock_mhz - below) / (above - below)
        return self.powers_w[k - 1] + share * (self.powers_w[k] - self.powers_w[k - 1])

    @property
    def least_w(self) -> float:
        return min(self.powers_w)

    @property
    def cheapest_clock_mhz(self) -> int:
        """The clock of least power; the highest if several are equal."""
        return max(
            clock for clock, power_w in zip(self.clocks_mhz, self.powers_w, strict=True) if power_w == self.least_w
        )


def waiting_power(points: Iterable[tuple[int, float]], *, where: str, is_assumed: bool = False) -> WaitingPower:
    """Return a validated curve from clocks in MHz and powers in watts; `where` names it in error messages.

    Raises:
        ProfileError: no points, two for one clock, or a value that is out of range.
    """
    ordered = sorted(points)
    if not ordered:
        raise ProfileError(f"{where}: no powers below the header")
    for k, (clock, power_w) in enumerate(ordered):
        if clock <= 0:
            raise ProfileError(f"{where}: frequency {clock} MHz must be > 0")
        if not (math.isfinite(power_w) and power_w >= 0):
            raise ProfileError(f"{where}: power {power_w} W at {clock} MHz must be finite and >= 0")
        if k and ordered[k - 1][0] == clock:
            raise ProfileError(f"{where}: {clock} MHz is given twice")
    return WaitingPower(tuple(clock for clock, _ in ordered), tuple(power_w for _, power_w in ordered), is_assumed)
