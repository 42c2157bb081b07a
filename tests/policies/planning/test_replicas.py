"""Frontiers of data-parallel replicas add up."""

from itertools import pairwise

import pytest

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.errors import TargetError
from gpuenergyd_policies.planning.frontier import frontier, solve
from gpuenergyd_policies.planning.replicas import Replica, add_frontiers, joint_energy_j

WAITING_POWER_W = 80.0
NUM_RANKS = 3


GRAPH = dependency_graph(one_forward_one_backward(NUM_RANKS, 6))


def profile_of(scale: float) -> PipelineProfile:
    classes = {}
    for rank in range(NUM_RANKS):
        for kind, base_s in ((InstructionKind.F, 0.05), (InstructionKind.B, 0.1)):
            time_s = base_s * scale * (1 + 0.1 * rank)
            options = [
                ClockOption(clock, time_s * 1400 / clock, time_s * (60 + 340 * (clock / 1400) ** 2) * 1400 / clock)
                for clock in range(1400, 800, -100)
            ]
            classes[InstructionClass(rank, kind)] = instruction_profile(options, where="test")
    return PipelineProfile(classes, WAITING_POWER_W)


def replica(scale: float) -> Replica:
    return Replica(frontier(GRAPH, profile_of(scale)), NUM_RANKS * WAITING_POWER_W)


def test_equal_replicas_cost_twice_one() -> None:
    one = replica(1.0)

    joint = add_frontiers([one, one])

    assert len(joint) == len(one.frontier.breakpoints)
    for point, alone in zip(joint, one.frontier.breakpoints, strict=True):
        assert point.energy_j == pytest.approx(2 * alone.energy_j)


def test_the_slowest_replica_sets_the_fastest_time() -> None:
    fast, slow = replica(1.0), replica(1.15)

    joint = add_frontiers([fast, slow])

    assert joint[0].iteration_time_s == pytest.approx(slow.frontier.min_time_s)


def test_the_sum_is_convex() -> None:
    joint = add_frontiers([replica(1.0), replica(1.1), replica(1.3)])
    slopes = [
        (b.energy_j - a.energy_j) / (b.iteration_time_s - a.iteration_time_s)
        for a, b in pairwise(joint)
        if b.iteration_time_s - a.iteration_time_s > 1e-9
    ]

    assert all(left <= right + 1e-3 for left, right in pairwise(slopes))


def test_waiting_for_a_straggler_uses_its_time_up_to_the_cheapest_clocks() -> None:
    fast, slow = replica(1.0), replica(1.2)
    straggler_s = slow.frontier.min_time_s

    together_j = joint_energy_j([fast, slow], [straggler_s])[0]

    alone_j = joint_energy_j([slow], [straggler_s])[0]
    hurried_j = fast.frontier.breakpoints[0].energy_j
    waited_j = fast.waiting_power_w * (straggler_s - fast.frontier.min_time_s)
    assert together_j < alone_j + hurried_j + waited_j


def test_the_joint_energy_is_what_the_planner_says_for_each() -> None:
    one = replica(1.0)
    time_s = 1.07 * one.frontier.min_time_s
    solved = solve(GRAPH, profile_of(1.0), deadline_s=time_s)

    assert joint_energy_j([one], [time_s])[0] == pytest.approx(solved.lower_bound_j, rel=1e-6)


def test_no_replica_and_no_time_are_refused_in_one_line() -> None:
    with pytest.raises(TargetError, match="at least one replica"):
        add_frontiers([])
    one = replica(1.0)
    with pytest.raises(TargetError, match="takes at least"):
        joint_energy_j([one], [0.5 * one.frontier.min_time_s])
