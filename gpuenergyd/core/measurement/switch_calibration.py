"""Switch latencies of one GPU model, estimated from the clock changes that jobs make.

Theory of operation. A clock request waits for the driver thread, then the driver call runs, and some time after it has
returned the new clock is effective. That instant is only known to lie between two readings: the last that showed the
old clock and the first that showed the new one. The estimate is the middle of this interval, its error half the width.
A change whose effect was never observed took at least as long as it was watched. It is treated as a censored
observation (Kaplan and Meier, 1958); otherwise slow GPUs would appear fast. If a driver updates clocks rarely, the
intervals are as wide as clocks are old, and their middles say little: see `bounded_latencies`.

Latency depends on the GPU, on the direction of the change and on both clocks, mostly on the target clock
(arXiv 2502.20075). Changes are therefore grouped by direction and target clock. A target with too few changes uses
those between the same coarse regions of start and target clock, then those with the same target region, then all of
the same direction.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median

from gpuenergyd.core.pipeline.switching import (
    ENOUGH,
    LATE_QUANTILE,
    LOW_QUANTILE,
    ClockRegion,
    Direction,
    LatencyBasis,
    ObservedSwitch,
    RegionLatency,
    SwitchLatency,
    TargetLatency,
    latency_quantiles_s,
    region_of,
)

_KEPT = 2048
_EVERY = 8
_EVERY_SHARE = 16
"""Estimates are updated after `_EVERY` new changes, or one in `_EVERY_SHARE` of the kept ones if that is more."""
_NOTABLE_RATIO = 0.25
_NOTABLE_EXCESS_S = 0.001
_FAR_RATIO = 1.5
"""Latencies beyond the late quantile times this factor are rare outliers; shorter ones are the usual spread."""


@dataclass(frozen=True, slots=True)
class SwitchEstimate:
    """Latency statistics of one kind of clock change; region None means all regions.

    `low_s` and `high_s` are the 10th and 90th percentile. A quantile is None if too many changes were not seen to take
    effect. `resolution_s` is the median interval between the readings before and after a change.
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


@dataclass(slots=True)
class SwitchCalibration:
    """Estimator of the switch latency of a GPU model; `latency` is the value for planning."""

    max_sm_clock_mhz: int
    latency: SwitchLatency
    """The published or assumed latency until enough changes were measured."""
    num_seen: int = 0
    """Changes since the daemon started that were seen to take effect."""
    num_unseen: int = 0
    _switches: deque[ObservedSwitch] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _num_new: int = 0
    reported: SwitchLatency = field(init=False)
    """`latency` as of its last notable change."""
    _estimates: tuple[SwitchEstimate, ...] | None = None

    def __post_init__(self) -> None:
        self.reported = self.latency

    @property
    def switches(self) -> tuple[ObservedSwitch, ...]:
        """The measured changes, oldest first."""
        return tuple(self._switches)

    @property
    def num_earlier(self) -> int:
        """Number of changes measured by an earlier daemon."""
        return max(0, len(self._switches) - self.num_seen - self.num_unseen)

    def restore(self, switches: Iterable[ObservedSwitch]) -> None:
        """Start with the changes that an earlier daemon measured on GPUs of this model."""
        self._switches.extend(switches)
        self._estimates = None
        if (latency := self._measured(LatencyBasis.MEASURED_EARLIER)) is not None:
            self.latency = self.reported = latency

    def observe(self, switch: ObservedSwitch, *, in_place_of: ObservedSwitch | None = None) -> bool:
        """Add a measured change, perhaps in place of what was known of it; return whether `latency` differs notably."""
        if in_place_of is not None and in_place_of in self._switches:
            self._switches.remove(in_place_of)
            self._count(in_place_of, -1)
        self._switches.append(switch)
        self._count(switch, 1)
        self._estimates = None
        self._num_new += 1
        self._forget_contradicted()
        is_enough = self.num_seen + self.num_unseen >= ENOUGH
        basis = LatencyBasis.MEASURED if is_enough else LatencyBasis.MEASURED_EARLIER
        is_first = self.reported.basis is not basis
        every = max(_EVERY, len(self._switches) // _EVERY_SHARE)
        if len(self._switches) < ENOUGH or (self._num_new < every and not is_first):
            return False
        self._num_new = 0
        if (latency := self._measured(basis)) is None:
            return False
        self.latency = latency
        is_notable = is_first or _differs_notably(self.reported, latency)
        self.reported = latency if is_notable else self.reported
        return is_notable

    def _count(self, switch: ObservedSwitch, num: int) -> None:
        if switch.settle_high_s is None:
            self.num_unseen += num
        else:
            self.num_seen += num

    def _forget_contradicted(self) -> None:
        """Drop older changes once several in a row took much more or less time than known for their target clock."""
        known = {(t.direction, t.sm_clock_mhz): t for t in self.latency.targets}
        num_contradicting = 0
        for num_kept, switch in enumerate(reversed(self._switches if known else ()), start=1):
            own = known.get((switch.direction, switch.to_sm_clock_mhz))
            if own is None:
                continue
            low_s, high_s = switch.bounds_s
            if low_s <= _FAR_RATIO * own.late_s and (high_s is None or _FAR_RATIO * high_s >= own.typical_s):
                return
            num_contradicting += 1
            if num_contradicting == ENOUGH:
                self._num_new = num_kept
                self._switches = deque(list(self._switches)[-num_kept:], _KEPT)
                self.latency = replace(self.latency, targets=(), regions=())
                return

    def estimates(self) -> tuple[SwitchEstimate, ...]:
        """Return the statistics by direction, then by regions; empty before the first change."""
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
        groups: dict[tuple[Direction | ClockRegion, ...], list[ObservedSwitch]] = {}
        to_clock: dict[tuple[Direction, int], list[ObservedSwitch]] = {}
        for switch in self._switches:
            direction, (source, target) = switch.direction, self._regions(switch)
            for key in ((direction,), (direction, target), (direction, source, target)):
                groups.setdefault(key, []).append(switch)
            to_clock.setdefault((direction, switch.to_sm_clock_mhz), []).append(switch)
        figures = {key: _figures(switches) for key, switches in groups.items() if len(switches) >= ENOUGH}
        known = {direction: figures[direction,] for direction in Direction if (direction,) in figures}
        if not known:
            return None
        # A direction with too few changes uses the figures of the other one.
        raises, lowers = (known.get(d) or next(iter(known.values())) for d in (Direction.RAISE, Direction.LOWER))
        regions = []
        for direction, source, target in product(known, ClockRegion, ClockRegion):
            own = figures.get((direction, source, target)) or figures.get((direction, target))
            if own is not None:
                regions.append(RegionLatency(direction, source, target, *own))
        latency = SwitchLatency(
            raise_s=raises[1],
            lower_s=lowers[0],
            call_s=median(s.call_s for s in self._switches),
            typical_raise_s=raises[0],
            max_sm_clock_mhz=self.max_sm_clock_mhz,
            regions=tuple(regions),
            basis=basis,
            targets=tuple(
                TargetLatency(direction, clock, *_figures(switches))
                for (direction, clock), switches in sorted(to_clock.items())
                if len(switches) >= ENOUGH
            ),
        )
        late_s = [latency.late_s(s.from_sm_clock_mhz, s.to_sm_clock_mhz) for s in self._switches]
        excess_s = sum(
            s.bounds_s[0] - own_s
            for s, own_s in zip(self._switches, late_s, strict=True)
            if s.bounds_s[0] > _FAR_RATIO * own_s
        )
        return replace(latency, excess_s=excess_s / len(self._switches))


def _estimate(
    key: tuple[Direction, ClockRegion | None, ClockRegion | None], switches: Sequence[ObservedSwitch]
) -> SwitchEstimate:
    widths = [s.settle_high_s - s.settle_low_s for s in switches if s.settle_high_s is not None]
    median_s, low_s, high_s = latency_quantiles_s(switches, (0.5, LOW_QUANTILE, LATE_QUANTILE))
    return SwitchEstimate(
        *key,
        num_seen=len(widths),
        num_unseen=len(switches) - len(widths),
        median_s=median_s,
        low_s=low_s,
        high_s=high_s,
        call_s=median(s.call_s for s in switches),
        settle_s=_settle_s(switches, median_s),
        resolution_s=median(widths) if widths else 0.0,
    )


def _settle_s(switches: Sequence[ObservedSwitch], median_s: float | None) -> float:
    if median_s is None or not any(s.clock_age_s for s in switches):
        return median(s.settle_s for s in switches)
    return max(0.0, median_s - median(s.handover_s + s.call_s for s in switches))


def _figures(switches: Sequence[ObservedSwitch]) -> tuple[float, float]:
    """Return the typical and the late latency; the longest observation replaces an unknown quantile."""
    longest_s = max(s.latency_s for s in switches)
    typical_s, late_s = latency_quantiles_s(switches, (0.5, LATE_QUANTILE))
    return longest_s if typical_s is None else typical_s, longest_s if late_s is None else late_s


def _differs_notably(before: SwitchLatency, now: SwitchLatency) -> bool:
    """Return whether two latencies differ enough to require a new plan."""
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
