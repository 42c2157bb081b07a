"""The grid of an energy counter that costs much to read, found by reading it for about a second.

Each change of value between two readings that follow one another bounds an update: it came after the start of the first
and before the end of the second. On a busy host calls are interrupted and these bounds are wide, but a grid must fit
all of them. Updates are numbered by the median of the times between them, which is one period, or a few where updates
were missed; the fewest that agree with all bounds are taken.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from operator import sub
from statistics import median

from gpuenergyd.gpu.worker.threads.predicted_edges import UNEVEN_NS, PredictedEdges

_PAUSE_NS = 1_000_000
_MIN_UPDATES, _MAX_UPDATES = 6, 30
_WIDEST_NS = 35_000_000
"""Wider bounds could leave the number of periods between two updates open."""
_FURTHEST_NS = 600_000_000
"""Updates further apart than this are not counted together: their number between is uncertain."""
_SHORTEST_PERIOD_NS = 45_000_000
"""Counters that are updated more often are not predicted: a reading may take as long."""
_SECOND_NS = 1_000_000_000
_MAX_WIDTH_RATIO = 0.4
"""Part of a period: how inexact an update a second later may be."""
_LIMIT_NS = 6_000_000_000

Bounds = tuple[int, int]
"""The earliest and the latest instant of an update."""


@dataclass(slots=True)
class GridLearner:
    """Collects updates of one counter until their grid is known."""

    begin_ns: int
    """When the first reading is made."""
    next_read_ns: int = field(init=False)
    has_failed: bool = False
    """Whether there is no grid: the counter hardly moves, or too often."""
    _updates: list[Bounds] = field(default_factory=list)
    _last: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self.next_read_ns = self.begin_ns

    @property
    def is_learning(self) -> bool:
        """Whether readings have begun."""
        return self._last is not None

    @property
    def short_period_ns(self) -> int:
        """Time between two updates if it is too short for them to be predicted, else 0."""
        middles_ns = [(early_ns + late_ns) // 2 for early_ns, late_ns in self._updates]
        period_ns = median(map(sub, middles_ns[1:], middles_ns)) if len(middles_ns) == _MAX_UPDATES else 0
        return round(period_ns) if period_ns < _SHORTEST_PERIOD_NS else 0

    def observe(self, called_ns: int, returned_ns: int, energy_j: float) -> PredictedEdges | None:
        """Process one reading, a call between two instants; return the grid once it is known."""
        self.next_read_ns = returned_ns + _PAUSE_NS
        if self._last is None:
            self.begin_ns = called_ns
        else:
            before_ns, before_j = self._last
            if energy_j < before_j:
                self._updates = []
            elif energy_j > before_j and returned_ns - before_ns <= _WIDEST_NS:
                self._add((before_ns - UNEVEN_NS, returned_ns + UNEVEN_NS))
        self._last = called_ns, energy_j
        grid = _grid(self._updates) if len(self._updates) >= _MIN_UPDATES else None
        self.has_failed = grid is None and returned_ns - self.begin_ns > _LIMIT_NS
        return grid

    def _add(self, update: Bounds) -> None:
        if self._updates and update[0] - self._updates[-1][1] > _FURTHEST_NS:
            self._updates = []
        self._updates = [*self._updates[1 - _MAX_UPDATES :], update]


def _grid(updates: list[Bounds]) -> PredictedEdges | None:
    """Return the grid with the longest period that contains all updates; None if there is none, or a vague one."""
    middles_ns = [(early_ns + late_ns) / 2 for early_ns, late_ns in updates]
    gaps_ns = [after - before for before, after in pairwise(middles_ns)]
    period_ns = median(gaps_ns)
    for num_within in range(1, 1 + int(period_ns / _SHORTEST_PERIOD_NS)):
        counts = [max(1, round(gap_ns * num_within / period_ns)) for gap_ns in gaps_ns]
        numbers = [number - sum(counts) for number in accumulate(counts, initial=0)]  # the last one is 0
        shortest_ns, longest_ns = _period_bounds(updates, numbers)
        if shortest_ns > longest_ns or longest_ns < _SHORTEST_PERIOD_NS:
            continue
        early_ns = max(update[0] - number * shortest_ns for update, number in zip(updates, numbers, strict=True))
        late_ns = min(update[1] - number * longest_ns for update, number in zip(updates, numbers, strict=True))
        width_ns = late_ns - early_ns + _SECOND_NS / shortest_ns * (longest_ns - shortest_ns)
        if late_ns - early_ns >= 0 and width_ns <= _MAX_WIDTH_RATIO * shortest_ns:
            return PredictedEdges(math.floor(early_ns), math.ceil(late_ns), shortest_ns, longest_ns)
    return None


def _period_bounds(updates: list[Bounds], numbers: list[int]) -> tuple[float, float]:
    """Return the bounds of the period, given the number of each update."""
    pairs = list(combinations(zip(updates, numbers, strict=True), 2))
    return (
        max((later[0] - earlier[1]) / (number - before) for (earlier, before), (later, number) in pairs),
        min((later[1] - earlier[0]) / (number - before) for (earlier, before), (later, number) in pairs),
    )
