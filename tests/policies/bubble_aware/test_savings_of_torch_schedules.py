"""Savings of the default policy on the demo's pipeline under torch's simplest schedules, in virtual time.

`benchmarks/runs/schedules.py` measures all seven schedules in real pipelines; those with two stages per rank take long
to plan.
"""

from functools import cache
from statistics import median

import pytest

pytest.importorskip("torch")

from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.driver.device_parameters import device_parameters
from gpuenergyd_sim.training.gpt_model import simulated_works
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import ModelWork
from tests.support.thorough import thorough

pytestmark = pytest.mark.torch

NUM_RANKS = 4
NUM_MICROBATCHES = 8
BASELINE = slice(2, 12)
A100 = device_parameters("a100-sxm")


@pytest.mark.parametrize(("schedule_name", "needed_ratio"), [("1f1b", 0.08), *thorough(("gpipe", 0.05))])
def test_demo_pipeline_saves_the_required_share_within_one_percent_of_time(
    schedule_name: str, needed_ratio: float
) -> None:
    schedule = make_schedule(schedule_name, NUM_RANKS, NUM_MICROBATCHES)
    works = cache(lambda stage_index: simulated_works(stage_index, schedule.num_stages))

    def work_of(instruction: Instruction) -> ModelWork:
        return ModelWork(A100, works(instruction.pp_rank)[str(instruction.kind)])

    run = VirtualTraining(
        schedule,
        {},
        BubbleAware(),
        work_of=work_of,
        switch_latency_s=0.014,
        assumed_latency_s=0.02,
        latency_spread_ratio=0.3,
        noise_ratio=0.003,
        energy_noise_ratio=0.01,
        counter_period_s=0.1,
        waiting_power_w=lambda sm_clock_mhz: blocking_power_w(A100, sm_clock_mhz),
        seed=3,
    )
    run.run(48)

    tuned = [(time_s, energy_j) for time_s, energy_j, plan_id in run.history if plan_id == run.job.current_plan.plan_id]
    full_speed = [(time_s, energy_j) for time_s, energy_j, _ in run.history[BASELINE]]
    time_ratio, energy_ratio = (median(t[k] for t in tuned[1:]) / median(u[k] for u in full_speed) for k in (0, 1))
    assert 1 - energy_ratio >= needed_ratio
    assert time_ratio <= 1.01
