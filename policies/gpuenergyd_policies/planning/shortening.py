"""Long pipelines shortened for a first estimate: microbatches cut out of the middle, where the order repeats itself.

Theory of operation. Far from both ends of an iteration every microbatch runs like the one before it. So each rank's
order is cut before a forward and before a later one; what lies between is left out, and later microbatches are
renumbered. This works for any order that repeats itself. Prices of the short pipeline are a flow, which is described by
how it divides among the predecessors of each instruction. These shares, carried over to the long pipeline, divide its
flow there, so that the result is a flow again, hence proves a bound, however well the estimate fits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.exact.averaging_kernels import PricedGraph
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class LongPipeline:
    """A graph in topological order with what identifies its nodes: class, rank and microbatch."""

    graph: PricedGraph
    class_of: IntArray
    rank_of: IntArray
    microbatch_of: IntArray


@dataclass(frozen=True, slots=True)
class ShortPipeline:
    """A shortened graph, and what stands for each node and edge of the long one."""

    graph: PricedGraph
    nodes: IntArray
    """Nodes of the long graph that the short one consists of."""
    node_of: IntArray
    """By long node: the short node that stands for it; of those cut out, the last one of the class before the cut."""
    edge_of: IntArray
    """By long edge: the short edge that stands for it, -1 if none is alike."""
    cut_class_of: IntArray
    """By long node: its class if it was cut out, else -1."""
    num_dropped: int
    """Microbatches that were cut out."""
    label_of: IntArray
    """By short node: its microbatch, renumbered."""
    near_class_of: IntArray
    """By short node: its class if it is near the cut and depends on the same as its stand-in, else -1."""

    def period_s(self, finish_s: FloatArray) -> float:
        """Return how much later each microbatch near the cut finishes than the one before it, at the slowest class."""
        longest_s = 0.0
        for own in np.unique(self.near_class_of[self.near_class_of >= 0]).tolist():
            nodes = np.flatnonzero(self.near_class_of == own)
            first, last = nodes[np.argmin(self.label_of[nodes])], nodes[np.argmax(self.label_of[nodes])]
            if first != last:
                longest_s = max(
                    longest_s, float(finish_s[last] - finish_s[first]) / int(self.label_of[last] - self.label_of[first])
                )
        return longest_s

    def divided(self, edge_flow: FloatArray, num_edges: IntArray) -> FloatArray:
        """Return the weights with which the flow of long nodes divides among their edges; `num_edges` is by long node.

        Edges without a likeness have a weight that matters only where no other one of the node has any.
        """
        head, slot = _heads(np.diff(np.asarray(self.graph.pred)))
        near = self.near_class_of[head]
        sums = np.zeros((int(max(near.max(), self.cut_class_of.max())) + 1, int(num_edges.max()) + 1))
        np.add.at(sums, (near[near >= 0], slot[near >= 0]), edge_flow[near >= 0])
        head, slot = _heads(num_edges)
        cut = self.cut_class_of[head]
        weights = np.where(cut >= 0, sums[cut, slot], edge_flow[self.edge_of])
        least = 1e-12 * max(1.0, float(edge_flow.max()))
        return np.where(self.edge_of >= 0, np.maximum(weights, least), least)

    def ends(self, edge_flow: FloatArray, prices: FloatArray) -> FloatArray:
        """Return by long node the flow that ends there, from flow and prices of the short one."""
        passed = np.bincount(np.asarray(self.graph.pred_node), edge_flow, minlength=len(prices))
        own = np.maximum(0.0, prices - passed)
        own[own < 1e-9 * prices.max()] = 0.0
        result = np.zeros(len(self.node_of))
        result[self.nodes] = own
        return result


def _heads(num_edges: IntArray) -> tuple[IntArray, IntArray]:
    """Return by edge the node that it leads to, and its place among that node's edges."""
    head = np.repeat(np.arange(len(num_edges)), num_edges)
    return head, np.arange(len(head)) - (np.cumsum(num_edges) - num_edges)[head]


def shortened(long: LongPipeline, num_kept: int, num_near: int) -> ShortPipeline | None:
    """Return a pipeline with `num_kept` microbatches, None if the order does not repeat itself.

    What is cut out is estimated by the `num_near` microbatches on either side of the cut.
    """
    class_of, microbatch_of = long.class_of, long.microbatch_of
    num_microbatches = int(microbatch_of.max()) + 1
    dropped, first = num_microbatches - num_kept, 5 * num_kept // 8
    if dropped <= 0:
        return None
    n = len(class_of)
    part = np.zeros(n, dtype=np.int64)  # 0 before the cut, 1 cut out, 2 after it
    for rank in range(int(long.rank_of.max()) + 1):
        own = np.flatnonzero(long.rank_of == rank)
        leading = class_of[own] == class_of[own[0]]
        begin, end = (np.flatnonzero(leading & (microbatch_of[own] == m)) for m in (first, first + dropped))
        if len(begin) != 1 or len(end) != 1 or begin[0] >= end[0]:
            return None
        part[own[begin[0] : end[0]]] = 1
        part[own[end[0] :]] = 2
    shift = np.where(part == 2, dropped, 0)
    kept = np.flatnonzero(part != 1)
    label = (microbatch_of - shift)[kept]
    at = np.full((int(class_of.max()) + 1, num_kept), -1, dtype=np.int64)
    if label.min() < 0 or label.max() >= num_kept:
        return None
    at[class_of[kept], label] = np.arange(len(kept))
    num_before = np.bincount(class_of[part == 0], minlength=len(at))
    stand_in = at[np.arange(len(at)), np.maximum(0, num_before - 1)]
    if int((at >= 0).sum()) != len(kept) or (num_before == 0).any() or (stand_in < 0).any():
        return None
    graph = _graph_of(long, kept, shift, at)
    if graph is None:
        return None
    node_of = np.empty(n, dtype=np.int64)
    node_of[kept] = np.arange(len(kept))
    node_of[part == 1] = stand_in[class_of[part == 1]]
    short = LongPipeline(graph, class_of[kept], long.rank_of[kept], label)
    alike = _alike(long, short, node_of)
    head, slot = _heads(np.diff(np.asarray(long.graph.pred)))
    edge_of = np.where(alike[head], np.asarray(graph.pred)[node_of[head]] + slot, -1)
    is_near = np.abs(label - num_before[short.class_of] + 0.5) < num_near
    is_near &= _alike(short, short, stand_in[short.class_of])
    return ShortPipeline(
        graph=graph,
        nodes=kept,
        node_of=node_of,
        edge_of=edge_of,
        cut_class_of=np.where(part == 1, class_of, -1),
        num_dropped=dropped,
        label_of=label,
        near_class_of=np.where(is_near, short.class_of, -1),
    )


def _graph_of(long: LongPipeline, kept: IntArray, shift: IntArray, at: IntArray) -> PricedGraph | None:
    """Return the graph of the nodes that are kept; None if one needs what is not there, or what comes later."""
    pred, before = np.asarray(long.graph.pred), np.asarray(long.graph.pred_node)
    counts = np.diff(pred)[kept]
    head, slot = _heads(counts)
    edge = pred[kept][head] + slot
    needed = long.microbatch_of[before[edge]] - shift[kept][head]
    if len(needed) and (needed.min() < 0 or needed.max() >= at.shape[1]):
        return None
    node = at[long.class_of[before[edge]], needed]
    if (node < 0).any() or (node >= head).any():
        return None
    return long.graph._replace(
        pred=ints(np.cumsum(np.concatenate([[0], counts]))),
        pred_node=ints(node),
        pred_latency=floats(np.asarray(long.graph.pred_latency)[edge]),
        epilogue=floats(np.asarray(long.graph.epilogue)[kept]),
        first=ints(np.asarray(long.graph.first)[kept]),
        last=ints(np.asarray(long.graph.last)[kept]),
    )


def _alike(one: LongPipeline, other: LongPipeline, node_of: IntArray) -> NDArray[np.bool_]:
    """Return by node of a graph whether its node of the other one depends on the same, microbatches being relative."""
    own, stand_in = (np.asarray(pipeline.graph.pred) for pipeline in (one, other))
    counts = np.diff(own)
    result: NDArray[np.bool_] = counts == np.diff(stand_in)[node_of]
    head, slot = _heads(np.where(result, counts, 0))
    edges = ((one, head, own[head] + slot), (other, node_of[head], stand_in[node_of[head]] + slot))
    needed = []
    for pipeline, node, edge in edges:
        before = np.asarray(pipeline.graph.pred_node)[edge]
        needed.append((pipeline.class_of[before], pipeline.microbatch_of[node] - pipeline.microbatch_of[before]))
    differs = (needed[0][0] != needed[1][0]) | (needed[0][1] != needed[1][1])
    result[head[differs]] = False
    return result
