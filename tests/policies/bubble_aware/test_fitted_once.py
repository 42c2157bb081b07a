"""One request for a plan fits the profile and builds the model of the pipeline once."""

from collections import Counter
from typing import Any

import pytest

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware import model
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages

COUNTED = ("learned_profile", "observed_pipeline")


class Counting(BubbleAware):
    """The policy, with what it computed for each first tuned plan."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts
        self.of_first_plans: list[dict[str, int]] = []

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the next plan, and record what it took."""
        self._counts.clear()
        plan = super().next_plan(view)
        if plan.purpose is PlanPurpose.TUNED and not view.num_issued(PlanPurpose.TUNED):
            self.of_first_plans.append(dict(self._counts))
        return plan


def test_a_first_plan_fits_its_profile_and_builds_its_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(model, name)

        def call(*args: Any, **others: Any) -> Any:
            counts[name] += 1
            return original(*args, **others)

        return call

    for name in COUNTED:
        monkeypatch.setattr(model, name, counted(name))
    policy = Counting(counts)

    VirtualTraining(one_forward_one_backward(4, 8), a100_stages([1.0, 0.93, 1.0, 1.1]), policy, seed=3).run(14)

    assert policy.of_first_plans == [dict.fromkeys(COUNTED, 1)]
