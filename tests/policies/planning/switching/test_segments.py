"""Segmented plans: at most K segments, on time with switch latency, and with the known savings."""

from itertools import combinations, groupby, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd_plan.profiles.profile_files import PlannerInstance, ProfileTable, read_pipeline_file
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_policies.planning.switching.segments import SegmentedPlan, cheapest_segments
from tests.policies.planning.pipelines import plan_segments
from tests.policies.planning.profiles import forward_backward_profile
from tests.support.examples import examples
from tests.support.measured_tables import DATA

F, B = InstructionKind.F, InstructionKind.B


def most_segments(plan: SegmentedPlan) -> int:
    """Return the number of clock segments of the rank that has most."""
    clocks: dict[int, list[int]] = {}
    for mhz, span in zip(plan.sm_clocks_mhz, plan.planned.spans, strict=True):
        clocks.setdefault(span.instruction.pp_rank, []).append(mhz)
    return max(sum(1 for _ in groupby(of_rank)) for of_rank in clocks.values())


@settings(max_examples=examples(15), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.8, 1.0, 1.1]), min_size=1, max_size=4),
    num_microbatches=st.integers(1, 6),
    max_segments=st.integers(1, 5),
    switch_latency_s=st.sampled_from([0.0, 0.05, 0.5, 3.0]),
    slowdown=st.sampled_from([0.0, 0.05]),
    epilogue_s=st.sampled_from([0.0, 0.4]),
)
def test_a_plan_has_at_most_k_segments_and_meets_its_deadline_with_latency(
    weights: list[float],
    num_microbatches: int,
    max_segments: int,
    switch_latency_s: float,
    slowdown: float,
    epilogue_s: float,
) -> None:
    profile = forward_backward_profile(weights)
    graph = dependency_graph(one_forward_one_backward(len(weights), num_microbatches))
    graph = graph.with_epilogues([0.0] * (len(weights) - 1) + [epilogue_s])
    full_speed = baseline(graph, profile)
    deadline_s = full_speed.iteration_time_s * (1 + slowdown)

    plan = plan_segments(
        graph, profile, solve(graph, profile, deadline_s=deadline_s), deadline_s=deadline_s,
        max_segments=max_segments, latency=switch_latency_s, steps=2000,
    )  # fmt: skip

    assert plan is not None
    assert most_segments(plan) <= max_segments
    assert plan.simulated.iteration_time_s <= deadline_s
    assert plan.simulated.iteration_time_s <= plan.planned.iteration_time_s * (1 + 1e-9)
    if switch_latency_s < min(span.end_s - span.start_s for span in plan.planned.spans):
        # With a longer latency a raise may cancel the reduction before it.
        assert plan.simulated.iteration_time_s == pytest.approx(plan.planned.iteration_time_s, rel=1e-9)
    assert plan.simulated.energy_j <= full_speed.energy_j * (1 + 1e-12)


@pytest.mark.thorough
def test_the_search_is_repeatable() -> None:
    profile = forward_backward_profile([1.0, 1.1])
    graph = dependency_graph(one_forward_one_backward(2, 4))
    deadline_s = baseline(graph, profile).iteration_time_s
    solved = solve(graph, profile, deadline_s=deadline_s)

    plans = [
        plan_segments(graph, profile, solved, deadline_s=deadline_s, max_segments=3, latency=0.1) for _ in range(2)
    ]

    assert plans[0] == plans[1]


@pytest.mark.thorough
def test_more_segments_save_no_less() -> None:
    profile = forward_backward_profile([1.0, 1.1, 0.9])
    graph = dependency_graph(one_forward_one_backward(3, 8))
    deadline_s = baseline(graph, profile).iteration_time_s
    solved = solve(graph, profile, deadline_s=deadline_s)

    energies_j = []
    for max_segments in (1, 4, 12):
        plan = plan_segments(graph, profile, solved, deadline_s=deadline_s, max_segments=max_segments, latency=0.1)
        assert plan is not None
        energies_j.append(plan.simulated.energy_j)

    assert energies_j[0] > energies_j[1] > energies_j[2]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_dynamic_program_finds_the_cheapest_segmentation(
    n: int, num_clocks: int, max_segments: int, seed: int
) -> None:
    costs = np.random.default_rng(seed).random((n, num_clocks))

    bounds, clocks = cheapest_segments(costs, max_segments)

    assert (len(bounds), len(clocks)) == (max_segments + 1, max_segments)
    assert bounds == sorted(bounds)
    found = sum(costs[i, clocks[k]] for k in range(max_segments) for i in range(bounds[k], bounds[k + 1]))
    cheapest = min(
        sum(costs[a:b, c].sum() for c, a, b in zip(chosen, (0, *cuts), (*cuts, n), strict=True))
        for num in range(1, min(max_segments, n) + 1)
        for cuts in combinations(range(1, n), num - 1)
        for chosen in product(range(num_clocks), repeat=num)
    )
    assert found == pytest.approx(cheapest)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared tables are not on this machine")
@pytest.mark.parametrize(
    ("file", "least_share"), [("profiles/gpt3-175b_a100-sxm.csv", 0.92), ("instances/s8m32_1f1b_a100.json", 0.88)]
)
@pytest.mark.thorough
def test_eight_segments_at_25_ms_keep_most_of_the_ideal_saving_without_slowdown(file: str, least_share: float) -> None:
    content = read_pipeline_file(DATA / file)
    match content:
        case PlannerInstance():
            graph, profile = content.graph, content.profile
        case ProfileTable():
            graph = dependency_graph(one_forward_one_backward(8, 32))
            profile = PipelineProfile(content.classes, 83.64)
    full_speed = baseline(graph, profile)
    deadline_s = full_speed.iteration_time_s
    solved = solve(graph, profile, deadline_s=deadline_s)

    plan = plan_segments(graph, profile, solved, deadline_s=deadline_s, max_segments=8, latency=0.025)

    assert plan is not None
    assert most_segments(plan) <= 8
    assert plan.simulated.iteration_time_s <= deadline_s
    ideal_j = full_speed.energy_j - solved.lower_bound_j
    assert full_speed.energy_j - plan.simulated.energy_j >= least_share * ideal_j


@settings(max_examples=examples(15), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.8, 1.0, 1.1]), min_size=2, max_size=4),
    max_segments=st.integers(1, 5),
    stall_s=st.sampled_from([0.01, 0.1, 0.6]),
    latency_s=st.sampled_from([0.05, 0.3]),
)
def test_plans_are_on_time_with_the_stalls_of_all_their_calls(
    weights: list[float], max_segments: int, stall_s: float, latency_s: float
) -> None:
    profile = forward_backward_profile(weights)
    graph = dependency_graph(one_forward_one_backward(len(weights), 6))
    deadline_s = baseline(graph, profile).iteration_time_s
    latency = (SwitchLatency(latency_s, latency_s, stall_s=stall_s),) * len(weights)

    plan = plan_segments(
        graph, profile, solve(graph, profile, deadline_s=deadline_s), deadline_s=deadline_s,
        max_segments=max_segments, latency=latency, steps=4000,
    )  # fmt: skip

    assert plan is not None
    assert plan.simulated.iteration_time_s <= deadline_s * (1 + 1e-6)
    assert plan.simulated.energy_j <= baseline(graph, profile).energy_j * (1 + 1e-6)


def test_a_plan_saves_without_slack_where_every_call_stalls_for_longer_than_the_latency() -> None:
    profile = forward_backward_profile([0.8, 1.0, 0.8, 1.1])
    graph = dependency_graph(one_forward_one_backward(4, 12))
    full_speed = baseline(graph, profile)
    plan = plan_segments(
        graph,
        profile,
        solve(graph, profile, deadline_s=full_speed.iteration_time_s),
        deadline_s=full_speed.iteration_time_s,
        max_segments=3,
        latency=(SwitchLatency(0.05, 0.05, stall_s=0.1),) * 4,
    )

    assert plan is not None
    assert plan.simulated.energy_j < 0.99 * full_speed.energy_j
