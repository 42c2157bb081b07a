"""The bound on a schedule's saving holds for plans that lower the clock of waits, too."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gpuenergyd.core.pipeline.graph import dependency_graph
from gpuenergyd.core.pipeline.profile import with_waiting_power
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_plan.offline.bubble_aware import plan_offline
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.plan_evaluation import baseline

pytestmark = pytest.mark.torch

RUNS = Path(__file__).parents[2] / "benchmarks" / "runs"


def test_bound_covers_plans_that_lower_the_clock_of_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RUNS))
    bounds = importlib.import_module("schedule_bounds")
    schedule = make_schedule("gpipe", 4, 8)
    profile, graph = bounds.exact_profile(schedule), dependency_graph(schedule)
    full_speed = baseline(graph, profile)
    lowered = with_waiting_power(profile, bounds.exact_waiting_power())

    plan = plan_offline(OfflineRequest("demo", lowered, schedule, graph, PerformanceTarget()))
    saved_ratio = 1 - plan.energy_j / plan.baseline_energy_j

    assert plan.baseline_energy_j == pytest.approx(full_speed.energy_j)
    assert saved_ratio <= bounds.most_saved_ratio(schedule) <= saved_ratio + 0.005
    at_maximum = solve(graph, profile, deadline_s=full_speed.iteration_time_s)
    assert saved_ratio > 1 - at_maximum.lower_bound_j / full_speed.energy_j + 0.01
