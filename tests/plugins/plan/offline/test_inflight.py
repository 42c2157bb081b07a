"""Extra in-flight microbatches: within memory, free of deadlocks, never slower, with the known savings."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import ScheduleError, TargetError, UsageError
from gpuenergyd_plan.offline.bubble_aware import plan_offline
from gpuenergyd_plan.offline.inflight import plan_inflight
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.offline_requests import caps_from_microbatches
from gpuenergyd_policies.planning.orders.relaxation import OrderTask
from gpuenergyd_policies.planning.plan_evaluation import baseline
from tests.policies.planning.profiles import forward_backward_profile
from tests.support.examples import examples
from tests.support.measured_tables import DATA
from tests.support.thorough import thorough

F, B = InstructionKind.F, InstructionKind.B


@settings(max_examples=examples(25), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.9, 1.0, 1.1]), min_size=2, max_size=5),
    num_microbatches=st.integers(1, 10),
    cap=st.sampled_from([0, 1, 3, None]),
)
def test_the_chosen_schedule_respects_deadline_and_caps_and_is_never_worse_than_plain_1f1b(
    weights: list[float], num_microbatches: int, cap: int | None
) -> None:
    num_ranks = len(weights)
    profile = forward_backward_profile(weights)
    plain = dependency_graph(one_forward_one_backward(num_ranks, num_microbatches))
    deadline_s = baseline(plain, profile).iteration_time_s

    task = OrderTask(num_microbatches, profile, deadline_s, [num_microbatches] * num_ranks)
    planned = plan_inflight(task, None if cap is None else [cap] * num_ranks)

    assert planned.solved.iteration_time_s <= deadline_s
    extra = planned.schedule.extra_inflight or (0,) * num_ranks
    assert cap is None or max(extra) <= cap
    ahead = [num_ranks - 1 - r + k for r, k in enumerate(extra)]
    assert all(left >= right for left, right in pairwise(ahead))
    assert timeline(planned.graph, planned.solved.durations_s).iteration_time_s <= deadline_s
    assert planned.solved.energy_j <= solve(plain, profile, deadline_s=deadline_s).energy_j * (1 + 1e-4)


def test_extra_microbatches_save_energy_at_the_same_iteration_time() -> None:
    profile = forward_backward_profile([1.0, 1.0, 1.0, 1.05])
    plain = dependency_graph(one_forward_one_backward(4, 16))
    full_speed = baseline(plain, profile)

    planned = plan_inflight(OrderTask(16, profile, full_speed.iteration_time_s, [16] * 4))

    assert any(planned.schedule.extra_inflight)
    plain_j = solve(plain, profile, deadline_s=full_speed.iteration_time_s).energy_j
    assert full_speed.energy_j - planned.solved.energy_j > 1.3 * (full_speed.energy_j - plain_j)


def test_without_room_for_extra_microbatches_the_schedule_is_plain_1f1b() -> None:
    profile = forward_backward_profile([1.0, 1.1, 1.0])
    plain = dependency_graph(one_forward_one_backward(3, 6))
    deadline_s = baseline(plain, profile).iteration_time_s

    planned = plan_inflight(OrderTask(6, profile, deadline_s, [6] * 3), [0, 0, 0])

    assert planned.schedule == one_forward_one_backward(3, 6)
    assert planned.solved.sm_clocks_mhz == solve(plain, profile, deadline_s=deadline_s).sm_clocks_mhz


def test_deadline_that_no_order_meets_is_refused() -> None:
    with pytest.raises(TargetError, match="T_min"):
        plan_inflight(OrderTask(6, forward_backward_profile([1.0, 1.1, 1.0]), 1.0, [6] * 3))


def test_memory_limits_become_caps() -> None:
    assert caps_from_microbatches([6, 3, 2]) == (3, 1, 1)
    with pytest.raises(ScheduleError, match="3 microbatches in flight on rank 0, memory holds 2"):
        caps_from_microbatches([2, 3, 2])


def test_the_offline_planner_respects_both_cap_and_memory_limit() -> None:
    schedule = one_forward_one_backward(4, 12)
    request = OfflineRequest(
        "test",
        forward_backward_profile([1.0, 1.0, 1.0, 1.05]),
        schedule,
        dependency_graph(schedule),
        PerformanceTarget(),
        extra_inflight=2,
        options={"memory_limit_microbatches": "5,9,9,9", "extra_inflight_caps": "2,1,2,2"},
    )

    planned = plan_offline(request)

    assert planned.extra_inflight[0] <= 1
    assert planned.extra_inflight[1] <= 1
    assert max(planned.extra_inflight) <= 2
    assert planned.iteration_time_s <= planned.baseline_time_s


def test_offline_planner_refuses_extra_microbatches_for_an_unknown_order() -> None:
    graph = dependency_graph(one_forward_one_backward(2, 2))
    request = OfflineRequest(
        "test", forward_backward_profile([1.0, 1.0]), None, graph, PerformanceTarget(), extra_inflight="auto"
    )

    with pytest.raises(UsageError, match="need schedule 1f1b"):
        plan_offline(request)


PROFILES = DATA / "profiles"


@pytest.mark.skipif(not PROFILES.is_dir(), reason="the shared tables are not on this machine")
@pytest.mark.parametrize(
    ("table", "blocking_power_w", "cap", "least_saving_percent"),
    [
        ("gpt3-175b_a100-sxm", 83.64, 1, 17.0),
        *thorough(
            ("gpt3-175b_a40", 70.38, None, 20.1),
            ("gpt3-175b_a100-sxm", 83.64, 2, 18.4),
            ("gpt3-175b_a100-sxm", 83.64, 4, 20.1),
            ("gpt3-175b_a100-sxm", 83.64, None, 21.2),
        ),
    ],
)
def test_gpt3_reaches_the_known_saving_without_slowdown(
    table: str, blocking_power_w: float, cap: int | None, least_saving_percent: float
) -> None:
    classes: dict[InstructionClass, list[ClockOption]] = {}
    for row in (PROFILES / f"{table}.csv").read_text().splitlines()[1:]:
        stage, instruction, mhz, time_s, energy_j = row.split(",")
        key = InstructionClass(int(stage), F if instruction == "forward" else B)
        classes.setdefault(key, []).append(ClockOption(int(float(mhz)), float(time_s), float(energy_j)))
    profile = PipelineProfile(
        {key: instruction_profile(options, where=str(key)) for key, options in classes.items()}, blocking_power_w
    )
    full_speed = baseline(dependency_graph(one_forward_one_backward(8, 32)), profile)

    task = OrderTask(32, profile, full_speed.iteration_time_s, [32] * 8)
    planned = plan_inflight(task, None if cap is None else [cap] * 8)

    assert planned.solved.iteration_time_s <= full_speed.iteration_time_s
    assert 100 * (1 - planned.solved.energy_j / full_speed.energy_j) >= least_saving_percent
