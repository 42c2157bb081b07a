"""Energy by one or two keys, such as user and month. Every joule is counted once, for a job or as idle."""

import pwd
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache, cached_property
from typing import Any

from gpuenergyd.quantities.energy_use import NO_ENERGY, EnergyUse, add_known, sum_of
from gpuenergyd.quantities.rates import Rates, read_rates
from gpuenergyd.quantities.tariff import Tariff
from gpuenergyd.report.group_keys import PERIODS, WITHOUT_JOBS, GroupBy
from gpuenergyd.report.job import JobReport
from gpuenergyd.store import History
from gpuenergyd.store.reading.energy_sums import EnergySum
from gpuenergyd.store.reading.trainings import Training, find_trainings

IDLE_GROUP = "(idle)"
"""The group of idle energy in reports grouped by job."""
UNTAGGED_GROUP = "(none)"
UNKNOWN_HOST = "(unknown)"
"""The group of energy recorded by versions that did not record hosts."""
_OF_HOSTS = PERIODS | {GroupBy.HOST}
"""Keys that also apply to the energy of a host's processors and memory."""
_OF_GPUS = WITHOUT_JOBS | {GroupBy.HOST}
"""Keys that also apply to energy without a job."""
_LAST_MINUTE = timedelta(minutes=59)


@dataclass(slots=True)
class Group:
    """One row of a grouped report: the energy used by jobs, and idle energy."""

    labels: Mapping[str, str]
    """Value of the key under the name `group`, or values of two keys under their names."""
    job_ids: set[str] = field(default_factory=set)
    by_jobs: EnergyUse = NO_ENERGY
    idle: EnergyUse = NO_ENERGY
    saved_energy_j: float | None = None
    """Sum of the significant savings of its jobs."""
    num_not_significant: int = 0
    """Number of jobs left out of this sum because their saving is not significant."""
    host_energy_j: float | None = None
    """Energy of the host's processors and memory, if measured; not included in other sums."""

    @property
    def name(self) -> str:
        """The group's values of the keys."""
        return ", ".join(self.labels.values())

    @property
    def energy_j(self) -> float | None:
        """Measured energy of jobs and idle time."""
        return add_known(self.by_jobs.energy_j, self.idle.energy_j)

    def add(self, part: EnergySum, rates: Rates) -> None:
        if part.job_id:
            self.job_ids.add(part.job_id)
            self.by_jobs = self.by_jobs.plus(part, rates)
        else:
            self.idle = self.idle.plus(part, rates)

    def add_saving(self, report: JobReport) -> None:
        """Add a job and its saving; if the saving is not significant, only count the job."""
        self.job_ids.add(report.summary.job_id)
        self.saved_energy_j = add_known(self.saved_energy_j, report.saved_energy_j)
        self.num_not_significant += report.is_saving_left_out

    def to_dict(self, rates: Rates | None = None) -> dict[str, Any]:
        """Return all values by their JSON and CSV names; missing values are None."""
        total = sum_of((self.by_jobs, self.idle))
        return {
            **self.labels,
            "num_jobs": len(self.job_ids),
            **energies_of(self.by_jobs, self.idle),
            "saved_energy_j": self.saved_energy_j,
            "num_not_significant": self.num_not_significant,
            "host_energy_j": self.host_energy_j,
            **total.carbon_to_dict(),
            **(rates or Rates()).to_dict(),
            "cost": total.cost,
        }


def energies_of(by_jobs: EnergyUse, idle: EnergyUse) -> dict[str, Any]:
    """Return energies and durations of jobs and idle GPUs together, by their JSON and CSV names."""
    total = sum_of((by_jobs, idle)).to_dict()
    return {
        "energy_j": total.pop("energy_j"),
        "job_energy_j": by_jobs.energy_j,
        "idle_energy_j": idle.energy_j,
        **total,
    }


@dataclass(frozen=True)
class EnergyQuery:
    """The history, time range, tariff and PUE of a grouped report (rates are cached, hence no slots)."""

    history: History
    since: datetime | None = None
    until: datetime | None = None
    tariff: Tariff | None = None
    pue: float = 1.0
    only_jobs: bool = False
    """Whether to leave out idle energy, which is unrelated to a report on one job."""

    @cached_property
    def rates(self) -> Rates:
        """Rates used for the price and emissions of its energy."""
        return read_rates(self.history, self.tariff, pue=self.pue, since=self.since, until=self.until)

    def parts(
        self, *, by_gpu: bool = False, by_host: bool = False, zone: tzinfo | None = UTC, by_time: bool = False
    ) -> Iterable[EnergySum]:
        """Return energy sums; by time in hours, or in minutes if a day of the time zone starts within the hour."""
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


def grouped(
    query: EnergyQuery,
    reports: Sequence[JobReport],
    keys: Sequence[GroupBy],
    *,
    tag: str = "",
    zone: tzinfo | None = None,
) -> tuple[Group, ...]:
    """Return one group per combination of values of one or two keys; days and months are those of a time zone.

    With keys of jobs, energy of jobs without a report is left out. Savings are known only for whole jobs, so groups by
    GPU, day or month have none. With `zone` None, the time zone of this host is used.
    """
    found = _Grouping(query, reports, keys, tag, zone)
    groups: dict[tuple[str, ...], Group] = {}

    def group_of(names: tuple[str, ...]) -> Group:
        labels = keys if len(keys) > 1 else ("group",)
        return groups.setdefault(names, Group(dict(zip(labels, names, strict=True))))

    for part in query.parts(
        by_gpu=GroupBy.GPU in keys, by_host=GroupBy.HOST in keys, by_time=not PERIODS.isdisjoint(keys), zone=zone
    ):
        if (names := found.names_of_energy(part)) is not None:
            group_of(names).add(part, query.rates)
    for report in reports if WITHOUT_JOBS.isdisjoint(keys) else ():
        group_of(found.names_of_job(report)).add_saving(report)
    if {*keys} <= _OF_HOSTS and not query.only_jobs:
        for row in query.history.host_energy(since=query.since, until=query.until):
            if (group := groups.get(found.names_at(row.host, row.started_at))) is not None:
                group.host_energy_j = add_known(group.host_energy_j, row.energy_j)
    return tuple(groups[names] for names in sorted(groups, key=lambda names: [(n == IDLE_GROUP, n) for n in names]))


@cache
def user_name(uid: int) -> str:
    """Return a user's name on this host, or the uid if it has none; the name in a job's tags is not verified."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def training_name(training: Training) -> str:
    """Return the job name of a training and its start time in UTC."""
    return f"{training.job_name} {training.started_at:%Y-%m-%d %H:%M}"


class _Grouping:
    """The group of each energy sum, of each job, and of each hour of a host, by the keys of a report."""

    def __init__(
        self, query: EnergyQuery, reports: Sequence[JobReport], keys: Sequence[GroupBy], tag: str, zone: tzinfo | None
    ) -> None:
        self._keys, self._zone = keys, zone
        self._only_jobs = query.only_jobs
        trainings: dict[str, str] = {}
        if GroupBy.TRAINING in keys:
            ranks = query.history.ranks([report.summary.job_id for report in reports])
            for training in find_trainings((report.summary for report in reports), ranks):
                trainings |= {part.job.job_id: training_name(training) for part in training.parts}
        self._names_of_job = {
            report.summary.job_id: {
                GroupBy.JOB: report.summary.job_id,
                GroupBy.TRAINING: trainings.get(report.summary.job_id, ""),
                GroupBy.USER: user_name(report.summary.uid),
                GroupBy.TAG: dict(report.summary.tags).get(tag, UNTAGGED_GROUP),
                GroupBy.HOST: report.summary.host or UNKNOWN_HOST,
            }
            for report in reports
        }

    def names_of_energy(self, part: EnergySum) -> tuple[str, ...] | None:
        """Return the value of each key, None for energy that belongs to no group."""
        of_job = self._names_of_job.get(part.job_id)
        if of_job is None and (self._only_jobs or (part.job_id and not {*self._keys} <= _OF_GPUS)):
            return None
        names: list[str] = []
        for key in self._keys:
            match key:
                case GroupBy.GPU:
                    names.append(part.gpu_uuid or "")
                case GroupBy.HOST:
                    names.append(part.host or UNKNOWN_HOST)
                case GroupBy.DAY | GroupBy.MONTH:
                    names.append(_period(key, part.started_at, self._zone))
                case _:
                    names.append(IDLE_GROUP if of_job is None else of_job[key])
        return tuple(names)

    def names_of_job(self, report: JobReport) -> tuple[str, ...]:
        """Return the value of each key for a whole job."""
        of_job = self._names_of_job[report.summary.job_id]
        return tuple(of_job[key] for key in self._keys)

    def names_at(self, host: str, at: datetime) -> tuple[str, ...]:
        """Return the value of each key for a host's energy in the hour at an instant."""
        return tuple(
            host or UNKNOWN_HOST if key is GroupBy.HOST else _period(key, at, self._zone) for key in self._keys
        )


def _period(key: GroupBy, at: datetime | None, zone: tzinfo | None) -> str:
    if at is None:
        return ""
    return _day(at, zone) if key is GroupBy.DAY else at.astimezone(zone).strftime("%Y-%m")


def _day(at: datetime, zone: tzinfo | None) -> str:
    return at.astimezone(zone).date().isoformat()
