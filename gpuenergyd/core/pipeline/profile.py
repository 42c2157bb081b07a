"""Pipeline profiles: time and energy of each instruction class at each SM clock, Pareto sets and convex hulls."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd.errors import ProfileError

KIND_OF_WORD = {
    "forward": InstructionKind.F,
    "backward": InstructionKind.B,
    "input": InstructionKind.I,
    "weight": InstructionKind.W,
}
"""Instruction kinds by the words of profile tables, orders and frequency files."""
WORD_OF_KIND = {kind: word for word, kind in KIND_OF_WORD.items()}
_NO_TIME_LOST_RATIO = 0.015
_SHARE_OF_CLOCK_LOST = 0.25


@dataclass(frozen=True, slots=True)
class ClockOption:
    """Time and energy of an instruction at one SM clock."""

    sm_clock_mhz: int
    time_s: float
    energy_j: float

    def effective_energy_j(self, blocking_power_w: float) -> float:
        """Return the energy beyond what waiting for the same time would use."""
        return self.energy_j - blocking_power_w * self.time_s


@dataclass(frozen=True, slots=True)
class InstructionProfile:
    """Clock options of one instruction class, highest clock first."""

    options: tuple[ClockOption, ...]

    @property
    def at_max_clock(self) -> ClockOption:
        """The option at the highest clock: full speed."""
        return self.options[0]

    @property
    def fastest(self) -> ClockOption:
        """The option with the shortest time, and the least energy if tied; not always at the highest clock."""
        return min(self.options, key=lambda o: (o.time_s, o.energy_j))

    def at_clock(self, sm_clock_mhz: int) -> ClockOption:
        """Return the option at one clock; raise ProfileError if the clock was not measured."""
        for option in self.options:
            if option.sm_clock_mhz == sm_clock_mhz:
                return option
        known = ", ".join(str(o.sm_clock_mhz) for o in self.options)
        raise ProfileError(f"no measurement at {sm_clock_mhz} MHz; measured: {known}")

    def interpolated(self, sm_clock_mhz: int) -> ClockOption:
        """Return time and energy at a clock: measured, interpolated between neighbours, or those of the nearest end."""
        faster = slower = self.options[0]
        for slower in self.options:
            if slower.sm_clock_mhz <= sm_clock_mhz:
                break
            faster = slower
        if slower is faster or slower.sm_clock_mhz == sm_clock_mhz:
            return slower
        share = (sm_clock_mhz - slower.sm_clock_mhz) / (faster.sm_clock_mhz - slower.sm_clock_mhz)
        return ClockOption(
            sm_clock_mhz,
            slower.time_s + share * (faster.time_s - slower.time_s),
            slower.energy_j + share * (faster.energy_j - slower.energy_j),
        )

    @property
    def throttling_clock_mhz(self) -> int | None:
        """Clock above which higher clocks save no time, a sign of a power cap; None if the highest clock saves time.

        It is the lowest clock whose time is within 1.5 % of the fastest, and whose relative loss of time is less than a
        quarter of the relative loss of clock. If the clock limited the work, both losses would be about equal.
        """
        top, fastest_s = self.options[0].sm_clock_mhz, self.fastest.time_s
        throttling = top
        for option in self.options:
            lost_time = option.time_s / fastest_s - 1
            lost_clock = top / option.sm_clock_mhz - 1
            if lost_time <= _NO_TIME_LOST_RATIO and lost_time <= _SHARE_OF_CLOCK_LOST * lost_clock:
                throttling = min(throttling, option.sm_clock_mhz)
        return throttling if throttling < top else None

    def pareto(self, blocking_power_w: float) -> tuple[ClockOption, ...]:
        """Return the Pareto set of time and effective energy, fastest first."""
        return tuple(option for option, _ in self._pareto(blocking_power_w))

    def _pareto(self, blocking_power_w: float) -> list[tuple[ClockOption, float]]:
        """Return the Pareto set with effective energies."""
        kept: list[tuple[ClockOption, float]] = []
        best_j = math.inf
        costs_j = [(option, option.effective_energy_j(blocking_power_w)) for option in self.options]
        for option, cost_j in sorted(costs_j, key=lambda own: (own[0].time_s, own[1])):
            if cost_j < best_j:
                kept.append((option, cost_j))
                best_j = cost_j
        return kept

    def lower_hull(self, blocking_power_w: float) -> tuple[ClockOption, ...]:
        """Return the vertices of the lower convex hull of (time, effective energy), fastest to cheapest."""
        hull: list[tuple[ClockOption, float]] = []
        for point in self._pareto(blocking_power_w):
            while len(hull) >= 2 and not _turns_up(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        return tuple(option for option, _ in hull)


@dataclass(frozen=True, slots=True)
class PipelineProfile:
    """Profiles of all instruction classes of a pipeline, and the blocking power of its GPUs."""

    classes: Mapping[InstructionClass, InstructionProfile]
    blocking_power_w: float
    """Power of a waiting GPU; at its highest clock if `waiting_power` is known."""
    waiting_power: WaitingPower | None = None
    """Power of a waiting GPU by clock; None means the blocking power at all clocks."""

    def __getitem__(self, key: InstructionClass) -> InstructionProfile:
        """Return the profile of one instruction class; raise ProfileError if it was not measured."""
        try:
            return self.classes[key]
        except KeyError:
            raise ProfileError(f"no profile for {key.kind} of stage {key.pp_rank} chunk {key.chunk_index}") from None


def with_waiting_power(profile: PipelineProfile, power: WaitingPower) -> PipelineProfile:
    """Return a profile whose GPUs wait with this power by clock; at full speed they wait at their highest clock."""
    highest_mhz = max(curve.at_max_clock.sm_clock_mhz for curve in profile.classes.values())
    return replace(profile, blocking_power_w=power.at(highest_mhz), waiting_power=power)


def instruction_profile(options: Iterable[ClockOption], *, where: str) -> InstructionProfile:
    """Return a validated profile; `where` names it in error messages.

    Raises:
        ProfileError: no options, two for one clock, or a value that is not a positive finite number.
    """
    ordered: Sequence[ClockOption] = sorted(options, key=lambda o: -o.sm_clock_mhz)
    if not ordered:
        raise ProfileError(f"{where}: no measurements")
    for option in ordered:
        if option.sm_clock_mhz <= 0:
            raise ProfileError(f"{where}: frequency {option.sm_clock_mhz} MHz must be > 0")
        if not (math.isfinite(option.time_s) and option.time_s > 0):
            raise ProfileError(f"{where}: time {option.time_s} s at {option.sm_clock_mhz} MHz must be finite and > 0")
        if not (math.isfinite(option.energy_j) and option.energy_j >= 0):
            raise ProfileError(
                f"{where}: energy {option.energy_j} J at {option.sm_clock_mhz} MHz must be finite and >= 0"
            )
    for left, right in pairwise(ordered):
        if left.sm_clock_mhz == right.sm_clock_mhz:
            raise ProfileError(f"{where}: {left.sm_clock_mhz} MHz is given twice")
    return InstructionProfile(tuple(ordered))


def _turns_up(*points: tuple[ClockOption, float]) -> bool:
    (a, ya), (b, yb), (c, yc) = points
    return (yb - ya) * (c.time_s - b.time_s) < (yc - yb) * (b.time_s - a.time_s)
