"""Virtual trainings under everything that GPUs do to a plan at once, and what a plan achieves under these conditions.

Clocks take effect late, by target clock and with tails, and are reported too early; calls take the driver's time and
stop the GPU's work; counters change seldom, sample power part of the time and are read by slow calls; instructions
scatter, and GPUs grow slower as they get warm. The size of each is that of the GPU model in the unkind simulated world,
times 1/2 to 2 by seed.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any
from unittest.mock import patch

from gpuenergyd.core.job.guard import GuardRules
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.pipeline.switching import Direction, LatencyBasis, SwitchLatency, TargetLatency
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd_policies.bubble_aware import candidates
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.calls import CallCost
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.driver.device_parameters import DeviceParameters
from gpuenergyd_sim.driver.world_kinds import WorldKind, parameters_in
from gpuenergyd_sim.virtual_training.random_jobs import COMMUNICATION_LATENCY_S, TrueJob
from tests.support.perfect_knowledge import Informed
from tests.support.slow_sampling import SlowlyReadTraining
from tests.support.unkind_training import TargetLatencies, UnkindDriver, UnkindTraining

ASSUMED_LATENCY_S = 0.03
TIME_NOISE_RATIO = 0.004
_ENERGY_NOISE_RATIO = 0.005
_MEDIAN_PER_MEAN = math.log(2)
"""Of an exponential distribution, as the simulated GPUs draw it."""
_LATE_SIGMAS = 1.2816
_WARMING_ITERATIONS = 15
_NUM_SETTLING, _NUM_MEASURED = 14, 60
"""Iterations before and while a known plan is measured."""
_NO_GUARD = GuardRules(budget_ratio=math.inf, gross_ratio=math.inf, faster_ratio=math.inf)
"""A known plan stays in force for as long as it is measured."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the GPUs of one job do."""

    driver: UnkindDriver
    read_s: float
    """Time of one driver call that reads."""
    counter_period_s: float
    sampled_ratio: float
    """Share of each counter period in which power is sampled."""
    warm_ratios: tuple[float, ...]
    """By rank, how much slower a warm GPU is."""


@dataclass
class EverythingUnkindTraining(SlowlyReadTraining, UnkindTraining):
    """A virtual training with slowly read counters on GPUs whose clocks cost something to set."""


def conditions(model: DeviceParameters, seed: int, num_ranks: int) -> Conditions:
    """Return the conditions on a GPU model, drawn by a seed."""
    draw = random.Random(f"conditions/{seed}")
    unkind = parameters_in(WorldKind.UNKIND, model)

    def drawn(value: float) -> float:
        return value * math.exp(math.log(2.0) * draw.uniform(-1.0, 1.0))

    median_s, spread = drawn(unkind.settle_mean_s * _MEDIAN_PER_MEAN), math.exp(unkind.settle_target_spread)
    latencies = TargetLatencies(
        median_s / spread,
        median_s * spread,
        tail_ratio=unkind.settle_tail_ratio,
        tail_min_s=unkind.settle_tail_min_s,
        tail_max_s=unkind.settle_tail_max_s,
        seed=seed,
    )
    return Conditions(
        driver=UnkindDriver(
            latencies,
            call_s=drawn(unkind.call_median_s),
            stall_s=drawn(unkind.set_stall_s),
            reported_early_s=drawn(unkind.reported_early_s),
        ),
        read_s=drawn(unkind.read_s),
        counter_period_s=drawn(unkind.energy_update_s),
        sampled_ratio=unkind.energy_sampled_ratio,
        warm_ratios=tuple(draw.uniform(0.0, 0.004) for _ in range(num_ranks)),
    )


def training(job: TrueJob, under: Conditions, policy: ClockPolicy) -> EverythingUnkindTraining:
    """Return a training of the job under the conditions; close it after use."""
    return EverythingUnkindTraining(
        **_of_job(job, under),
        policy=policy,
        assumed_latency_s=ASSUMED_LATENCY_S,
        noise_ratio=TIME_NOISE_RATIO,
        energy_noise_ratio=_ENERGY_NOISE_RATIO,
        slowdown_of=lambda rank, iteration: (
            1.0 + under.warm_ratios[rank] * (1 - math.exp(-iteration / _WARMING_ITERATIONS))
        ),
        counter_period_s=under.counter_period_s,
        read_s=under.read_s,
        sampled_ratio=under.sampled_ratio,
    )


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Mean energy and time of iterations under a known plan, and at full speed."""

    energy_j: float
    time_s: float
    full_speed_energy_j: float
    full_speed_time_s: float

    @property
    def saving_ratio(self) -> float:
        """Saving against full speed."""
        return 1 - self.energy_j / self.full_speed_energy_j

    @property
    def slowdown_ratio(self) -> float:
        """Slowdown against full speed."""
        return self.time_s / self.full_speed_time_s - 1


@dataclass
class _OnePlan:
    """A policy that always answers with one plan."""

    plan: ClockPlan

    def next_plan(self, view: JobView) -> ClockPlan:
        return view.issued_plans[-1] if view.issued_plans else self.plan


def result_of(job: TrueJob, under: Conditions, plan: ClockPlan) -> PlanResult:
    """Return what a plan costs under the conditions, on warm GPUs, latencies drawn as they come."""
    return _measured(job, under, _OnePlan(replace(plan, plan_id="one")))


def best_result(job: TrueJob, under: Conditions, *, max_slowdown_ratio: float) -> PlanResult:
    """Return the result of the best plan from exact knowledge that is no slower than permitted.

    It is made with the true times, energies, latencies and stalls. The power of waiting depends on the clock, which a
    planner has one value for: that of the highest clock and of a lower one are tried; and plans are tried that ignore
    rare long latencies.
    """
    found = []
    profile = job.profile()
    for waiting_ratio, is_careless in ((1.0, False), (0.8, False), (1.0, True)):
        waiting_w = blocking_power_w(job.model, waiting_ratio * job.model.max_sm_clock_mhz)
        policy = Informed(replace(profile, blocking_power_w=waiting_w), calls=CallCost(under.driver.stall_s, 0.0))
        careless = replace(TUNING, max_expected_late_ratio=math.inf, price_of_lateness=0.0)
        with patch.object(candidates, "TUNING", careless if is_careless else TUNING):
            found.append(_measured(job, under, policy))
    on_time = [own for own in found if own.slowdown_ratio <= max_slowdown_ratio]
    return min(on_time or found, key=lambda own: own.energy_j)


def true_latency(under: Conditions, clocks_mhz: Sequence[int]) -> SwitchLatency:
    """Return the latency that a planner would know after very many changes, reports corrected."""
    driver, latencies = under.driver, under.driver.latencies
    targets = []
    for clock in clocks_mhz:
        typical_s = driver.call_s + latencies.median_s(clock)
        late_s = driver.call_s + latencies.median_s(clock) * math.exp(_LATE_SIGMAS * latencies.spread)
        targets += [TargetLatency(direction, clock, typical_s, late_s) for direction in Direction]
    typical_s, late_s = mean(t.typical_s for t in targets), mean(t.late_s for t in targets)
    tail_s = (latencies.tail_min_s + latencies.tail_max_s) / 2
    return SwitchLatency(
        raise_s=late_s,
        lower_s=typical_s,
        call_s=driver.call_s,
        typical_raise_s=typical_s,
        max_sm_clock_mhz=clocks_mhz[0],
        basis=LatencyBasis.MEASURED,
        targets=tuple(targets),
        excess_s=latencies.tail_ratio * max(0.0, tail_s + driver.call_s - late_s),
    )


def _measured(job: TrueJob, under: Conditions, policy: ClockPolicy) -> PlanResult:
    run = UnkindTraining(
        **_of_job(job, under),
        policy=policy,
        rules=JobRules(proof_iterations=0, guard=_NO_GUARD),
        noise_ratio=TIME_NOISE_RATIO,
        slowdown_of=lambda rank, _: 1.0 + under.warm_ratios[rank],
    )
    for calibration in run.calibrations.values():
        calibration.latency = true_latency(under, job.clocks_mhz)
    run.report_gpus()
    run.run(_NUM_SETTLING + _NUM_MEASURED)
    full_speed, planned = run.history[2:8], run.history[-_NUM_MEASURED:]
    return PlanResult(
        mean(energy_j for _, energy_j, _ in planned),
        mean(time_s for time_s, _, _ in planned),
        mean(energy_j for _, energy_j, _ in full_speed),
        mean(time_s for time_s, _, _ in full_speed),
    )


def _of_job(job: TrueJob, under: Conditions) -> dict[str, Any]:
    return {
        "schedule": job.schedule,
        "work": job.work,
        "communication_latency_s": COMMUNICATION_LATENCY_S,
        "waiting_power_w": lambda clock: blocking_power_w(job.model, clock),
        "clocks_mhz": job.clocks_mhz,
        "model_name": job.model.model_name,
        "driver": under.driver,
        "seed": job.seed,
    }
