"""Proven bounds on savings: the planner's bounds on the exact tables of the demo's simulated stages."""

from collections.abc import Sequence
from dataclasses import replace

from gpuenergyd.core.pipeline.graph import Schedule, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.core.pipeline.waiting import WaitingPower, waiting_power
from gpuenergyd_plan.offline.inflight import plan_inflight
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.offline_requests import caps_from_microbatches
from gpuenergyd_policies.planning.orders.relaxation import OrderTask
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.driver.device_parameters import device_parameters
from gpuenergyd_sim.training.gpt_model import simulated_works
from gpuenergyd_sim.virtual_training.work import ModelWork
from gpuenergyd_sim.virtual_training.work import exact_profile as profile_of_work

GPU_MODEL = "a100-sxm"


def exact_profile(schedule: Schedule, duration_scale: float = 1.0, *, gpu_model: str = GPU_MODEL) -> PipelineProfile:
    """Return the profile of a schedule's instructions, as computed by the simulated GPUs."""
    model = device_parameters(gpu_model)
    works = {}
    for order in schedule.orders:
        for instruction in order:
            stage_index = schedule.stage_index(instruction.pp_rank, instruction.chunk_index)
            work = simulated_works(
                stage_index, schedule.num_stages, num_ranks=schedule.num_ranks, duration_scale=duration_scale
            )[str(instruction.kind)]
            works[instruction.instruction_class] = ModelWork(model, work)
    waiting_w = blocking_power_w(model, model.max_sm_clock_mhz)
    return profile_of_work(works, model.supported_sm_clocks_mhz, blocking_power_w=waiting_w)


def exact_waiting_power(gpu_model: str = GPU_MODEL) -> WaitingPower:
    """Return the power of a simulated GPU that waits, by clock."""
    model = device_parameters(gpu_model)
    points = [(clock_mhz, blocking_power_w(model, clock_mhz)) for clock_mhz in model.supported_sm_clocks_mhz]
    return waiting_power(points, where=gpu_model)


def most_saved_ratio(schedule: Schedule, duration_scale: float = 1.0, *, gpu_model: str = GPU_MODEL) -> float:
    """Return a proven bound on the saving at no slowdown, whatever the clocks, with changes at once and for nothing.

    Full speed waits at the maximum clock, plans may wait at the clock of least power.
    """
    profile = exact_profile(schedule, duration_scale, gpu_model=gpu_model)
    graph = dependency_graph(schedule)
    at_full_speed = baseline(graph, profile)
    waits_low = replace(profile, blocking_power_w=exact_waiting_power(gpu_model).least_w)
    solved = solve(graph, waits_low, deadline_s=at_full_speed.iteration_time_s)
    return 1 - solved.lower_bound_j / at_full_speed.energy_j


def schedule_of(name: str, num_ranks: int, num_microbatches: int, extra_inflight: Sequence[int] | None) -> Schedule:
    """Return the schedule of a case."""
    if extra_inflight is not None:
        return one_forward_one_backward(num_ranks, num_microbatches, extra_inflight)
    return make_schedule(name, num_ranks, num_microbatches)


def extra_inflight_for(num_ranks: int, num_microbatches: int, *, memory_limit: int) -> tuple[int, ...]:
    """Return the extra microbatches that the planner chooses without slowdown, within a memory limit per rank."""
    plain = make_schedule("1f1b", num_ranks, num_microbatches)
    profile = exact_profile(plain)
    deadline_s = baseline(dependency_graph(plain), profile).iteration_time_s
    caps = caps_from_microbatches([memory_limit] * num_ranks)
    planned = plan_inflight(OrderTask(num_microbatches, profile, deadline_s, [num_microbatches] * num_ranks), caps)
    return planned.schedule.extra_inflight
