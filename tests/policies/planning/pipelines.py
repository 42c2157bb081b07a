"""Pipelines for planner tests: random ones, the shared instances, and the optimum from an independent LP solver."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import coo_array

from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    Instruction,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    graph_from_edges,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd_plan.profiles.profile_files import PlannerInstance, ProfileTable, read_pipeline_file
from gpuenergyd_policies.planning.exact.network import FlowNetwork
from gpuenergyd_policies.planning.exact.sweep_kernels import NetworkArrays
from gpuenergyd_policies.planning.frontier import SolvedPlan
from gpuenergyd_policies.planning.switching.requests import Latency
from gpuenergyd_policies.planning.switching.segments import SegmentedPlan, SegmentSearch
from tests.support.measured_tables import DATA

F, B = InstructionKind.F, InstructionKind.B
Pipeline = tuple[DependencyGraph, PipelineProfile]


@st.composite
def tables(draw: st.DrawFn) -> InstructionProfile:
    """Return any table a GPU might show: one clock or many, own grid, noisy, not monotone."""
    clocks = draw(st.lists(st.integers(3, 40).map(lambda k: 45 * k), min_size=1, max_size=7, unique=True))
    work_s = draw(st.floats(0.005, 0.1))
    options = []
    for clock in clocks:
        noise = draw(st.floats(0.9, 1.1))
        time_s = work_s * (0.2 + 0.8 * 1800 / clock) * noise
        options.append(ClockOption(clock, time_s, time_s * (60 + clock**2 / 9000) * draw(st.floats(0.9, 1.1))))
    return instruction_profile(options, where="random")


@st.composite
def random_pipelines(draw: st.DrawFn) -> Pipeline:
    """Return any small graph of ranks with order edges, any further edges, latencies, epilogues, and shared classes."""
    num_ranks = draw(st.integers(1, 4))
    lengths = [draw(st.integers(1, 5)) for _ in range(num_ranks)]
    instructions = [
        Instruction(rank, draw(st.sampled_from([F, B])), k)
        for rank, length in enumerate(lengths)
        for k in range(length)
    ]
    first = np.cumsum([0, *lengths]).tolist()
    edges = [(v, v + 1, 0.0) for rank in range(num_ranks) for v in range(first[rank], first[rank + 1] - 1)]
    # more edges, all forward in one interleaving of the ranks, so never a cycle
    depth = {first[rank] + k: (k, rank) for rank, length in enumerate(lengths) for k in range(length)}
    nodes = sorted(depth, key=lambda v: depth[v])
    for _ in range(draw(st.integers(0, 8))):
        i = draw(st.integers(0, len(nodes) - 1))
        j = draw(st.integers(0, len(nodes) - 1))
        if i < j and instructions[nodes[i]].pp_rank != instructions[nodes[j]].pp_rank:
            edges.append((nodes[i], nodes[j], draw(st.sampled_from([0.0, 0.0, 0.0005, 0.01]))))
    epilogues_s = [draw(st.sampled_from([0.0, 0.0, 0.003, 0.05])) for _ in range(num_ranks)]
    graph = graph_from_edges(instructions, edges, num_ranks=num_ranks).with_epilogues(epilogues_s)
    shared = draw(st.booleans())
    classes = {}
    for kind in (F, B):
        same = draw(tables())
        for rank in range(num_ranks):
            classes[InstructionClass(rank, kind)] = same if shared else draw(tables())
    return graph, PipelineProfile(classes, draw(st.sampled_from([0.0, 30.0, 85.0])))


def plain_pipeline(
    num_ranks: int, num_microbatches: int, *, weights: tuple[float, ...] = (), latency_s: float = 0.0
) -> Pipeline:
    """Return 1F1B of stages that differ by their weights only; all weights one makes them identical."""
    classes = {
        InstructionClass(rank, kind): instruction_profile(
            (
                ClockOption(mhz, weight * work * (0.3 + 0.7 * 1410 / mhz), weight * work * (100 + mhz**2 / 8000))
                for mhz in range(1410, 810, -60)
            ),
            where="plain",
        )
        for rank, weight in enumerate(weights or (1.0,) * num_ranks)
        for kind, work in ((F, 0.05), (B, 0.1))
    }
    schedule = one_forward_one_backward(num_ranks, num_microbatches)
    return dependency_graph(schedule, communication_latency_s=latency_s), PipelineProfile(classes, 85.0)


def least_energy_j(graph: DependencyGraph, profile: PipelineProfile, deadline_s: float) -> float:
    """Return the relaxed optimum with waiting charged to the deadline, by HiGHS on convex combinations of options."""
    power_w = profile.blocking_power_w
    n = len(graph.instructions)
    options = [profile[i.instruction_class].options for i in graph.instructions]
    first = np.cumsum([n] + [len(o) for o in options])
    cost = np.zeros(first[-1])
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits: list[float] = []

    def add(row: dict[int, float], limit: float) -> None:
        rows.extend([len(limits)] * len(row))
        columns.extend(row)
        values.extend(row.values())
        limits.append(limit)

    for v in range(n):
        span = {int(first[v]) + k: o.time_s for k, o in enumerate(options[v])}
        for k, option in enumerate(options[v]):
            cost[first[v] + k] = option.energy_j - power_w * option.time_s
        add({v: 1.0, **span}, deadline_s - graph.epilogues_s[v])
        for w, latency_s in graph.successors[v]:
            add({v: 1.0, w: -1.0, **span}, -latency_s)
    equal_rows = np.repeat(np.arange(n), [len(o) for o in options])
    result = linprog(
        cost,
        A_ub=coo_array((values, (rows, columns)), shape=(len(limits), len(cost))),
        b_ub=limits,
        A_eq=coo_array((np.ones(len(equal_rows)), (equal_rows, np.arange(n, first[-1]))), shape=(n, len(cost))),
        b_eq=np.ones(n),
        method="highs",
    )
    assert result.status == 0, result.message
    return float(result.fun) + power_w * graph.num_ranks * deadline_s


def shared_instance(name: str) -> Pipeline:
    """Return an instance of the shared data; skips the test where that is absent."""
    path = DATA / "instances" / f"{name}.json"
    if not path.exists():
        pytest.skip("the shared planner instances are not on this machine")
    instance = read_pipeline_file(path)
    assert isinstance(instance, PlannerInstance)
    return instance.graph, instance.profile


def gpt3(gpu: str, num_microbatches: int, extra_inflight: tuple[int, ...] = ()) -> Pipeline:
    """Return 8-stage 1F1B on the measured GPT-3 tables; skips the test where they are absent."""
    path = DATA / "profiles" / f"gpt3-175b_{gpu}.csv"
    if not path.exists():
        pytest.skip("the shared profiles are not on this machine")
    table = read_pipeline_file(path)
    assert isinstance(table, ProfileTable)
    power_w = {"a100-sxm": 83.64, "a40": 70.38}[gpu]
    schedule = one_forward_one_backward(8, num_microbatches, extra_inflight)
    return dependency_graph(schedule), PipelineProfile(table.classes, power_w)


def kernel_arrays(network: FlowNetwork) -> Any:
    """Return the arrays of a network as numpy's, whether or not kernels are compiled."""
    arrays: Any = map(np.asarray, network.arrays)
    return NetworkArrays(*arrays)


def plan_segments(
    graph: DependencyGraph, profile: PipelineProfile, solved: SolvedPlan, *, latency: Latency, **wanted: Any
) -> SegmentedPlan | None:
    """Return the best plan with few segments per rank; see `SegmentSearch.best`."""
    return SegmentSearch(graph, profile, latency=latency).best(solved, **wanted)
