"""The planner's tables: clock options per node, and thinned hulls."""

import numpy as np
import pytest

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_policies.planning.exact.tables import LONG_HULL, ClassTable, planning_tables, thinned


def curve(num: int, bend: float = 1.0) -> ClassTable:
    """Return a class whose hull is all of its options: times from 1 to 2 s, convex falling energies."""
    times = np.linspace(1.0, 2.0, num)
    costs = 100.0 * times**-bend
    return ClassTable(np.arange(num), times, costs + 5.0, costs, np.arange(num))


def rise_j(table: ClassTable, kept: np.ndarray) -> float:
    """Return how far the kept vertices' chords rise above the hull."""
    line = np.interp(table.times_s[table.hull], table.times_s[kept], table.costs_j[kept])
    return float(np.max(line - table.costs_j[table.hull]))


@pytest.mark.parametrize("tolerance_ratio", [1e-4, 1e-3, 1e-2, 0.1])
def test_a_thinned_hull_stays_within_the_tolerance(tolerance_ratio: float) -> None:
    table = curve(60)
    allowed_j = tolerance_ratio * 55.0

    kept = thinned(table, tolerance_ratio)

    assert (kept[0], kept[-1]) == (0, 59)
    assert rise_j(table, kept) <= allowed_j
    assert len(kept) < 60
    for dropped in range(1, len(kept) - 1):  # and none could be spared
        assert rise_j(table, np.delete(kept, dropped)) > allowed_j / 4


def test_more_tolerance_keeps_fewer_vertices() -> None:
    counts = [len(thinned(curve(60), ratio)) for ratio in (0.0, 1e-4, 1e-3, 1e-2, 1.0)]

    assert counts == sorted(set(counts), reverse=True)
    assert (counts[0], counts[-1]) == (60, 2)


def test_short_hulls_and_zero_tolerance_are_not_thinned() -> None:
    assert len(thinned(curve(LONG_HULL), 1.0)) == LONG_HULL
    assert len(thinned(curve(LONG_HULL + 1), 1.0)) == 2
    assert len(thinned(curve(60), 0.0)) == 60


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
