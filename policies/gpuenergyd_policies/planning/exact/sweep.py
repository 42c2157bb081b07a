"""The time-energy frontier of a pipeline as a parametric minimum-cost flow, breakpoint by breakpoint.

Theory of operation. For a fixed iteration time T the cheapest durations solve a convex-cost project-crashing problem
whose dual is a flow from source to sink. Operation i carries x_i, the price in watts at which it would buy time. The
value F of the flow is the price of reducing iteration time by one second (Fulkerson 1961; Phillips and Dessouky 1977).
The sweep starts with all operations at their slowest and no flow, then repeats:

1. Compute shortest distances from the source over the residual network. Arc lengths are slacks, so the distance D of
   the sink is how far T can fall while the present flow stays optimal: a linear piece of the frontier with slope -F.
2. Move all potentials by min(distance, D). T falls by D, all slacks stay non-negative, arcs with flow stay tight.
3. Push as much as fits along the now tight shortest path: the price of time rises to the next breakpoint.

A path of unlimited capacity consists of operations at their fastest option; T has then reached T_min. Each step is as
long as possible, so the frontier is exact and time is not discretized. All quantities are integers.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd_policies.planning.compiled import ints
from gpuenergyd_policies.planning.exact.network import MICROWATTS, FlowNetwork
from gpuenergyd_policies.planning.exact.sweep_kernels import (
    Search,
    SweepRequest,
    SweepSnapshots,
    SweepState,
    sweep_down,
)
from gpuenergyd_policies.planning.exact.tables import FloatArray


@dataclass(frozen=True, slots=True)
class Sweep:
    """Result of a sweep. Snapshots are in the order of the requested deadlines, followed by one at T*.

    `durations_s`, `prices_w` have one column per operation, `edge_prices_w` one per edge of the network.
    Breakpoints run from slow to fast; each price applies to times just below its breakpoint.
    """

    durations_s: FloatArray
    prices_w: FloatArray
    edge_prices_w: FloatArray
    snapshot_prices_w: FloatArray
    breakpoint_times_s: FloatArray
    breakpoint_prices_w: FloatArray
    min_energy_time_s: float
    num_augmentations: int


def sweep_frontier(
    network: FlowNetwork, deadlines_s: FloatArray, *, min_time_s: float, idle_power_w: float, stop_early: bool
) -> Sweep:
    """Return the frontier's breakpoints and the optimal flow and durations at each deadline.

    Deadlines below T_min get the snapshot at T_min. With `stop_early` the sweep ends after the last deadline.
    """
    n, m = network.num_operations, len(network.edge_latency_s)
    tick_s = network.tick_s
    # Rounding and jitter move T_min by at most a few microseconds; shift all deadlines by the same amount.
    shift = longest_path_ticks(network) - round(min_time_s / tick_s)
    wanted = np.rint(deadlines_s / tick_s).astype(np.int64) + shift
    by_time = np.argsort(-wanted, kind="stable")
    k = len(wanted) + 1
    out = SweepSnapshots(
        durations=ints(np.zeros(k * n)),
        op_flow=ints(np.zeros(k * n)),
        edge_flow=ints(np.zeros(k * m)),
        value=ints(np.zeros(k)),
    )
    breakpoint_ticks, breakpoint_prices, least_energy_ticks, augmentations = sweep_down(
        n,
        m,
        network.arrays,
        sweep_state(n, m),
        SweepRequest(ints(wanted[by_time]), round(idle_power_w * MICROWATTS), stop_early),
        out,
    )
    rows = np.empty(k, dtype=np.int64)
    rows[by_time] = np.arange(k - 1)
    rows[k - 1] = k - 1
    return Sweep(
        durations_s=np.asarray(out.durations).reshape(k, n)[rows] * tick_s,
        prices_w=np.asarray(out.op_flow).reshape(k, n)[rows] / MICROWATTS,
        edge_prices_w=np.asarray(out.edge_flow).reshape(k, m)[rows] / MICROWATTS,
        snapshot_prices_w=np.asarray(out.value)[rows] / MICROWATTS,
        breakpoint_times_s=np.asarray(breakpoint_ticks, dtype=np.float64) * tick_s - shift * tick_s,
        breakpoint_prices_w=np.asarray(breakpoint_prices, dtype=np.int64) / MICROWATTS,
        min_energy_time_s=(least_energy_ticks - shift) * tick_s,
        num_augmentations=augmentations,
    )


def longest_path_ticks(network: FlowNetwork) -> int:
    """Return T_min of the network in ticks, including jitter."""
    n = network.num_operations
    first, _, level_ticks, _, tails, _, edge_ticks, _, start, edges, order = (
        np.asarray(part).tolist() for part in network.arrays
    )
    finish = [0] * (n + 2)
    for v in [*order, n + 1]:
        begin = 0
        for e in edges[start[v] : start[v + 1]]:
            begin = max(begin, finish[tails[e]] + edge_ticks[e])
        finish[v] = begin + (level_ticks[first[v]] if v < n else 0)
    return finish[n + 1]


def sweep_state(num_operations: int, num_edges: int) -> SweepState:
    """Return working memory for sweeps of networks up to this size."""
    nodes = 2 * num_operations + 3
    return SweepState(
        search=Search(
            dist=ints(np.zeros(nodes)),
            parent=ints(np.zeros(nodes)),
            stack=ints(np.zeros(nodes)),
            touched=ints(np.zeros(nodes)),
        ),
        potential=ints(np.zeros(nodes)),
        vertex=ints(np.zeros(num_operations)),
        flow=ints(np.zeros(num_operations)),
        edge_flow=ints(np.zeros(num_edges)),
    )
