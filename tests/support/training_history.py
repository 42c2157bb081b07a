"""Jobs of trainings as a history has them: what the store returns, and the records that a daemon writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import SimpleNamespace
from zlib import crc32

from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.store import JobSummary
from gpuenergyd.store.encoding.compressed_json import encode_tags
from gpuenergyd.store.reading.summaries import job_summary
from gpuenergyd.store.reading.summary_inputs import SummaryInputs
from gpuenergyd.store.records import (
    EstimateRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    RankRecord,
    Record,
    RollupRecord,
)

NUM_TUNED = 4
BASELINE_J = 100.0


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One job; its ranks have pids that no other job has, unless the first one is given."""

    job_id: str
    started_at: datetime
    ended_at: datetime | None = None
    job_name: str = "gpt"
    run_key: str = "run-1"
    dp_rank: int = 0
    uid: int = 1000
    host: str | None = "host-0"
    num_gpus: int = 2
    first_pid: int = 0
    tags: tuple[tuple[str, str], ...] = ()

    @property
    def record(self) -> JobRecord:
        return JobRecord(
            self.job_id, self.job_name, self.run_key, self.dp_rank, "bubble-aware", "1f1b", "torch", True,
            self.num_gpus, 8, 0.0, self.uid, self.started_at, self.tags,
        )  # fmt: skip

    @property
    def summary(self) -> JobSummary:
        """The job without iterations, as the store reads it."""
        started = {name: getattr(self.record, name) for name in JobRecord.__slots__}
        ended = {"ended_at": self.ended_at, "end_reason": None, "outcome": None, "outcome_reason": None}
        row = SimpleNamespace(**{**started, **ended, "host": self.host, "tags": encode_tags(self.tags)})
        return job_summary(row, SummaryInputs())

    @property
    def ranks(self) -> tuple[RankRecord, ...]:
        """Its ranks, one per stage."""
        first_pid = self.first_pid or 16 * (crc32(self.job_id.encode()) % 2**20)
        return tuple(
            RankRecord(self.job_id, k, f"GPU-{self.job_id}-{k}", "A100", first_pid + k, self.uid, self.started_at)
            for k in range(self.num_gpus)
        )

    def records(
        self, energies_j: Sequence[float | None], saving: tuple[float, float, float] | None = None
    ) -> Iterator[Record]:
        """Yield the job, the energy of each of its GPUs in its first minute, and its iterations.

        `saving` is a ratio and its interval; without it, the daemon had no estimate.
        """
        yield self.record
        yield from self.ranks
        for rank, energy_j in zip(self.ranks, energies_j, strict=True):
            for bucket_s in (60, 3600):
                begin = self.started_at.replace(second=0, microsecond=0)
                begin = begin.replace(minute=0) if bucket_s == 3600 else begin
                times = (0.0, 0.0, 60.0) if energy_j is None else (60.0, 0.0, 0.0)
                yield RollupRecord(
                    bucket_s, rank.gpu_uuid, begin, self.job_id, energy_j, None, None, 1410.0, 60, None, *times
                )
        if saving is not None:
            ratio, low, high = saving
            yield EstimateRecord(
                self.job_id, 0, 1.0, BASELINE_J, 1.0, BASELINE_J * (1 - ratio), 9, 9, ratio, low, high, 0.0, -0.1, 0.1
            )
        for index in range(NUM_TUNED + 1):
            purpose = PlanPurpose.TUNED if index else PlanPurpose.BASELINE
            yield IterationRecord(
                self.job_id, index, self.started_at + timedelta(seconds=index), 1.0, BASELINE_J,
                "tuned-1" if index else BASELINE_PLAN_ID, purpose, is_regular=True,
            )  # fmt: skip
        if self.ended_at is not None:
            yield JobEndRecord(self.job_id, self.ended_at, "rank 0 was released")
