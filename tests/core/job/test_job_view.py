"""What a policy sees of its job: how plans are numbered and named."""

from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import gpipe
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.switching import constant_latency
from gpuenergyd.core.policy_api.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget

PLANS = (ClockPlan("a", PlanPurpose.TRIAL), ClockPlan("b", PlanPurpose.TUNED), ClockPlan("c", PlanPurpose.TUNED))


def view(generation: int = 0) -> JobView:
    return JobView(
        "j", gpipe(1, 1), (), PerformanceTarget(), BaselineView(1.0, None, 10), (), PLANS,
        generation=generation, num_dropped_plans={PlanPurpose.TUNED: 5, PlanPurpose.BASELINE: 1},
    )  # fmt: skip


def test_the_view_counts_dropped_plans_too() -> None:
    assert view().num_issued() == 9
    assert view().num_issued(PlanPurpose.TUNED) == 7
    assert view().num_issued(PlanPurpose.TRIAL) == 1
    assert view().num_issued(PlanPurpose.BASELINE) == 1


def test_a_plan_id_carries_the_generation() -> None:
    assert [view(generation).plan_id("tuned-1") for generation in (0, 1, 2)] == ["tuned-1", "tuned-1@2", "tuned-1@3"]


def test_by_default_a_view_permits_clocks_and_has_no_latencies() -> None:
    assert view().can_set_clocks
    assert (view().communication_latency_s, view().launch_gap_s) == (0.0, 0.0)
    assert GpuView("GPU-0", "A100", (1410,), 0.25).switch_latency == constant_latency(0.25)


def gpu(k: int, host: str, *, num_gpus: int = 1, num_host_gpus: int = 0) -> GpuView:
    return GpuView(f"GPU-{k}", "A100", (1410,), 0.01, num_gpus=num_gpus, host=host, num_host_gpus=num_host_gpus)


@pytest.mark.parametrize(
    ("gpus", "num_calls"),
    [
        ([gpu(0, "a"), gpu(1, "a")], [1, 1]),  # nothing is known of others
        ([gpu(0, "a", num_host_gpus=2), gpu(1, "a", num_host_gpus=2)], [1, 1]),  # the host is this job's alone
        ([gpu(0, "a", num_host_gpus=1), gpu(1, "a", num_host_gpus=8)], [4, 4]),  # others joined since the first rank
        ([gpu(0, "a", num_gpus=2, num_host_gpus=5), gpu(1, "b", num_host_gpus=1)], [5, 1]),  # each host by itself
        ([gpu(0, "", num_host_gpus=3), gpu(1, "", num_host_gpus=3)], [2, 2]),  # rounded up
    ],
)
def test_driver_calls_are_counted_over_all_jobs_of_a_host(gpus: list[GpuView], num_calls: list[int]) -> None:
    latencies = replace(view(), gpus=tuple(gpus)).switch_latencies

    assert [latency.num_calls for latency in latencies] == num_calls
    assert [latency.host for latency in latencies] == [own.host for own in gpus]
    assert {latency.raise_s for latency in latencies} == {0.01}


def test_by_default_a_baseline_has_no_spread() -> None:
    assert BaselineView(1.0, None, 10).iteration_sigma_s == 0.0
