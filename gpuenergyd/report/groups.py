"""Energy by user, tag, host, GPU or day. Every joule is counted once, for a job or as idle."""

import pwd
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache, cached_property
from typing import Any

from gpuenergyd.report.energy_use import NO_ENERGY, EnergyUse, add_known, sum_of
from gpuenergyd.report.job import JobReport
from gpuenergyd.report.rates import Rates, read_rates
from gpuenergyd.report.tariff import Tariff
from gpuenergyd.store import History
from gpuenergyd.store.reading.energy_sums import EnergySum

IDLE_GROUP = "(idle)"
"""The group of idle energy in groups of jobs."""
UNTAGGED_GROUP = "(none)"
UNKNOWN_HOST = "(unknown)"
"""The group of energy written by versions that did not record hosts."""
_LAST_MINUTE = timedelta(minutes=59)


@dataclass(slots=True)
class Group:
    """One row of a grouped report: the energy that jobs used and idle energy."""

    name: str
    job_ids: set[str] = field(default_factory=set)
    by_jobs: EnergyUse = NO_ENERGY
    idle: EnergyUse = NO_ENERGY
    saved_energy_j: float | None = None
    """The sum of the significant savings of its jobs."""
    num_not_significant: int = 0
    """The number of jobs that this sum leaves out: their saving may be chance."""
    host_energy_j: float | None = None
    """Energy of the host's processors and memory, if measured; not part of any other sum."""

    @property
    def energy_j(self) -> float | None:
        """Measured energy of jobs and idle time."""
        return add_known(self.by_jobs.energy_j, self.idle.energy_j)

    def add(self, part: EnergySum, rates: Rates) -> None:
        """Add a sum of attributed energy."""
        if part.job_id:
            self.job_ids.add(part.job_id)
            self.by_jobs = self.by_jobs.plus(part, rates)
        else:
            self.idle = self.idle.plus(part, rates)

    def add_saving(self, report: JobReport) -> None:
        """Add a job and its saving, or count it as left out."""
        self.job_ids.add(report.summary.job_id)
        self.saved_energy_j = add_known(self.saved_energy_j, report.saved_energy_j)
        self.num_not_significant += report.is_saving_left_out

    def to_dict(self, tariff: Tariff | None = None) -> dict[str, Any]:
        """Return all values by their JSON and CSV names; missing values are None."""
        total = sum_of((self.by_jobs, self.idle))
        return {
            "group": self.name,
            "num_jobs": len(self.job_ids),
            **energies_of(self.by_jobs, self.idle),
            "saved_energy_j": self.saved_energy_j,
            "num_not_significant": self.num_not_significant,
            "host_energy_j": self.host_energy_j,
            **total.carbon_to_dict(),
            "price_per_kwh": tariff.flat_price_per_kwh if tariff is not None else None,
            "cost": total.cost,
        }


def energies_of(by_jobs: EnergyUse, idle: EnergyUse) -> dict[str, Any]:
    """Return energies and durations of jobs and idle GPUs together by their JSON and CSV names."""
    total = sum_of((by_jobs, idle)).to_dict()
    return {
        "energy_j": total.pop("energy_j"),
        "job_energy_j": by_jobs.energy_j,
        "idle_energy_j": idle.energy_j,
        **total,
    }


@dataclass(frozen=True)
class EnergyQuery:
    """The history, time range and tariff of a grouped report (rates are cached, hence no slots)."""

    history: History
    since: datetime | None = None
    until: datetime | None = None
    tariff: Tariff | None = None
    only_jobs: bool = False
    """Whether idle energy is left out: it is unrelated to a report on one job."""

    @cached_property
    def rates(self) -> Rates:
        """What its energy is priced with."""
        return read_rates(self.history, self.tariff, since=self.since, until=self.until)

    def parts(
        self, *, by_gpu: bool = False, by_host: bool = False, zone: tzinfo | None = UTC, by_time: bool = False
    ) -> Iterable[EnergySum]:
        """Return energy sums; by time in hours, and in minutes if a day of the time zone starts within the hour."""
        rates = self.rates

        def is_split(hour: datetime) -> bool:
            has_midnight = by_time and _day(hour, zone) != _day(hour + _LAST_MINUTE, zone)
            return has_midnight or rates.is_split(hour)

        return self.history.energy_sums(
            since=self.since,
            until=self.until,
            by_gpu=by_gpu,
            by_host=by_host,
            by_time=by_time or rates.is_by_time,
            is_split=is_split if by_time or rates.intensities else None,
        )


def groups_by_user(query: EnergyQuery, reports: Sequence[JobReport]) -> tuple[Group, ...]:
    """Return one group per user and one of idle energy."""
    return _groups_of_jobs(query, reports, name=lambda report: user_name(report.summary.uid))


@cache
def user_name(uid: int) -> str:
    """Return a user's name on this host, or the uid where it has none; the name in a job's tags is not verified."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def groups_by_tag(query: EnergyQuery, reports: Sequence[JobReport], tag: str) -> tuple[Group, ...]:
    """Return one group per value of a tag, one of jobs without the tag and one of idle energy."""
    return _groups_of_jobs(query, reports, name=lambda report: dict(report.summary.tags).get(tag, UNTAGGED_GROUP))


def groups_by_gpu(query: EnergyQuery) -> tuple[Group, ...]:
    """Return one group per GPU."""
    return _groups(query.parts(by_gpu=True), query.rates, name=lambda part: part.gpu_uuid or "")


def groups_by_host(query: EnergyQuery, reports: Sequence[JobReport]) -> tuple[Group, ...]:
    """Return one group per host that shares the history, with the energy of its processors and memory."""
    reported = {report.summary.job_id for report in reports}
    parts = (part for part in query.parts(by_host=True) if not query.only_jobs or part.job_id in reported)
    groups = {group.name: group for group in _groups(parts, query.rates, name=lambda part: part.host or UNKNOWN_HOST)}
    for report in reports:
        name = report.summary.host or UNKNOWN_HOST
        groups.setdefault(name, Group(name)).add_saving(report)
    for row in () if query.only_jobs else query.history.host_energy(since=query.since, until=query.until):
        if (of_host := groups.get(row.host or UNKNOWN_HOST)) is not None:
            of_host.host_energy_j = add_known(of_host.host_energy_j, row.energy_j)
    return tuple(groups[name] for name in sorted(groups))


def groups_by_day(query: EnergyQuery, *, zone: tzinfo | None) -> tuple[Group, ...]:
    """Return one group per day in a time zone; None: the zone of this host."""
    return _groups_by_period(query, zone, name=lambda at: _day(at, zone))


def groups_by_month(query: EnergyQuery, *, zone: tzinfo | None) -> tuple[Group, ...]:
    """Return one group per month in a time zone; None: the zone of this host."""
    return _groups_by_period(query, zone, name=lambda at: at.astimezone(zone).strftime("%Y-%m"))


def _groups_by_period(query: EnergyQuery, zone: tzinfo | None, *, name: Callable[[datetime], str]) -> tuple[Group, ...]:
    periods = _groups(
        query.parts(by_time=True, zone=zone),
        query.rates,
        name=lambda part: name(part.started_at) if part.started_at else "",
    )
    by_name = {period.name: period for period in periods}
    for row in query.history.host_energy(since=query.since, until=query.until):
        period = by_name.get(name(row.started_at))
        if period is not None:
            period.host_energy_j = add_known(period.host_energy_j, row.energy_j)
    return periods


def _day(at: datetime, zone: tzinfo | None) -> str:
    return at.astimezone(zone).date().isoformat()


def _groups_of_jobs(
    query: EnergyQuery, reports: Sequence[JobReport], *, name: Callable[[JobReport], str]
) -> tuple[Group, ...]:
    """Return groups of jobs; the energy of a job without a report is in no group."""
    name_of = {report.summary.job_id: name(report) for report in reports}
    if not query.only_jobs:
        name_of[""] = IDLE_GROUP
    parts = (part for part in query.parts() if part.job_id in name_of)
    groups = {group.name: group for group in _groups(parts, query.rates, name=lambda part: name_of[part.job_id])}
    for report in reports:
        groups.setdefault(name(report), Group(name(report))).add_saving(report)
    return tuple(groups[key] for key in sorted(groups, key=lambda key: (key == IDLE_GROUP, key)))


def _groups(parts: Iterable[EnergySum], rates: Rates, *, name: Callable[[EnergySum], str]) -> tuple[Group, ...]:
    groups: dict[str, Group] = defaultdict(lambda: Group(""))
    for part in parts:
        groups[name(part)].add(part, rates)
    for key, group in groups.items():
        group.name = key
    return tuple(groups[key] for key in sorted(groups))
