"""What the core knows of each GPU: who it is, how it is, what it was asked for, and what the worker saw of it."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from gpuenergyd.core.policy import GpuView
from gpuenergyd.core.switching import LatencyBasis, ObservedSwitch, SwitchCalibration, constant_latency
from gpuenergyd.core.telemetry import ClockHistory, EnergyCounter
from gpuenergyd.errors import GpuNotFoundError, JobError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link_messages import ClockSet, GpuHealth, GpuSample
from gpuenergyd.store.records import RollupRecord

_NS_PER_S = 1_000_000_000
_KEPT_S = 900
"""How long clock changes and counter edges are kept: longer than any iteration that is worth a plan."""
_ASSUMED_SWITCH_LATENCY_S = 0.03
"""Until enough clock changes were seen on this host, where nobody published a figure: above what an A100 needs."""
_SAME_CLOCK_MHZ = 16
"""One step of a GPU's clocks: what is read further away from what was asked for came about by something else."""
_ENERGY_GRACE_NS = 2 * _NS_PER_S
BUCKET_S = 1
LONG_BUCKET_S = 60


class ClaimKind(StrEnum):
    """For whom a GPU is taken."""

    JOB = "job"
    ADMINISTRATOR = "administrator"
    """Locked or limited by hand."""
    ZEUSD_CLIENT = "zeusd-client"
    """Set by a program written for zeusd, for as long as that lives."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who a GPU works for."""

    job_id: str
    job_name: str
    uid: int
    since_mono_ns: int
    kind: ClaimKind = ClaimKind.JOB
    """Unless it is a job's, `job_id` is the lease."""
    pid: int | None = None
    """The process that a lease ends with."""

    @property
    def is_lease(self) -> bool:
        """Whether it is nobody's job."""
        return self.kind is not ClaimKind.JOB


@dataclass(slots=True)
class _Bucket:
    """One second of one GPU for one job, while it is being filled."""

    begin_ns: int
    started_at: datetime
    job_id: str
    num_samples: int = 0
    powers_w: list[float] = field(default_factory=list)
    clocks_mhz: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Gpu:
    """One GPU as last seen."""

    identity: GpuIdentity
    clocks: ClockHistory
    counter: EnergyCounter = field(default_factory=EnergyCounter)
    sample: GpuSample | None = None
    health: GpuHealth = GpuHealth.OK
    detail: str = ""
    requested_sm_clock_mhz: int | None = None
    claim: Claim | None = None
    switching: SwitchCalibration = field(init=False)
    """What was learned about its clock changes; kept from job to job."""
    _buckets: deque[_Bucket] = field(default_factory=deque)
    _forgotten_until_ns: int = 0

    def __post_init__(self) -> None:
        published_s = self.identity.switch_latency_s
        prior = (
            constant_latency(_ASSUMED_SWITCH_LATENCY_S)
            if published_s is None
            else constant_latency(published_s, LatencyBasis.PUBLISHED)
        )
        self.switching = SwitchCalibration(self.max_sm_clock_mhz, prior)

    @property
    def max_sm_clock_mhz(self) -> int:
        """The clock of an un-tuned GPU."""
        return self.identity.supported_sm_clocks_mhz[0]

    def view(self) -> GpuView:
        """Return the GPU as a policy sees it."""
        return GpuView(
            gpu_uuid=self.identity.gpu_uuid,
            model_name=self.identity.model_name,
            supported_sm_clocks_mhz=self.identity.supported_sm_clocks_mhz,
            switch_latency_s=self.switching.latency.raise_s,
            blocking_power_w=self.identity.blocking_power_w,
            switching=self.switching.latency,
        )

    def take_sample(self, sample: GpuSample) -> tuple[RollupRecord, ...]:
        """Note a reading; return the buckets that are complete now."""
        self.sample = sample
        if sample.energy_edge_mono_ns is not None and sample.total_energy_j is not None:
            self.counter.record(sample.energy_edge_mono_ns, sample.total_energy_j)
        self._fill_bucket(sample)
        horizon_ns = sample.read_mono_ns - _KEPT_S * _NS_PER_S
        if horizon_ns > self._forgotten_until_ns + 10 * _NS_PER_S:
            self._forgotten_until_ns = horizon_ns
            self.clocks.forget_before(horizon_ns)
            self.counter.forget_before(horizon_ns)
        return self._complete_buckets(sample.read_mono_ns)

    def take_clock_set(self, change: ClockSet) -> bool:
        """Note a clock change; return whether the latency to plan with has changed by it."""
        if change.error is not None:
            return False
        effective_ns = change.returned_mono_ns
        if change.effective_mono_ns is not None:
            effective_ns = (change.effective_mono_ns + (change.unseen_until_mono_ns or change.returned_mono_ns)) // 2
        self.clocks.record(effective_ns, change.requested_sm_clock_mhz)
        switch = observed_switch(change)
        return switch is not None and self.switching.observe(switch)

    def note_restored(self, mono_ns: int) -> None:
        """Note that the GPU is un-tuned from now on."""
        self.requested_sm_clock_mhz = None
        self.clocks.record(mono_ns, self.max_sm_clock_mhz)

    def _fill_bucket(self, sample: GpuSample) -> None:
        job_id = self.claim.job_id if self.claim is not None and not self.claim.is_lease else ""
        now = utc_at(sample.read_mono_ns)
        started_at = now.replace(microsecond=0)
        last = self._buckets[-1] if self._buckets else None
        if last is None or last.started_at != started_at or last.job_id != job_id:
            begin_ns = sample.read_mono_ns - now.microsecond * 1000
            if last is not None and last.started_at == started_at:
                begin_ns = sample.read_mono_ns
            last = _Bucket(begin_ns, started_at, job_id)
            self._buckets.append(last)
        last.num_samples += 1
        if sample.power_w is not None:
            last.powers_w.append(sample.power_w)
        if sample.sm_clock_mhz is not None:
            last.clocks_mhz.append(sample.sm_clock_mhz)

    def _complete_buckets(self, now_ns: int) -> tuple[RollupRecord, ...]:
        done: list[RollupRecord] = []
        while len(self._buckets) > 1:
            bucket, end_ns = self._buckets[0], self._buckets[1].begin_ns
            if not self.counter.covers(end_ns) and now_ns < end_ns + _ENERGY_GRACE_NS:
                break
            self._buckets.popleft()
            energy_j = self.counter.energy_j(bucket.begin_ns, end_ns)
            for bucket_s in (BUCKET_S, LONG_BUCKET_S):
                second = bucket.started_at.second
                done.append(
                    RollupRecord(
                        bucket_s=bucket_s,
                        gpu_uuid=self.identity.gpu_uuid,
                        started_at=bucket.started_at - timedelta(seconds=second % bucket_s),
                        job_id=bucket.job_id,
                        energy_j=energy_j,
                        mean_power_w=_mean(bucket.powers_w),
                        max_power_w=max(bucket.powers_w, default=None),
                        mean_sm_clock_mhz=_mean(bucket.clocks_mhz),
                        num_samples=bucket.num_samples,
                    )
                )
        return tuple(done)


class Gpus:
    """All GPUs of this host, by UUID."""

    def __init__(self) -> None:
        self._gpus: dict[str, Gpu] = {}

    def __iter__(self) -> Iterator[Gpu]:
        return iter(sorted(self._gpus.values(), key=lambda gpu: gpu.identity.index))

    def __getitem__(self, gpu_uuid: str) -> Gpu:
        """Return one GPU.

        Raises:
            GpuNotFoundError: no such GPU; the message names those there are.
        """
        try:
            return self._gpus[gpu_uuid]
        except KeyError:
            known = ", ".join(gpu.identity.gpu_uuid for gpu in self) or "none"
            raise GpuNotFoundError(f"no GPU {gpu_uuid!r} on this host; GPUs: {known}") from None

    def find(self, uuid_or_index: str) -> Gpu:
        """Return the GPU that a person names.

        Raises:
            GpuNotFoundError: no such GPU; the message names those there are.
        """
        for gpu in self:
            if uuid_or_index in {gpu.identity.gpu_uuid, str(gpu.identity.index)}:
                return gpu
        return self[uuid_or_index]

    def learn(self, identities: Iterable[GpuIdentity]) -> None:
        """Take the GPUs that a worker found; what is known of them stays."""
        found = {identity.gpu_uuid: identity for identity in identities}
        for gpu_uuid, identity in found.items():
            if gpu_uuid in self._gpus:
                self._gpus[gpu_uuid].identity = identity
                self._gpus[gpu_uuid].health, self._gpus[gpu_uuid].detail = GpuHealth.OK, ""
            else:
                self._gpus[gpu_uuid] = Gpu(identity, ClockHistory(identity.supported_sm_clocks_mhz[0]))
        for gpu_uuid in self._gpus.keys() - found.keys():
            gpu = self._gpus[gpu_uuid]
            gpu.health, gpu.detail = GpuHealth.LOST, "the driver does not list it any more"

    def known(self, gpu_uuid: str) -> Gpu | None:
        """Return one GPU, None when there is none."""
        return self._gpus.get(gpu_uuid)

    def claim(self, gpu_uuid: str, claim: Claim) -> Gpu:
        """Give a GPU to a job.

        Raises:
            GpuNotFoundError: no such GPU.
            JobError: it works for a job already, or is leased to the administrator.
        """
        gpu = self.require_free(gpu_uuid)
        gpu.claim = claim
        return gpu

    def require_free(self, gpu_uuid: str) -> Gpu:
        """Return a GPU that nobody has claimed.

        Raises:
            GpuNotFoundError: no such GPU.
            JobError: somebody has; the message names owner, job and age.
        """
        gpu = self[gpu_uuid]
        if gpu.claim is None:
            return gpu
        claim, age_s = gpu.claim, (time.monotonic_ns() - gpu.claim.since_mono_ns) / _NS_PER_S
        if claim.is_lease:
            process = "" if claim.pid is None else f" pid {claim.pid}"
            raise JobError(
                f"GPU {gpu_uuid} is leased to the {claim.kind}, uid {claim.uid}{process}, since {age_s:.0f} s;"
                f" `gpuenergyd lock --release {gpu_uuid}` ends that"
            )
        raise JobError(
            f"GPU {gpu_uuid} works for job {claim.job_id} ({claim.job_name!r}) of uid {claim.uid} since {age_s:.0f} s"
        )

    def release(self, job_id: str) -> None:
        """Take back the GPUs of a job."""
        for gpu in self._gpus.values():
            if gpu.claim is not None and gpu.claim.job_id == job_id:
                gpu.claim = None


def observed_switch(change: ClockSet) -> ObservedSwitch | None:
    """Return what a clock change says about latency; None when what was read is not what was asked for."""
    before_mhz, wanted_mhz, actual_mhz = (
        change.previous_sm_clock_mhz,
        change.requested_sm_clock_mhz,
        change.actual_sm_clock_mhz,
    )
    if before_mhz is None or abs(before_mhz - wanted_mhz) <= _SAME_CLOCK_MHZ:
        return None
    is_seen = change.effective_mono_ns is not None
    if is_seen and (actual_mhz is None or abs(actual_mhz - wanted_mhz) > _SAME_CLOCK_MHZ):
        return None
    if not is_seen and change.unseen_until_mono_ns is None:
        return None
    seen_ns, unseen_ns = change.effective_mono_ns, change.unseen_until_mono_ns or change.returned_mono_ns
    return ObservedSwitch(
        from_sm_clock_mhz=before_mhz,
        to_sm_clock_mhz=wanted_mhz,
        handover_s=max(0, change.called_mono_ns - change.due_mono_ns - change.blocked_ns) / _NS_PER_S,
        call_s=(change.returned_mono_ns - change.called_mono_ns) / _NS_PER_S,
        settle_low_s=(unseen_ns - change.returned_mono_ns) / _NS_PER_S,
        settle_high_s=None if seen_ns is None else (seen_ns - change.returned_mono_ns) / _NS_PER_S,
    )


def utc_at(mono_ns: int) -> datetime:
    """Return the UTC instant of a host monotonic instant, by the offset that holds now."""
    return datetime.fromtimestamp((time.time_ns() - time.monotonic_ns() + mono_ns) / _NS_PER_S, tz=UTC)


def _mean(values: list[float] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None
