"""Compiles the kernels of this plugin, as those of the planner: entry point of the group `gpuenergyd.kernels`."""

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd_plan.flat.plan import flat_plan
from gpuenergyd_plan.offline.capped_problem import CappedProblem
from gpuenergyd_policies.planning.frontier import SolvedPlan


def compile_kernels(graph: DependencyGraph, profile: PipelineProfile, solved: SolvedPlan) -> None:
    """Call every kernel with a plan of a tiny pipeline."""
    flat_plan(graph, profile, solved, search_steps=100)
    CappedProblem(graph, profile).plan(15.0)
