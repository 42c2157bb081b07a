"""What a policy sees of its job: how plans are numbered and named."""

from gpuenergyd.core.pipeline.graph import gpipe
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.switching import constant_latency
from gpuenergyd.core.policy_api.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget

PLANS = (ClockPlan("a", PlanPurpose.PROFILE), ClockPlan("b", PlanPurpose.TUNED), ClockPlan("c", PlanPurpose.TUNED))


def view(generation: int = 0) -> JobView:
    return JobView(
        "j", gpipe(1, 1), (), PerformanceTarget(), BaselineView(1.0, None, 10), (), PLANS,
        generation=generation, num_dropped_plans={PlanPurpose.TUNED: 5, PlanPurpose.BASELINE: 1},
    )  # fmt: skip


def test_the_view_counts_dropped_plans_too() -> None:
    assert view().num_issued() == 9
    assert view().num_issued(PlanPurpose.TUNED) == 7
    assert view().num_issued(PlanPurpose.PROFILE) == 1
    assert view().num_issued(PlanPurpose.BASELINE) == 1


def test_a_plan_id_carries_the_generation() -> None:
    assert [view(generation).plan_id("tuned-1") for generation in (0, 1, 2)] == ["tuned-1", "tuned-1@2", "tuned-1@3"]


def test_by_default_a_view_permits_clocks_and_has_no_latencies() -> None:
    assert view().can_set_clocks
    assert (view().communication_latency_s, view().launch_gap_s) == (0.0, 0.0)
    assert GpuView("GPU-0", "A100", (1410,), 0.25).switch_latency == constant_latency(0.25)


def test_by_default_a_baseline_has_no_spread() -> None:
    assert BaselineView(1.0, None, 10).iteration_sigma_s == 0.0
