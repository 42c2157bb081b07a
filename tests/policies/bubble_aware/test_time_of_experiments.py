"""Time for experiments: the plan after a kept one has more time than the target, any other one has not."""

from types import SimpleNamespace
from typing import cast

import pytest

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware import best_known
from gpuenergyd_policies.bubble_aware.best_known import EXPERIMENT_LATE_RATIO, TriedPlans
from gpuenergyd_policies.bubble_aware.model import PipelineModel
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.risk import MAX_LATE_RATIO
from gpuenergyd_policies.planning.large import TOO_LARGE

KEPT, OTHER = (1410, 1200), (1410, 1110)


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model say that every plan takes one second."""
    monkeypatch.setattr(best_known, "simulate_switching", lambda *_, **__: SimpleNamespace(iteration_time_s=1.0))


def more(*clocks: tuple[int, ...], number: int, num_instructions: int = 16, target_ratio: float = 1.0) -> float:
    """Return the extra time of plan `number` after plans with these clocks for the target of equal time."""
    plans = [
        SimpleNamespace(
            purpose=PlanPurpose.TUNED,
            plan_id=f"tuned-{k}",
            orders=(),
            ranks=(SimpleNamespace(sm_clocks_mhz=own),),
            figure=lambda _name: target_ratio,
            changes_of=lambda _rank: (),
        )
        for k, own in enumerate(clocks)
    ]
    observations = [
        SimpleNamespace(is_regular=True, plan_id=plan.plan_id, own_time_s=1.0)
        for plan in plans
        for _ in range(1 + TUNING.min_iterations_to_learn)
    ]
    view = SimpleNamespace(
        target=SimpleNamespace(iteration_time_s=lambda baseline_s: baseline_s),
        baseline=SimpleNamespace(iteration_time_s=1.0),
        issued_plans=plans,
        observations=observations,
    )
    graph = SimpleNamespace(instructions=range(num_instructions), num_ranks=1)
    model = SimpleNamespace(graph=graph, profile=None, latencies=(), bias_s=0.0)
    return TriedPlans(cast("JobView", view), cast("PipelineModel", model), number).more_time_ratio


@pytest.mark.parametrize("clocks", [(KEPT, KEPT), (KEPT, OTHER, KEPT)])
def test_the_plan_after_a_kept_one_has_more_time(clocks: tuple[tuple[int, ...], ...]) -> None:
    assert more(*clocks, number=4) == EXPERIMENT_LATE_RATIO
    assert 0 < EXPERIMENT_LATE_RATIO < MAX_LATE_RATIO


def test_other_plans_have_the_time_of_the_target() -> None:
    assert more(number=1) == 0.0
    assert more(KEPT, OTHER, number=3) == 0.0
    assert more(KEPT, KEPT, number=TUNING.num_learning_plans) == 0.0, "the last plan is no experiment"
    assert more(KEPT, KEPT, number=4, num_instructions=TOO_LARGE + 1) == 0.0, "too large to compare plans"
    assert more(KEPT, KEPT, number=4, target_ratio=1.1) == 0.0, "those plans were for another target"
