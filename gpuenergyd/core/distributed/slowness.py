"""Slowness of clocks: how much longer the instructions of a class take at a clock than at full speed.

Learned from plans: a time at a clock over the time at full speed just before. A GPU that becomes slower or faster
in between (a straggler that begins or ends) would be mistaken for an effect of the clock, and its replica for a
straggler under each plan with that clock. Therefore a reading counts only if it is physically possible, agrees with
those of neighbouring clocks, and the next time at full speed agrees with the one before.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from gpuenergyd.core.measurement.observation import InstructionSample
from gpuenergyd.core.pipeline.graph import InstructionClass

_RECENT = 3
"""Full-speed iterations that are the reference of a clock's slowness: few, because a GPU may change."""
_READINGS = 4
"""Number of readings of one clock that determine its slowness; the GPU may have changed before later ones."""
_CHANGED_RATIO = 0.05
"""Change of a time at full speed, or difference of a reading from its neighbours, beyond which the GPU has changed."""


@dataclass(slots=True)
class ClockSlowness:
    """The slowness of all clocks of one replica's GPUs, by class of instruction."""

    _full_speed_s: dict[InstructionClass, deque[float]] = field(default_factory=dict)
    _readings: dict[InstructionClass, dict[int, list[float]]] = field(default_factory=dict)
    _unconfirmed: dict[InstructionClass, list[int]] = field(default_factory=dict)
    """Clocks of the readings since the last time at full speed."""
    _top_clock_mhz: dict[InstructionClass, int] = field(default_factory=dict)

    def learn_full_speed(self, samples: Iterable[InstructionSample]) -> None:
        """Learn the times at full speed, the reference of the readings that follow; drop those that it refutes."""
        for sample in samples:
            key = sample.instruction_class
            clocks_mhz = {share.sm_clock_mhz for share in sample.shares}
            top_mhz = self._top_clock_mhz[key] = max(self._top_clock_mhz.get(key, 0), *clocks_mhz)
            if clocks_mhz == {top_mhz}:
                recent_s = self._full_speed_s.setdefault(key, deque(maxlen=_RECENT))
                if recent_s and abs(sample.time_s / median(recent_s) - 1) > _CHANGED_RATIO:
                    self._drop_unconfirmed(key)
                    recent_s.clear()
                self._unconfirmed.pop(key, None)
                recent_s.append(sample.time_s)

    def learn(self, samples: Iterable[InstructionSample]) -> None:
        """Learn the slowness of the clocks of an iteration that tries them."""
        for sample in samples:
            key = sample.instruction_class
            recent_s = self._full_speed_s.get(key)
            main = sample.main_share
            known = self._readings.setdefault(key, {}).setdefault(main.sm_clock_mhz, [])
            if not recent_s or main.sm_clock_mhz == self._top_clock_mhz[key] or len(known) >= _READINGS:
                continue
            # The other shares ran at other clocks; if their slowness is unknown, time is assumed inverse to the clock.
            rest = sum(
                share.time_s / (self.at(key, share.sm_clock_mhz) or self._largest(key, share.sm_clock_mhz))
                for share in sample.shares
                if share is not main
            )
            done_ratio = 1.0 - rest / median(recent_s)
            slowness = main.time_s / done_ratio / median(recent_s) if done_ratio > 0 else math.inf
            if self._is_plausible(key, main.sm_clock_mhz, slowness):
                known.append(slowness)
                self._unconfirmed.setdefault(key, []).append(main.sm_clock_mhz)

    def at(self, key: InstructionClass, sm_clock_mhz: int) -> float | None:
        """Return the ratio of the time at a clock to that at full speed; None outside the measured clocks."""
        return self._at(key, sm_clock_mhz, except_mhz=0)

    def _at(self, key: InstructionClass, sm_clock_mhz: int, *, except_mhz: int) -> float | None:
        """Return the slowness at a clock without the readings of one clock."""
        top_mhz = self._top_clock_mhz.get(key)
        if top_mhz is None:
            return None
        if sm_clock_mhz == top_mhz:
            return 1.0
        known = {mhz: median(seen) for mhz, seen in self._readings.get(key, {}).items() if seen}
        known.pop(except_mhz, None)
        known[top_mhz] = 1.0
        above = min((mhz for mhz in known if mhz >= sm_clock_mhz), default=None)
        below = max((mhz for mhz in known if mhz <= sm_clock_mhz), default=None)
        if above is None or below is None:
            return None
        if above == below:
            return known[above]
        # Linear in the cycle time: exact where memory and compute times add up.
        share = (1 / sm_clock_mhz - 1 / above) / (1 / below - 1 / above)
        return known[above] + share * (known[below] - known[above])

    def _is_plausible(self, key: InstructionClass, sm_clock_mhz: int, slowness: float) -> bool:
        """Return whether a reading is neither faster than full speed, nor slower than the clock, nor out of line."""
        if not 1 - _CHANGED_RATIO <= slowness <= (1 + _CHANGED_RATIO) * self._largest(key, sm_clock_mhz):
            return False
        expected = self._at(key, sm_clock_mhz, except_mhz=sm_clock_mhz)
        return expected is None or abs(slowness / expected - 1) <= _CHANGED_RATIO

    def _drop_unconfirmed(self, key: InstructionClass) -> None:
        """Drop the readings since the last time at full speed, unless nothing else is known: then they are better."""
        readings, unconfirmed = self._readings.get(key, {}), self._unconfirmed.get(key, [])
        if sum(map(len, readings.values())) > len(unconfirmed):
            for sm_clock_mhz in unconfirmed:
                readings[sm_clock_mhz].pop()

    def _largest(self, key: InstructionClass, sm_clock_mhz: int) -> float:
        return self._top_clock_mhz[key] / sm_clock_mhz
