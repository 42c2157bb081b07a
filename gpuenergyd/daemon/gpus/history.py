"""Database records of one GPU: each sample, and its attributed energy in buckets of 1 s, 1 min and 1 h."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gpuenergyd.core.measurement.attribution import EnergyAttribution, EnergySlice
from gpuenergyd.core.measurement.telemetry import EnergyCounter
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.store.records import Record, RollupRecord, SampleRecord

BUCKETS_S = (1, 60, 3600)


@dataclass(slots=True)
class GpuHistory:
    """Converts samples of one GPU to records; an energy record follows once the energy of its interval is known."""

    gpu_uuid: str
    host_power_w: float = 0.0
    """The GPU's share of the power that is assumed for the rest of its host."""
    _attribution: EnergyAttribution = field(default_factory=EnergyAttribution)

    def records_of(self, sample: GpuSample, *, at: datetime, job_id: str, counter: EnergyCounter) -> Iterator[Record]:
        """Yield the records that a sample completes; `at` is the wall-clock time of the reading."""
        yield SampleRecord(
            self.gpu_uuid, at, sample.power_w, sample.total_energy_j, sample.sm_clock_mhz, sample.temperature_celsius
        )
        self._attribution.add_sample(
            mono_ns=sample.read_mono_ns, at=at, job_id=job_id, power_w=sample.power_w, sm_clock_mhz=sample.sm_clock_mhz
        )
        for piece in self._attribution.completed_slices(sample.read_mono_ns, counter):
            for bucket_s in BUCKETS_S:
                yield self._rollup(piece, bucket_s)

    def _rollup(self, piece: EnergySlice, bucket_s: int) -> RollupRecord:
        begun_s = int(piece.started_at.timestamp())
        return RollupRecord(
            bucket_s=bucket_s,
            gpu_uuid=self.gpu_uuid,
            # One-second buckets keep the exact start, so that two pieces in one second remain distinct.
            started_at=piece.started_at
            if bucket_s == 1
            else datetime.fromtimestamp(begun_s - begun_s % bucket_s, tz=UTC),
            job_id=piece.job_id,
            energy_j=piece.energy_j,
            mean_power_w=piece.mean_power_w,
            max_power_w=piece.max_power_w,
            mean_sm_clock_mhz=piece.mean_sm_clock_mhz,
            num_samples=piece.num_samples,
            estimated_j=piece.estimated_j,
            measured_s=piece.measured_s,
            estimated_s=piece.estimated_s,
            missing_s=piece.missing_s,
            assumed_host_j=self.host_power_w * (piece.measured_s + piece.estimated_s + piece.missing_s) or None,
        )
