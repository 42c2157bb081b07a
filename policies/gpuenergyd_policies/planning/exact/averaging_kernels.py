"""Compiled kernel of flow averaging: computes prices of time by repeatedly charging the longest paths of a graph."""

from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled


class PricedGraph(NamedTuple):
    """A graph with nodes in topological order; predecessors of v are at pred[v]:pred[v + 1].

    The hull of node v is at first[v] to last[v] in `times`, fastest first; `slopes` is the power saved per second
    between a vertex and the next slower one.
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
    """Working memory and result by node: price, mean duration, hull vertex, start, finish, charge of one step."""

    price: list[float]
    duration: list[float]
    vertex: list[int]
    begin: list[float]
    finish: list[float]
    charge: list[float]


@compiled
def average_flows(  # noqa: C901, PLR0912  one walk forward over the graph, one back
    graph: PricedGraph,
    averages: Averages,
    deadline: float,
    least_flow: float,
    most_flow: float,
    tolerance: float,
    steps: tuple[int, int],
    known: tuple[float, float],
) -> tuple[float, float]:
    """Return the flow and its latency after these steps; their prices and mean durations are in `averages`.

    Steps are numbered. If the first number is not 0, the known flow and its prices are the mean of the steps before;
    durations are the mean of these steps alone.

    Each step charges the longest paths: with the most flow if they exceed the deadline, else with the least. The flow
    divides among the predecessors of a node that end within a tolerance of the last one, in proportion to the tolerance
    that they leave. The tolerance falls with the square root of the number of steps.
    """
    pred, pred_node, pred_latency, epilogue, first, last, times, slopes = graph
    price, duration, vertex, begin, finish, charge = averages
    n = len(first)
    flow, flow_latency = known
    for step in range(steps[0], steps[1]):
        makespan = -1.0
        share = 2.0 / (step + 2.0)
        duration_share = 2.0 / (step - steps[0] + 2.0)
        for v in range(n):
            k = vertex[v]
            while k > first[v] and slopes[k - 1] <= price[v]:
                k -= 1
            while k < last[v] and slopes[k] > price[v]:
                k += 1
            vertex[v] = k
            start = 0.0
            for e in range(pred[v], pred[v + 1]):
                ready = finish[pred_node[e]] + pred_latency[e]
                start = max(start, ready)
            begin[v] = start
            finish[v] = start + times[k]
            duration[v] += duration_share * (times[k] - duration[v])
            makespan = max(makespan, finish[v] + epilogue[v])
        charged = share * (most_flow if makespan > deadline else least_flow)
        near = tolerance / (step + 1.0) ** 0.5
        weight = 0.0
        for v in range(n):
            late = makespan - finish[v] - epilogue[v]
            charge[v] = 1.0 - late / near if late < near else 0.0
            weight += charge[v]
        latency = 0.0
        for v in range(n):
            charge[v] *= charged / weight
            latency += charge[v] * epilogue[v]
        for v in range(n - 1, -1, -1):
            own = charge[v]
            price[v] = (1.0 - share) * price[v] + own
            if own == 0.0:
                continue
            weight = 0.0
            for e in range(pred[v], pred[v + 1]):
                late = begin[v] - finish[pred_node[e]] - pred_latency[e]
                if late < near:
                    weight += 1.0 - late / near
            for e in range(pred[v], pred[v + 1]):
                late = begin[v] - finish[pred_node[e]] - pred_latency[e]
                if late < near:
                    part = own * (1.0 - late / near) / weight
                    charge[pred_node[e]] += part
                    latency += part * pred_latency[e]
        flow = (1.0 - share) * flow + charged
        flow_latency = (1.0 - share) * flow_latency + latency
    return flow, flow_latency


@compiled
def priced_cost(graph: PricedGraph, costs: list[float], price: list[float], scale: float, vertex: list[int]) -> float:
    """Return the minimum sum of costs and of times at scaled prices; the search starts at `vertex`.

    `costs` belong to the hulls' vertices. The vertices found are left in `vertex`.
    """
    _, _, _, _, first, last, times, slopes = graph
    total = 0.0
    for v in range(len(first)):
        own = scale * price[v]
        k = vertex[v]
        while k > first[v] and slopes[k - 1] <= own:
            k -= 1
        while k < last[v] and slopes[k] > own:
            k += 1
        vertex[v] = k
        total += costs[k] + own * times[k]
    return total
