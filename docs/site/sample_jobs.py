"""Sample histories for the screenshots: the example pipeline with its real plan, a plain loop, a carbon job.

Plans and timelines come from the planner; iterations are drawn around its predictions with a fixed seed.
"""

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from docs.site.pictures import planned_iterations
from gpuenergyd.core.carbon.intensity import EmissionFactor, IntensityBasis, SampleStatus, SignalKind
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.store.records import (
    IntensityRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    PlanRecord,
    RankRecord,
    RollupRecord,
    TargetRecord,
)

START = datetime(2026, 3, 2, 9, 0, 0, tzinfo=UTC)
NUM_GPUS = 4
_NUM_WARMUP, _NUM_BASELINE, _NUM_LEARNED = 2, 30, 36
_NUM_BLOCKS, _NUM_IN_BLOCK, _NUM_BETWEEN_BLOCKS = 4, 6, 24
_LEARNED_FROM = ((1.000, 0.955), (1.004, 0.93), (1.002, 0.915), (1.001, 0.905), (1.001, 0.90), (1.000, 0.895))
"""Time and energy of the first plans, relative to full speed."""
_NUM_HOURS = 24
_SHARE_PERMITTED = 0.05

Record: TypeAlias = (
    JobRecord | RankRecord | PlanRecord | IterationRecord | RollupRecord | IntensityRecord | TargetRecord | JobEndRecord
)
_Step: TypeAlias = tuple[ClockPlan | None, float, float]
"""The plan of one iteration, its expected time and its expected energy."""


def pipeline_job() -> Iterator[Record]:
    """Yield a job of the example pipeline: baseline, plans with blocks at full speed, and a week of energy after it."""
    before, after, plan = planned_iterations()
    energy_j, bound_j, full_j = plan.energy_j, plan.lower_bound_j, plan.baseline_energy_j
    tuned = _tuned_plan(plan.iteration_time_s, energy_j, bound_j, full_j, len(_LEARNED_FROM))
    steps = _steps(plan.baseline_time_s, plan.baseline_energy_j)
    under_plan: list[_Step] = [(tuned, plan.iteration_time_s, plan.energy_j)] * _NUM_BETWEEN_BLOCKS
    at_full_speed: list[_Step] = [(None, plan.baseline_time_s, plan.baseline_energy_j)] * _NUM_IN_BLOCK
    steps += [*under_plan, *at_full_speed] * _NUM_BLOCKS + under_plan

    def spans(step: ClockPlan | None) -> tuple[ObservedSpan, ...]:
        return (after if step else before).spans

    yield from _job("gpt-2.6b", steps, spans, schedule_name="1f1b", num_microbatches=6)
    yield from _week_after()


def loop_job() -> Iterator[Record]:
    """Yield a training loop on one GPU without a permitted slowdown: no plan, everything at full speed."""
    yield from _job("resnet", [(None, 0.412, 148.0)] * 90, lambda _: (), schedule_name="loop", num_gpus=1)


def carbon_job() -> Iterator[Record]:
    """Yield a job that follows a replayed day of a grid: slower in its carbon-intensive hours, within 5 %."""
    before, after, plan = planned_iterations()
    time_s, energy_j, full_s = plan.iteration_time_s, plan.energy_j, plan.baseline_time_s
    frontier = tuple((time_s * (1 + 0.01 * k), energy_j * (1 - 0.085 * k / (k + 4))) for k in range(10))
    steps = _steps(full_s, plan.baseline_energy_j)
    begun_s = sum(time_s for _, time_s, _ in steps)
    intensities = [210 + 95 * _day_shape(hour) for hour in range(_NUM_HOURS)]
    num_per_hour = 8
    targets: list[Record] = []
    grid: list[Record] = []
    at_s = begun_s
    for hour, intensity in enumerate(intensities):
        slower = max(0.0, min(1.0, (intensity - 180.0) / 110.0)) * _SHARE_PERMITTED
        k = 100 * slower
        tuned = _tuned_plan(
            time_s * (1 + slower),
            energy_j * (1 - 0.085 * k / (k + 4)),
            None,
            plan.baseline_energy_j,
            len(_LEARNED_FROM) + hour,
        )
        predicted = tuned.predicted
        assert predicted is not None
        steps += [(tuned, predicted.iteration_time_s, predicted.energy_j)] * num_per_hour
        end_s = at_s + num_per_hour * predicted.iteration_time_s
        begin, end = START + timedelta(seconds=at_s if hour else 0.0), START + timedelta(seconds=end_s)
        status = SampleStatus.MEASURED if hour < _NUM_HOURS - 3 else SampleStatus.FORECAST
        grid.append(
            IntensityRecord(
                "GB", "csv", SignalKind.AVERAGE, EmissionFactor.LIFECYCLE, status, begin, end,
                START + timedelta(hours=hour), intensity, START,
            )
        )  # fmt: skip
        targets.append(
            TargetRecord(
                "carbon-1", START + timedelta(seconds=at_s), "carbon", full_s * (1 + slower), "follows the intensity",
                IntensityBasis.LIVE, intensity, "g/kWh", 0.02, _SHARE_PERMITTED, 0.0, frontier if hour == 0 else None,
            )
        )  # fmt: skip
        at_s = end_s

    def spans(step: ClockPlan | None) -> tuple[ObservedSpan, ...]:
        return (after if step else before).spans

    yield from _job(
        "carbon", steps, spans, schedule_name="1f1b", num_microbatches=6, max_slowdown_ratio=_SHARE_PERMITTED
    )
    yield from grid
    yield from targets


def _steps(time_s: float, energy_j: float) -> list[_Step]:
    """Return warm-up, baseline and the plans from which curves are learned."""
    steps: list[_Step] = [(None, time_s, energy_j)] * (_NUM_WARMUP + _NUM_BASELINE)
    for k in range(_NUM_LEARNED):
        number = k * len(_LEARNED_FROM) // _NUM_LEARNED
        slower, less = _LEARNED_FROM[number]
        plan = _tuned_plan(time_s * slower, energy_j * less, None, energy_j, number)
        steps.append((plan, time_s * slower, energy_j * less))
    return steps


def _tuned_plan(
    time_s: float, energy_j: float, lower_bound_j: float | None, baseline_j: float, number: int
) -> ClockPlan:
    predicted = PlanPrediction(time_s, energy_j, lower_bound_j, time_s, baseline_j)
    return ClockPlan(f"tuned-{number + 1}", PlanPurpose.TUNED, predicted=predicted, reason="slack on 3 of 4 stages")


def _day_shape(hour: int) -> float:
    """Return the carbon intensity of an hour between about -1 (night and noon) and 1 (morning and evening)."""
    peaks = ((6, 1.3), (17, 1.3))
    return sum(height * max(0.0, 1.0 - abs(hour - peak) / 5.0) for peak, height in peaks) * 1.3 - 1.0


def _job(
    name: str,
    steps: list[_Step],
    spans: Callable[[ClockPlan | None], tuple[ObservedSpan, ...]],
    *,
    schedule_name: str,
    num_microbatches: int = 1,
    num_gpus: int = NUM_GPUS,
    max_slowdown_ratio: float = 0.0,
) -> Iterator[Record]:
    """Yield a job of one iteration per step, with its plans and the power of its GPUs."""
    noise, job_id = random.Random(name), f"{name}-1"  # noqa: S311  noise of a drawing
    yield JobRecord(
        job_id, name, "run-1", 0, "bubble-aware", schedule_name, "torch", True, num_gpus, num_microbatches,
        max_slowdown_ratio, 1000, START, tags=(("user", "ada"),),
    )  # fmt: skip
    for rank in range(num_gpus):
        yield RankRecord(job_id, rank, f"GPU-{rank}", "NVIDIA A100-SXM4-40GB (simulated)", 100 + rank, 1000, START)
    at_s, issued = 0.0, ""
    powers_w: list[tuple[float, float]] = []
    for index, (plan, expected_s, expected_j) in enumerate(steps):
        is_disturbed = index < _NUM_WARMUP or index in {57, 131}
        time_s = expected_s * (1.0 + noise.gauss(0.0, 0.0012)) * (1.09 if is_disturbed else 1.0)
        energy_j = expected_j * (1.0 + noise.gauss(0.0, 0.004)) * (1.05 if is_disturbed else 1.0)
        begin = START + timedelta(seconds=at_s)
        if plan is not None and plan.plan_id != issued:
            issued = plan.plan_id
            yield PlanRecord(job_id, index, plan, begin, index)
        plan_id, purpose = (plan.plan_id, plan.purpose) if plan else (BASELINE_PLAN_ID, PlanPurpose.BASELINE)
        yield IterationRecord(
            job_id, index, begin, time_s, energy_j, plan_id, purpose, not is_disturbed,
            () if is_disturbed else spans(plan),
        )  # fmt: skip
        at_s += time_s
        powers_w.append((at_s, energy_j / time_s / num_gpus))
    yield from _power(job_id, powers_w, num_gpus, noise)
    yield JobEndRecord(job_id, START + timedelta(seconds=at_s), "released")


def _power(
    job_id: str, powers_w: list[tuple[float, float]], num_gpus: int, noise: random.Random
) -> Iterator[RollupRecord]:
    """Yield the mean power of every GPU for each second, minute and hour of a job."""
    ends = iter(powers_w)
    end_s, power_w = next(ends)
    hours: dict[tuple[int, datetime, int], list[float]] = {}
    for second in range(int(powers_w[-1][0])):
        while end_s <= second:
            end_s, power_w = next(ends)
        at = START + timedelta(seconds=second)
        for gpu in range(num_gpus):
            now_w = power_w * (1.0 + 0.05 * (gpu - (num_gpus - 1) / 2)) * (1.0 + noise.gauss(0.0, 0.01))
            for bucket_s in (1, 60, 3600):
                begin = at - timedelta(seconds=(60 * at.minute + at.second) % bucket_s)
                hours.setdefault((bucket_s, begin, gpu), []).append(now_w)
    for (bucket_s, begin, gpu), watts in hours.items():
        mean_w = sum(watts) / len(watts)
        yield RollupRecord(
            bucket_s, f"GPU-{gpu}", begin, job_id, sum(watts), mean_w, max(watts), 1200.0, 10 * len(watts),
            measured_s=float(len(watts)),
        )  # fmt: skip


def _week_after() -> Iterator[RollupRecord]:
    """Yield six more days on which other jobs ran for some hours; on one of them readings are missing."""
    for day in range(1, 7):
        for hour in range(24):
            at = START.replace(hour=0) + timedelta(days=day, hours=hour)
            for gpu in range(NUM_GPUS):
                owner, power_w = ("later-1", 270.0) if 7 <= hour < 9 + 2 * day else ("", 58.0)
                missing_s = 2400.0 if day == 4 and hour > 14 else 0.0
                known_s = 3600.0 - missing_s
                yield RollupRecord(
                    3600, f"GPU-{gpu}", at, owner, known_s * power_w, power_w, power_w, 1410.0, 36_000,
                    None, known_s, 0.0, missing_s,
                )  # fmt: skip
