"""Steps of EnvPipe's planner on cases solved by hand: valleys, extra warm-up, envelope and critical path."""

import pytest

from gpuenergyd.core.pipeline.graph import InstructionClass, dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_policies.planning.envpipe import (
    EnvelopeMode,
    critical_walk,
    envelope_flags,
    extra_warm_up,
    latest_on_path,
    next_clock,
    plan_envelope,
    profiled_clocks,
    slowest_on_path,
    valleys,
)
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks, rank_orders, unproven_plan
from tests.policies.planning.pipelines import B, F


def _profile(num_ranks: int, forward: tuple[ClockOption, ...], backward: tuple[ClockOption, ...]) -> PipelineProfile:
    tables = {F: InstructionProfile(forward), B: InstructionProfile(backward)}
    return PipelineProfile({InstructionClass(r, k): tables[k] for r in range(num_ranks) for k in (F, B)}, 10.0)


FORWARD = (ClockOption(900, 1.0, 90.0), ClockOption(720, 1.2, 84.0), ClockOption(540, 1.7, 102.0))
BACKWARD = (ClockOption(900, 2.0, 180.0), ClockOption(720, 2.4, 168.0), ClockOption(540, 3.4, 204.0))


def test_profiled_clocks_are_common_multiples_and_the_highest_common_clock() -> None:
    forward = tuple(ClockOption(mhz, 1.0, 1.0) for mhz in (1000, 950, 900, 720, 600))
    backward = tuple(ClockOption(mhz, 1.0, 1.0) for mhz in (950, 900, 810, 720, 600))
    profile = _profile(1, forward, backward)

    assert profiled_clocks(profile) == [720, 900, 950]
    assert profiled_clocks(profile, 300) == [600, 900, 950]
    assert profiled_clocks(_profile(1, forward[:1], backward[:1])) == []


def test_a_valley_is_the_clock_of_least_energy_with_waiting_and_the_lower_one_of_equals() -> None:
    """One microbatch on one rank: at 900 MHz 270 J, at 720 MHz 252 J, at 540 MHz 306 J, all of the time running."""
    graph = dependency_graph(gpipe(1, 1))
    flat = tuple(ClockOption(mhz, 1.0, 50.0) for mhz in (900, 720))

    assert valleys(graph, _profile(1, FORWARD, BACKWARD), [540, 720, 900]) == (720,)
    assert valleys(graph, _profile(1, FORWARD, BACKWARD), [540, 900]) == (900,)
    assert valleys(graph, _profile(1, flat, flat), [900, 720]) == (720,)


def test_waiting_ranks_are_charged_blocking_power() -> None:
    """Rank 1 gets cheaper by slowness, rank 0 only waits longer for it: 2 J saved per rank and 12 J waited."""
    tables = {
        InstructionClass(r, k): InstructionProfile((ClockOption(900, 1.0, 90.0), ClockOption(720, t, j)))
        for r, t, j in ((0, 1.0, 86.0), (1, 2.0, 70.0))
        for k in (F, B)
    }
    graph = dependency_graph(gpipe(2, 1))

    assert valleys(graph, PipelineProfile(tables, 10.0), [720, 900]) == (900, 720)
    assert valleys(graph, PipelineProfile(tables, 3.0), [720, 900]) == (720, 720)


@pytest.mark.parametrize(
    ("num_microbatches", "caps", "extra"),
    [
        (20, None, (6, 4, 2, 0)),  # two forwards fit into each backward behind
        (8, None, (4, 4, 2, 0)),  # rank 0 runs four ahead anyway
        (7, None, (3, 4, 2, 0)),  # all are in flight on rank 0: it may run ahead less
        (4, None, (0, 1, 2, 0)),
        (1, None, (0, 0, 0, 0)),
        (20, (2, 9, 9, 9), (2, 2, 2, 0)),  # else a rank runs ahead no further than the one before it
        (20, (9, 1, 9, 9), (6, 1, 1, 0)),
    ],
)
def test_extra_warm_up_is_the_number_of_forwards_that_fit_into_later_backwards(
    num_microbatches: int, caps: tuple[int, ...] | None, extra: tuple[int, ...]
) -> None:
    profile = _profile(4, FORWARD[:1], BACKWARD)

    assert extra_warm_up(profile, [900] * 4, num_microbatches=num_microbatches, caps=caps) == extra


def test_forwards_of_extra_warm_up_run_at_their_valley_and_backwards_at_full_speed() -> None:
    profile = _profile(3, FORWARD, BACKWARD)

    assert extra_warm_up(profile, [900] * 3, num_microbatches=20) == (4, 2, 0)
    assert extra_warm_up(profile, [540] * 3, num_microbatches=20) == (2, 1, 0)  # 2 s hold one forward of 1.7 s


def test_the_envelope_is_the_last_rank_and_the_first_forward_and_last_backward_of_the_others() -> None:
    graph = dependency_graph(one_forward_one_backward(3, 4))

    inside = {str(i) for i, is_on in zip(graph.instructions, envelope_flags(graph), strict=True) if not is_on}

    assert inside == {f"F{k}@{r}" for k in (1, 2, 3) for r in (0, 1)} | {f"B{k}@{r}" for k in (0, 1, 2) for r in (0, 1)}


def test_balanced_raises_all_of_the_slowest_on_the_path_and_greedy_the_latest_below_full_speed() -> None:
    clocks, top = [500, 600, 500, 900, 400], [900, 900, 900, 900, 900]

    assert slowest_on_path([3, 2, 1, 0], clocks, top) == [2, 0]
    assert slowest_on_path([3, 1], clocks, top) == [1]
    assert latest_on_path([3, 1, 2, 0], clocks, top) == [1]


def test_the_critical_path_stays_on_a_rank_that_did_not_wait() -> None:
    """Two ranks, two microbatches; forwards take 1 s and backwards 2: rank 0 waits for rank 1 before its backwards."""
    graph = dependency_graph(one_forward_one_backward(2, 2))
    durations_s = [2.0 if i.kind is B else 1.0 for i in graph.instructions]

    path = [str(graph.instructions[v]) for v in critical_walk(graph, durations_s)]

    assert path == ["B1@0", "B1@1", "F1@1", "B0@1", "F0@1", "F0@0"]


def test_the_next_clock_is_the_lowest_measured_one_not_below_or_the_highest() -> None:
    measured_mhz = [540, 720, 900]

    assert [next_clock(measured_mhz, mhz) for mhz in (500, 540, 541, 720, 721, 900, 901)] == [
        *(540, 540, 720, 720, 900, 900, 900)
    ]


def test_modes_without_reconfiguration_take_no_steps() -> None:
    graph, profile = dependency_graph(one_forward_one_backward(2, 3)), _profile(2, FORWARD, BACKWARD)

    uniform, envelope = (
        plan_envelope(graph, profile, [720, 540], mode=mode) for mode in (EnvelopeMode.UNIFORM, EnvelopeMode.ENVELOPE)
    )

    assert uniform.num_steps == envelope.num_steps == 0
    assert uniform.evaluation.sm_clocks_mhz == tuple(720 if i.pp_rank == 0 else 540 for i in graph.instructions)
    on_envelope = envelope_flags(graph)
    assert envelope.evaluation.sm_clocks_mhz == tuple(900 if is_on else 720 for is_on in on_envelope)


def test_the_energy_of_given_clocks_includes_waiting() -> None:
    """F0 1 s and B0 2.4 s on one rank, then two ranks: each waits while the other runs."""
    profile = _profile(2, FORWARD, BACKWARD)
    graph = dependency_graph(gpipe(2, 1))
    clocks = [900 if i.kind is F else 720 for i in graph.instructions]

    evaluated = evaluate_clocks(graph, profile, clocks)

    assert evaluated.iteration_time_s == pytest.approx(2 * 1.0 + 2 * 2.4)
    assert evaluated.energy_j == pytest.approx(2 * 90.0 + 2 * 168.0 + 10.0 * evaluated.iteration_time_s)
    assert baseline(graph, profile).sm_clocks_mhz == (900,) * 4
    assert [[str(i) for i in order] for order in rank_orders(graph)] == [["F0@0", "B0@0"], ["F0@1", "B0@1"]]
    request = OfflineRequest("test", profile, None, graph, PerformanceTarget())
    plan = unproven_plan(request, evaluated, solve_cpu_s=1.5)
    assert (plan.baseline_time_s, plan.iteration_time_s) == pytest.approx((6.0, 6.8))
    assert (plan.baseline_energy_j, plan.energy_j) == pytest.approx((600.0, evaluated.energy_j))
    assert (plan.solve_cpu_s, plan.lower_bound_j) == (1.5, None)
    assert list(plan.sm_clocks_mhz.values()) == clocks
