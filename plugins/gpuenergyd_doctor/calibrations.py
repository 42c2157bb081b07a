"""Calibration: measures the switch latencies of idle GPUs for an administrator's process, one GPU after another.

Theory of operation. The daemon leases the GPUs to the requesting process, then makes clock changes and measures them as
it measures those of jobs, for the same estimates. An idle GPU does not run at the clock that is set, so the process
computes on the GPU during that time; the daemon begins when the driver lists the process there. The leases end with the
process, however it ends, and the worker then restores the GPUs.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuenergyd.core.pipeline.switching import ObservedSwitch
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.gpus.inventory import ClaimKind, Gpu, Gpus
from gpuenergyd.daemon.gpus.switches import observed_switch
from gpuenergyd.daemon.manual_leases.leases import LeaseHolder, ManualLease, ManualLeases
from gpuenergyd.daemon.ports import WorkerPort
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.daemon.settings import REFUSED_IN_OBSERVE
from gpuenergyd.errors import GpuEnergyError, GpuError, JobError, UsageError
from gpuenergyd.gpu.link.messages import USABLE_HEALTH, ListProcesses
from gpuenergyd_doctor.messages import (
    CalibratedGpu,
    CalibrationPhase,
    CalibrationProgress,
    CalibrationRequest,
    CalibrationStarted,
    CalibrationState,
    MeasuredGpus,
    MeasuredGpusKept,
)
from gpuenergyd_doctor.walk import calibrated_targets, calibration_clocks_mhz, calibration_walk_mhz

log = logging.getLogger(__name__)

MAX_CHANGES = 200
"""Most changes to each target clock in each direction; more than enough for a 90th percentile."""
_PAUSE_S = (0.005, 0.025)
"""Range of the random pause after a change took effect, so that changes fall anywhere between two readings."""
_LOAD_LIMIT_S = 30.0
_LOAD_POLL_S = 0.05
_WAKING_NS = 300_000_000
"""Time from the start of the load until the GPU has left its idle clock."""
_OVERHEAD_S = 0.005
"""Assumed time from a change's effect to its report."""
_CHECK_EVERY = 16
"""Changes between two checks of the processes on the GPU."""
_FIRST_CHANGES = 8
"""Number of first changes; if none takes effect, the calibration fails."""
_MAX_KEPT = 8
_MAX_NAMED = 8


@dataclass(slots=True)
class _Measurement:
    """The calibration of one GPU."""

    gpu: Gpu
    clocks_mhz: tuple[int, ...]
    walk_mhz: tuple[int, ...]
    lease: ManualLease | None = None
    phase: CalibrationPhase = CalibrationPhase.QUEUED
    num_done: int = 0
    reason: str = ""
    switches: list[ObservedSwitch] = field(default_factory=list)

    @property
    def gpu_uuid(self) -> str:
        return self.gpu.identity.gpu_uuid

    @property
    def description(self) -> CalibratedGpu:
        """The GPU, its clocks, and how long its changes should take by the latencies known before."""
        latency, identity = self.gpu.switching.latency, self.gpu.identity
        per_change_s = (latency.raise_s + latency.lower_s + sum(_PAUSE_S)) / 2 + _OVERHEAD_S
        num_changes = len(self.walk_mhz)
        return CalibratedGpu(
            *(identity.gpu_uuid, identity.index, identity.model_name, self.clocks_mhz),
            num_changes=num_changes,
            expected_s=num_changes * per_change_s,
        )

    @property
    def progress(self) -> CalibrationProgress:
        targets = calibrated_targets(self.switches)
        return CalibrationProgress(
            self.gpu_uuid, self.phase, len(self.walk_mhz), self.num_done, reason=self.reason, targets=targets
        )


@dataclass(slots=True)
class _Calibration:
    """The calibration of all GPUs of one request."""

    calibration_id: str
    holder: LeaseHolder
    measurements: list[_Measurement]
    is_finished: bool = False


@dataclass(slots=True)
class Calibrations:
    """Runs calibrations, one at a time; the caller has checked that the client is an administrator."""

    leases: ManualLeases
    gpus: Gpus
    worker: WorkerPort
    is_observing: bool = False
    _calibrations: dict[str, _Calibration] = field(default_factory=dict)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def keep_measured(self, measured: MeasuredGpus, peer: PeerCredentials) -> MeasuredGpusKept:
        """Keep what an administrator's `doctor --measure` has found for the models of this host."""
        kept = tuple(gpu.model_name for gpu in measured.gpus if self.gpus.keep_measured(gpu))
        log.info("measurements of %s by %s are kept", ", ".join(kept) or "no model of this host", peer)
        return MeasuredGpusKept(kept)

    async def start(self, request: CalibrationRequest, peer: PeerCredentials, pidfd: int) -> CalibrationStarted:
        """Lease the GPUs to the process of `pidfd` and begin; the leases end with that process.

        Raises:
            GpuNotFoundError: no such GPU.
            UsageError: the number of changes is out of range, or a GPU supports too few clocks.
            JobError: a GPU is in use or unhealthy, another calibration is running, or the daemon only observes.
            GpuError: the driver does not list the processes of a GPU, or refuses the lease.
        """
        if self.is_observing:
            raise JobError(REFUSED_IN_OBSERVE)
        if not 1 <= request.num_changes <= MAX_CHANGES:
            raise UsageError(f"num_changes = {request.num_changes}: valid are 1 to {MAX_CHANGES}")
        async with self._starting:
            for running in self._calibrations.values():
                if not running.is_finished:
                    raise JobError(f"process {running.holder.pid} is calibrating GPUs; retry when it has ended")
            measurements = [_measurement(gpu, request.num_changes) for gpu in self._chosen(request.gpus)]
            for measurement in measurements:
                await self._require_idle(measurement.gpu)
            described = tuple(measurement.description for measurement in measurements)
            if request.is_dry_run:
                return CalibrationStarted(None, described)
            holder = LeaseHolder(ClaimKind.CALIBRATION, peer.uid, peer.pid)
            await self._lease(measurements, holder, pidfd)
            calibration = _Calibration(f"calibration-{secrets.token_hex(3)}", holder, measurements)
            self._remember(calibration)
            self.leases.spawn(self._run(calibration))
        return CalibrationStarted(calibration.calibration_id, described)

    def state(self, calibration_id: str) -> CalibrationState | None:
        """Return the state of a running or recent calibration, None if there is none."""
        found = self._calibrations.get(calibration_id)
        if found is None:
            return None
        return CalibrationState(
            calibration_id, found.is_finished, tuple(measurement.progress for measurement in found.measurements)
        )

    # --- before the first change ---

    def _chosen(self, names: Sequence[str]) -> list[Gpu]:
        """Return the named GPUs, or all GPUs if none is named, in the order of their index."""
        chosen = [self.gpus.find(name) for name in names] or list(self.gpus)
        if not chosen:
            raise JobError("this host has no GPU to calibrate")
        return sorted({gpu.identity.gpu_uuid: gpu for gpu in chosen}.values(), key=lambda gpu: gpu.identity.index)

    async def _require_idle(self, gpu: Gpu) -> None:
        gpu_uuid = gpu.identity.gpu_uuid
        self.gpus.require_free(gpu_uuid)
        if gpu.health not in USABLE_HEALTH:
            raise JobError(f"GPU {gpu_uuid} is {gpu.health}: {gpu.detail}")
        pids = (await self.worker.do(ListProcesses(gpu_uuid))).pids
        if pids:
            raise JobError(f"GPU {gpu_uuid} is not idle: processes {_pids_text(pids)} compute on it")

    async def _lease(self, measurements: Sequence[_Measurement], holder: LeaseHolder, pidfd: int) -> None:
        try:
            for measurement in measurements:
                async with self.leases.lock_gpu(measurement.gpu_uuid):
                    self.gpus.require_free(measurement.gpu_uuid)
                    measurement.lease = lease = await self.leases.set(measurement.gpu, holder, pidfd=pidfd)
                plan = count_text(len(measurement.walk_mhz), "clock change")
                self.leases.record("calibrate", measurement.gpu_uuid, holder, f"lease {lease.lease_id}", "", plan)
        except GpuEnergyError as error:
            for measurement in measurements:
                await self._end_lease(measurement, f"the calibration could not begin: {error}")
            raise

    def _remember(self, calibration: _Calibration) -> None:
        self._calibrations[calibration.calibration_id] = calibration
        for oldest in list(self._calibrations)[:-_MAX_KEPT]:
            del self._calibrations[oldest]

    # --- the changes ---

    async def _run(self, calibration: _Calibration) -> None:
        try:
            for measurement in calibration.measurements:
                try:
                    await self._measure(measurement, calibration.holder)
                except GpuEnergyError as error:
                    measurement.phase, measurement.reason = CalibrationPhase.FAILED, str(error)
                    log.warning("the calibration of GPU %s failed: %s", measurement.gpu_uuid, error)
                    await self._end_lease(measurement, f"its calibration failed: {error}")
                else:
                    await self._end_lease(measurement, "its calibration is done")
                    measurement.phase = CalibrationPhase.DONE
        finally:
            calibration.is_finished = True

    async def _measure(self, measurement: _Measurement, holder: LeaseHolder) -> None:
        """Make the changes of one GPU.

        Raises:
            JobError: its lease has ended, the process does not compute on it, or another one does.
            GpuError: a change failed, or none took effect.
        """
        measurement.phase = CalibrationPhase.AWAITING_LOAD
        try:
            async with asyncio.timeout(_LOAD_LIMIT_S):
                await self._await_load(measurement, holder)
        except TimeoutError:
            raise JobError(
                f"the driver did not list process {holder.pid} on GPU {measurement.gpu_uuid} within"
                f" {_LOAD_LIMIT_S:g} s; an idle GPU does not show the clocks that are set"
            ) from None
        measurement.phase = CalibrationPhase.MEASURING
        draw = random.Random(measurement.gpu_uuid)  # noqa: S311  spreads instants, guards nothing
        await self._change(measurement, measurement.clocks_mhz[0])
        for position, sm_clock_mhz in enumerate(measurement.walk_mhz, start=1):
            await asyncio.sleep(draw.uniform(*_PAUSE_S))
            switch = await self._change(measurement, sm_clock_mhz)
            if switch is not None:
                measurement.switches.append(switch)
            measurement.num_done = position
            if position == _FIRST_CHANGES and all(s.settle_high_s is None for s in measurement.switches):
                raise GpuError(
                    f"none of {count_text(position, 'clock change')} of GPU {measurement.gpu_uuid} took effect; is"
                    " another program"
                    " limiting its clock or power?"
                )
            if position % _CHECK_EVERY == 0 and not await self._is_loaded(measurement, holder):
                raise JobError(f"process {holder.pid} no longer computes on GPU {measurement.gpu_uuid}")

    async def _is_loaded(self, measurement: _Measurement, holder: LeaseHolder) -> bool:
        """Return whether the process of the lease computes on the GPU.

        Raises:
            JobError: another process computes there, or the lease has ended.
        """
        self._require_lease(measurement)
        pids = (await self.worker.do(ListProcesses(measurement.gpu_uuid))).pids
        others = [pid for pid in pids if pid != holder.pid]
        if others:
            raise JobError(f"processes {_pids_text(others)} began to compute on GPU {measurement.gpu_uuid}")
        return bool(pids)

    async def _await_load(self, measurement: _Measurement, holder: LeaseHolder) -> None:
        """Wait until the process computes on the GPU and a reading follows that shows the GPU awake."""
        woken_ns: int | None = None
        while True:
            sample = measurement.gpu.sample
            if not await self._is_loaded(measurement, holder):
                woken_ns = None
            elif woken_ns is None:
                woken_ns = time.monotonic_ns() + _WAKING_NS
            elif sample is not None and sample.read_mono_ns >= woken_ns:
                return
            await asyncio.sleep(_LOAD_POLL_S)

    async def _change(self, measurement: _Measurement, sm_clock_mhz: int) -> ObservedSwitch | None:
        """Set a clock and wait for its effect; return the measured latency, None if it is unknown."""
        async with self.leases.lock_gpu(measurement.gpu_uuid):
            lease = self._require_lease(measurement)
            return observed_switch(await self.leases.change_clock(lease, sm_clock_mhz))

    def _require_lease(self, measurement: _Measurement) -> ManualLease:
        lease = measurement.lease
        if lease is None or self.leases.get(measurement.gpu_uuid) is not lease:
            raise JobError(f"the lease of GPU {measurement.gpu_uuid} has ended")
        return lease

    async def _end_lease(self, measurement: _Measurement, reason: str) -> None:
        async with self.leases.lock_gpu(measurement.gpu_uuid):
            lease, measurement.lease = measurement.lease, None
            if lease is not None and self.leases.get(measurement.gpu_uuid) is lease:
                await self.leases.end(lease, reason)


def _measurement(gpu: Gpu, num_changes: int) -> _Measurement:
    """Return the measurement of a GPU, with the sequence of clocks for its index.

    Raises:
        UsageError: it supports too few clocks.
    """
    identity = gpu.identity
    clocks_mhz = calibration_clocks_mhz(identity.supported_sm_clocks_mhz)
    if len(clocks_mhz) < 2:
        raise UsageError(f"GPU {identity.gpu_uuid} supports too few SM clocks: {len(identity.supported_sm_clocks_mhz)}")
    return _Measurement(gpu, clocks_mhz, calibration_walk_mhz(clocks_mhz, num_changes=num_changes, seed=identity.index))


def _pids_text(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids[:_MAX_NAMED]))
