"""Compiled kernel of path averaging: prices of time by repeatedly charging the longest path of a graph."""

from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled


class PricedGraph(NamedTuple):
    """A graph with nodes in topological order, predecessors of v at pred[v]:pred[v + 1].

    The hull of node v is at first[v] to last[v] in `times`, fastest first; `slopes` is what a second saves between a
    vertex and the next slower one.
    """

    pred: list[int]
    pred_node: list[int]
    pred_latency: list[float]
    epilogue: list[float]
    first: list[int]
    last: list[int]
    times: list[float]
    slopes: list[float]


class Averages(NamedTuple):
    """Working memory and result by node: price, mean duration, hull vertex, finish, predecessor on its longest path."""

    price: list[float]
    duration: list[float]
    vertex: list[int]
    finish: list[float]
    before: list[int]


@compiled
def average_paths(
    graph: PricedGraph,
    averages: Averages,
    deadline: float,
    least_flow: float,
    most_flow: float,
    num_steps: int,
) -> tuple[float, float]:
    """Return flow and its latency, after so many longest paths; their prices and mean durations are in `averages`.

    Each step charges the longest path with the most flow if it exceeds the deadline, else with the least.
    """
    pred, pred_node, pred_latency, epilogue, first, last, times, slopes = graph
    price, duration, vertex, finish, before = averages
    n = len(first)
    flow = 0.0
    flow_latency = 0.0
    for step in range(num_steps):
        end = 0
        makespan = -1.0
        share = 2.0 / (step + 2.0)
        for v in range(n):
            k = vertex[v]
            while k > first[v] and slopes[k - 1] <= price[v]:
                k -= 1
            while k < last[v] and slopes[k] > price[v]:
                k += 1
            vertex[v] = k
            begin = 0.0
            before[v] = -1
            for e in range(pred[v], pred[v + 1]):
                ready = finish[pred_node[e]] + pred_latency[e]
                if ready > begin or before[v] < 0:
                    begin = ready
                    before[v] = e
            finish[v] = begin + times[k]
            duration[v] += share * (times[k] - duration[v])
            price[v] *= 1.0 - share
            if finish[v] + epilogue[v] > makespan:
                makespan = finish[v] + epilogue[v]
                end = v
        charged = share * (most_flow if makespan > deadline else least_flow)
        flow = (1.0 - share) * flow + charged
        latency = epilogue[end]
        v = end
        while True:
            price[v] += charged
            e = before[v]
            if e < 0:
                break
            latency += pred_latency[e]
            v = pred_node[e]
        flow_latency = (1.0 - share) * flow_latency + charged * latency
    return flow, flow_latency
