"""The planner's tables: clock options per node, and hulls of fewer vertices."""

import numpy as np
import pytest

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_policies.planning.exact.tables import LONG_HULL, HullChain, planning_tables, under_hull


def curve(num: int) -> HullChain:
    """Return a hull with times from 1 to 2 s and convex falling energies."""
    times = np.linspace(1.0, 2.0, num)
    return HullChain(times, 100.0 / times)


@pytest.mark.parametrize("allowed_j", [0.005, 0.05, 0.5, 5.0])
def test_an_under_estimate_of_a_hull_stays_within_the_tolerance(allowed_j: float) -> None:
    hull = curve(60)

    below = under_hull(hull, allowed_j)

    assert (below.times_s[0], below.times_s[-1]) == (1.0, 2.0)
    assert (below.costs_j[0], below.costs_j[-1]) == (hull.costs_j[0], hull.costs_j[-1])
    at_corners_j = np.interp(below.times_s, hull.times_s, hull.costs_j)
    assert np.all(at_corners_j - below.costs_j <= allowed_j + 1e-12)
    assert np.all(np.interp(hull.times_s, below.times_s, below.costs_j) <= hull.costs_j + 1e-12)
    slopes_w = np.diff(below.costs_j) / np.diff(below.times_s)
    assert np.all(np.diff(slopes_w) > 0)


def test_more_tolerance_keeps_fewer_vertices_and_none_keeps_all() -> None:
    counts = [len(under_hull(curve(60), allowed_j).times_s) for allowed_j in (0.0, 0.005, 0.05, 0.5, 10.0)]

    assert counts == sorted(set(counts), reverse=True)
    assert (counts[0], counts[-1]) == (60, 3)
    assert len(under_hull(curve(LONG_HULL), 10.0).times_s) == LONG_HULL


def test_options_of_all_classes_are_concatenated() -> None:
    """Two classes on one rank; of each the dominated option drops out, and of the backward one lies above the hull."""
    forward = [(1410, 1.0, 500.0), (1200, 1.2, 420.0), (900, 1.3, 600.0)]
    backward = [(1410, 2.0, 1000.0), (1200, 2.2, 990.0), (900, 2.8, 800.0)]
    profile = PipelineProfile(
        {
            InstructionClass(0, kind): InstructionProfile(tuple(ClockOption(*option) for option in options))
            for kind, options in ((InstructionKind.F, forward), (InstructionKind.B, backward))
        },
        blocking_power_w=100.0,
    )

    tables = planning_tables(dependency_graph(one_forward_one_backward(1, 2)), profile)

    assert tables.class_of.tolist() == [0, 1, 0, 1]
    assert tables.start.tolist() == [0, 2, 5]
    assert tables.sm_clocks_mhz.tolist() == [1410, 1200, 1410, 1200, 900]
    assert tables.costs_j.tolist() == pytest.approx([400.0, 300.0, 800.0, 770.0, 520.0])
    assert tables.hull_start.tolist() == [0, 2, 4]
    assert tables.hull_options.tolist() == [0, 1, 2, 4]
    assert tables.fastest_s.tolist() == [1.0, 2.0, 1.0, 2.0]
    assert tables.slowest_s.tolist() == [1.2, 2.8, 1.2, 2.8]
    assert tables.idle_power_w == 100.0
