"""The backstop of a power budget: lowers clocks, then power limits, based only on measured power.

Theory of operation. The backstop knows no jobs and no curves. Dynamic power falls at least as fast as the clock, so
scaling clocks by the ratio of permitted to measured dynamic power is enough; if the power is still too high, it lowers
them again, and power limits, too. It acts a little before power has been above the budget for a second. In the first
seconds after the budget was lowered it acts at once, unless jobs follow plans that fit the budget. It raises its
ceilings slowly while power is left, and removes them when jobs follow plans that fit. After plans were wrong, it waits
before it trusts them again; this time doubles each time.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuenergyd.core.clock_request import Ceiling

_SAME_S = 0.001
"""Tolerance for rounding when a time limit falls on a reading, which come at regular intervals."""


@dataclass(frozen=True, slots=True)
class GpuPower:
    """What is known about a GPU now."""

    power_w: float | None
    """Measured power; None if unknown."""
    sm_clock_mhz: int | None
    supported_sm_clocks_mhz: tuple[int, ...]
    """In descending order."""
    power_limit_range_w: tuple[float, float] | None
    """Lowest and default power limit; None if power cannot be limited."""
    can_change: bool = True
    """Whether clocks or limits of this GPU can be set."""
    can_set_clocks: bool = True


@dataclass(frozen=True, slots=True)
class BackstopRules:
    """Parameters of when and how much the backstop acts."""

    tolerance_ratio: float = 0.015
    """Measured power up to this ratio above the budget is tolerated."""
    patience_s: float = 0.6
    """Uninterrupted time above the budget before it acts; with the time to act, less than a second."""
    long_window_s: float = 3.0
    """The backstop also acts if the mean over this time is above the budget, with or without interruptions."""
    impatience_s: float = 3.0
    """Time after the budget was lowered during which it acts at once, unless jobs follow plans that fit before."""
    settle_s: float = 0.2
    """Time between two actions if the first was not enough."""
    margin_ratio: float = 0.02
    """How far below the budget the first action aims."""
    next_margin_ratio: float = 0.05
    """How far below the budget later actions aim, as power is then rising, within an iteration or at a job's start."""
    raise_period_s: float = 1.0
    most_raise_ratio: float = 0.05
    """Largest raise of the ceilings at a time."""
    first_distrust_s: float = 2.0
    most_distrust_s: float = 120.0
    unknown_s: float = 3.0
    """Time for which the last known power of a GPU is used, before its default power limit is assumed."""


@dataclass(slots=True)
class Backstop:
    """Determines the ceilings of all GPUs of a host from readings of their power."""

    rules: BackstopRules = field(default_factory=BackstopRules)
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    """The ceiling of each GPU; empty while the host is below its budget without ceilings."""
    num_cuts: int = 0
    """How often the backstop began to lower GPUs."""
    over_s: float = 0.0
    """Total time above the budget with its tolerance."""
    measured_w: float | None = None
    """Power of the whole host at the last reading, with the most possible power for GPUs whose power is unknown."""
    _budget_w: float | None = None
    _impatient_until_s: float = -math.inf
    _over_since_s: float | None = None
    _acted_s: float = -math.inf
    _raised_s: float = -math.inf
    _seen_s: float | None = None
    _steps: int = 0
    """Number of actions since the host was last below its budget."""
    _distrust_s: float = 0.0
    _trusted_s: float = -math.inf
    _idle_w: dict[str, float] = field(default_factory=dict)
    _known: dict[str, tuple[float, float]] = field(default_factory=dict)
    _recent: deque[tuple[float, float]] = field(default_factory=deque)

    @property
    def is_cutting(self) -> bool:
        return bool(self.ceilings)

    def observe(
        self,
        now_s: float,
        readings: Mapping[str, GpuPower],
        *,
        budget_w: float | None,
        host_power_w: float = 0.0,
        plans_fit: bool = False,
    ) -> bool:
        """Compare the host's power with its budget; return whether the ceilings changed.

        Args:
            now_s: monotonic instant of the readings.
            readings: all GPUs of the host, whether a job uses them or not.
            budget_w: None without a budget, which removes all ceilings.
            host_power_w: assumed power of the host without its GPUs.
            plans_fit: whether all jobs follow plans whose predicted power is within the budget.
        """
        before = self.ceilings
        powers_w = {uuid: self._power_w(now_s, uuid, reading) for uuid, reading in readings.items()}
        measured_w = self.measured_w = host_power_w + math.fsum(powers_w.values())
        is_lowered = budget_w is not None and (self._budget_w is None or budget_w < self._budget_w)
        elapsed_s = 0.0 if self._seen_s is None else min(1.0, max(0.0, now_s - self._seen_s))
        self._seen_s, self._budget_w = now_s, budget_w
        if budget_w is None:
            self._end_episode()
            self._recent.clear()
            self.ceilings, self._distrust_s = {}, 0.0
            return bool(before)
        if is_lowered:
            self._recent.clear()
            self._impatient_until_s = now_s + self.rules.impatience_s
        elif plans_fit:
            self._impatient_until_s = -math.inf
        self._remember(now_s, measured_w)
        if measured_w <= budget_w * (1 + self.rules.tolerance_ratio):
            self._over_since_s = None
            if not self._is_mean_over(now_s, budget_w):
                self._steps = 0
                self._raise(now_s, readings, host_power_w, plans_fit=plans_fit)
                return self.ceilings != before
        else:
            self.over_s += elapsed_s
            self._over_since_s = now_s if self._over_since_s is None else self._over_since_s
        if self._is_due(now_s, budget_w):
            self._cut(now_s, readings, powers_w, measured_w)
        return self.ceilings != before

    # --- inside ---

    def _power_w(self, now_s: float, uuid: str, reading: GpuPower) -> float:
        """Return a GPU's power: measured, else last known, else the most that it may draw."""
        if reading.power_w is not None and math.isfinite(reading.power_w) and reading.power_w >= 0:
            self._known[uuid] = (now_s, reading.power_w)
            self._idle_w[uuid] = min(reading.power_w, self._idle_w.get(uuid, math.inf))
            return reading.power_w
        at_s, power_w = self._known.get(uuid, (-math.inf, 0.0))
        if now_s - at_s <= self.rules.unknown_s or reading.power_limit_range_w is None:
            return power_w
        limit_w = self.ceilings.get(uuid, Ceiling()).power_limit_w
        return reading.power_limit_range_w[1] if limit_w is None else limit_w

    def _remember(self, now_s: float, measured_w: float) -> None:
        self._recent.append((now_s, measured_w))
        while self._recent and now_s - self._recent[0][0] > self.rules.long_window_s:
            self._recent.popleft()

    def _is_mean_over(self, now_s: float, budget_w: float) -> bool:
        if not self._recent or now_s - self._recent[0][0] < 0.9 * self.rules.long_window_s:
            return False
        mean_w = math.fsum(w for _, w in self._recent) / len(self._recent)
        return mean_w > budget_w * (1 + self.rules.tolerance_ratio)

    def _is_due(self, now_s: float, budget_w: float) -> bool:
        if now_s - self._acted_s < self.rules.settle_s - _SAME_S:
            return False
        if self._over_since_s is None:
            return self._is_mean_over(now_s, budget_w)
        is_impatient = now_s < self._impatient_until_s or self._steps > 0
        return is_impatient or now_s - self._over_since_s >= self.rules.patience_s - _SAME_S

    def _cut(
        self, now_s: float, readings: Mapping[str, GpuPower], powers_w: Mapping[str, float], measured_w: float
    ) -> None:
        """Lower ceilings until the host's power is expected to be below the budget."""
        assert self._budget_w is not None
        is_last_resort = self._steps > 0
        margin_ratio = self.rules.next_margin_ratio if is_last_resort else self.rules.margin_ratio
        aim_w = self._budget_w * (1 - margin_ratio)
        can_change = [uuid for uuid, reading in readings.items() if reading.can_change]
        changed_w = math.fsum(powers_w[uuid] for uuid in can_change)
        idle_w = math.fsum(min(self._idle_w.get(uuid, 0.0), 0.5 * powers_w[uuid]) for uuid in can_change)
        left_w = aim_w - (measured_w - changed_w)
        ratio = (left_w - idle_w) / (changed_w - idle_w) if changed_w > idle_w else 0.0
        ratio = min(1.0, max(0.0, ratio))
        if not self.ceilings:
            self.num_cuts += 1
            self._distrust(now_s)
        share = left_w / changed_w if changed_w > 0 else 0.0
        self.ceilings = {
            uuid: _lowered(readings[uuid], self.ceilings.get(uuid, Ceiling()), ratio, share * powers_w[uuid])
            if is_last_resort or not readings[uuid].can_set_clocks
            else _lowered_clock(readings[uuid], self.ceilings.get(uuid, Ceiling()), ratio)
            for uuid in can_change
        }
        self.ceilings = {uuid: ceiling for uuid, ceiling in self.ceilings.items() if ceiling != Ceiling()}
        self._steps += 1
        self._acted_s = self._raised_s = now_s
        self._recent.clear()

    def _distrust(self, now_s: float) -> None:
        """Wait longer before trusting plans again if they were wrong soon after they were trusted."""
        first_s = self.rules.first_distrust_s
        was_wrong = now_s - self._trusted_s < 2 * max(self._distrust_s, first_s)
        self._distrust_s = min(self.rules.most_distrust_s, max(first_s, 2 * self._distrust_s)) if was_wrong else 0.0

    def _raise(self, now_s: float, readings: Mapping[str, GpuPower], host_power_w: float, *, plans_fit: bool) -> None:
        """Raise the ceilings while the highest recent power leaves room, or remove them if plans fit."""
        assert self._budget_w is not None
        if not self.ceilings or now_s - self._acted_s < self.rules.raise_period_s:
            return
        if plans_fit and now_s - self._acted_s >= self._distrust_s:
            self._trusted_s = now_s
            self._end_episode()
            self.ceilings = {}
            return
        aim_w = self._budget_w * (1 - self.rules.margin_ratio / 2)
        highest_w = max(w for _, w in self._recent)
        left_ratio = (aim_w - highest_w) / max(highest_w - host_power_w, 1.0)
        is_known = now_s - self._recent[0][0] >= self.rules.raise_period_s
        if left_ratio <= 0 or not is_known or now_s - self._raised_s < self.rules.raise_period_s:
            return
        self._raised_s = now_s
        factor = 1 + min(self.rules.most_raise_ratio, left_ratio / 2)
        raised = {
            uuid: _raised(readings[uuid], ceiling, factor)
            for uuid, ceiling in self.ceilings.items()
            if uuid in readings
        }
        self.ceilings = {uuid: ceiling for uuid, ceiling in raised.items() if ceiling != Ceiling()}

    def _end_episode(self) -> None:
        self._over_since_s, self._steps = None, 0


def _lowered_clock(reading: GpuPower, ceiling: Ceiling, ratio: float) -> Ceiling:
    """Return the ceiling with the highest supported clock up to `ratio` times the present one."""
    clocks_mhz = reading.supported_sm_clocks_mhz
    if not clocks_mhz or not reading.can_set_clocks:
        return ceiling
    present_mhz = min(reading.sm_clock_mhz or clocks_mhz[0], ceiling.sm_clock_mhz or clocks_mhz[0])
    lower_mhz = next((mhz for mhz in clocks_mhz if mhz <= ratio * present_mhz), clocks_mhz[-1])
    return replace(ceiling, sm_clock_mhz=lower_mhz)


def _lowered(reading: GpuPower, ceiling: Ceiling, ratio: float, limit_w: float) -> Ceiling:
    """Return a lower ceiling, with a power limit if the GPU supports one."""
    lowered = _lowered_clock(reading, ceiling, ratio)
    if reading.power_limit_range_w is None:
        return lowered
    low_w, default_w = reading.power_limit_range_w
    known_w = default_w if ceiling.power_limit_w is None else ceiling.power_limit_w
    wanted_w = max(low_w, min(limit_w, known_w))
    return replace(lowered, power_limit_w=None if wanted_w >= default_w else wanted_w)


def _raised(reading: GpuPower, ceiling: Ceiling, factor: float) -> Ceiling:
    """Return a higher ceiling: at least one clock step higher, and without a power limit once it is the default."""
    clock_mhz, limit_w = ceiling.sm_clock_mhz, ceiling.power_limit_w
    clocks_mhz = reading.supported_sm_clocks_mhz
    if clock_mhz is not None:
        above = [mhz for mhz in clocks_mhz if mhz > clock_mhz]
        reached = [mhz for mhz in above if mhz <= clock_mhz * factor]
        clock_mhz = reached[0] if reached else (above[-1] if above else None)
        if clock_mhz is not None and clock_mhz >= clocks_mhz[0]:
            clock_mhz = None
    if limit_w is not None and reading.power_limit_range_w is not None:
        limit_w = limit_w * factor
        if limit_w >= reading.power_limit_range_w[1]:
            limit_w = None
    return Ceiling(clock_mhz, limit_w)
