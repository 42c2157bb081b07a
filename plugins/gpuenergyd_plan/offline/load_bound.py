"""Lower bound on the energy of any order, from the load of each GPU alone, for pipelines too large for the program.

Theory of operation. A GPU runs one instruction at a time, so its work must fit between its first start and the end of
the iteration. With one stage per GPU, a stage starts when the first forward has passed all stages before it. If stages
may be placed freely, all work must fit on all GPUs together. The minimum cost of the work comes from the hulls of
forward and backward, where a backward may be full, split, or any mixture, and clocks may be mixed freely. Memory and
mutual waits are ignored, which loosens the bound. Plans that end before the deadline are covered too, because energy is
a convex function of the iteration time, and its minimum is used.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_policies.planning.exact.tables import FloatArray

_Points = list[tuple[float, float]]
"""Vertices (time, effective energy) of a convex chain, fastest first."""


class Load(NamedTuple):
    """Work that must fit on some GPUs, as a convex chain: iteration times and the least effective energy at each."""

    iteration_times_s: FloatArray
    costs_j: FloatArray


def stage_loads(profile: PipelineProfile, num_microbatches: int) -> list[Load]:
    """Return the load of each GPU of a pipeline with one stage per GPU."""
    loads: list[Load] = []
    fill_s = 0.0
    for rank in range(max(key.pp_rank for key in profile.classes) + 1):
        forward, backward = _stage_chains(profile, rank, 0)
        loads.append(_load([forward, backward], num_microbatches, 1, fill_s))
        fill_s += forward[0][0]
    return loads


def shared_load(profile: PipelineProfile, num_gpus: int, num_microbatches: int) -> Load:
    """Return the load of all GPUs together, wherever stages are placed."""
    chains = [
        chain
        for rank, chunk in sorted({(key.pp_rank, key.chunk_index) for key in profile.classes})
        for chain in _stage_chains(profile, rank, chunk)
    ]
    return _load(chains, num_microbatches, num_gpus, 0.0)


def load_bound_j(loads: Sequence[Load], waiting_w: float, deadline_s: float, *, forced: bool) -> float:
    """Return a lower bound for plans that meet a deadline; with `forced` the time until then passes anyway.

    `waiting_w` is the total power of all GPUs while they wait. Infinity if no plan is fast enough.
    """
    # The energy is convex and linear between vertices, so its minimum is at a vertex or at the deadline.
    vertices_s = np.concatenate([load.iteration_times_s for load in loads])
    ends_s = np.array([deadline_s]) if forced else np.append(vertices_s[vertices_s < deadline_s], deadline_s)
    costs_j = [np.interp(ends_s, load.iteration_times_s, load.costs_j, left=np.inf) for load in loads]
    return float(np.min(np.sum(costs_j, axis=0) + waiting_w * ends_s))


def _load(chains: Sequence[_Points], num_times: int, num_gpus: int, fill_s: float) -> Load:
    total = _sum_of(chains)
    times_s, costs_j = (num_times * np.array(values) for values in zip(*total, strict=True))
    return Load(fill_s + times_s / num_gpus, costs_j)


def _stage_chains(profile: PipelineProfile, rank: int, chunk: int) -> tuple[_Points, _Points]:
    """Return the chains of a stage's forward and of its backward, full or split."""
    own = {
        kind: _chain(profile.classes[key], profile.blocking_power_w)
        for kind in InstructionKind
        if (key := InstructionClass(rank, kind, chunk)) in profile.classes
    }
    ways = [own[InstructionKind.B]] if InstructionKind.B in own else []
    if InstructionKind.I in own:
        ways.append(_sum_of([own[InstructionKind.I], own[InstructionKind.W]]))
    return own[InstructionKind.F], _lower_hull([point for way in ways for point in way])


def _chain(profile: InstructionProfile, power_w: float) -> _Points:
    return [(option.time_s, option.effective_energy_j(power_w)) for option in profile.lower_hull(power_w)]


def _sum_of(chains: Sequence[_Points]) -> _Points:
    """Return the chain for one of each: all at their fastest, then slowed down where that saves most per second."""
    time_s, cost_j = (sum(chain[0][k] for chain in chains) for k in (0, 1))
    steps = [
        ((slow[1] - fast[1]) / (slow[0] - fast[0]), slow[0] - fast[0])
        for chain in chains
        for fast, slow in pairwise(chain)
    ]
    points = [(time_s, cost_j)]
    for slope_w, width_s in sorted(steps):
        time_s, cost_j = time_s + width_s, cost_j + slope_w * width_s
        points.append((time_s, cost_j))
    return points


def _lower_hull(points: _Points) -> _Points:
    """Return the falling part of the lower convex hull of points, fastest first."""
    options = InstructionProfile(tuple(ClockOption(0, time_s, cost_j) for time_s, cost_j in points))
    return _chain(options, 0.0)
