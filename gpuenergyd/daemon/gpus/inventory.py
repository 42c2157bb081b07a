"""What the core knows of each GPU: who it is, how it is, what it was asked for, and what the worker saw of it."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from gpuenergyd.core.measurement.telemetry import ClockHistory, EnergyCounter
from gpuenergyd.core.pipeline.switching import LatencyBasis, ObservedSwitch, SwitchCalibration, constant_latency
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.daemon.gpus.history import GpuHistory
from gpuenergyd.errors import GpuNotFoundError, JobError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import ClockSet, GpuHealth, GpuSample
from gpuenergyd.store.records import Record

_NS_PER_S = 1_000_000_000
_KEPT_S = 900
"""How long clock changes and counter edges are kept: longer than any iteration that is worth a plan."""
_ASSUMED_SWITCH_LATENCY_S = 0.03
"""Until enough clock changes were seen on this host, where nobody published a figure: above what an A100 needs."""
_SAME_CLOCK_MHZ = 16
"""One step of a GPU's clocks: what is read further away from what was asked for came about by something else."""


class ClaimKind(StrEnum):
    """For whom a GPU is taken."""

    JOB = "job"
    ADMINISTRATOR = "administrator"
    """Locked or limited by hand."""
    ZEUSD_CLIENT = "zeusd-client"
    """Set by a program written for zeusd, for as long as that lives."""


@dataclass(frozen=True, slots=True)
class GpuClaim:
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
class Gpu:
    """One GPU as last seen."""

    identity: GpuIdentity
    clocks: ClockHistory
    counter: EnergyCounter = field(default_factory=EnergyCounter)
    sample: GpuSample | None = None
    health: GpuHealth = GpuHealth.OK
    detail: str = ""
    requested_sm_clock_mhz: int | None = None
    claim: GpuClaim | None = None
    switching: SwitchCalibration = field(init=False)
    """What was learned about its clock changes; kept from job to job."""
    _history: GpuHistory = field(init=False)
    _forgotten_until_ns: int = 0

    def __post_init__(self) -> None:
        published_s = self.identity.switch_latency_s
        prior = (
            constant_latency(_ASSUMED_SWITCH_LATENCY_S)
            if published_s is None
            else constant_latency(published_s, LatencyBasis.PUBLISHED)
        )
        self.switching = SwitchCalibration(self.max_sm_clock_mhz, prior)
        self._history = GpuHistory(self.identity.gpu_uuid)

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

    def record_sample(self, sample: GpuSample) -> tuple[Record, ...]:
        """Note a reading; return what the history shall keep of it."""
        self.sample = sample
        if sample.energy_edge_mono_ns is not None and sample.total_energy_j is not None:
            self.counter.record(sample.energy_edge_mono_ns, sample.total_energy_j)
        horizon_ns = sample.read_mono_ns - _KEPT_S * _NS_PER_S
        if horizon_ns > self._forgotten_until_ns + 10 * _NS_PER_S:
            self._forgotten_until_ns = horizon_ns
            self.clocks.forget_before(horizon_ns)
            self.counter.forget_before(horizon_ns)
        job_id = self.claim.job_id if self.claim is not None and not self.claim.is_lease else ""
        return tuple(self._history.take(sample, at=utc_at(sample.read_mono_ns), job_id=job_id, counter=self.counter))

    def record_clock_set(self, change: ClockSet) -> bool:
        """Note a clock change; return whether the latency to plan with has changed by it."""
        if change.error is not None:
            return False
        effective_ns = change.returned_mono_ns
        if change.effective_mono_ns is not None:
            effective_ns = (change.effective_mono_ns + (change.unseen_until_mono_ns or change.returned_mono_ns)) // 2
        self.clocks.record(effective_ns, change.requested_sm_clock_mhz)
        switch = observed_switch(change)
        return switch is not None and self.switching.observe(switch)

    def record_restored(self, mono_ns: int) -> None:
        """Note that the GPU is un-tuned from now on."""
        self.requested_sm_clock_mhz = None
        self.clocks.record(mono_ns, self.max_sm_clock_mhz)


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

    def update(self, identities: Iterable[GpuIdentity]) -> None:
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

    def get(self, gpu_uuid: str) -> Gpu | None:
        """Return one GPU, None when there is none."""
        return self._gpus.get(gpu_uuid)

    def claim(self, gpu_uuid: str, claim: GpuClaim) -> Gpu:
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
