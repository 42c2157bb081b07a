"""Refinement: re-optimizes windows of a rounded plan one after the other (large neighbourhood search).

Theory of operation. Rounding loses most where a hull has wide gaps: the continuous plan mixes two clocks within one
instruction, while a discrete plan has to spread them over microbatches, depending on slack in the rest of the plan. A
window is a stretch of time, or some microbatches, with all operations on paths between its members. The plan before it
gives each of its operations a release time and the plan after it a due time; both are exact because the window is
closed under paths. The sweep solves the window's relaxation, several roundings of it are tried, and a hill climb (make
one operation faster, let others use the slack) improves the best. The plan outside is unchanged, so the result never
costs more and never exceeds the deadline.
"""

from collections.abc import Sequence

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.discrete.rounding import RoundedPlan, Rounder
from gpuenergyd_policies.planning.discrete.rounding_kernels import GraphArrays, Rounding
from gpuenergyd_policies.planning.discrete.window_kernels import (
    BY_MICROBATCH,
    BY_TIME,
    LATER_SPANS,
    PipelineArrays,
    PlanState,
    Window,
    Windows,
    refine_windows,
)
from gpuenergyd_policies.planning.exact.network import JITTER_TICKS, FlowNetwork
from gpuenergyd_policies.planning.exact.sweep import sweep_state
from gpuenergyd_policies.planning.exact.sweep_kernels import NetworkArrays, SweepRequest, SweepSnapshots
from gpuenergyd_policies.planning.exact.tables import PlanningTables

LIGHT_PASSES = ((BY_MICROBATCH, 64), (BY_TIME, 96))
FEW_PASSES = ((BY_MICROBATCH, 256), (BY_MICROBATCH, 128), (BY_TIME, 96))
FULL_PASSES = 2 * ((BY_MICROBATCH, 256), (BY_MICROBATCH, 128), (BY_MICROBATCH, 64), (BY_TIME, 96))
"""Passes over the pipeline with half-overlapping windows: how windows are cut, and free operations in each."""
SEED = 1
NO_PRICE = 0
"""A sweep takes its snapshot at T*, which windows do not need, at once when waiting has this price."""


def refine(
    rounder: Rounder,
    network: FlowNetwork,
    tables: PlanningTables,
    graph: DependencyGraph,
    plan: RoundedPlan,
    deadline_s: float,
    *,
    passes: tuple[tuple[int, int], ...] = FULL_PASSES,
    only: Sequence[int] | None = None,
) -> RoundedPlan:
    """Return a plan with at most the same effective energy that still meets the deadline.

    With `only`, just these windows of all passes are refined, by their number.
    """
    n = rounder.num_operations
    order = rounder.order
    most_edges = len(network.edge_tail) + 2 * n
    single_vertex = len(network.level_ticks)
    microbatches = np.array([i.microbatch_index for i in graph.instructions], dtype=np.int64)[order]
    windows = _windows(n, int(microbatches.max()) + 1, passes)
    if only is not None:
        windows = [windows[number] for number in only]
    state = PlanState(
        choice=ints(plan.options[order]),
        earliest=floats(np.zeros(n)),
        latest=floats(np.zeros(n)),
        is_free=ints(np.zeros(n)),
        marks=ints(np.zeros(n)),
    )
    rows = len(LATER_SPANS) + 1
    cost_j = refine_windows(
        n,
        SEED,
        Windows(
            kinds=ints([kind for kind, _, _ in windows]),
            begins=ints([begin for _, begin, _ in windows]),
            ends=ints([end for _, _, end in windows]),
        ),
        PipelineArrays(
            graph=rounder.due_by(deadline_s),
            options=rounder.options,
            first_vertex=ints(network.first_level[order]),
            last_vertex=ints(network.last_level[order]),
            single_vertex=single_vertex,
            microbatches=ints(microbatches),
            tick_s=network.tick_s,
            jitter_ticks=JITTER_TICKS,
        ),
        state,
        _largest_window(rounder, network, tables, most_edges),
        (
            SweepRequest(deadlines=ints(np.zeros(len(LATER_SPANS))), idle_price=NO_PRICE, stop_early=True),
            sweep_state(n, most_edges),
            SweepSnapshots(
                durations=ints(np.zeros(rows * n)),
                op_flow=ints(np.zeros(rows * n)),
                edge_flow=ints(np.zeros(rows * most_edges)),
                value=ints(np.zeros(rows)),
            ),
        ),
    )
    makespan_s = rounder.makespan_s(state.earliest)
    if makespan_s > deadline_s:  # cannot happen; a plan late by a rounding error would break the guarantee
        return plan
    options = np.empty(n, dtype=np.int64)
    options[order] = state.choice
    return RoundedPlan(options, cost_j, makespan_s)


def num_windows(graph: DependencyGraph, passes: tuple[tuple[int, int], ...]) -> int:
    """Return how many windows these passes have."""
    num_microbatches = 1 + max(i.microbatch_index for i in graph.instructions)
    return len(_windows(len(graph.instructions), num_microbatches, passes))


def _largest_window(rounder: Rounder, network: FlowNetwork, tables: PlanningTables, most_edges: int) -> Window:
    """Return working memory for windows of any size: all hull vertices, then each option as a vertex of its own."""
    n = rounder.num_operations
    num_edges = len(network.edge_tail)
    option_ticks = np.maximum(1, np.rint(tables.times_s / network.tick_s).astype(np.int64))
    return Window(
        nodes=ints(np.zeros(n)),
        position=ints(np.zeros(n)),
        graph=GraphArrays(
            pred=ints(np.zeros(n + 1)),
            pred_node=ints(np.zeros(num_edges)),
            pred_latency=floats(np.zeros(num_edges)),
            succ=ints(np.zeros(n + 1)),
            succ_node=ints(np.zeros(num_edges)),
            succ_latency=floats(np.zeros(num_edges)),
            release=floats(np.zeros(n)),
            due=floats(np.zeros(n)),
        ),
        options=rounder.options._replace(
            low=ints(np.zeros(n)),
            high=ints(np.zeros(n)),
            last=ints(np.zeros(n)),
            hull_low=ints(np.zeros(n)),
            hull_high=ints(np.zeros(n)),
        ),
        network=NetworkArrays(
            first=ints(np.zeros(n)),
            last=ints(np.zeros(n)),
            ticks=ints(np.concatenate([network.level_ticks, option_ticks])),
            slope=ints(np.concatenate([network.level_slope_uw, np.zeros_like(option_ticks)])),
            tail=ints(np.zeros(most_edges)),
            head=ints(np.zeros(most_edges)),
            latency=ints(np.zeros(most_edges)),
            succ=ints(np.zeros(n + 3)),
            pred=ints(np.zeros(n + 3)),
            pred_edges=ints(np.zeros(most_edges)),
            order=ints(np.arange(n)),
        ),
        durations=floats(np.zeros(n)),
        best=ints(np.zeros(n)),
        trial=Rounding(
            choice=ints(np.zeros(n)),
            finish=floats(np.zeros(n)),
            latest=floats(np.zeros(n)),
            latest_fast=floats(np.zeros(n)),
        ),
    )


def _windows(n: int, num_microbatches: int, passes: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    """Return (kind, begin, end) of the windows of all passes; later passes are shifted against earlier ones."""
    windows = []
    for number, (kind, operations) in enumerate(passes):
        places = num_microbatches if kind == BY_MICROBATCH else n
        size = max(1, min(places, operations * places // n))
        shift = number * size // len(passes)
        windows += [
            (kind, max(0, begin), begin + size)
            for begin in range(-shift, places, max(1, size // 2))
            if begin + size > 0
        ]
    return windows
