"""The any-order bounds hold for every tested order and are tight for a single stage."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.report.any_order import any_order_bound_j, any_order_min_time_s
from gpuenergyd.core.pipeline.graph import (
    InstructionClass,
    InstructionKind,
    dependency_graph,
    gpipe,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.plan_evaluation import baseline
from tests.policies.planning.profiles import forward_backward_profile


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.8, 1.0, 1.1]), min_size=1, max_size=4),
    num_microbatches=st.integers(1, 8),
    extra=st.integers(0, 3),
    more_time=st.sampled_from([1.0, 1.05, 1.5]),
)
def test_no_order_beats_the_bounds_on_energy_and_time(
    weights: list[float], num_microbatches: int, extra: int, more_time: float
) -> None:
    num_stages = len(weights)
    profile = forward_backward_profile(weights)
    ahead = [min(extra * (num_stages - 1 - s), max(0, num_microbatches - num_stages + s)) for s in range(num_stages)]

    for schedule in (
        one_forward_one_backward(num_stages, num_microbatches),
        one_forward_one_backward(num_stages, num_microbatches, ahead),
        gpipe(num_stages, num_microbatches),
    ):
        graph = dependency_graph(schedule)
        deadline_s = more_time * baseline(graph, profile).iteration_time_s
        planned = solve(graph, profile, deadline_s=deadline_s)

        bound_j = any_order_bound_j(profile, num_stages, num_microbatches, planned.iteration_time_s)
        assert bound_j <= planned.energy_j * (1 + 1e-9)
        fastest_s = any_order_min_time_s(profile, num_stages, num_microbatches)
        assert fastest_s <= planned.iteration_time_s * (1 + 1e-9)


def test_one_stage_alone_reaches_its_bound() -> None:
    options = [ClockOption(2000, 1.0, 400.0), ClockOption(1000, 2.0, 500.0)]
    tables = {
        InstructionClass(0, kind): instruction_profile(options, where="hand")
        for kind in InstructionKind
        if kind in {InstructionKind.F, InstructionKind.B}
    }
    profile = PipelineProfile(tables, 100.0)

    # Two microbatches are four instructions; blocking 100 W, so each costs 300 J fast and 300 J slow above it.
    assert any_order_bound_j(profile, 1, 2, 4.0) == pytest.approx(4 * 400.0)
    assert any_order_bound_j(profile, 1, 2, 6.0) == pytest.approx(2 * 400.0 + 2 * 500.0)
    assert any_order_bound_j(profile, 1, 2, 3.9) == math.inf
    assert any_order_min_time_s(profile, 1, 2) == pytest.approx(4.0)
