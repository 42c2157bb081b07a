"""One job in figures, from its iterations: the single ones and those that have become blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store.encoding.compressed_json import decode_tags
from gpuenergyd.store.readers.sqlite import Reader, Row
from gpuenergyd.store.reading.iterations import Iterations, all_iterations
from gpuenergyd.store.reading.summary_inputs import JobParts

if TYPE_CHECKING:
    from gpuenergyd.core.job.savings import Interval


@dataclass(frozen=True, slots=True)
class Counted:
    """Which part of a job its figures count: what began from `since` on and before `until`; None is no bound."""

    since: datetime | None = None
    until: datetime | None = None

    def holds(self, at: datetime) -> bool:
        """Return whether what began at an instant counts."""
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)

    def holds_all(self, started_at: datetime, ended_at: datetime | None) -> bool:
        """Return whether all of a job counts; one that runs has no end yet, one whose clock was set back ends early."""
        if self != WHOLE and ended_at is not None and ended_at < started_at:
            return False
        is_over = self.until is None or (ended_at is not None and ended_at <= self.until)
        return is_over and (self.since is None or started_at >= self.since)


WHOLE = Counted()


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One job in figures; None is what was not measured or does not exist yet.

    `energy_j` is the sum over the `num_measured_iterations` regular iterations whose energy is known. Baseline figures
    are medians over all regular iterations at full speed, later blocks included, tuned ones over those under a tuned
    plan; predictions are those of the last tuned plan. Intervals hold the ratio with 95 % confidence, drift taken out.
    """

    job_id: str
    job_name: str
    policy: str
    schedule_name: str
    is_simulated: bool
    started_at: datetime
    ended_at: datetime | None
    end_reason: str | None
    num_ranks: int
    num_microbatches: int
    max_slowdown_ratio: float
    uid: int
    gpu_uuids: tuple[str, ...]
    num_iterations: int
    num_measured_iterations: int
    duration_s: float
    energy_j: float | None
    num_baseline_iterations: int
    baseline_time_s: float | None
    baseline_energy_j: float | None
    num_tuned_iterations: int
    iteration_time_s: float | None
    energy_per_iteration_j: float | None
    num_profile_iterations: int
    profile_energy_j: float | None
    saving_ratio: float | None
    slowdown_ratio: float | None
    predicted_iteration_time_s: float | None
    predicted_energy_j: float | None
    lower_bound_j: float | None
    saving_interval: tuple[float, float] | None = None
    slowdown_interval: tuple[float, float] | None = None
    would_save_ratio: float | None = None
    """Predicted for a job whose clocks nobody could set; None once any plan of it was carried out."""
    would_save_basis: str | None = None
    num_measured_profile_iterations: int = 0
    tags: tuple[tuple[str, str], ...] = ()
    """By name: whose run it was and from which source, as its processes said."""
    host: str | None = None
    """Which host's daemon wrote it; None of jobs from before hosts were noted."""


def weighted_median(values: Iterable[tuple[float, int]]) -> float | None:
    """Return the median of values that each count so many times; of two middle ones their mean. None without any."""
    ordered = sorted((value, weight) for value, weight in values if weight > 0)
    total = sum(weight for _, weight in ordered)
    if not total:
        return None
    passed = 0
    for k, (value, weight) in enumerate(ordered):
        passed += weight
        if 2 * passed > total:
            return value
        if 2 * passed == total:
            return (value + ordered[k + 1][0]) / 2
    raise AssertionError


@dataclass(frozen=True, slots=True)
class Typical:
    """How many iterations, and their median time and energy; None without any."""

    num_iterations: int
    iteration_time_s: float | None
    energy_j: float | None


def baseline_of(reader: Reader, job_id: str) -> Typical:
    """Return what a job's regular full-speed iterations are like."""
    return _typical(_regular(all_iterations(reader, job_id), PlanPurpose.BASELINE))


def job_summary(job: Row, parts: JobParts, counted: Counted = WHOLE) -> JobSummary:
    """Return one row of the table of jobs with all that its iterations and plans say.

    Of a part of it, the baseline is still that of the whole job: full speed is what every saving refers to.
    """
    from gpuenergyd.core.job.savings import saving_between  # noqa: PLC0415  a report of ended jobs needs no statistics

    whole = parts.iterations
    every = [own for own in whole if counted.holds(own.started_at)]
    regular = [own for own in every if own.is_regular]
    at_full_speed, under_plan = _regular(whole, PlanPurpose.BASELINE), _regular(every, PlanPurpose.TUNED)
    baseline, tuned = _typical(at_full_speed), _typical(under_plan)
    measured = saving_between(_points(at_full_speed), _points(under_plan))
    profiled = [own for own in every if own.purpose is PlanPurpose.PROFILE]
    last = parts.tuned_plan
    would_be = None if tuned.num_iterations else parts.would_be_plan
    begun_at = max(job.started_at, counted.since or job.started_at)
    seen_until = job.ended_at or (whole[-1].started_at + timedelta(seconds=whole[-1].sum_time_s) if whole else begun_at)
    over_at = min(seen_until, counted.until or seen_until)
    return JobSummary(
        job_id=job.job_id,
        job_name=job.job_name,
        policy=job.policy,
        schedule_name=job.schedule_name,
        is_simulated=job.is_simulated,
        started_at=job.started_at,
        ended_at=job.ended_at,
        end_reason=job.end_reason,
        num_ranks=job.num_ranks,
        num_microbatches=job.num_microbatches,
        max_slowdown_ratio=job.max_slowdown_ratio,
        uid=job.uid,
        gpu_uuids=tuple(parts.gpu_uuids),
        num_iterations=sum(own.num_iterations for own in every),
        num_measured_iterations=sum(own.num_measured for own in regular),
        duration_s=(over_at - begun_at).total_seconds() if over_at > begun_at else sum(own.sum_time_s for own in every),
        energy_j=_sum(own.sum_energy_j for own in regular),
        num_baseline_iterations=baseline.num_iterations,
        baseline_time_s=baseline.iteration_time_s,
        baseline_energy_j=baseline.energy_j,
        num_tuned_iterations=tuned.num_iterations,
        iteration_time_s=tuned.iteration_time_s,
        energy_per_iteration_j=tuned.energy_j,
        num_profile_iterations=sum(own.num_iterations for own in profiled),
        profile_energy_j=_sum(own.sum_energy_j for own in profiled),
        saving_ratio=_change(baseline.energy_j, tuned.energy_j, sign=-1),
        slowdown_ratio=_change(baseline.iteration_time_s, tuned.iteration_time_s, sign=1),
        predicted_iteration_time_s=last.predicted_iteration_time_s if last else None,
        predicted_energy_j=last.predicted_energy_j if last else None,
        lower_bound_j=last.lower_bound_j if last else None,
        saving_interval=_bounds(measured.saving_ratio) if measured else None,
        slowdown_interval=_bounds(measured.slowdown_ratio) if measured else None,
        would_save_ratio=_change(baseline.energy_j, would_be.predicted_energy_j, sign=-1) if would_be else None,
        would_save_basis=would_be.reason if would_be else None,
        tags=decode_tags(job.tags),
        num_measured_profile_iterations=sum(own.num_measured for own in profiled),
        host=job.host,
    )


def _regular(every: Sequence[Iterations], purpose: PlanPurpose) -> list[Iterations]:
    return [own for own in every if own.is_regular and own.purpose is purpose]


def _typical(every: Sequence[Iterations]) -> Typical:
    return Typical(
        sum(own.num_iterations for own in every),
        weighted_median((own.median_time_s, own.num_iterations) for own in every),
        weighted_median((own.median_energy_j, own.num_measured) for own in every if own.median_energy_j is not None),
    )


def _points(every: Sequence[Iterations]) -> list[tuple[int, float, float | None]]:
    """Return what the statistics of the domain want of iterations: when, how long, how much; a block speaks once."""
    return [(own.first_index + own.num_iterations // 2, own.median_time_s, own.median_energy_j) for own in every]


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _bounds(interval: "Interval | None") -> tuple[float, float] | None:
    return None if interval is None else (interval.low, interval.high)


def _change(before: float | None, after: float | None, *, sign: int) -> float | None:
    return sign * (after / before - 1.0) if before and after is not None else None
