"""Measures swings of a host's power, and limits the ramps of its jobs if the settings ask for it."""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from gpuenergyd.core.clock_request import Ceiling
from gpuenergyd.daemon.jobs.audit_log import DAEMON
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.store.records import ControlEventRecord
from gpuenergyd_power.rules.backstop import GpuPower
from gpuenergyd_power.rules.ramp import RampJob, RampLimiter, RampStage
from gpuenergyd_power.rules.swing_meter import SwingMeter

log = logging.getLogger(__name__)


class HostSwings:
    """The swing meter of a host, and its ramp limiter; owned by the event loop."""

    def __init__(self, settings: Settings, jobs: Jobs, write: Callable[[ControlEventRecord], None]) -> None:
        self._jobs, self._write = jobs, write
        self.meter = SwingMeter(settings.sample_period_s)
        ramp_w_per_s = None if settings.is_observing else settings.power_ramp_w_per_s
        self._limiter = None if ramp_w_per_s is None else RampLimiter(ramp_w_per_s)
        self._stages: dict[str, RampStage] = {}

    @property
    def ceilings(self) -> Mapping[str, Ceiling]:
        """The clocks that GPUs may not exceed now, by GPU."""
        return {} if self._limiter is None else self._limiter.ceilings

    @property
    def is_limiting(self) -> bool:
        return self._limiter is not None

    def limit(self, now_s: float, readings: Mapping[str, GpuPower]) -> bool:
        """Update the ramp limiter with readings of all GPUs; return whether the ceilings have changed."""
        assert self._limiter is not None
        jobs = [_ramp_job(runner) for runner in self._jobs if runner.job.ranks.gpu_uuids and not runner.job.is_ended]
        has_changed = self._limiter.observe(now_s, readings, jobs)
        self._record_stages()
        return has_changed

    def _record_stages(self) -> None:
        """Record changes of the jobs' ramp stages in the log and the audit log."""
        assert self._limiter is not None
        stages = {job_id: ramp.stage for job_id, ramp in self._limiter.jobs.items()}
        for job_id, stage in stages.items():
            before = self._stages.get(job_id, RampStage.FREE)
            if stage is not before:
                log.info("power ramp of job %s: %s (before: %s)", job_id, stage, before)
                reason = f"ramps of at most {self._limiter.ramp_w_per_s:g} W/s"
                at = datetime.now(tz=UTC)
                self._write(ControlEventRecord(at, "power-ramp", DAEMON, job_id, None, reason, before, stage))
        self._stages = stages


def _ramp_job(runner: JobRunner) -> RampJob:
    job = runner.job
    baseline_s = None if job.baseline is None else job.baseline.iteration_time_s
    measured_s = (seen.iteration_time_s for seen in reversed(job.observations) if seen.iteration_time_s > 0)
    newest_s = next(measured_s, baseline_s)
    total = job.description.length.total_iterations(baseline_s) if baseline_s is not None else None
    left = None if total is None else total - job.num_iterations
    return RampJob(
        job_id=runner.job_id,
        gpu_uuids=tuple(job.ranks.gpu_uuids),
        num_iterations=job.num_iterations,
        iteration_time_s=newest_s,
        left_s=left * newest_s if left is not None and newest_s is not None and left >= 0 else None,
    )
