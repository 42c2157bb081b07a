"""A pipeline's profile as arrays: clock options per instruction class and their lower convex hulls.

Options of a class are kept as its Pareto set in (time, effective energy), fastest first, where effective energy is
energy minus blocking power times time: the cost of running beyond that of waiting. The sweep uses the lower hull of
that set, rounding all of it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass
from gpuenergyd.core.pipeline.profile import PipelineProfile

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

LONG_HULL = 16
"""Hulls up to this many vertices are never thinned, since that would save no time."""


@dataclass(frozen=True, slots=True)
class ClassTable:
    """Options of one instruction class; `hull` holds the positions of the hull's vertices among them."""

    sm_clocks_mhz: IntArray
    times_s: FloatArray
    energies_j: FloatArray
    costs_j: FloatArray
    hull: IntArray


@dataclass(frozen=True, slots=True)
class PlanningTables:
    """Options of all classes; `class_of[i]` is the class of node i, its options are start[c]:start[c + 1]."""

    tables: tuple[ClassTable, ...]
    class_of: IntArray
    start: IntArray
    sm_clocks_mhz: IntArray
    times_s: FloatArray
    energies_j: FloatArray
    costs_j: FloatArray
    hull_start: IntArray
    hull_options: IntArray
    """Positions of hull vertices among all options, class by class."""
    blocking_power_w: float
    num_ranks: int

    @property
    def fastest_s(self) -> FloatArray:
        """Least time of each node."""
        return self.times_s[self.start[self.class_of]]

    @property
    def slowest_s(self) -> FloatArray:
        """Time of each node at its least effective energy."""
        return self.times_s[self.start[self.class_of + 1] - 1]

    @property
    def idle_power_w(self) -> float:
        """Power of all ranks together while they wait."""
        return self.blocking_power_w * self.num_ranks


def planning_tables(graph: DependencyGraph, profile: PipelineProfile) -> PlanningTables:
    """Return the tables of the classes that a graph uses.

    Raises:
        ProfileError: a class of the graph was not measured.
    """
    index: dict[InstructionClass, int] = {}
    class_of = np.array([index.setdefault(i.instruction_class, len(index)) for i in graph.instructions], dtype=np.int64)
    tables = []
    for key in index:
        options = profile[key].pareto(profile.blocking_power_w)
        positions = {option.sm_clock_mhz: k for k, option in enumerate(options)}
        hull = [positions[option.sm_clock_mhz] for option in profile[key].lower_hull(profile.blocking_power_w)]
        tables.append(
            ClassTable(
                sm_clocks_mhz=np.array([o.sm_clock_mhz for o in options], dtype=np.int64),
                times_s=np.array([o.time_s for o in options]),
                energies_j=np.array([o.energy_j for o in options]),
                costs_j=np.array([o.effective_energy_j(profile.blocking_power_w) for o in options]),
                hull=np.array(hull, dtype=np.int64),
            )
        )
    start = np.cumsum([0] + [len(t.times_s) for t in tables])
    return PlanningTables(
        tables=tuple(tables),
        class_of=class_of,
        start=start,
        sm_clocks_mhz=np.concatenate([t.sm_clocks_mhz for t in tables]),
        energies_j=np.concatenate([t.energies_j for t in tables]),
        times_s=np.concatenate([t.times_s for t in tables]),
        costs_j=np.concatenate([t.costs_j for t in tables]),
        hull_start=np.cumsum([0] + [len(t.hull) for t in tables]),
        hull_options=np.concatenate([t.hull + s for t, s in zip(tables, start, strict=False)]),
        blocking_power_w=profile.blocking_power_w,
        num_ranks=graph.num_ranks,
    )


def thinned(table: ClassTable, tolerance_ratio: float) -> IntArray:
    """Return hull vertices whose chords lie at most `tolerance_ratio` of the least energy above the full hull."""
    hull = table.hull
    if len(hull) <= LONG_HULL or tolerance_ratio <= 0:
        return hull
    allowed_j = tolerance_ratio * float(table.energies_j[hull].min())
    times, costs = table.times_s[hull], table.costs_j[hull]
    kept = [0]
    while kept[-1] < len(hull) - 1:
        left = kept[-1]
        right = left + 1
        while right + 1 < len(hull):
            far = right + 1
            slope = (costs[far] - costs[left]) / (times[far] - times[left])
            chord = costs[left] + slope * (times[left:far] - times[left])
            if np.max(chord - costs[left:far]) > allowed_j:
                break
            right = far
        kept.append(right)
    return hull[np.array(kept, dtype=np.int64)]
