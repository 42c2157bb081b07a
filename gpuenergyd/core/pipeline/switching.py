"""Switch latencies of one GPU model, estimated from the clock changes that jobs make.

Theory of operation. A clock request waits for the driver thread, the driver call runs, and some time after the call has
returned the new clock is effective. That instant is known only up to an interval between two readings: the last that
showed the old clock and the first that showed the new one. The estimate is the middle of the interval, its error half
the width. A change that was never observed to settle took at least as long as it was watched; it counts as a censored
observation (Kaplan and Meier, 1958), otherwise slow GPUs would look fast.

Latency depends on the GPU, on the direction of the change and on both clocks, mostly on the target clock
(arXiv 2502.20075). Changes are therefore grouped by direction and target clock. A target with too few changes uses
those between the same coarse regions of start and target clock, then those with the same target region, then all of the
same direction.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Self

ENOUGH = 12
"""Minimum number of changes for an estimate: the 90th percentile of fewer is one of the two slowest."""
LOW_QUANTILE, LATE_QUANTILE = 0.1, 0.9
"""A lead beyond the latter saves little time and costs energy at every raise."""
_KEPT = 2048
_EVERY = 8
_EVERY_SHARE = 16
"""Estimates are made again after `_EVERY` changes, or after this fraction of those that are kept."""
_NOTABLE_RATIO = 0.25
_NOTABLE_EXCESS_S = 0.001
_FAR_RATIO = 1.5
"""Latencies beyond the late one by this factor are rare long ones; those between are its usual spread."""


class Direction(StrEnum):
    """Direction of a clock change."""

    RAISE = "raise"
    LOWER = "lower"


class ClockRegion(StrEnum):
    """Clock relative to the GPU's maximum; voltage starts to fall with the clock between middle and low."""

    HIGH = "high"
    """90 % of the maximum and more."""
    MIDDLE = "middle"
    LOW = "low"
    """Below 75 % of the maximum."""


class LatencyBasis(StrEnum):
    """Source of a switch latency."""

    ASSUMED = "assumed"
    """Default for unknown GPU models."""
    PUBLISHED = "published"
    """Published measurement of this GPU model or its die."""
    MEASURED_EARLIER = "measured_earlier"
    """Measured on this host by an earlier daemon, with the same driver version."""
    MEASURED = "measured"
    """Measured on this host, with at least `ENOUGH` changes since the daemon started."""

    @property
    def is_measured(self) -> bool:
        """Whether it was measured on this host."""
        return self in {LatencyBasis.MEASURED, LatencyBasis.MEASURED_EARLIER}


@dataclass(frozen=True, slots=True)
class ObservedSwitch:
    """Measured latency of one clock change.

    `handover_s` is the time from the due instant to the driver call, without waits for calls on other GPUs; `call_s` is
    the duration of the driver call. After the call, the new clock was not yet effective at `settle_low_s` and was
    effective at `settle_high_s`; None if it was never observed.
    """

    from_sm_clock_mhz: int
    to_sm_clock_mhz: int
    handover_s: float
    call_s: float
    settle_low_s: float
    settle_high_s: float | None

    @property
    def settle_s(self) -> float:
        """Estimated settling time; a lower bound if settling was not observed."""
        if self.settle_high_s is None:
            return self.settle_low_s
        return (self.settle_low_s + self.settle_high_s) / 2

    @property
    def latency_s(self) -> float:
        """Time from the due instant to the effective clock; a lower bound if settling was not observed."""
        return self.handover_s + self.call_s + self.settle_s

    @property
    def direction(self) -> Direction:
        """Direction of this change."""
        return direction_of(self.from_sm_clock_mhz, self.to_sm_clock_mhz)


@dataclass(frozen=True, slots=True)
class SwitchEstimate:
    """Latency statistics of one kind of clock change; region None means all regions.

    `low_s` and `high_s` are the 10th and 90th percentile; a quantile is None if too many changes were not observed to
    settle. `resolution_s` is the median interval between the readings before and after.
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
    """Typical (median) and late (90th percentile) latency of changes between two clock regions."""

    direction: Direction
    from_region: ClockRegion
    to_region: ClockRegion
    typical_s: float
    late_s: float


@dataclass(frozen=True, slots=True)
class TargetLatency:
    """Typical (median) and late (90th percentile) latency of changes to one clock."""

    direction: Direction
    sm_clock_mhz: int
    typical_s: float
    late_s: float


@dataclass(frozen=True, slots=True)
class SwitchLatency:
    """Switch latencies of a GPU for planning, without waits for other GPUs.

    A raise is requested `raise_s` ahead (90th percentile: a late raise costs time); a reduction is assumed to take
    effect `lower_s` after its request (median: a late one costs only energy). During `call_s` the driver changes no
    other GPU of the host.
    """

    raise_s: float
    lower_s: float
    call_s: float = 0.0
    typical_raise_s: float | None = None
    """Median latency of raises; None if only one figure is known."""
    max_sm_clock_mhz: int = 0
    """Maximum clock that the regions are relative to."""
    regions: tuple[RegionLatency, ...] = ()
    basis: LatencyBasis = LatencyBasis.ASSUMED
    targets: tuple[TargetLatency, ...] = ()
    """Latency by target clock, where enough changes to it were seen."""
    stall_s: float = 0.0
    """Time for which a driver call stops the work of the GPU whose clock it sets."""
    excess_s: float = 0.0
    """Time beyond the late (90th percentile) latency of changes that take half as long again, mean over all changes."""
    num_calls: int = 1
    """Driver calls per change: one for each GPU of the stage."""
    host: str = ""
    """The host whose driver is called: its calls queue up, those of different hosts do not."""

    def late_s(self, from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> float:
        """Return the lead of a request for this change: its late (90th percentile) latency."""
        region = self._region(from_sm_clock_mhz, to_sm_clock_mhz)
        if region is not None:
            return region.late_s
        return self.raise_s if to_sm_clock_mhz > from_sm_clock_mhz else self.lower_s

    def typical_s(self, from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> float:
        """Return the typical (median) latency of this change."""
        region = self._region(from_sm_clock_mhz, to_sm_clock_mhz)
        if region is not None:
            return region.typical_s
        if to_sm_clock_mhz <= from_sm_clock_mhz:
            return self.lower_s
        return self.raise_s if self.typical_raise_s is None else self.typical_raise_s

    def delayed(self, delay_s: float) -> Self:
        """Return the latency if clocks take effect so much later than they are reported, never before the call."""
        return replace(
            self,
            raise_s=max(0.0, self.raise_s + delay_s),
            lower_s=max(0.0, self.lower_s + delay_s),
            typical_raise_s=None if self.typical_raise_s is None else max(0.0, self.typical_raise_s + delay_s),
            regions=tuple(
                replace(r, typical_s=max(0.0, r.typical_s + delay_s), late_s=max(0.0, r.late_s + delay_s))
                for r in self.regions
            ),
            targets=tuple(
                replace(t, typical_s=max(0.0, t.typical_s + delay_s), late_s=max(0.0, t.late_s + delay_s))
                for t in self.targets
            ),
        )

    def _region(self, from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> RegionLatency | TargetLatency | None:
        direction = direction_of(from_sm_clock_mhz, to_sm_clock_mhz)
        for target in self.targets:
            if target.sm_clock_mhz == to_sm_clock_mhz and target.direction is direction:
                return target
        from_region = region_of(from_sm_clock_mhz, self.max_sm_clock_mhz)
        to_region = region_of(to_sm_clock_mhz, self.max_sm_clock_mhz)
        for region in self.regions:
            if (region.direction, region.from_region, region.to_region) == (direction, from_region, to_region):
                return region
        return None


def constant_latency(latency_s: float, basis: LatencyBasis = LatencyBasis.ASSUMED) -> SwitchLatency:
    """Return a switch latency that is the same for all changes."""
    return SwitchLatency(latency_s, latency_s, basis=basis)


def direction_of(from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> Direction:
    """Return the direction of a change."""
    return Direction.RAISE if to_sm_clock_mhz > from_sm_clock_mhz else Direction.LOWER


def region_of(sm_clock_mhz: int, max_sm_clock_mhz: int) -> ClockRegion:
    """Return the region of a clock."""
    if sm_clock_mhz >= 0.9 * max_sm_clock_mhz:
        return ClockRegion.HIGH
    return ClockRegion.MIDDLE if sm_clock_mhz >= 0.75 * max_sm_clock_mhz else ClockRegion.LOW


@dataclass(slots=True)
class SwitchCalibration:
    """Estimator of the switch latency of a GPU model; `latency` is the value for planning."""

    max_sm_clock_mhz: int
    latency: SwitchLatency
    """The published or assumed latency until enough changes were measured."""
    num_seen: int = 0
    """Changes since the daemon started whose effect was observed."""
    num_unseen: int = 0
    _switches: deque[ObservedSwitch] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _num_new: int = 0
    _num_contradicting: int = 0
    _num_since_contradicted: int = 0
    """Changes since the first one of those that contradict in a row."""
    _estimates: tuple[SwitchEstimate, ...] | None = None

    @property
    def switches(self) -> tuple[ObservedSwitch, ...]:
        """The measured changes, oldest first."""
        return tuple(self._switches)

    @property
    def num_earlier(self) -> int:
        """Number of those that an earlier daemon measured."""
        return max(0, len(self._switches) - self.num_seen - self.num_unseen)

    def restore(self, switches: Iterable[ObservedSwitch]) -> None:
        """Begin with the changes that an earlier daemon measured on GPUs of this model."""
        self._switches.extend(switches)
        self._estimates = None
        latency = self._measured(LatencyBasis.MEASURED_EARLIER)
        if latency is not None:
            self.latency = latency

    def observe(self, switch: ObservedSwitch) -> bool:
        """Add a measured change; return whether `latency` has changed."""
        is_seen = switch.settle_high_s is not None
        self.num_seen += is_seen
        self.num_unseen += not is_seen
        self._switches.append(switch)
        self._estimates = None
        self._num_new += 1
        self._forget_contradicted(switch)
        is_enough = self.num_seen + self.num_unseen >= ENOUGH
        basis = LatencyBasis.MEASURED if is_enough else LatencyBasis.MEASURED_EARLIER
        is_first = self.latency.basis is not basis
        every = max(_EVERY, len(self._switches) // _EVERY_SHARE)
        if len(self._switches) < ENOUGH or (self._num_new < every and not is_first):
            return False
        self._num_new = 0
        latency = self._measured(basis)
        if latency is None or (not is_first and not _differs_notably(self.latency, latency)):
            return False
        self.latency = latency
        return True

    def _forget_contradicted(self, switch: ObservedSwitch) -> None:
        """Forget all changes before those in a row that took far more, or far less, time than known of their clock."""
        known = (t for t in self.latency.targets if t.sm_clock_mhz == switch.to_sm_clock_mhz)
        own = next((t for t in known if t.direction is switch.direction), None)
        self._num_since_contradicted += self._num_contradicting > 0
        if own is None:
            return
        is_slower = switch.latency_s > _FAR_RATIO * own.late_s
        is_faster = switch.settle_high_s is not None and _FAR_RATIO * switch.latency_s < own.typical_s
        if not (is_slower or is_faster):
            self._num_contradicting = self._num_since_contradicted = 0
            return
        self._num_contradicting += 1
        if self._num_contradicting < ENOUGH:
            return
        kept = list(self._switches)[-1 - self._num_since_contradicted :]
        self._switches.clear()
        self._switches.extend(kept)
        self.latency = replace(self.latency, targets=(), regions=())
        self._num_contradicting = self._num_since_contradicted = 0
        self._num_new = len(kept)

    def estimates(self) -> tuple[SwitchEstimate, ...]:
        """Return the statistics of each direction, then by regions; empty before the first change."""
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

    def _measured(self, basis: LatencyBasis) -> SwitchLatency | None:
        """Return the latency from the measured changes; None while both directions have too few."""
        both: dict[Direction, list[ObservedSwitch]] = {d: [] for d in Direction}
        to_region: dict[tuple[Direction, ClockRegion], list[ObservedSwitch]] = {}
        between: dict[tuple[Direction, ClockRegion, ClockRegion], list[ObservedSwitch]] = {}
        to_clock: dict[tuple[Direction, int], list[ObservedSwitch]] = {}
        for switch in self._switches:
            direction, (source, target) = switch.direction, self._regions(switch)
            both[direction].append(switch)
            to_region.setdefault((direction, target), []).append(switch)
            between.setdefault((direction, source, target), []).append(switch)
            to_clock.setdefault((direction, switch.to_sm_clock_mhz), []).append(switch)
        known = {direction: _figures(own) for direction, own in both.items() if len(own) >= ENOUGH}
        if not known:
            return None
        # A direction with too few changes uses the figures of the other one.
        raises, lowers = (known.get(d) or next(iter(known.values())) for d in (Direction.RAISE, Direction.LOWER))
        regions = []
        for direction in known:
            of_target = {t: _figures(g) for (d, t), g in to_region.items() if d is direction and len(g) >= ENOUGH}
            for source in ClockRegion:
                for target in ClockRegion:
                    own = between.get((direction, source, target), [])
                    figures = _figures(own) if len(own) >= ENOUGH else of_target.get(target)
                    if figures is not None:
                        regions.append(RegionLatency(direction, source, target, *figures))
        latency = SwitchLatency(
            raise_s=raises[1],
            lower_s=lowers[0],
            call_s=median(s.call_s for s in self._switches),
            typical_raise_s=raises[0],
            max_sm_clock_mhz=self.max_sm_clock_mhz,
            regions=tuple(regions),
            basis=basis,
            targets=tuple(
                TargetLatency(direction, clock, *_figures(own))
                for (direction, clock), own in sorted(to_clock.items())
                if len(own) >= ENOUGH
            ),
        )
        late_s = [latency.late_s(s.from_sm_clock_mhz, s.to_sm_clock_mhz) for s in self._switches]
        excess_s = sum(
            s.latency_s - own_s
            for s, own_s in zip(self._switches, late_s, strict=True)
            if s.latency_s > _FAR_RATIO * own_s
        )
        return replace(latency, excess_s=excess_s / len(self._switches))


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
    """Return (typical, late) latency; a quantile that is unknown counts as the longest observation."""
    longest_s = max(s.latency_s for s in switches)
    typical_s, late_s = (latency_quantile_s(switches, share) for share in (0.5, LATE_QUANTILE))
    return longest_s if typical_s is None else typical_s, longest_s if late_s is None else late_s


def latency_quantile_s(switches: Iterable[ObservedSwitch], share: float) -> float | None:
    """Return a quantile of the latency (Kaplan-Meier); None if too many changes were not observed to settle."""
    ordered = sorted((s.latency_s, s.settle_high_s is None) for s in switches)
    surviving, at_risk = 1.0, len(ordered)
    for latency_s, is_unseen in ordered:
        if not is_unseen:
            surviving *= 1 - 1 / at_risk
            if surviving <= 1 - share + 1e-9:
                return latency_s
        at_risk -= 1
    return None


def _differs_notably(before: SwitchLatency, now: SwitchLatency) -> bool:
    """Return whether two latencies differ enough to require another plan."""
    if [_key(r) for r in now.regions] != [_key(r) for r in before.regions]:
        return True
    if abs(now.excess_s - before.excess_s) > max(_NOTABLE_RATIO * before.excess_s, _NOTABLE_EXCESS_S):
        return True
    targets = {(t.direction, t.sm_clock_mhz): t.late_s for t in before.targets}
    if any((t.direction, t.sm_clock_mhz) not in targets for t in now.targets):
        return True
    pairs = [(before.raise_s, now.raise_s), (before.lower_s, now.lower_s)]
    pairs += [(a.late_s, b.late_s) for a, b in zip(before.regions, now.regions, strict=True)]
    pairs += [(targets[t.direction, t.sm_clock_mhz], t.late_s) for t in now.targets]
    return any(abs(b - a) > _NOTABLE_RATIO * a for a, b in pairs)


def _key(region: RegionLatency) -> tuple[Direction, ClockRegion, ClockRegion]:
    return region.direction, region.from_region, region.to_region
