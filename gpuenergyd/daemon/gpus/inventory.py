"""GPU inventory: identity, health, readings, requested clock and owner of each GPU of this host."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from gpuenergyd.core.host.measured_gpu import MeasuredGpu
from gpuenergyd.core.measurement.switch_calibration import SwitchCalibration
from gpuenergyd.core.measurement.telemetry import ClockHistory, EnergyCounter
from gpuenergyd.core.pipeline.switching import ObservedSwitch
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.daemon.gpus.history import GpuHistory
from gpuenergyd.daemon.gpus.knobs import Knobs
from gpuenergyd.daemon.gpus.switches import max_sm_clock_mhz, observed_switch, switch_calibration
from gpuenergyd.daemon.gpus.switching_file import SavedSwitches
from gpuenergyd.daemon.gpus.true_clocks import TrueClocks
from gpuenergyd.errors import GpuNotFoundError, JobError
from gpuenergyd.gpu.device import GpuIdentity, RefusedValues
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuHealth, GpuSample
from gpuenergyd.gpu.plausible import max_power_w
from gpuenergyd.store.records import Record
from gpuenergyd.wire.messages import TrueClockRow

log = logging.getLogger(__name__)

_SwitchingKey = tuple[str, int, str | None]
"""What switch latencies depend on: GPU model, its maximum clock in MHz, and driver version."""
_NS_PER_S = 1_000_000_000
_KEPT_S = 900
"""How long clock changes and energy counter readings are kept; longer than any iteration that can be planned."""


class ClaimKind(StrEnum):
    """Purpose of the claim of a GPU."""

    JOB = "job"
    ADMINISTRATOR = "administrator"
    """A clock lock or power limit that an administrator set."""
    ZEUSD_CLIENT = "zeusd-client"
    """Set by a zeusd client program; ends with that process."""
    CALIBRATION = "calibration"
    """Clock changes that measure switch latencies; ends with the `calibrate` command."""


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """The job or lease that a GPU is assigned to."""

    job_id: str
    job_name: str
    uid: int
    since_mono_ns: int
    kind: ClaimKind = ClaimKind.JOB
    """For every kind but JOB, `job_id` holds the id of the lease."""
    pid: int | None = None
    """The process whose end ends the lease, None if the lease is not tied to a process."""
    is_paused: bool = False
    """Whether the job's program has announced a pause, and has not reported since that it goes on."""

    @property
    def is_lease(self) -> bool:
        """Whether the GPU is leased outside any job."""
        return self.kind is not ClaimKind.JOB


@dataclass(slots=True)
class Gpu:
    """State of one GPU."""

    identity: GpuIdentity
    clocks: ClockHistory
    switching: SwitchCalibration
    """Latencies of clock changes measured on all GPUs of this model, kept from job to job."""
    counter: EnergyCounter = field(init=False)
    sample: GpuSample | None = None
    health: GpuHealth = GpuHealth.OK
    detail: str = ""
    requested_sm_clock_mhz: int | None = None
    claim: GpuClaim | None = None
    knobs: Knobs = field(init=False)
    """Settings as read back from the driver, and who set them."""
    host: str = ""
    """Name of the host, so that plans know which GPUs share a driver."""
    refused: dict[str, RefusedValues] = field(default_factory=dict)
    """Implausible driver readings since the daemon started, by the field that they left unknown."""
    history: GpuHistory = field(init=False)
    true_clocks: TrueClocks = field(default_factory=TrueClocks)
    _forgotten_until_ns: int = 0

    def __post_init__(self) -> None:
        self.counter = EnergyCounter(max_power_w(self.identity))
        self.history = GpuHistory(self.identity.gpu_uuid)
        self.knobs = Knobs(self.identity.default_power_limit_w)

    @property
    def max_sm_clock_mhz(self) -> int:
        """The highest SM clock of the GPU; 0 if the driver lists none and the GPU can only be observed."""
        return max_sm_clock_mhz(self.identity)

    @property
    def full_speed_clock_mhz(self) -> int:
        """The SM clock without a request from this daemon: the highest one, or the one another program has locked."""
        foreign_mhz = None if self.knobs.details is None else self.knobs.details.foreign_sm_clock_mhz
        return self.max_sm_clock_mhz if foreign_mhz is None else min(foreign_mhz, self.max_sm_clock_mhz)

    def view(self) -> GpuView:
        """Return the GPU as policies see it."""
        return GpuView(
            gpu_uuid=self.identity.gpu_uuid,
            model_name=self.identity.model_name,
            supported_sm_clocks_mhz=self.identity.supported_sm_clocks_mhz,
            switch_latency_s=self.switching.latency.raise_s,
            blocking_power_w=self.identity.blocking_power_w,
            switching=self.switching.latency,
            host=self.host,
            power_limit_range_w=_power_limit_range_w(self.identity),
            power_profiles=self.identity.power_profiles,
            foreign_power_profiles=self.knobs.foreign_power_profiles,
        )

    def record_sample(self, sample: GpuSample) -> tuple[Record, ...]:
        """Record a reading; return the records for the database."""
        self.sample = sample
        for new in sample.refused:
            known = self.refused.get(new.name)
            self.refused[new.name] = new if known is None else replace(new, num=known.num + new.num)
        if sample.energy_edge_mono_ns is not None and sample.total_energy_j is not None:
            self.counter.record(sample.energy_edge_mono_ns, sample.total_energy_j)
        if sample.power_w is not None:
            self.counter.record_power(sample.read_mono_ns, sample.power_w)
        if sample.sm_clock_mhz is not None and sample.is_power_capped is not None:
            is_power_capped = sample.is_power_capped
            self.clocks.record_reading(sample.read_mono_ns, sample.sm_clock_mhz, is_power_capped=is_power_capped)
        horizon_ns = sample.read_mono_ns - _KEPT_S * _NS_PER_S
        if horizon_ns > self._forgotten_until_ns + 10 * _NS_PER_S:
            self._forgotten_until_ns = horizon_ns
            self.clocks.forget_before(horizon_ns)
            self.counter.forget_before(horizon_ns)
        job_id = self.claim.job_id if self.claim is not None and not self.claim.is_lease else ""
        return tuple(
            self.history.records_of(sample, at=utc_at(sample.read_mono_ns), job_id=job_id, counter=self.counter)
        )

    def record_clock_change(self, change: ClockChangeReport) -> bool:
        """Record a clock change; return whether it changed the latency that plans for GPUs of this model use.

        A change replaced or abandoned while the GPU was still seen at the previous clock never took effect. A change
        that could not be observed at all is assumed to take effect when its driver call returned. Where clocks are read
        late, it is the instant at which such changes usually take effect, within what the readings permit.
        """
        if change.error is not None:
            return False
        low_ns = change.unseen_until_mono_ns or change.returned_mono_ns
        if change.clock_age_ns:
            self.true_clocks.add_change(change)
            usual_ns = max(low_ns, self._usual_effect_ns(change))
            if change.effective_mono_ns is not None:
                self.clocks.record(min(usual_ns, change.effective_mono_ns), change.requested_sm_clock_mhz)
            elif change.unseen_until_mono_ns is None or low_ns < usual_ns:
                self.clocks.record(usual_ns, change.requested_sm_clock_mhz)
        elif change.effective_mono_ns is not None:
            self.clocks.record((change.effective_mono_ns + low_ns) // 2, change.requested_sm_clock_mhz)
        elif change.unseen_until_mono_ns is None:
            self.clocks.record(change.returned_mono_ns, change.requested_sm_clock_mhz)
        self.clocks.record_call(change.called_mono_ns)
        switch = observed_switch(change)
        return switch is not None and self.switching.observe(switch)

    def record_true_clocks(self, clocks: Iterable[TrueClockRow]) -> bool:
        """Record clocks that the GPU has counted; return whether they changed the latency that plans use."""
        pairs = [tuple(map(observed_switch, pair)) for pair in self.true_clocks.narrowed(clocks)]
        return sum(self.switching.observe(switch, in_place_of=wide) for wide, switch in pairs if switch is not None) > 0

    def _usual_effect_ns(self, change: ClockChangeReport) -> int:
        """Return when a change takes effect by the latency that plans use."""
        before_mhz, requested_mhz = change.previous_sm_clock_mhz, change.requested_sm_clock_mhz
        usual_s = self.switching.latency.typical_s(before_mhz or self.max_sm_clock_mhz, requested_mhz)
        return change.due_mono_ns + change.blocked_ns + round(usual_s * _NS_PER_S)

    def record_restored(self, mono_ns: int) -> None:
        """Record that the GPU runs without this daemon's clock lock from this instant on."""
        self.requested_sm_clock_mhz = None
        self.clocks.record(mono_ns, self.full_speed_clock_mhz)


class Gpus:
    """All GPUs of this host, by UUID."""

    def __init__(self, saved: Iterable[SavedSwitches] = (), *, host: str = "", host_power_w: float = 0.0) -> None:
        """Start from the clock changes that earlier daemons measured, the host's name and its assumed power."""
        self._host, self._host_power_w = host, host_power_w
        self._gpus: dict[str, Gpu] = {}
        self._switching_of_model: dict[_SwitchingKey, SwitchCalibration] = {}
        self._saved = list(saved)
        self.measured: tuple[MeasuredGpu, ...] = ()
        """What `doctor --measure` has found, newest last."""

    def __iter__(self) -> Iterator[Gpu]:
        return iter(sorted(self._gpus.values(), key=lambda gpu: gpu.identity.index))

    def __getitem__(self, gpu_uuid: str) -> Gpu:
        """Return the GPU with a UUID; raise GpuNotFoundError, which lists the GPUs of this host, if there is none."""
        try:
            return self._gpus[gpu_uuid]
        except KeyError:
            known = ", ".join(gpu.identity.gpu_uuid for gpu in self) or "none"
            if gpu_uuid.startswith("MIG-"):
                raise GpuNotFoundError(
                    f"{gpu_uuid!r} is a MIG instance: clocks apply to the whole GPU, which may have several users, so"
                    " a rank on an instance is not followed; disable MIG on GPUs that are to be tuned"
                ) from None
            raise GpuNotFoundError(f"no GPU {gpu_uuid!r} on this host; GPUs: {known}") from None

    def find(self, uuid_or_index: str) -> Gpu:
        """Return the GPU with a UUID or NVML index.

        Raises:
            GpuNotFoundError: no such GPU; the message lists the GPUs of this host.
        """
        for gpu in self:
            if uuid_or_index in {gpu.identity.gpu_uuid, str(gpu.identity.index)}:
                return gpu
        return self[uuid_or_index]

    def update(self, identities: Iterable[GpuIdentity]) -> None:
        """Add or refresh the GPUs that the worker found, and mark missing ones as lost."""
        found = {identity.gpu_uuid: identity for identity in identities}
        for gpu_uuid, identity in found.items():
            if gpu_uuid in self._gpus:
                self.refresh(identity)
                self._gpus[gpu_uuid].health, self._gpus[gpu_uuid].detail = GpuHealth.OK, ""
            else:
                clocks, switching = ClockHistory(max_sm_clock_mhz(identity)), self._switching_of(identity)
                self._gpus[gpu_uuid] = Gpu(identity, clocks, switching, host=self._host)
        for gpu_uuid in self._gpus.keys() - found.keys():
            gpu = self._gpus[gpu_uuid]
            gpu.health, gpu.detail = GpuHealth.LOST, "the driver no longer lists it"
        for gpu_uuid in found:
            self._gpus[gpu_uuid].history.host_power_w = self._host_power_w / len(found)

    def refresh(self, identity: GpuIdentity) -> None:
        """Replace the identity of a GPU that has been reopened; the worker reports its health separately."""
        gpu = self._gpus[identity.gpu_uuid]
        gpu.identity, gpu.switching = identity, self._switching_of(identity)
        gpu.counter.max_power_w = max_power_w(identity)

    def _switching_of(self, identity: GpuIdentity) -> SwitchCalibration:
        key = (identity.model_name, max_sm_clock_mhz(identity), identity.driver_version)
        if key not in self._switching_of_model:
            self._switching_of_model[key] = calibration = switch_calibration(identity)
            calibration.restore(self._restored_switches(*key))
        return self._switching_of_model[key]

    def _restored_switches(
        self, model_name: str, max_sm_clock_mhz: int, driver_version: str | None
    ) -> tuple[ObservedSwitch, ...]:
        """Return the saved changes of a model, and forget those of its other driver versions."""
        of_model = [saved for saved in self._saved if saved.is_of(model_name, max_sm_clock_mhz)]
        self._saved = [saved for saved in self._saved if not saved.is_of(model_name, max_sm_clock_mhz)]
        found: tuple[ObservedSwitch, ...] = ()
        for saved in of_model:
            if saved.driver_version == driver_version:
                found = saved.switches
            else:
                log.info(
                    "%s: switch latencies are measured anew: driver version %s, saved ones are of %s",
                    *(model_name, driver_version or "unknown", saved.driver_version),
                )
        return found

    def measured_switches(self) -> tuple[SavedSwitches, ...]:
        """Return the clock changes to save: those of each model found, then those of models now absent.

        Changes measured under an unknown driver version are not saved: the version could change unnoticed.
        """
        found = {(g.identity.model_name, g.max_sm_clock_mhz, g.identity.driver_version): g.switching for g in self}
        measured = (
            SavedSwitches(model_name, max_sm_clock_mhz, driver_version, calibration.switches)
            for (model_name, max_sm_clock_mhz, driver_version), calibration in found.items()
            if driver_version is not None and calibration.switches
        )
        return (*measured, *self._saved)

    def keep_measured(self, measured: MeasuredGpu) -> bool:
        """Keep what was measured in place of what is known of the model; return whether this host has such GPUs."""
        is_here = any(gpu.identity.model_name == measured.model_name for gpu in self)
        if is_here:
            others = (kept for kept in self.measured if kept.model_name != measured.model_name)
            self.measured = (*others, measured)
        return is_here

    def _measured_waiting_power_w(self, identity: GpuIdentity) -> float | None:
        key = identity.model_name, identity.driver_version
        return next((m.waiting_power_w for m in self.measured if (m.model_name, m.driver_version) == key), None)

    def of_same_model(self, gpu: Gpu) -> list[Gpu]:
        """Return the GPUs, including this one, that share one estimate of switch latencies."""
        return [other for other in self if other.switching is gpu.switching]

    def get(self, gpu_uuid: str) -> Gpu | None:
        return self._gpus.get(gpu_uuid)

    def view(self, gpu: Gpu) -> GpuView:
        """Return the view of a GPU that policies get, with the number of GPUs that share its driver.

        Its power while waiting is the published one, or else the measured one.
        """
        num_host_gpus, view = sum(other.claim is not None and not other.claim.is_lease for other in self), gpu.view()
        if view.blocking_power_w is None:
            view = replace(view, blocking_power_w=self._measured_waiting_power_w(gpu.identity))
        return replace(view, num_host_gpus=num_host_gpus)

    def claim(self, gpu_uuid: str, claim: GpuClaim) -> Gpu:
        """Assign a GPU to a job or lease.

        Raises:
            GpuNotFoundError: no such GPU.
            JobError: it is assigned already.
        """
        gpu = self.require_free(gpu_uuid)
        gpu.claim = claim
        return gpu

    def require_free(self, gpu_uuid: str) -> Gpu:
        """Return a GPU that has no claim.

        Raises:
            GpuNotFoundError: no such GPU.
            JobError: it is claimed; the message gives the owner, the job or lease, and its age.
        """
        gpu = self[gpu_uuid]
        if gpu.claim is None:
            return gpu
        claim, age_s = gpu.claim, (time.monotonic_ns() - gpu.claim.since_mono_ns) / _NS_PER_S
        if claim.is_lease:
            process = "" if claim.pid is None else f" pid {claim.pid}"
            raise JobError(
                f"GPU {gpu_uuid} has been leased to the {claim.kind}, uid {claim.uid}{process}, for {age_s:.0f} s;"
                f" end the lease with `gpuenergyd lock --release {gpu_uuid}`"
            )
        raise JobError(
            f"GPU {gpu_uuid} has been in use by job {claim.job_id} ({claim.job_name!r}) of uid {claim.uid}"
            f" for {age_s:.0f} s"
        )

    def record_pause(self, gpu_uuid: str, *, is_paused: bool) -> None:
        """Record whether the program on a claimed GPU pauses."""
        gpu = self[gpu_uuid]
        if gpu.claim is not None and gpu.claim.is_paused is not is_paused:
            gpu.claim = replace(gpu.claim, is_paused=is_paused)

    def release(self, job_id: str) -> None:
        """Remove the claims of a job or lease."""
        for gpu in self._gpus.values():
            if gpu.claim is not None and gpu.claim.job_id == job_id:
                gpu.claim = None


def _power_limit_range_w(identity: GpuIdentity) -> tuple[float, float] | None:
    low_w, default_w = identity.min_power_limit_w, identity.default_power_limit_w
    return None if low_w is None or default_w is None or low_w >= default_w else (low_w, default_w)


def utc_at(mono_ns: int) -> datetime:
    """Convert a host monotonic instant to UTC, using the present offset between the two clocks."""
    return datetime.fromtimestamp((time.time_ns() - time.monotonic_ns() + mono_ns) / _NS_PER_S, tz=UTC)
