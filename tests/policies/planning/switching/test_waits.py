"""Waits charged by clock: planned and simulated alike, never later, never dearer than kept clocks, above the bound."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import PipelineProfile, with_waiting_power
from gpuenergyd.core.pipeline.schedules import make_schedule, zero_bubble_h1
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.timeline import Timeline, timeline
from gpuenergyd.core.pipeline.waiting import WaitingPower, waiting_power
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_plan.offline.bubble_aware import plan_offline
from gpuenergyd_plan.offline.clock_changes import lowered_waits, planned_waits
from gpuenergyd_policies.planning.switching.simulation import simulate_switching
from gpuenergyd_policies.planning.switching.waits import WaitRules, with_lowered_waits
from tests.policies.planning.orders.cases import split_profile
from tests.support.examples import examples
from tests.support.plain_switching import PlainRankClock

Changes = tuple[tuple[ClockChange, ...], ...]
CURVE = waiting_power([(200, 35.0), (700, 45.0), (1400, 80.0)], where="test")


@st.composite
def _curves(draw: st.DrawFn) -> WaitingPower:
    powers = sorted(draw(st.lists(st.integers(20, 90), min_size=1, max_size=4)))
    clocks = sorted(draw(st.lists(st.integers(200, 1400), min_size=len(powers), max_size=len(powers), unique=True)))
    return waiting_power(zip(clocks, map(float, powers), strict=True), where="test")


@st.composite
def _pipelines(draw: st.DrawFn) -> tuple[DependencyGraph, PipelineProfile]:
    weights = draw(st.lists(st.sampled_from([0.7, 1.0, 1.0, 1.3]), min_size=1, max_size=4))
    make = draw(st.sampled_from([one_forward_one_backward, zero_bubble_h1]))
    schedule = make(len(weights), draw(st.integers(max(1, len(weights)), 8)))
    graph = dependency_graph(schedule, communication_latency_s=draw(st.sampled_from([0.0, 0.07])))
    return graph, with_waiting_power(split_profile(weights), draw(_curves()))


def _request(graph: DependencyGraph, profile: PipelineProfile, slowdown: float, latency_s: float) -> OfflineRequest:
    return OfflineRequest("test", profile, None, graph, PerformanceTarget(slowdown), switch_latency_s=latency_s)


def _energy_j(graph: DependencyGraph, profile: PipelineProfile, clocks: dict[Instruction, int]) -> float:
    """Return the energy with every wait at the cheaper of its own clock and the lowest power, from scratch."""
    power = profile.waiting_power
    assert power is not None
    options = [profile[i.instruction_class].at_clock(clocks[i]) for i in graph.instructions]
    ends_s, starts_s = [0.0] * len(options), [0.0] * len(options)
    for v in graph.topological_order:
        starts_s[v] = max((ends_s[u] + latency_s for u, latency_s in graph.predecessors[v]), default=0.0)
        ends_s[v] = starts_s[v] + options[v].time_s
    total_j = sum(option.energy_j for option in options)
    for rank in range(graph.num_ranks):
        own = [v for v, i in enumerate(graph.instructions) if i.pp_rank == rank]
        waits_s = [starts_s[w] - ends_s[v] for v, w in pairwise(own)]
        waits_s.append(max(ends_s) - ends_s[own[-1]] + starts_s[own[0]])
        for v, wait_s in zip(own, waits_s, strict=True):
            total_j += wait_s * min(power.at(options[v].sm_clock_mhz), power.least_w)
    return total_j


@settings(max_examples=examples(12), deadline=None)
@given(pipeline=_pipelines(), slowdown=st.sampled_from([0.0, 0.1]))
def test_plans_cost_what_they_promise_and_no_less_than_the_bound(
    pipeline: tuple[DependencyGraph, PipelineProfile], slowdown: float
) -> None:
    graph, profile = pipeline

    plan = plan_offline(_request(graph, profile, slowdown, 0.0))

    clocks = dict(plan.sm_clocks_mhz)
    assert plan.energy_j == pytest.approx(_energy_j(graph, profile, clocks), rel=1e-9)
    assert plan.lower_bound_j is not None
    assert plan.lower_bound_j <= plan.energy_j * (1 + 1e-9)
    assert plan.iteration_time_s <= plan.baseline_time_s * (1 + slowdown) * (1 + 1e-9)
    assert plan.waiting is not None
    assert plan.energy_j <= plan.waiting.kept_energy_j * (1 + 1e-9)
    at_once = SwitchLatency(0.0, 0.0)
    durations_s = [profile[i.instruction_class].at_clock(clocks[i]).time_s for i in graph.instructions]
    planned = timeline(graph, durations_s)
    every = tuple(
        tuple(ClockChange(span.instruction, 0.0, clocks[span.instruction]) for span in planned.rank_spans(rank))
        for rank in range(graph.num_ranks)
    )
    assert profile.waiting_power is not None
    latencies = [at_once] * graph.num_ranks
    changes, lowered = with_lowered_waits(planned, every, profile.waiting_power, latency=latencies)
    simulated = simulate_switching(graph, profile, changes, latency=latencies)
    assert simulated.energy_j == pytest.approx(plan.energy_j, rel=1e-9)
    assert sum(w.wait_s for w in lowered) == pytest.approx(sum(w.wait_s for w in plan.waiting.lowered), abs=1e-9)


@settings(max_examples=examples(12), deadline=None)
@given(pipeline=_pipelines(), latency_s=st.sampled_from([0.01, 0.1, 0.5]), slowdown=st.sampled_from([0.0, 0.1]))
def test_with_switch_latency_lowered_waits_cost_no_time_and_save_energy(
    pipeline: tuple[DependencyGraph, PipelineProfile], latency_s: float, slowdown: float
) -> None:
    graph, profile = pipeline

    plan = plan_offline(_request(graph, profile, slowdown, latency_s))

    assert plan.waiting is not None
    assert plan.switching is not None
    assert plan.lower_bound_j is not None
    assert plan.iteration_time_s <= plan.switching.free_lead_time_s * (1 + 1e-9)
    assert plan.lower_bound_j <= plan.energy_j * (1 + 1e-9)
    assert plan.energy_j <= plan.waiting.kept_energy_j * (1 + 1e-9)
    again = simulate_switching(graph, profile, plan.switching.changes, latency=latency_s)
    assert again.energy_j == pytest.approx(plan.energy_j, rel=1e-9)
    assert all(wait.wait_s > latency_s for wait in plan.waiting.lowered)


def test_long_waits_are_lowered_and_short_ones_are_not() -> None:
    graph = dependency_graph(one_forward_one_backward(4, 6))
    profile = with_waiting_power(split_profile([1.0, 1.0, 1.0, 1.0]), CURVE)

    lowered = {
        latency_s: plan_offline(_request(graph, profile, 0.0, latency_s)).waiting for latency_s in (0.0, 0.2, 9.0)
    }

    counts = [len(waiting.lowered) for waiting in lowered.values() if waiting is not None]
    assert counts[0] > counts[1] > counts[2] == 0
    at_once = lowered[0.0]
    assert at_once is not None
    assert {wait.sm_clock_mhz for wait in at_once.lowered} == {200}
    assert (at_once.at_highest_clock_w, at_once.least_w) == (80.0, 35.0)


def test_a_clock_that_would_come_back_late_leaves_the_plan_alone() -> None:
    graph = dependency_graph(one_forward_one_backward(2, 2))
    profile = with_waiting_power(split_profile([1.0, 1.0]), replace(CURVE, powers_w=(80.0, 80.0, 80.0)))
    durations_s = [profile[i.instruction_class].at_max_clock.time_s for i in graph.instructions]
    planned = timeline(graph, durations_s)
    changes = tuple((ClockChange(planned.rank_spans(rank)[0].instruction, 0.0, 1400),) for rank in range(2))
    simulated = simulate_switching(graph, profile, changes, latency=0.1)

    same = lowered_waits(graph, profile, planned, changes, simulated, latency=0.1)

    assert same == (changes, simulated, ())
    clocks = dict.fromkeys(graph.instructions, 1400)
    assert profile.waiting_power is not None
    waits = planned_waits(planned, clocks, profile.waiting_power)
    assert len(waits.lowered) == 0
    assert waits.in_force_j == pytest.approx(80.0 * waits.total_s)


def test_a_waiting_gpu_draws_the_power_of_the_clock_in_force() -> None:
    clock = PlainRankClock(1400, SwitchLatency(0.1, 0.1))
    clock.request(1.0, 200, wait_s=0.0)
    clock.request(2.0, 1400, wait_s=0.0)

    energy_j = clock.wait(0.5, 3.0, CURVE)

    assert energy_j == pytest.approx(0.6 * 80.0 + 1.0 * 35.0 + 0.9 * 80.0)


def _gpipe(latency: SwitchLatency, rules: WaitRules) -> tuple[DependencyGraph, Timeline, Changes, Changes]:
    """Return a pipeline at full speed, its planned timeline, and its changes without and with lowered waits."""
    graph = dependency_graph(make_schedule("gpipe", 3, 4))
    profile = split_profile([1.0, 1.0, 1.0])
    planned = timeline(graph, [profile[i.instruction_class].at_max_clock.time_s for i in graph.instructions])
    changes = tuple((ClockChange(planned.rank_spans(rank)[0].instruction, 0.0, 1400),) for rank in range(3))
    lowered, _ = with_lowered_waits(planned, changes, CURVE, latency=[latency] * 3, rules=rules)
    return graph, planned, changes, lowered


def test_a_running_job_keeps_its_clock_between_iterations_and_requests_it_again_when_a_wait_ends() -> None:
    latency = SwitchLatency(0.1, 0.05)
    _, planned, changes, lowered = _gpipe(latency, WaitRules(margin_s=0.2, of_running_job=True))

    assert lowered[2] == changes[2]  # the last stage waits between iterations only
    for rank in (0, 1):
        spans = planned.rank_spans(rank)
        k = next(k for k in range(len(spans) - 1) if spans[k + 1].start_s > spans[k].end_s + 1e-9)
        wait_s = spans[k + 1].start_s - spans[k].end_s
        first, fall, rise, again = lowered[rank]
        assert first == changes[rank][0]
        assert fall == ClockChange(spans[k].instruction, spans[k].duration_s + 0.2, 200)
        assert (rise.instruction, rise.sm_clock_mhz) == (spans[k].instruction, 1400)
        assert rise.offset_s == pytest.approx(spans[k].duration_s + wait_s - 0.1 - 0.2)
        assert again == ClockChange(spans[k + 1].instruction, 0.0, 1400)
    anywhere, _ = with_lowered_waits(planned, changes, CURVE, latency=[latency] * 3)
    assert len(anywhere[2]) == len(changes[2]) + 2


def test_a_wait_that_saves_too_little_or_is_too_short_for_the_margin_is_left_alone() -> None:
    latency = SwitchLatency(0.1, 0.05)
    longest_s = 99.0

    for rules in (
        WaitRules(margin_s=longest_s, of_running_job=True),
        WaitRules(least_saved_j=1e6, of_running_job=True),
    ):
        _, _, changes, lowered = _gpipe(latency, rules)
        assert lowered == changes


def test_a_slower_clock_after_a_short_wait_is_requested_at_the_begin_of_the_wait() -> None:
    graph, planned, changes, _ = _gpipe(SwitchLatency(0.1, 0.05), WaitRules())
    spans = planned.rank_spans(0)
    k = next(k for k in range(len(spans) - 1) if spans[k + 1].start_s > spans[k].end_s + 1e-9)
    slower = ClockChange(spans[k + 1].instruction, 0.0, 700)
    own = (*changes[0], slower)
    long_latency = [SwitchLatency(9.0, 9.0)] * graph.num_ranks

    moved, lowered = with_lowered_waits(
        planned, (own, *changes[1:]), CURVE, latency=long_latency, rules=WaitRules(of_running_job=True)
    )

    assert lowered == ()
    assert moved == ((changes[0][0], ClockChange(spans[k].instruction, spans[k].duration_s, 700)), *changes[1:])
