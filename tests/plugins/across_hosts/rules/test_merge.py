"""Merging of member observations; tensor-parallel ranks of a stage count as one."""

from dataclasses import replace
from typing import Any

import pytest

from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd_across_hosts.rules.merge import busy_s, merge_observations, merge_siblings


def part(forward_s: float, backward_s: float, energy_j: float | None = 10.0) -> IterationObservation:
    samples = tuple(
        InstructionSample(0, kind, (ClockShare(1410, time_s),), count=2)
        for kind, time_s in ((InstructionKind.F, forward_s), (InstructionKind.B, backward_s))
    )
    return IterationObservation(7, "p.1", 0.5, samples, (RankEnergy(0, 0.5, energy_j, ()),))


def test_each_member_becomes_its_rank_and_energies_add_up() -> None:
    whole = merge_observations([part(0.01, 0.02), part(0.03, 0.04, energy_j=5.0)])

    assert [(s.pp_rank, s.time_s) for s in whole.instruction_samples] == [(0, 0.01), (0, 0.02), (1, 0.03), (1, 0.04)]
    assert whole.energy_j == 15.0
    assert (whole.plan_id, whole.iteration_index, whole.is_regular) == ("p.1", 7, True)


def test_tensor_parallel_ranks_have_the_time_of_the_slowest_and_the_sum_of_energies() -> None:
    whole = merge_siblings([part(0.010, 0.02), part(0.012, 0.019)])

    assert sorted((s.kind, s.time_s) for s in whole.instruction_samples) == [("B", 0.02), ("F", 0.012)]
    assert whole.energy_j == 20.0
    assert len(whole.ranks) == 1


def test_missing_energy_of_a_member_is_missing_for_its_stage() -> None:
    whole = merge_siblings([part(0.01, 0.02), part(0.01, 0.02, energy_j=None)])

    assert whole.energy_j is None


@pytest.mark.parametrize("merge", [merge_observations, merge_siblings])
def test_an_iteration_under_different_plans_has_no_plan_and_one_disturbed_on_a_member_is_disturbed(merge: Any) -> None:
    whole = merge([part(0.01, 0.02), replace(part(0.01, 0.02), plan_id="p.2", is_regular=False)])

    assert whole.plan_id is None
    assert not whole.is_regular


def test_launch_gaps_of_single_members_are_dropped() -> None:
    first = replace(part(0.01, 0.02), launch_gap_s=0.06)

    assert merge_observations([first, part(0.01, 0.02)]).launch_gap_s is None


def test_the_turnaround_of_a_stage_is_that_of_its_last_rank() -> None:
    def turning(turnaround_s: float | None, lead_s: float) -> IterationObservation:
        return replace(part(0.01, 0.02), turnarounds_s=(turnaround_s,), lead_s=lead_s)

    first = merge_siblings([turning(0.01, 0.001), turning(0.03, 0.002)])
    last = merge_siblings([turning(0.02, 0.004), turning(None, 0.005)])
    whole = merge_observations([first, turning(0.02, 0.003), last])

    assert whole.turnarounds_s == (0.03, 0.02, None)
    assert whole.lead_s == 0.001


def test_busy_time_is_the_iteration_time_without_waits() -> None:
    graph = dependency_graph(one_forward_one_backward(2, 2))
    whole = merge_observations([part(0.01, 0.02), part(0.01, 0.02)])

    assert busy_s(whole, graph) == pytest.approx(0.09)
    assert busy_s(merge_observations([part(0.01, 0.02)]), graph) is None


def test_busy_time_uses_the_samples_nearest_to_the_planned_clocks() -> None:
    schedule = one_forward_one_backward(1, 2)
    slow = InstructionSample(0, InstructionKind.B, (ClockShare(780, 0.05), ClockShare(1410, 0.001)), count=1)
    fast = InstructionSample(0, InstructionKind.B, (ClockShare(1410, 0.02),), count=3)
    one = part(0.01, 0.02)
    whole = merge_observations([replace(one, instruction_samples=(one.instruction_samples[0], slow, fast))])
    planned = [795 if i == schedule.orders[0][1] else 1410 for i in schedule.orders[0]]

    assert busy_s(whole, dependency_graph(schedule), planned) == pytest.approx(0.01 + 0.051 + 0.01 + 0.02)


def test_the_merge_of_merged_siblings_is_that_of_all() -> None:
    four = [part(0.010, 0.02), part(0.012, 0.019), replace(part(0.011, 0.021), is_regular=False), part(0.009, 0.018)]

    assert merge_siblings([merge_siblings(four[:2]), merge_siblings(four[2:])]) == merge_siblings(four)
