"""One job in figures, from its iterations: the single ones and those that have become blocks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from gpuenergyd.core.plan import PlanPurpose
from gpuenergyd.store.blobs import decode_tags
from gpuenergyd.store.reading import Reader, Row, names_of

if TYPE_CHECKING:
    from gpuenergyd.core.savings import Interval


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

_PURPOSES: Mapping[str | None, PlanPurpose | None] = {None: None, "": None, **{str(word): word for word in PlanPurpose}}
_OF_ITERATIONS = ("iteration_index", "started_at", "plan_purpose", "is_regular", "iteration_time_s", "energy_j")
_OF_BLOCKS = (
    *("first_iteration_index", "started_at", "plan_purpose", "is_regular", "num_iterations"),
    *("sum_time_s", "median_time_s", "num_measured", "sum_energy_j", "median_energy_j"),
)
"""The columns that `Iterations` holds, in its order."""


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


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One iteration as recorded."""

    iteration_index: int
    started_at: datetime
    iteration_time_s: float
    energy_j: float | None
    plan_id: str | None
    plan_purpose: PlanPurpose | None
    is_regular: bool


def iteration_rows(reader: Reader, job_id: str) -> tuple[IterationRow, ...]:
    """Return the single iterations of a job, in order."""
    rows = reader.values(names_of(IterationRow), "iterations", {"job_id = ?": job_id}, order_by="iteration_index")
    return tuple(
        IterationRow(index, at, time_s, energy_j, plan_id, _PURPOSES[purpose], is_regular)
        for index, at, time_s, energy_j, plan_id, purpose, is_regular in rows
    )


@dataclass(frozen=True, slots=True)
class Iterations:
    """One or many iterations that are alike in plan and regularity; times and energies are medians beside sums."""

    first_index: int
    started_at: datetime
    purpose: PlanPurpose | None
    is_regular: bool
    num_iterations: int
    sum_time_s: float
    median_time_s: float
    num_measured: int
    sum_energy_j: float | None
    median_energy_j: float | None

    @property
    def measured_time_s(self) -> float:
        """How long those took whose energy was measured, taken in proportion."""
        return self.sum_time_s * self.num_measured / self.num_iterations


def all_iterations(reader: Reader, job_id: str) -> list[Iterations]:
    """Return a job's iterations in order, as single as they are still kept."""
    single = reader.values(_OF_ITERATIONS, "iterations", {"job_id = ?": job_id}, order_by="iteration_index")
    found = [
        Iterations(index, at, _PURPOSES[purpose], is_regular, 1, time_s, time_s, int(j is not None), j, j)
        for index, at, purpose, is_regular, time_s, j in single
    ]
    blocks = reader.values(_OF_BLOCKS, "iteration_blocks", {"job_id = ?": job_id}, order_by="first_iteration_index")
    found += [
        Iterations(index, at, _PURPOSES[purpose], is_regular, *figures)
        for index, at, purpose, is_regular, *figures in blocks
    ]
    return sorted(found, key=lambda own: own.first_index)


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


def job_summary(reader: Reader, job: Row, counted: Counted = WHOLE) -> JobSummary:
    """Return one row of the table of jobs with all that its iterations and plans say.

    Of a part of it, the baseline is still that of the whole job: full speed is what every saving refers to.
    """
    from gpuenergyd.core.savings import saving_between  # noqa: PLC0415  a report of ended jobs needs no statistics

    whole = all_iterations(reader, job.job_id)
    every = [own for own in whole if counted.holds(own.started_at)]
    regular = [own for own in every if own.is_regular]
    at_full_speed, under_plan = _regular(whole, PlanPurpose.BASELINE), _regular(every, PlanPurpose.TUNED)
    baseline, tuned = _typical(at_full_speed), _typical(under_plan)
    measured = saving_between(_points(at_full_speed), _points(under_plan))
    profiled = [own for own in every if own.purpose is PlanPurpose.PROFILE]
    of_job = {"job_id = ?": job.job_id}
    tuned_plans = reader.select(
        ("predicted_iteration_time_s", "predicted_energy_j", "lower_bound_j"),
        "plans",
        of_job | {"purpose = ?": PlanPurpose.TUNED, "issued_at < ?": counted.until},
        order_by="plan_epoch DESC",
        limit=1,
    )
    last_tuned = tuple(vars(tuned_plans[0]).values()) if tuned_plans else (None, None, None)
    would_be = reader.select(
        ("predicted_energy_j", "reason"), "plans", of_job | {"purpose = ?": PlanPurpose.WOULD_BE}, limit=1
    )
    if tuned.num_iterations:
        would_be = []
    ranks = reader.select("gpu_uuid", "ranks", of_job, order_by="pp_rank")
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
        gpu_uuids=tuple(row.gpu_uuid for row in ranks),
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
        predicted_iteration_time_s=last_tuned[0],
        predicted_energy_j=last_tuned[1],
        lower_bound_j=last_tuned[2],
        saving_interval=_bounds(measured.saving_ratio) if measured else None,
        slowdown_interval=_bounds(measured.slowdown_ratio) if measured else None,
        would_save_ratio=_change(baseline.energy_j, would_be[0].predicted_energy_j, sign=-1) if would_be else None,
        would_save_basis=would_be[0].reason if would_be else None,
        tags=decode_tags(job.tags),
        num_measured_profile_iterations=sum(own.num_measured for own in profiled),
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
