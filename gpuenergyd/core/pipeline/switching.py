"""How long clock changes of one GPU take: learned from the changes a job makes anyway, given to planners as figures.

Theory of operation. A change is asked for, waits for the driver, is called for, and some time after the call has
returned the new clock is effective. When that was is known only between two looks at the GPU: the last that showed
the old clock and the first that showed the new one; the middle of the two is taken, and half their distance is what
cannot be known better. A change that was never seen to arrive took at least as long as it was watched: it counts as
such (Kaplan and Meier, 1958), or slow GPUs would look fast.

Latency depends on the GPU, on whether the clock rises or falls, and on both clocks, of which the target matters more
(arXiv 2502.20075). So changes are sorted by direction and by coarse regions of start and target; where a region has
too few, those with the same target stand in, then all of the direction.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

ENOUGH = 12
"""Changes seen before a figure is believed: the 90th percentile of fewer is one of the two slowest."""
LOW_QUANTILE, LATE_QUANTILE = 0.1, 0.9
"""Leading by more than the latter buys little time and costs energy at every raise."""
_KEPT = 512
_EVERY = 8
_NEWS_RATIO = 0.25


class Direction(StrEnum):
    """Which way a clock changes."""

    RAISE = "raise"
    LOWER = "lower"


class ClockRegion(StrEnum):
    """Where a clock lies, against the GPU's maximum; voltage begins to fall with the clock between middle and low."""

    HIGH = "high"
    """90 % and more."""
    MIDDLE = "middle"
    LOW = "low"
    """Below 75 %."""


class LatencyBasis(StrEnum):
    """Where a latency to plan with comes from."""

    ASSUMED = "assumed"
    """Nothing is known of this GPU model."""
    PUBLISHED = "published"
    """Measured by others on this GPU model or its die."""
    MEASURED = "measured"
    """Seen on this GPU, on this host, since the daemon started."""


@dataclass(frozen=True, slots=True)
class ObservedSwitch:
    """One clock change that was followed to its effect, or as long as it was watched.

    `handover_s` is the time from when it was due until the driver was called, without waits for calls that set other
    GPUs; `call_s` the driver's call. The clock was not there `settle_low_s` after the call, and was `settle_high_s`
    after it; None if it was never seen.
    """

    from_sm_clock_mhz: int
    to_sm_clock_mhz: int
    handover_s: float
    call_s: float
    settle_low_s: float
    settle_high_s: float | None

    @property
    def settle_s(self) -> float:
        """The best guess at the settling time, or what it exceeded."""
        if self.settle_high_s is None:
            return self.settle_low_s
        return (self.settle_low_s + self.settle_high_s) / 2

    @property
    def latency_s(self) -> float:
        """From due to effective, or what that exceeded."""
        return self.handover_s + self.call_s + self.settle_s

    @property
    def direction(self) -> Direction:
        """Which way the clock went."""
        return direction_of(self.from_sm_clock_mhz, self.to_sm_clock_mhz)


@dataclass(frozen=True, slots=True)
class SwitchEstimate:
    """What was seen of one kind of change; None for a region stands for all.

    `low_s` and `high_s` are the 10th and 90th percentile; None when so many were not seen that they are not known.
    `resolution_s` is the median distance between the looks before and after.
    """

    direction: Direction
    from_region: ClockRegion | None
    to_region: ClockRegion | None
    num_seen: int
    num_unseen: int
    median_s: float | None
    low_s: float | None
    high_s: float | None
    call_s: float
    settle_s: float
    resolution_s: float


@dataclass(frozen=True, slots=True)
class RegionLatency:
    """What to plan a change with that goes from one region to another: what is typical, and what is late."""

    direction: Direction
    from_region: ClockRegion
    to_region: ClockRegion
    typical_s: float
    late_s: float


@dataclass(frozen=True, slots=True)
class SwitchLatency:
    """What to plan a GPU's clock changes with, waits for other GPUs left out.

    A raise is asked for `raise_s` ahead (90th percentile: one that comes late costs time), a reduction is taken to
    come `lower_s` after it was asked for (median: it costs energy only). While `call_s` runs, the driver changes no
    other GPU of the host.
    """

    raise_s: float
    lower_s: float
    call_s: float = 0.0
    typical_raise_s: float | None = None
    """Median of raises; None where only one figure is known."""
    max_sm_clock_mhz: int = 0
    """What the regions refer to."""
    regions: tuple[RegionLatency, ...] = ()
    basis: LatencyBasis = LatencyBasis.ASSUMED

    def late_s(self, from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> float:
        """Return how long ahead a change must be asked for."""
        region = self._region(from_sm_clock_mhz, to_sm_clock_mhz)
        if region is not None:
            return region.late_s
        return self.raise_s if to_sm_clock_mhz > from_sm_clock_mhz else self.lower_s

    def typical_s(self, from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> float:
        """Return how long a change takes as a rule."""
        region = self._region(from_sm_clock_mhz, to_sm_clock_mhz)
        if region is not None:
            return region.typical_s
        if to_sm_clock_mhz <= from_sm_clock_mhz:
            return self.lower_s
        return self.raise_s if self.typical_raise_s is None else self.typical_raise_s

    def _region(self, from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> RegionLatency | None:
        direction = direction_of(from_sm_clock_mhz, to_sm_clock_mhz)
        from_region = region_of(from_sm_clock_mhz, self.max_sm_clock_mhz)
        to_region = region_of(to_sm_clock_mhz, self.max_sm_clock_mhz)
        for region in self.regions:
            if (region.direction, region.from_region, region.to_region) == (direction, from_region, to_region):
                return region
        return None


def constant_latency(latency_s: float, basis: LatencyBasis = LatencyBasis.ASSUMED) -> SwitchLatency:
    """Return a latency that is the same for every change."""
    return SwitchLatency(latency_s, latency_s, basis=basis)


def direction_of(from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> Direction:
    """Return which way a change goes."""
    return Direction.RAISE if to_sm_clock_mhz > from_sm_clock_mhz else Direction.LOWER


def region_of(sm_clock_mhz: int, max_sm_clock_mhz: int) -> ClockRegion:
    """Return where a clock lies."""
    if sm_clock_mhz >= 0.9 * max_sm_clock_mhz:
        return ClockRegion.HIGH
    return ClockRegion.MIDDLE if sm_clock_mhz >= 0.75 * max_sm_clock_mhz else ClockRegion.LOW


@dataclass(slots=True)
class SwitchCalibration:
    """Learns the latency of one GPU's clock changes; `latency` is what to plan with now."""

    max_sm_clock_mhz: int
    latency: SwitchLatency
    """Begins as what is known of the GPU's model, and stays that until enough changes were seen."""
    num_seen: int = 0
    num_unseen: int = 0
    _switches: deque[ObservedSwitch] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _num_new: int = 0
    _estimates: tuple[SwitchEstimate, ...] | None = None

    def observe(self, switch: ObservedSwitch) -> bool:
        """Take a change; return whether the latency to plan with has become another by it."""
        is_seen = switch.settle_high_s is not None
        self.num_seen += is_seen
        self.num_unseen += not is_seen
        self._switches.append(switch)
        self._estimates = None
        self._num_new += 1
        is_first = self.latency.basis is not LatencyBasis.MEASURED
        if len(self._switches) < ENOUGH or (self._num_new < _EVERY and not is_first):
            return False
        self._num_new = 0
        latency = self._measured()
        if latency is None or (not is_first and not _is_news(self.latency, latency)):
            return False
        self.latency = latency
        return True

    def estimates(self) -> tuple[SwitchEstimate, ...]:
        """Return what was seen so far: each direction as a whole, then by regions; empty before anything was."""
        if self._estimates is None:
            self._estimates = self._estimated()
        return self._estimates

    def _estimated(self) -> tuple[SwitchEstimate, ...]:
        groups: dict[tuple[Direction, ClockRegion | None, ClockRegion | None], list[ObservedSwitch]] = {}
        for switch in self._switches:
            own = (switch.direction, *self._regions(switch))
            for key in ((switch.direction, None, None), own):
                groups.setdefault(key, []).append(switch)
        whole_first = sorted(groups, key=lambda key: (key[1] is not None, *map(str, key)))
        return tuple(_estimate(key, groups[key]) for key in whole_first)

    def _regions(self, switch: ObservedSwitch) -> tuple[ClockRegion, ClockRegion]:
        top = self.max_sm_clock_mhz
        return region_of(switch.from_sm_clock_mhz, top), region_of(switch.to_sm_clock_mhz, top)

    def _measured(self) -> SwitchLatency | None:
        """Return what the changes seen say, None while one direction has too few."""
        both = {d: [s for s in self._switches if s.direction is d] for d in Direction}
        known = {direction: _figures(own) for direction, own in both.items() if len(own) >= ENOUGH}
        if not known:
            return None
        # Until the other direction has been seen often enough, it is taken to be no faster than this one.
        raises, lowers = (known.get(d) or next(iter(known.values())) for d in (Direction.RAISE, Direction.LOWER))
        regions = []
        for direction in known:
            for from_region in ClockRegion:
                for to_region in ClockRegion:
                    same_target = [s for s in both[direction] if self._regions(s)[1] is to_region]
                    own = [s for s in same_target if self._regions(s)[0] is from_region]
                    enough = next((group for group in (own, same_target) if len(group) >= ENOUGH), None)
                    if enough is not None:
                        regions.append(RegionLatency(direction, from_region, to_region, *_figures(enough)))
        return SwitchLatency(
            raise_s=raises[1],
            lower_s=lowers[0],
            call_s=median(s.call_s for s in self._switches),
            typical_raise_s=raises[0],
            max_sm_clock_mhz=self.max_sm_clock_mhz,
            regions=tuple(regions),
            basis=LatencyBasis.MEASURED,
        )


def _estimate(
    key: tuple[Direction, ClockRegion | None, ClockRegion | None], switches: Sequence[ObservedSwitch]
) -> SwitchEstimate:
    widths = [s.settle_high_s - s.settle_low_s for s in switches if s.settle_high_s is not None]
    return SwitchEstimate(
        *key,
        num_seen=len(widths),
        num_unseen=len(switches) - len(widths),
        median_s=latency_quantile_s(switches, 0.5),
        low_s=latency_quantile_s(switches, LOW_QUANTILE),
        high_s=latency_quantile_s(switches, LATE_QUANTILE),
        call_s=median(s.call_s for s in switches),
        settle_s=median(s.settle_s for s in switches),
        resolution_s=median(widths) if widths else 0.0,
    )


def _figures(switches: Sequence[ObservedSwitch]) -> tuple[float, float]:
    """Return (typical, late) latency; where too many were not seen, the longest that was watched."""
    longest_s = max(s.latency_s for s in switches)
    typical_s, late_s = (latency_quantile_s(switches, share) for share in (0.5, LATE_QUANTILE))
    return longest_s if typical_s is None else typical_s, longest_s if late_s is None else late_s


def latency_quantile_s(switches: Iterable[ObservedSwitch], share: float) -> float | None:
    """Return the latency that `share` of the changes do not exceed; None when too many were not seen to say so."""
    ordered = sorted((s.latency_s, s.settle_high_s is None) for s in switches)
    surviving, at_risk = 1.0, len(ordered)
    for latency_s, is_unseen in ordered:
        if not is_unseen:
            surviving *= 1 - 1 / at_risk
            if surviving <= 1 - share + 1e-9:
                return latency_s
        at_risk -= 1
    return None


def _is_news(before: SwitchLatency, now: SwitchLatency) -> bool:
    """Return whether a plan made with one would be another with the other."""
    if [_key(r) for r in now.regions] != [_key(r) for r in before.regions]:
        return True
    pairs = [(before.raise_s, now.raise_s), (before.lower_s, now.lower_s)]
    pairs += [(a.late_s, b.late_s) for a, b in zip(before.regions, now.regions, strict=True)]
    return any(abs(b - a) > _NEWS_RATIO * a for a, b in pairs)


def _key(region: RegionLatency) -> tuple[Direction, ClockRegion, ClockRegion]:
    return region.direction, region.from_region, region.to_region
