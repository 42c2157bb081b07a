"""Energy by user, tag, host, GPU or day, from the ledger: each joule of a GPU counted once, for a job or for nobody."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from gpuenergyd.report.energy_use import NOTHING_USED, EnergyUse, added
from gpuenergyd.report.job import JobReport
from gpuenergyd.report.tariff import Tariff
from gpuenergyd.store import History
from gpuenergyd.store.reading.energy_sums import EnergySum

IDLE_GROUP = "(idle)"
"""What nobody's jobs used, where groups are of jobs."""
UNTAGGED_GROUP = "(none)"
UNKNOWN_HOST = "(unknown)"
"""Of what was written before hosts were noted."""
_ALL_BUT_THE_NEXT = timedelta(minutes=59)


@dataclass(slots=True)
class Group:
    """One line of a grouped report: what jobs used, what was used for nobody, and how well that is known."""

    name: str
    job_ids: set[str] = field(default_factory=set)
    by_jobs: EnergyUse = NOTHING_USED
    idle: EnergyUse = NOTHING_USED
    saved_energy_j: float | None = None
    host_energy_j: float | None = None
    """What processors and memory of the host used beside the GPUs, where that was measured; in no other sum."""

    @property
    def energy_j(self) -> float | None:
        """Measured energy for jobs and for nobody together."""
        return added(self.by_jobs.energy_j, self.idle.energy_j)

    def take(self, part: EnergySum, tariff: Tariff | None) -> None:
        """Add one part of the ledger."""
        if part.job_id:
            self.job_ids.add(part.job_id)
            self.by_jobs = self.by_jobs.plus(part, tariff)
        else:
            self.idle = self.idle.plus(part, tariff)

    def figures(self, tariff: Tariff | None = None) -> dict[str, Any]:
        """Return everything by name, as JSON and CSV give it; a missing figure is None."""
        return {
            "group": self.name,
            "num_jobs": len(self.job_ids),
            "energy_j": self.energy_j,
            "job_energy_j": self.by_jobs.energy_j,
            "idle_energy_j": self.idle.energy_j,
            "estimated_j": added(self.by_jobs.estimated_j, self.idle.estimated_j),
            "measured_s": self.by_jobs.measured_s + self.idle.measured_s,
            "estimated_s": self.by_jobs.estimated_s + self.idle.estimated_s,
            "missing_s": self.by_jobs.missing_s + self.idle.missing_s,
            "saved_energy_j": self.saved_energy_j,
            "host_energy_j": self.host_energy_j,
            "price_per_kwh": tariff.flat_price_per_kwh if tariff is not None else None,
            "cost": added(self.by_jobs.cost, self.idle.cost),
        }


@dataclass(frozen=True, slots=True)
class Span:
    """Which part of the history is added up, and at what prices."""

    history: History
    since: datetime | None = None
    until: datetime | None = None
    tariff: Tariff | None = None
    only_jobs: bool = False
    """Whether what was used for nobody is left out: of one job it says nothing."""

    def parts(
        self, *, by_gpu: bool = False, by_host: bool = False, zone: tzinfo | None = UTC, by_time: bool = False
    ) -> Iterable[EnergySum]:
        """Return the ledger's sums; by time in hours, and in minutes where a day of the zone begins within an hour."""
        has_periods = self.tariff is not None and self.tariff.periods != ()

        def is_split(hour: datetime) -> bool:
            return _day(hour, zone) != _day(hour + _ALL_BUT_THE_NEXT, zone)

        return self.history.energy_sums(
            since=self.since,
            until=self.until,
            by_gpu=by_gpu,
            by_host=by_host,
            by_time=by_time or has_periods,
            is_split=is_split if by_time else None,
        )


def groups_by_user(span: Span, reports: Sequence[JobReport]) -> tuple[Group, ...]:
    """Return one group per user who ran jobs, and what was used for nobody."""
    return _of_jobs(span, reports, name=lambda report: str(report.summary.uid))


def groups_by_tag(span: Span, reports: Sequence[JobReport], tag: str) -> tuple[Group, ...]:
    """Return one group per value of a tag, jobs without it together, and what was used for nobody."""
    return _of_jobs(span, reports, name=lambda report: dict(report.summary.tags).get(tag, UNTAGGED_GROUP))


def groups_by_gpu(span: Span) -> tuple[Group, ...]:
    """Return one group per GPU: jobs and idling."""
    return _added_up(span.parts(by_gpu=True), span.tariff, name=lambda part: part.gpu_uuid or "")


def groups_by_host(span: Span, reports: Sequence[JobReport]) -> tuple[Group, ...]:
    """Return one group per host that shares the history: its jobs and its idling, processors and memory beside."""
    wanted = {report.summary.job_id for report in reports}
    parts = (part for part in span.parts(by_host=True) if not span.only_jobs or part.job_id in wanted)
    groups = {group.name: group for group in _added_up(parts, span.tariff, name=lambda part: part.host or UNKNOWN_HOST)}
    for report in reports:
        name = report.summary.host or UNKNOWN_HOST
        group = groups.setdefault(name, Group(name))
        group.job_ids.add(report.summary.job_id)
        group.saved_energy_j = added(group.saved_energy_j, report.saved_energy_j)
    for row in () if span.only_jobs else span.history.host_energy(since=span.since, until=span.until):
        if (own := groups.get(row.host or UNKNOWN_HOST)) is not None:
            own.host_energy_j = added(own.host_energy_j, row.energy_j)
    return tuple(groups[name] for name in sorted(groups))


def groups_by_day(span: Span, *, zone: tzinfo | None) -> tuple[Group, ...]:
    """Return one group per day of a time zone (None: this host's)."""
    days = _added_up(
        span.parts(by_time=True, zone=zone),
        span.tariff,
        name=lambda part: _day(part.started_at, zone) if part.started_at else "",
    )
    by_name = {day.name: day for day in days}
    for row in span.history.host_energy(since=span.since, until=span.until):
        day = by_name.get(_day(row.started_at, zone))
        if day is not None:
            day.host_energy_j = added(day.host_energy_j, row.energy_j)
    return days


def _day(at: datetime, zone: tzinfo | None) -> str:
    return at.astimezone(zone).date().isoformat()


def _of_jobs(span: Span, reports: Sequence[JobReport], *, name: Callable[[JobReport], str]) -> tuple[Group, ...]:
    """Return groups of jobs; a job that is in the ledger but not among the reports is in none, its energy neither."""
    name_of = {report.summary.job_id: name(report) for report in reports}
    if not span.only_jobs:
        name_of[""] = IDLE_GROUP
    parts = (part for part in span.parts() if part.job_id in name_of)
    groups = {group.name: group for group in _added_up(parts, span.tariff, name=lambda part: name_of[part.job_id])}
    for report in reports:
        group = groups.setdefault(name(report), Group(name(report)))
        group.job_ids.add(report.summary.job_id)
        group.saved_energy_j = added(group.saved_energy_j, report.saved_energy_j)
    return tuple(groups[key] for key in sorted(groups, key=lambda key: (key == IDLE_GROUP, key)))


def _added_up(
    parts: Iterable[EnergySum], tariff: Tariff | None, *, name: Callable[[EnergySum], str]
) -> tuple[Group, ...]:
    groups: dict[str, Group] = defaultdict(lambda: Group(""))
    for part in parts:
        groups[name(part)].take(part, tariff)
    for key, group in groups.items():
        group.name = key
    return tuple(groups[key] for key in sorted(groups))
