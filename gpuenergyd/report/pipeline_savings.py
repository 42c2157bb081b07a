"""Measured saving of a pipeline across hosts: measured for the whole, not the sum over its members."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuenergyd.report.job import JobReport
from gpuenergyd.store import History
from gpuenergyd.store.reading.trainings import Training
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
