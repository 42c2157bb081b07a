"""Pinned plans of a few small pipelines: a change that makes plans more expensive does not go unnoticed.

Where clocks are discrete the search is heuristic, and no theory says what it finds; each plan here lies within 1 % of
its proven bound. Update the figures when a change finds cheaper plans; a change that finds more expensive ones must
justify it. The same figures hold with numba and without.
"""

import pytest

from gpuenergyd.core.pipeline.graph import dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd_policies.planning.frontier import frontier, solve
from gpuenergyd_policies.planning.problem import make_problem
from tests.policies.planning.pipelines import Pipeline, plain_pipeline, plan_segments
from tests.policies.planning.profiles import forward_backward_profile

PIPELINES: dict[str, Pipeline] = {
    "uneven stages and a latency": plain_pipeline(3, 6, weights=(1.0, 1.1, 0.95), latency_s=0.001),
    "gpipe": (dependency_graph(gpipe(3, 4)), forward_backward_profile([1.0, 1.1, 0.9])),
    "1f1b": (dependency_graph(one_forward_one_backward(3, 5)), forward_backward_profile([1.0, 1.1, 0.9])),
}


@pytest.mark.parametrize(
    ("name", "slowness", "energy_j", "time_s", "bound_j"),
    [
        ("uneven stages and a latency", 1.0, 898.9610145787353, 1.266, 893.7326009130564),
        ("uneven stages and a latency", 1.05, 815.159717161715, 1.3287556275702617, 813.2697965499583),
        ("uneven stages and a latency", 1.2, 690.5467948337717, 1.5191295046573312, 689.3103615387784),
        ("gpipe", 1.0, 12542.624195804196, 18.9, 12515.51020284084),
        ("gpipe", 1.05, 11517.840326340327, 19.836969696969692, 11437.315050220805),
        ("gpipe", 1.2, 9708.27371794872, 22.672735042735045, 9635.43061169513),
        ("1f1b", 1.0, 14151.10688811189, 21.6, 14109.591325954545),
        ("1f1b", 1.05, 12978.861270396272, 22.67946153846154, 12905.95802312572),
        ("1f1b", 1.2, 10958.409906759905, 25.91558275058275, 10939.604644005762),
    ],
)
def test_plans_match_the_pinned_ones(
    name: str, slowness: float, energy_j: float, time_s: float, bound_j: float
) -> None:
    pipeline = PIPELINES[name]

    solved = solve(*pipeline, deadline_s=slowness * make_problem(*pipeline).min_time_s)

    found = (solved.energy_j, solved.iteration_time_s, solved.lower_bound_j)
    assert found == pytest.approx((energy_j, time_s, bound_j), rel=1e-9)
    assert energy_j < 1.01 * bound_j


def test_frontiers_match_the_pinned_ones() -> None:
    found = frontier(*PIPELINES["uneven stages and a latency"], num_points=5)

    assert [value for point in found.points for value in (point.iteration_time_s, point.energy_j)] == pytest.approx(
        [
            *(1.266, 899.1863859256919),
            *(1.370885913185913, 777.0637475440035),
            *(1.5638468417591882, 679.1554997369931),
            *(1.8053971078976636, 662.0562346357062),
            *(1.8134482758620687, 661.9399331896551),
        ],
        rel=1e-9,
    )


@pytest.mark.parametrize(
    ("latency_s", "slowness", "energy_j", "time_s"),
    [
        (0.0, 1.0, 15482.69090909091, 21.6),
        (0.0, 1.05, 13844.60965034965, 22.632517482517482),
        (0.1, 1.0, 15541.543181818182, 21.6),
        (0.1, 1.05, 13982.054652018096, 22.67167296207442),
    ],
)
def test_segments_match_the_pinned_ones(latency_s: float, slowness: float, energy_j: float, time_s: float) -> None:
    pipeline = PIPELINES["1f1b"]
    deadline_s = slowness * make_problem(*pipeline).min_time_s
    solved = solve(*pipeline, deadline_s=deadline_s)

    found = plan_segments(*pipeline, solved, deadline_s=deadline_s, max_segments=3, latency=latency_s, steps=2000)

    assert found is not None
    simulated = found.simulated
    assert (simulated.energy_j, simulated.iteration_time_s) == pytest.approx((energy_j, time_s), rel=1e-9)
