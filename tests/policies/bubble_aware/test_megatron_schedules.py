"""Savings of the default policy on Megatron's interleaved and combined schedules, in virtual time."""

from statistics import median

import pytest

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.pipeline.megatron_orders import combined_1f1b, megatron_interleaved
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, a100_waiting_power_w
from tests.support.thorough import thorough

TIMES_S = {InstructionKind.F: 0.025, InstructionKind.B: 0.050, InstructionKind.FB: 0.065}
"""A combined step is shorter than its parts: each hides the other's messages."""
LAST_RANK_RATIO = 1.3
BASELINE = slice(2, 12)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schedule",
    [
        megatron_interleaved(2, 6, 2, 3),
        *thorough(megatron_interleaved(3, 6, 2, is_paired=True), combined_1f1b(2, 6, 2)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_an_uneven_pipeline_saves_within_one_percent_of_time(schedule: Schedule) -> None:
    def work_of(instruction: Instruction) -> A100Work:
        is_last = instruction.pp_rank == schedule.num_ranks - 1
        time_s = TIMES_S[instruction.kind] * (LAST_RANK_RATIO if is_last else 1.0)
        return A100Work(0.25 * time_s, 0.75 * time_s, 0.25)

    run = VirtualTraining(
        schedule, {}, BubbleAware(), work_of=work_of, switch_latency_s=0.014, waiting_power_w=a100_waiting_power_w
    )
    run.run(80)

    tuned = [(time_s, energy_j) for time_s, energy_j, plan_id in run.history if plan_id == run.job.current_plan.plan_id]
    full_speed = [(time_s, energy_j) for time_s, energy_j, _ in run.history[BASELINE]]
    time_ratio, energy_ratio = (median(t[k] for t in tuned[1:]) / median(u[k] for u in full_speed) for k in (0, 1))
    assert run.job.current_plan.plan_id.startswith("tuned")
    assert 1 - energy_ratio >= 0.08
    assert time_ratio <= 1.01
