"""Runner of lowtime 0.3.0 on a pipeline, set up as in Perseus, for comparison; optional; `make bench` installs it.

Fits an exponential to every table, starts with everything slowest and takes one time unit off per plan. lowtime
has no latencies between stages and no deadline; the caller evaluates the time and energy of its plans.
"""

import importlib
import importlib.util
import time
import warnings
from dataclasses import dataclass
from typing import Any

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile


@dataclass(frozen=True, slots=True)
class LowtimeRun:
    """The clocks of each of lowtime's plans, slowest first, the CPU seconds they took, and how it ended."""

    plans: tuple[tuple[int, ...], ...]
    cpu_s: float
    is_finished: bool
    failure: str | None = None


def is_installed() -> bool:
    """Return whether lowtime is installed."""
    return importlib.util.find_spec("lowtime") is not None


def run_lowtime(graph: DependencyGraph, profile: PipelineProfile, *, unit_s: float, budget_s: float) -> LowtimeRun:
    """Return lowtime's plans within a budget of CPU seconds, including the plan in progress at its end."""
    plans: list[tuple[int, ...]] = []
    began_s = time.process_time()
    is_finished, failure = True, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its fits overflow on many of their starting points
            operations, solver = _prepared(graph, profile, unit_s)
            for _ in solver.run():
                plans.append(tuple(one.assigned_knob for one in operations))
                if time.process_time() - began_s > budget_s:
                    is_finished = False
                    break
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  its Rust half panics with a BaseException; how it fails is a result
        is_finished, failure = False, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return LowtimeRun(tuple(plans), time.process_time() - began_s, is_finished, failure)


def _prepared(graph: DependencyGraph, profile: PipelineProfile, unit_s: float) -> tuple[list[Any], Any]:
    """Return its operations, node by node, and its solver."""
    operation: Any = importlib.import_module("lowtime.operation")
    model: Any = importlib.import_module("lowtime.cost_model")
    solver: Any = importlib.import_module("lowtime.solver")
    tools: Any = importlib.import_module("lowtime.graph_utils")
    networkx: Any = importlib.import_module("networkx")
    specs = {}
    for key in sorted({i.instruction_class for i in graph.instructions}):
        options = operation.CandidateExecutionOptions(
            options=[
                operation.ExecutionOption(
                    real_time=o.time_s,
                    unit_time=unit_s,
                    cost=o.effective_energy_j(profile.blocking_power_w),
                    knob=o.sm_clock_mhz,
                )
                for o in profile[key].options
            ]
        )
        specs[key] = operation.OperationSpec(
            options=options, cost_model=model.ExponentialModel(options, search_strategy="best")
        )
    dag = networkx.DiGraph()
    operations = [operation.Operation(spec=specs[i.instruction_class]) for i in graph.instructions]
    for node, one in enumerate(operations):
        dag.add_node(node, op=one)
    for u, after in enumerate(graph.successors):
        for v, _ in after:
            dag.add_edge(u, v)
    tools.add_source_node(dag, len(operations))
    tools.add_sink_node(dag, len(operations) + 1)
    dag.graph["source_node"], dag.graph["sink_node"] = len(operations), len(operations) + 1
    return operations, solver.PhillipsDessouky(dag)
