"""A whole host under a budget in virtual time: wrong curves, plans that lie, and a foreign job."""

import pytest

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from tests.plugins.power.powered_host import SAMPLE_S, PoweredHost, TableJob

CLOCKS_MHZ = tuple(range(1410, 600, -30))
IDLE_W = 60.0


def law_job(name: str, num_ranks: int, microbatches: int, scale: float, *, error: float = 0.0) -> TableJob:
    """Return a job whose times and energies are those of a law."""
    classes = {}
    for rank in range(num_ranks):
        for kind, time_s in ((InstructionKind.F, 0.02), (InstructionKind.B, 0.04)):
            own_s = scale * time_s * (1 + 0.1 * (rank % 2))
            options = []
            for mhz in CLOCKS_MHZ:
                at_s = own_s * (0.3 + 0.7 * 1410 / mhz)
                options.append(ClockOption(mhz, at_s, at_s * (90 + 230 * (mhz / 1410) ** 2.4)))
            classes[InstructionClass(rank, kind)] = InstructionProfile(tuple(options))
    graph = dependency_graph(one_forward_one_backward(num_ranks, microbatches))
    return TableJob(name, graph, PipelineProfile(classes, 80.0), energy_error=error)


def _host(*, error: float = 0.0) -> PoweredHost:
    return PoweredHost(
        [law_job("pipeline", 2, 4, 1.0, error=error), law_job("loop", 1, 1, 8.0, error=-error)],
        num_gpus=4,
        idle_w=IDLE_W,
    )


def _longest_over_s(host: PoweredHost, since_s: float) -> float:
    longest = run = 0.0
    for at_s, power_w, budget_w in host.trace:
        if at_s > since_s and budget_w is not None:
            run = run + SAMPLE_S if power_w > 1.02 * budget_w else 0.0
            longest = max(longest, run)
    return longest


@pytest.mark.parametrize("error", [0.0, 0.2, -0.2])
def test_wrong_curves_are_held_and_learned(error: float) -> None:
    host = _host(error=error)
    budget_w = 0.8 * host.draw_w()
    host.run(3.0, None)
    host.run(60.0, budget_w)
    assert _longest_over_s(host, 3.0 + 0.3) <= 1.0 + SAMPLE_S
    last = [w for at_s, w, _ in host.trace if at_s > 43.0]
    assert 0.9 * budget_w <= sum(last) / len(last) <= budget_w * 1.005
    assert not host.control.backstop.is_cutting


def test_plans_that_lie_are_held_by_the_backstop() -> None:
    host = _host()
    host.follows_targets = False
    host.run(3.0, None)
    host.run(90.0, 0.75 * host.draw_w())
    assert _longest_over_s(host, 3.0) <= 1.0 + SAMPLE_S
    assert sum(SAMPLE_S for _, w, b in host.trace if b is not None and w > 1.02 * b) <= 6.0


def test_a_foreign_job_is_held_and_makes_the_others_slower() -> None:
    host = _host()
    budget_w = 0.9 * host.draw_w() + 60
    host.run(3.0, None)
    host.run(20.0, budget_w)
    speeds = dict(host.decision.speed_ratios) if host.decision is not None else {}
    host.foreign_w = 200.0
    host.run(60.0, budget_w)
    assert _longest_over_s(host, 3.3) <= 1.0 + SAMPLE_S
    assert host.decision is not None
    assert sum(host.decision.speed_ratios.values()) < sum(speeds.values())
