"""Lower bounds on the energy of any plan, from a flow by weak LP duality.

For any flow x >= 0 from source to sink of value F, and any plan with makespan at most T,

    sum_i cost_i >= sum_i min_k (cost_ik + x_i * time_ik) + sum_e x_e * latency_e - F * T.

The bound is evaluated on the original tables and latencies, not on the rounded and thinned ones of the sweep, so it is
valid for any flow: a worse flow gives a weaker bound, never an invalid one.
"""

import numpy as np

from gpuenergyd_policies.planning.exact.network import FlowNetwork
from gpuenergyd_policies.planning.exact.tables import FloatArray, PlanningTables


def cost_lower_bounds_j(
    tables: PlanningTables,
    network: FlowNetwork,
    *,
    prices_w: FloatArray,
    edge_prices_w: FloatArray,
    values_w: FloatArray,
    deadlines_s: FloatArray,
) -> FloatArray:
    """Return, for each row of prices, a lower bound on the effective energy of plans that meet that row's deadline."""
    bounds = edge_prices_w @ network.edge_latency_s - values_w * deadlines_s
    for index, table in enumerate(tables.tables):
        members = np.flatnonzero(tables.class_of == index)
        times, costs = table.times_s[table.hull], table.costs_j[table.hull]
        slopes = -np.diff(costs) / np.diff(times)
        prices = prices_w[:, members]
        # cost + price * time is convex over the hull: its least vertex is where the slope falls below the price
        vertex = np.searchsorted(-slopes, -prices.ravel()).reshape(prices.shape)
        bounds += (costs[vertex] + prices * times[vertex]).sum(axis=1)
    return bounds
