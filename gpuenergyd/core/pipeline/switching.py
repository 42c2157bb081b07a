"""Latency of clock changes on one GPU model: a single observed change, and the latency used for planning."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from gpuenergyd.core.pipeline.bounded_latencies import distribution_of

ENOUGH = 12
"""Minimum number of changes for an estimate: with fewer, the 90th percentile is one of the two slowest."""
LOW_QUANTILE, LATE_QUANTILE = 0.1, 0.9
"""A lead beyond the late quantile saves little time and costs energy at every raise."""


class Direction(StrEnum):
    """Direction of a clock change."""

    RAISE = "raise"
    LOWER = "lower"


class ClockRegion(StrEnum):
    """Clock relative to the GPU's maximum; below the middle region, voltage falls with the clock as well."""

    HIGH = "high"
    """At least 90 % of the maximum."""
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
        """Whether the latency was measured on this host."""
        return self in {LatencyBasis.MEASURED, LatencyBasis.MEASURED_EARLIER}


@dataclass(frozen=True, slots=True)
class ObservedSwitch:
    """Measured latency of one clock change.

    `handover_s` is the time from the scheduled instant to the driver call, without waits for calls on other GPUs;
    `call_s` is the duration of the driver call. After the call, the new clock was not yet effective at `settle_low_s`
    and was effective at `settle_high_s`; None if its effect was never observed.
    """

    from_sm_clock_mhz: int
    to_sm_clock_mhz: int
    handover_s: float
    call_s: float
    settle_low_s: float
    settle_high_s: float | None
    clock_age_s: float = 0.0
    """Maximum age of the clocks that were read; the bounds of the latency are about this far apart."""

    @property
    def settle_s(self) -> float:
        """Estimated time from the end of the call to the effective clock; a lower bound if never observed."""
        if self.settle_high_s is None:
            return self.settle_low_s
        return (self.settle_low_s + self.settle_high_s) / 2

    @property
    def latency_s(self) -> float:
        """Time from the scheduled instant to the effective clock; a lower bound if the effect was not observed."""
        return self.handover_s + self.call_s + self.settle_s

    @property
    def bounds_s(self) -> tuple[float, float | None]:
        """Bounds of the latency: both the estimate if clocks are read without delay, else an age apart, as refreshes.

        Readings prove a little less. Bounds that overlap would favour short latencies.
        """
        if not self.clock_age_s:
            return self.latency_s, None if self.settle_high_s is None else self.latency_s
        before_s, low_s, high_s = self.handover_s + self.call_s, self.settle_low_s, self.settle_high_s
        if high_s is not None and high_s - low_s < 1.1 * self.clock_age_s:  # else readings were held up
            low_s = max(low_s, high_s - self.clock_age_s)
        return before_s + low_s, None if high_s is None else before_s + high_s

    @property
    def direction(self) -> Direction:
        """Direction of this change."""
        return direction_of(self.from_sm_clock_mhz, self.to_sm_clock_mhz)


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

    A raise is requested `raise_s` ahead (90th percentile, because a late raise costs time). A reduction is assumed to
    take effect `lower_s` after its request (median, because a late one costs only energy). During `call_s` the driver
    cannot change another GPU of the host.
    """

    raise_s: float
    lower_s: float
    call_s: float = 0.0
    typical_raise_s: float | None = None
    """Median latency of raises; None if only one figure is known."""
    max_sm_clock_mhz: int = 0
    """Maximum clock, to which the regions are relative."""
    regions: tuple[RegionLatency, ...] = ()
    basis: LatencyBasis = LatencyBasis.ASSUMED
    targets: tuple[TargetLatency, ...] = ()
    """Latency by target clock, for clocks with enough observed changes."""
    stall_s: float = 0.0
    """Time for which a driver call stalls the GPU whose clock it sets."""
    excess_s: float = 0.0
    """Mean excess over the late latency, counting only changes that exceed it by half; averaged over all changes."""
    num_calls: int = 1
    """Driver calls per change: one for each GPU of the stage."""
    host: str = ""
    """Host whose driver is called; calls on one host wait for each other, those on different hosts do not."""

    def late_s(self, from_sm_clock_mhz: int, to_sm_clock_mhz: int) -> float:
        """Return how far ahead to request this change: its late (90th percentile) latency."""
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
        """Return the latency if clocks take effect `delay_s` later than reported, but never before the call."""
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


def latency_quantiles_s(switches: Sequence[ObservedSwitch], shares: Sequence[float]) -> tuple[float | None, ...]:
    """Return quantiles of the latency; None if too many changes were never seen to take effect.

    They come from the changes for which clocks were read without delay (Kaplan and Meier) or, if these are too few,
    from the distribution that fits the bounds of all changes.
    """
    exact = [switch for switch in switches if not switch.clock_age_s]
    if len(exact) < min(ENOUGH, len(switches)):
        distribution = distribution_of([switch.bounds_s for switch in switches])
        return tuple(distribution.quantile_s(share) for share in shares)
    ordered = sorted((s.latency_s, s.settle_high_s is None) for s in exact)
    return tuple(_quantile_s(ordered, share) for share in shares)


def _quantile_s(ordered: Sequence[tuple[float, bool]], share: float) -> float | None:
    surviving, at_risk = 1.0, len(ordered)
    for latency_s, is_unseen in ordered:
        if not is_unseen:
            surviving *= 1 - 1 / at_risk
            if surviving <= 1 - share + 1e-9:
                return latency_s
        at_risk -= 1
    return None
