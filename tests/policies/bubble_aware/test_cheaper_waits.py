"""Plans of running jobs with lowered waits: they save energy, cost no time, and keep the limits of their calls."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import dependency_graph
from gpuenergyd.core.pipeline.profile import PipelineProfile, with_waiting_power
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.pipeline.waiting import waiting_power
from gpuenergyd_policies.bubble_aware.candidates import Candidate, Candidates
from gpuenergyd_policies.bubble_aware.cheaper_waits import with_cheaper_waits
from gpuenergyd_policies.bubble_aware.model import PipelineModel
from gpuenergyd_policies.bubble_aware.planning import _with_caution
from gpuenergyd_policies.learning.calls import CallCost
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.switching.simulation import simulate_switching
from tests.policies.planning.orders.cases import split_profile
from tests.support.examples import examples

POWER = waiting_power([(700, 50.0), (1000, 60.0), (1400, 85.0)], where="test")


def _planned(
    name: str, weights: list[float], latency: SwitchLatency, caution_ratio: float
) -> tuple[PipelineModel, PipelineProfile, Candidate]:
    graph, profile = dependency_graph(make_schedule(name, len(weights), 2 * len(weights))), split_profile(weights)
    durations_s = [profile[i.instruction_class].at_max_clock.time_s for i in graph.instructions]
    model = PipelineModel(profile, graph, 1.0, 0.0, (latency,) * len(weights), CallCost.none(), POWER)
    cautious = _with_caution(profile, caution_ratio, waits_end_earlier_s=0.0)
    solved = solve(graph, cautious, deadline_s=timeline(graph, durations_s).iteration_time_s)
    chosen = Candidates(model, cautious, solved, lambda: solved.lower_bound_j, is_forced=False, search_share=1.0).best()
    return model, cautious, chosen


def _with_waits_j(model: PipelineModel, candidate: Candidate) -> float:
    profile = with_waiting_power(model.profile, POWER)
    return simulate_switching(model.graph, profile, candidate.changes, latency=model.latencies).energy_j


@settings(max_examples=examples(24), deadline=None)
@given(
    name=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    weights=st.lists(st.sampled_from([0.8, 1.0, 1.0, 1.2]), min_size=2, max_size=4),
    raise_s=st.sampled_from([0.01, 0.1, 0.4]),
    stall_s=st.sampled_from([0.0, 0.02]),
    caution_ratio=st.sampled_from([0.0, 0.01]),
    margin_s=st.sampled_from([0.0, 0.1]),
)
def test_lowered_waits_save_energy_and_cost_no_time(
    name: str, weights: list[float], raise_s: float, stall_s: float, caution_ratio: float, margin_s: float
) -> None:
    latency = SwitchLatency(raise_s, raise_s / 2, typical_raise_s=raise_s / 2, stall_s=stall_s)
    model, cautious, chosen = _planned(name, weights, latency, caution_ratio)

    found = with_cheaper_waits(model, cautious, chosen, margin_s=margin_s)

    assert found.clock_of == chosen.clock_of
    assert found.simulated.iteration_time_s <= chosen.simulated.iteration_time_s * (1 + 1e-4)
    assert found.excess_of_calls <= max(1.0, chosen.excess_of_calls)
    if found is not chosen:
        assert _with_waits_j(model, found) < _with_waits_j(model, chosen)


def test_gpipe_saves_in_the_wait_between_its_forwards_and_its_backwards() -> None:
    model, cautious, chosen = _planned("gpipe", [1.0, 1.0, 1.0, 1.0], SwitchLatency(0.1, 0.05), 0.0)

    found = with_cheaper_waits(model, cautious, chosen, margin_s=0.0)

    assert found.num_changes > chosen.num_changes
    assert _with_waits_j(model, found) < 0.99 * _with_waits_j(model, chosen)


@pytest.mark.parametrize("power", [None, waiting_power([(1400, 85.0)], where="test")])
def test_without_a_cheaper_clock_for_waits_the_plan_stays(power: object) -> None:
    model, cautious, chosen = _planned("gpipe", [1.0, 1.0, 1.0], SwitchLatency(0.1, 0.05), 0.0)

    assert with_cheaper_waits(replace(model, waiting_power=power), cautious, chosen, margin_s=0.0) is chosen  # type: ignore[arg-type]
