"""A pipeline's profile as arrays: clock options per instruction class and their lower convex hulls.

The options of a class are its Pareto set in (time, effective energy), fastest first. Effective energy is energy minus
blocking power times time: the cost of running beyond that of waiting. The sweep uses the lower hull of this set;
rounding uses all of it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass
from gpuenergyd.core.pipeline.profile import PipelineProfile

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


HULL_TOLERANCE = 1e-3
"""Maximum error of approximate hulls for windows and large pipelines, as a share of the class's least energy."""
LONG_HULL = 16
"""Hulls of at most this many vertices are not simplified: coarse ones need each vertex, and it would save no time."""


class HullChain(NamedTuple):
    """Vertices (time, effective energy) of a convex falling chain, fastest first."""

    times_s: FloatArray
    costs_j: FloatArray


@dataclass(frozen=True, slots=True)
class ClassTable:
    """Options of one instruction class; `hull` holds the indices of the hull's vertices among them."""

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
    """Indices of hull vertices among all options, class by class."""
    blocking_power_w: float
    num_ranks: int

    @property
    def fastest_s(self) -> FloatArray:
        """Shortest time of each node."""
        return self.times_s[self.start[self.class_of]]

    @property
    def slowest_s(self) -> FloatArray:
        """Time of each node at its least effective energy."""
        return self.times_s[self.start[self.class_of + 1] - 1]

    @property
    def idle_power_w(self) -> float:
        """Total power of all ranks while they wait."""
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


def under_hull(hull: HullChain, allowed_j: float) -> HullChain:
    """Return a convex chain at most `allowed_j` below a hull, made of a few of the lines through neighbouring vertices.

    It starts and ends with the hull. Because it lies below the hull, bounds computed with it remain valid.
    """
    times, costs = hull
    if len(times) <= LONG_HULL or allowed_j <= 0:
        return hull
    slopes_w = np.diff(costs) / np.diff(times)
    at_zero_j = costs[:-1] - slopes_w * times[:-1]
    corners_s, corners_j = [float(times[0])], [float(costs[0])]
    kept = 0
    while kept < len(slopes_w) - 1:
        # the chain lies farthest below the hull where the kept line meets a later one
        corner_s = (at_zero_j[kept + 1 :] - at_zero_j[kept]) / (slopes_w[kept] - slopes_w[kept + 1 :])
        corner_j = at_zero_j[kept] + slopes_w[kept] * corner_s
        is_far = np.append(np.interp(corner_s, times, costs) - corner_j > allowed_j, True)
        last = int(np.argmax(is_far[1:]))
        corners_s.append(float(corner_s[last]))
        corners_j.append(float(corner_j[last]))
        kept += 1 + last
    return HullChain(np.array([*corners_s, times[-1]]), np.array([*corners_j, costs[-1]]))
