"""Refinement: optimizes windows of a rounded plan again, one after the other (large neighbourhood search).

Theory of operation. Rounding loses most where a hull has wide gaps: the continuous plan mixes two clocks within one
instruction, but a discrete plan has to distribute them over microbatches, depending on slack in the rest of the plan. A
window is a period of time. The plan before it gives each of its operations a release time, and the plan after it a due
time; both are exact because all paths between its operations lie within it. The sweep solves the window's relaxation,
and several roundings of the solution are tried. A hill climb (make one operation faster, let others use the slack)
improves the best one. The plan outside is unchanged, so the result never costs more and never exceeds the deadline.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.discrete.rounding import RoundedPlan, Rounder
from gpuenergyd_policies.planning.discrete.window_kernels import (
    LATER_SPANS,
    PipelineArrays,
    Window,
    Windows,
    refine_windows,
)
from gpuenergyd_policies.planning.exact.network import JITTER_TICKS, FlowNetwork
from gpuenergyd_policies.planning.exact.sweep import sweep_state
from gpuenergyd_policies.planning.exact.sweep_kernels import NetworkArrays, SweepRequest, SweepSnapshots

BY_TIME, BY_MICROBATCH = False, True
FULL_PASSES = (
    *((BY_MICROBATCH, 256), (BY_MICROBATCH, 128), (BY_MICROBATCH, 64)),
    *((BY_MICROBATCH, 256), (BY_MICROBATCH, 128), (BY_TIME, 96), (BY_TIME, 32)),
)
LIGHT_PASSES = ((BY_MICROBATCH, 64), (BY_TIME, 96))
"""Passes over the pipeline with half-overlapping windows: how windows are cut, and the number of free operations."""
SEED = 1
NO_PRICE = 0
"""Price of waiting that makes a sweep take its snapshot at T* (least energy) at once: windows do not need it."""


class OperationWindow(NamedTuple):
    """Operations `first` to `last` in the rounder's order; only those in a range of microbatches may change."""

    first: int
    last: int
    free_from: int
    free_to: int


def refine(
    rounder: Rounder, network: FlowNetwork, plan: RoundedPlan, deadline_s: float, windows: Sequence[OperationWindow]
) -> RoundedPlan:
    """Return a plan with at most the same effective energy that still meets the deadline."""
    longest = max((window.last - window.first for window in windows), default=0)
    pipeline, memory = working_memory(rounder, network, deadline_s, longest)
    best, trial = ints(plan.options[rounder.order]), rounder.trial
    columns = np.array(windows, dtype=np.int64).reshape(-1, len(OperationWindow._fields)).T
    cost_j = refine_windows(Windows(*map(ints, columns)), SEED, pipeline, best, trial, memory)
    makespan_s = rounder.makespan_s(trial.finish)
    if makespan_s > deadline_s:  # cannot happen; a plan late by a rounding error would break the guarantee
        return plan
    options = np.empty(rounder.num_operations, dtype=np.int64)
    options[rounder.order] = best
    return RoundedPlan(options, cost_j, makespan_s)


def working_memory(
    rounder: Rounder, network: FlowNetwork, deadline_s: float, longest: int
) -> tuple[PipelineArrays, Window]:
    """Return a pipeline with its deadline, and memory for windows of at most `longest` operations."""
    n, order = rounder.num_operations, rounder.order
    arrays = network.arrays
    most_edges = len(arrays.tail) + 2 * longest
    rows = len(LATER_SPANS) + 1
    option_ticks = np.maximum(1, np.rint(np.asarray(rounder.options.times) / network.tick_s).astype(np.int64))
    pipeline = PipelineArrays(
        graph=rounder.due_by(deadline_s),
        options=rounder.options,
        offered=rounder.offered,
        first_vertex=ints(np.asarray(arrays.first)[order]),
        last_vertex=ints(np.asarray(arrays.last)[order]),
        single_vertex=len(arrays.ticks),
        microbatches=ints(rounder.microbatches),
        deadline=deadline_s,
        tick_s=network.tick_s,
        jitter_ticks=JITTER_TICKS,
    )
    window = Window(
        options=rounder.options._replace(low=ints(np.zeros(n)), high=ints(np.zeros(n))),
        network=NetworkArrays(
            first=ints(np.zeros(longest)),
            last=ints(np.zeros(longest)),
            ticks=ints(np.concatenate([arrays.ticks, option_ticks])),
            slope=ints(np.concatenate([arrays.slope, np.zeros_like(option_ticks)])),
            tail=ints(np.zeros(most_edges)),
            head=ints(np.zeros(most_edges)),
            latency=ints(np.zeros(most_edges)),
            succ=ints(np.zeros(longest + 3)),
            pred=ints(np.zeros(longest + 3)),
            pred_edges=ints(np.zeros(most_edges)),
            order=ints(np.arange(longest)),
        ),
        request=SweepRequest(deadlines=ints(np.zeros(len(LATER_SPANS))), idle_price=NO_PRICE, stop_early=True),
        state=sweep_state(longest, most_edges),
        snapshots=SweepSnapshots(
            durations=ints(np.zeros(rows * longest)),
            op_flow=ints(np.zeros(rows * longest)),
            edge_flow=ints(np.zeros(rows * most_edges)),
            value=ints(np.zeros(rows)),
        ),
        durations=floats(np.zeros(n)),
    )
    return pipeline, window


def windows_of_passes(rounder: Rounder, passes: Sequence[tuple[bool, int]]) -> list[OperationWindow]:
    """Return the windows of all passes, which overlap by half; later passes are shifted relative to earlier ones.

    A window of microbatches covers the period in which these microbatches run.
    """
    n, microbatches = rounder.num_operations, rounder.microbatches
    num_microbatches = int(microbatches.max()) + 1
    begins, ends = np.full(num_microbatches, n), np.zeros(num_microbatches, dtype=np.int64)
    np.minimum.at(begins, microbatches, np.arange(n))
    np.maximum.at(ends, microbatches, np.arange(n) + 1)
    windows = []
    for number, (kind, operations) in enumerate(passes):
        places = num_microbatches if kind is BY_MICROBATCH else n
        size = max(1, min(places, operations * places // n))
        shift = number * size // len(passes)
        for begin in range(-shift, places, max(1, size // 2)):
            first, last = max(0, begin), min(places, begin + size)
            if first >= last:
                continue
            if kind is BY_MICROBATCH:
                stretch = int(begins[first:last].min()), int(ends[first:last].max())
                windows.append(OperationWindow(*stretch, first, last))
            else:
                windows.append(OperationWindow(first, last, 0, num_microbatches))
    return windows
