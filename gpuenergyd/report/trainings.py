"""The energy of each training, and within it of each replica, pipeline stage, host and GPU; no joule counts twice."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd.quantities.energy_use import NO_ENERGY, EnergyUse, add_known, sum_of
from gpuenergyd.quantities.rates import Rates
from gpuenergyd.report.groups import IDLE_GROUP, EnergyQuery, energies_of, training_name, user_name
from gpuenergyd.report.job import JobReport
from gpuenergyd.report.totals import saved_total, totals_dict
from gpuenergyd.store import History
from gpuenergyd.store.reading.trainings import Training, TrainingPart, find_trainings
from gpuenergyd.store.records import EstimateRecord, pipeline_id_of

_SHOWN = (
    *("baseline_time_s", "baseline_energy_j", "iteration_time_s", "energy_per_iteration_j"),
    *("saving_ratio", "saving_low_ratio", "saving_high_ratio"),
    *("slowdown_ratio", "slowdown_low_ratio", "slowdown_high_ratio"),
)


@dataclass(frozen=True, slots=True)
class PipelineSaving:
    """One replica whose stages are on several hosts; the daemon of its leading member measured the whole."""

    dp_rank: int
    leader: JobReport
    estimate: EstimateRecord

    @property
    def report(self) -> JobReport:
        """The leading member's report, with the saving of the whole pipeline instead of its own."""
        named = self.estimate
        interval = slowdown = None
        if named.saving_low_ratio is not None and named.saving_high_ratio is not None:
            interval = named.saving_low_ratio, named.saving_high_ratio
        if named.slowdown_low_ratio is not None and named.slowdown_high_ratio is not None:
            slowdown = named.slowdown_low_ratio, named.slowdown_high_ratio
        summary = replace(
            self.leader.summary,
            since_iteration=named.since_iteration,
            baseline_time_s=named.baseline_time_s,
            baseline_energy_j=named.baseline_energy_j,
            iteration_time_s=named.iteration_time_s,
            energy_per_iteration_j=named.energy_per_iteration_j,
            saving_ratio=named.saving_ratio,
            slowdown_ratio=named.slowdown_ratio,
            saving_interval=interval,
            slowdown_interval=slowdown,
        )
        return JobReport(summary, self.leader.read_iterations)

    def to_dict(self) -> dict[str, Any]:
        """Return the values of the whole pipeline, over all its hosts, by their JSON names."""
        return {"dp_rank": self.dp_rank, **{name: getattr(self.estimate, name) for name in _SHOWN}}


def pipeline_savings(
    history: History, trainings: Sequence[Training], reports: Mapping[str, JobReport]
) -> Mapping[str, tuple[PipelineSaving, ...]]:
    """Return, by training, its pipelines across hosts whose leading members are in the history.

    The key is the id of the training's first job.
    """
    leaders = {
        pipeline_id_of(part.job.job_id): part
        for training in trainings
        for part in training.parts
        if part.key.stage == 0 and part.key.stage_rank == 0
    }
    estimates = {record.job_id: record for record in history.estimates(list(leaders))} if leaders else {}
    return {
        training.parts[0].job.job_id: tuple(
            PipelineSaving(part.job.dp_rank, reports[part.job.job_id], found)
            for part in training.parts
            if (found := estimates.get(pipeline_id_of(part.job.job_id))) is not None
        )
        for training in trainings
    }


_UNITS_PER_J = 1024
"""Joules are rounded to 1/1024, the resolution of NVML's counters, so that sums of any parts are exact."""
_MAX_NAMED = 3
"""How many trainings a line names at most."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The energy that one GPU used for one job; `gpu_uuid` is None for a job whose ranks are unknown."""

    part: TrainingPart
    gpu_uuid: str | None
    use: EnergyUse

    @property
    def dp_rank(self) -> int:
        """The replica of the job."""
        return self.part.job.dp_rank

    @property
    def pp_rank(self) -> int | None:
        """The pipeline stage of the GPU, None if unknown."""
        return None if self.gpu_uuid is None else self.part.stage_of(self.gpu_uuid)

    @property
    def host(self) -> str | None:
        """The host of the job, None if a version recorded the job that did not record hosts."""
        return self.part.job.host


@dataclass(frozen=True)
class TrainingReport:
    """The report of one training: what its GPUs used and what its jobs saved. Without slots, as values are cached."""

    training: Training
    jobs: Mapping[str, JobReport]
    """The reports of its jobs by ID."""
    shares: tuple[GpuShare, ...]
    wholes: tuple[PipelineSaving, ...] = ()
    """Savings of the pipelines that span hosts, if the history has the job of the leading member."""

    @cached_property
    def use(self) -> EnergyUse:
        return sum_of(share.use for share in self.shares)

    @property
    def name(self) -> str:
        """The name of its job and when it started, in UTC."""
        return training_name(self.training)

    @cached_property
    def measured(self) -> tuple[JobReport, ...]:
        """The reports whose savings are added up.

        For a pipeline across hosts this is the report of the whole pipeline instead of those of its members, if the
        history has all ranks of the training: otherwise the whole cannot be compared with its GPUs.
        """
        training = self.training
        is_whole = training.world_size is not None and not training.is_incomplete
        is_whole = is_whole and not any(report.is_partial for report in self.jobs.values())
        wholes = {whole.dp_rank: whole.report for whole in self.wholes} if is_whole else {}
        members = {part.job.job_id for part in training.parts if part.key.stage is not None}
        own = (r for job_id, r in self.jobs.items() if job_id not in members or r.summary.dp_rank not in wholes)
        return *wholes.values(), *own

    @property
    def saving_ratios(self) -> tuple[float | None, float | None, float | None]:
        """The saving of its plans as a ratio of the energy of as many iterations at full speed, with its 95 % interval.

        All three are None unless the savings of all jobs can be counted.
        """
        full_speed_j = None
        tuned = [report for report in self.measured if report.summary.num_tuned_iterations]
        for report in tuned:
            if report.saved_energy_j is None or report.summary.baseline_energy_j is None:
                return None, None, None
            of_report_j = report.summary.baseline_energy_j * report.summary.num_tuned_iterations
            full_speed_j = add_known(full_speed_j, of_report_j)
        total = saved_total(tuned)
        if total.saved_energy_j is None or not full_speed_j:
            return None, None, None
        ratio = total.saved_energy_j / full_speed_j
        if total.interval_j is None:
            return ratio, None, None
        low_j, high_j = total.interval_j
        return ratio, low_j / full_speed_j, high_j / full_speed_j

    def to_dict(self, rates: Rates) -> dict[str, Any]:
        """Return the values of the training by their JSON and CSV names; missing values are None."""
        training, first = self.training, self.training.parts[0]
        hosts = {share.host for share in self.shares} - {None}
        stages = {share.pp_rank for share in self.shares} - {None}
        return {
            "group": self.name,
            "job_name": training.job_name,
            "user": user_name(first.job.uid),
            "run_key": first.key.name,
            "is_simulated": any(part.job.is_simulated for part in training.parts),
            "started_at": training.started_at,
            "ended_at": training.ended_at,
            "num_jobs": len(training.parts),
            "num_hosts": len(hosts) or None,
            "num_replicas": len({share.dp_rank for share in self.shares}),
            "num_stages": len(stages) or None,
            "num_gpus": len(_gpus(self.shares)) or None,
            "num_ranks": training.num_ranks or None,
            "world_size": training.world_size,
            **energies_of(self.use, NO_ENERGY),
            **self.use.carbon_to_dict(),
            **_savings(self.jobs.values(), self.measured),
            **dict(zip(("saving_ratio", "saving_low_ratio", "saving_high_ratio"), self.saving_ratios, strict=True)),
            **rates.to_dict(),
            "cost": self.use.cost,
        }

    def parts_to_dict(self) -> dict[str, Any]:
        """Return the parts of the training by their JSON names; the energies of each list add up to the training's."""
        return {
            "by_replica": self._by("dp_rank"),
            "by_stage": self._by("pp_rank"),
            "by_host": self._by("host"),
            "by_gpu": self._by("host", "gpu_uuid", "dp_rank", "pp_rank"),
            "pipelines": [whole.to_dict() for whole in self.wholes],
        }

    def _by(self, *names: str) -> list[dict[str, Any]]:
        """Return one mapping per distinct value of these attributes; savings only where no job has several values."""
        found: dict[tuple[Any, ...], list[GpuShare]] = defaultdict(list)
        values_of_job: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
        for share in self.shares:
            values = tuple(getattr(share, name) for name in names)
            found[values].append(share)
            values_of_job[share.part.job.job_id].add(values)
        rows = []
        for values in sorted(found, key=lambda values: [(value is None, value or 0) for value in values]):
            shares = found[values]
            job_ids = {share.part.job.job_id for share in shares}
            is_whole = all(len(values_of_job[job_id]) == 1 for job_id in job_ids)
            reports = [self.jobs[job_id] for job_id in sorted(job_ids)]
            savings = _savings(reports, self._measured_of(reports) if names == ("dp_rank",) else reports)
            rows.append(
                {
                    **dict(zip(names, values, strict=True)),
                    "num_jobs": len(job_ids),
                    "num_gpus": len(_gpus(shares)) or None,
                    **(use := sum_of(share.use for share in shares)).to_dict(),
                    **use.carbon_to_dict(),
                    **(savings if is_whole else dict.fromkeys(savings)),
                    "cost": use.cost,
                }
            )
        return rows

    def _measured_of(self, reports: Sequence[JobReport]) -> Sequence[JobReport]:
        """Return the reports in `measured` of the replicas of these jobs."""
        replicas = {report.summary.dp_rank for report in reports}
        return [report for report in self.measured if report.summary.dp_rank in replicas]


@dataclass(frozen=True, slots=True)
class TrainingsReport:
    """The trainings of a history in order of their start, and the energy that GPUs used while they ran no job."""

    trainings: tuple[TrainingReport, ...]
    idle: EnergyUse | None
    """None if the report leaves out idle energy, or if there is none."""
    rates: Rates

    def rows(self, *, has_parts: bool = False) -> list[dict[str, Any]]:
        """Return one mapping per training, with its parts if asked for, and one for idle energy if there is any."""
        rows = [
            {**training.to_dict(self.rates), **(training.parts_to_dict() if has_parts else {})}
            for training in self.trainings
        ]
        if self.idle is not None:
            idle = {"group": IDLE_GROUP, "num_jobs": 0, **energies_of(NO_ENERGY, self.idle)}
            prices = {**self.idle.carbon_to_dict(), **self.rates.to_dict(), "cost": self.idle.cost}
            rows.append({**dict.fromkeys(rows[0] if rows else ()), **idle, **prices})
        return rows

    def incomplete_line(self) -> str:
        """Return one line on the trainings some of whose ranks the history lacks; empty if no training is known to."""
        found = [each for each in self.trainings if each.training.is_incomplete]
        if not found:
            return ""
        named = [
            f"{each.name} ({each.training.num_ranks} of {count_text(world_size, 'rank')})"
            for each in found[:_MAX_NAMED]
            if (world_size := each.training.world_size) is not None
        ]
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        return (
            f"only a part of these trainings is in this history and period: {', '.join(named)}{more}; other ranks are"
            " in the histories of their own hosts, or have not joined"
        )


def trainings_report(query: EnergyQuery, reports: Sequence[JobReport]) -> TrainingsReport:
    """Return the trainings that these jobs belong to; energy of jobs without a report is left out."""
    by_id = {report.summary.job_id: report for report in reports}
    use_of: dict[tuple[str, str], EnergyUse] = defaultdict(EnergyUse)
    idle: EnergyUse | None = None
    for part in query.parts(by_gpu=True):
        if part.job_id in by_id:
            key = part.job_id, part.gpu_uuid or ""
            use_of[key] = use_of[key].plus(part, query.rates)
        elif not part.job_id and not query.only_jobs:
            idle = (idle or NO_ENERGY).plus(part, query.rates)
    gpus_of: dict[str, set[str]] = defaultdict(set)
    ranks = query.history.ranks(list(by_id))
    for job_id, gpu_uuid in (*use_of, *((rank.job_id, rank.gpu_uuid) for rank in ranks)):
        gpus_of[job_id].add(gpu_uuid)
    found = find_trainings((report.summary for report in reports), ranks)
    wholes = pipeline_savings(query.history, found, by_id)
    return TrainingsReport(
        tuple(
            TrainingReport(
                training,
                {part.job.job_id: by_id[part.job.job_id] for part in training.parts},
                tuple(
                    GpuShare(part, gpu_uuid, _exact(use_of.get((part.job.job_id, gpu_uuid or ""), NO_ENERGY)))
                    for part in training.parts
                    for gpu_uuid in (sorted(gpus_of[part.job.job_id]) or (None,))
                ),
                wholes[training.parts[0].job.job_id],
            )
            for training in found
        ),
        idle,
        query.rates,
    )


def _exact(use: EnergyUse) -> EnergyUse:
    """Return an energy use with rounded joules, so that sums are exact in floating point."""

    def rounded(energy_j: float | None) -> float | None:
        return None if energy_j is None else round(energy_j * _UNITS_PER_J) / _UNITS_PER_J

    return replace(use, energy_j=rounded(use.energy_j), estimated_j=rounded(use.estimated_j))


def _gpus(shares: Iterable[GpuShare]) -> set[tuple[str | None, str]]:
    return {(share.host, share.gpu_uuid) for share in shares if share.gpu_uuid is not None}


def _savings(reports: Iterable[JobReport], measured: Sequence[JobReport]) -> dict[str, Any]:
    """Return by name the savings of `measured`, only significant ones, and the emissions that `reports` saved."""
    totals = {**totals_dict(measured), "saved_carbon_g": totals_dict(tuple(reports))["saved_carbon_g"]}
    names = ("saved_energy_j", "saved_energy_low_j", "saved_energy_high_j", "num_jobs_counted", "num_not_significant")
    return {name: totals[name] for name in (*names, "saved_carbon_g")}
