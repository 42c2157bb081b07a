"""Builds the status responses of the daemon, its GPUs and its jobs; missing values are null, never 0."""

import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Protocol

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.measurements.savings import Interval, SavingEstimate, saved_power_w, sum_of_significant
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.operator_orders import OptionSource
from gpuenergyd.core.job.outcome import expectation, power_limit_text
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.measurement.switch_calibration import SwitchCalibration
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.power_swing import SwingFigure
from gpuenergyd.core.pipeline.reorder import order_fields
from gpuenergyd.daemon.gpus.host_energy import HostEnergy
from gpuenergyd.daemon.gpus.inventory import ClaimKind, Gpu, GpuClaim, Gpus
from gpuenergyd.daemon.host_services import HostService
from gpuenergyd.daemon.jobs.registry import EndedJob, Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.manual_leases.leases import ManualLease, ManualLeases
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.daemon.processes.gpu_worker import GpuWorker
from gpuenergyd.daemon.processes.policy_client import PolicyClient
from gpuenergyd.daemon.registration import option_source
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.gpu.device import GpuDetails
from gpuenergyd.gpu.link.messages import USABLE_HEALTH, GpuHealth
from gpuenergyd.store import WriterStatus
from gpuenergyd.store.database import sqlite_path
from gpuenergyd.wire.daemon_codec import plain
from gpuenergyd.wire.messages import RankRegistration

_VERSION = version("gpuenergyd")


class StatusSource(Protocol):
    """The parts of the daemon that the status is built from."""

    settings: Settings
    started_mono_s: float
    gpus: Gpus
    jobs: Jobs
    leases: ManualLeases
    worker: GpuWorker
    policy: PolicyClient
    host_energy: HostEnergy
    services: Mapping[str, HostService]

    def history_status(self) -> WriterStatus:
        """Return the state of the database writer."""
        ...


def daemon_status(daemon: StatusSource) -> dict[str, Any]:
    """Return the status of the daemon: health, GPUs and jobs."""
    history, welcome = daemon.history_status(), daemon.worker.welcome
    history_trouble = f"history: {history.reason}" if history.reason else None
    services = daemon.services.values()
    troubles = (daemon.worker.trouble, history_trouble, *(service.trouble for service in services))
    reasons = [reason for reason in troubles if reason]
    # GPUs without control rights are normal in observe mode.
    normal = {*USABLE_HEALTH, GpuHealth.RELEASED}
    if daemon.settings.is_observing:
        normal.add(GpuHealth.OBSERVE_ONLY)
    reasons += [
        f"GPU {gpu.identity.gpu_uuid} is {gpu.health}: {gpu.detail}" for gpu in daemon.gpus if gpu.health not in normal
    ]
    return {
        "version": _VERSION,
        "pid": os.getpid(),
        "uptime_s": time.monotonic() - daemon.started_mono_s,
        "is_degraded": bool(reasons),
        "degraded_reasons": reasons,
        "driver": daemon.settings.driver,
        "mode": daemon.settings.mode,
        "mode_note": daemon.settings.mode_note,
        "pue": daemon.settings.pue,
        "worker": {
            "pid": None if welcome is None else welcome.pid,
            "sentinel_pid": None if welcome is None else welcome.sentinel_pid,
            "is_alive": daemon.worker.is_alive,
            "heartbeat_age_s": daemon.worker.heartbeat_age_s,
            "num_restarts": daemon.worker.num_restarts,
            "missing_capabilities": () if welcome is None else welcome.missing_capabilities,
        },
        "policy_host": {
            "pid": daemon.policy.pid,
            "is_alive": daemon.policy.is_alive,
            "num_restarts": daemon.policy.num_restarts,
            "activity": daemon.policy.activity,
            "trouble": daemon.policy.trouble,
        },
        "gpus": [_gpu(gpu, daemon.leases.get(gpu.identity.gpu_uuid)) for gpu in daemon.gpus],
        "measured_gpus": plain(daemon.gpus.measured),
        "jobs": [_job(runner, daemon) for runner in daemon.jobs],
        "ended_jobs": [_ended_job(ended) for ended in reversed(daemon.jobs.ended)],
        **_total_saved_power(daemon.jobs),
        **{name: value for service in services for name, value in service.status().items()},
        "clock_requests": {
            "num_stale": daemon.jobs.clock_requests.num_stale,
            "num_hostile": daemon.jobs.clock_requests.num_hostile,
        },
        "host_energy": daemon.host_energy.status(),
        "store": {
            "path": history.path,
            "num_rows_written": history.num_rows_written,
            "num_rows_dropped": history.num_rows_dropped,
            "num_records_waiting": history.num_records_waiting,
        },
        "files": _files(daemon.settings),
    }


def job_detail(daemon: StatusSource, job_id: str) -> Mapping[str, Any] | None:
    """Return a job's status with its plan and last measured timeline, None if no such job runs."""
    runner = daemon.jobs.runner(job_id)
    if runner is None:
        return None
    index, spans = runner.recorder.timeline or (None, ())
    plan, schedule = runner.job.current_plan, runner.job.ranks.schedule
    return {
        **_job(runner, daemon),
        "plan": plan,
        "schedule_orders": None if schedule is None else plan.schedule(schedule).orders,
        "timeline_iteration_index": index,
        "timeline": spans,
    }


def _files(settings: Settings) -> dict[str, str | None]:
    """Return the absolute paths of the daemon's files, for commands that read them; None without such a file."""
    paths = {
        "history_path": sqlite_path(settings.database_url),
        "journal_path": settings.journal_path,
        "carbon_path": settings.carbon_file_path if settings.carbon_zone is not None else None,
        "world_path": settings.driver_path,
    }
    return {name: None if path is None else str(path.absolute()) for name, path in paths.items()}


def _gpu(gpu: Gpu, lease: ManualLease | None) -> dict[str, Any]:
    sample = gpu.sample
    return {
        "gpu_uuid": gpu.identity.gpu_uuid,
        "index": gpu.identity.index,
        "model_name": gpu.identity.model_name,
        "is_simulated": gpu.identity.is_simulated,
        "energy_scope": gpu.identity.energy_scope,
        "state": gpu.health,
        "state_reason": gpu.detail or None,
        "sm_clock_mhz": sample.sm_clock_mhz if sample else None,
        "clock_age_s": sample.clock_age_ns / 1e9 if sample else None,
        "requested_sm_clock_mhz": gpu.requested_sm_clock_mhz,
        "power_w": sample.power_w if sample else None,
        "total_energy_j": sample.total_energy_j if sample else None,
        "temperature_celsius": sample.temperature_celsius if sample else None,
        "reading_age_s": _age_s(sample.read_mono_ns) if sample else None,
        "refused_readings": plain(tuple(gpu.refused.values())),
        **_knobs(gpu),
        "switching": _switching(gpu.switching),
        "job_id": gpu.claim.job_id if gpu.claim and not gpu.claim.is_lease else None,
        "administrator_lease": _lease(gpu.claim, lease, ClaimKind.ADMINISTRATOR),
        "zeusd_client_lease": _lease(gpu.claim, lease, ClaimKind.ZEUSD_CLIENT),
        "calibration_lease": _lease(gpu.claim, lease, ClaimKind.CALIBRATION),
    }


def _knobs(gpu: Gpu) -> dict[str, Any]:
    """Return the settings read back from the driver; null if the driver does not report one or it was not read yet."""
    details = gpu.knobs.details or GpuDetails()
    return {
        "power_limit_w": details.power_limit_w,
        "enforced_power_limit_w": details.enforced_power_limit_w,
        "default_power_limit_w": gpu.identity.default_power_limit_w,
        "power_limit_owner": gpu.knobs.power_limit_owner,
        "foreign_sm_clock_mhz": details.foreign_sm_clock_mhz,
        "application_sm_clock_mhz": details.application_sm_clock_mhz,
        "application_memory_clock_mhz": details.application_memory_clock_mhz,
        "memory_clock_mhz": details.memory_clock_mhz,
        "max_memory_clock_mhz": details.max_memory_clock_mhz,
        "is_power_smoothing_on": details.is_power_smoothing_on,
        "power_smoothing_profile": details.power_smoothing_profile,
        "power_floor_w": details.power_floor_w,
        "secondary_power_floor_w": details.secondary_power_floor_w,
        "is_persistent": details.is_persistent,
        "is_mig_enabled": details.is_mig_enabled,
        "requested_power_profiles": _numbers(details.requested_power_profiles),
        "enforced_power_profiles": _numbers(details.enforced_power_profiles),
        "our_power_profile": gpu.knobs.our_power_profile,
    }


def _numbers(text: str | None) -> list[int] | None:
    return None if text is None else [int(number) for number in text.split(",") if number]


def _switching(calibration: SwitchCalibration) -> dict[str, Any]:
    """Return the switch latencies that plans use, and the measured ones."""
    latency = calibration.latency
    return {
        "basis": latency.basis,
        "raise_s": latency.raise_s,
        "lower_s": latency.lower_s,
        "call_s": latency.call_s if latency.basis.is_measured else None,
        "num_seen": calibration.num_seen,
        "num_unseen": calibration.num_unseen,
        "num_earlier": calibration.num_earlier,
        "seen": plain(calibration.estimates()),
    }


def _lease(claim: GpuClaim | None, lease: ManualLease | None, kind: ClaimKind) -> dict[str, Any] | None:
    """Return a lease outside jobs with what it sets and for how long."""
    if claim is None or claim.kind is not kind:
        return None
    return {
        "lease_id": claim.job_id,
        "uid": claim.uid,
        "pid": claim.pid,
        "age_s": _age_s(claim.since_mono_ns),
        "sm_clock_mhz": lease.sm_clock_mhz if lease is not None else None,
        "power_limit_w": lease.power_limit_w if lease is not None else None,
        "remaining_s": lease.remaining_s if lease is not None else None,
    }


def _job(runner: JobRunner, daemon: StatusSource) -> dict[str, Any]:
    job = runner.job
    plan, predicted = job.current_plan, job.current_plan.predicted
    measured = job.knowledge.measured_under(plan.plan_id)
    registration, outcome = daemon.jobs.registration(runner.job_id), runner.outcome()
    saved_w = _saved_power_w(runner)
    sessions = daemon.jobs.sessions.of_job(runner.job_id)
    return {
        "job_id": runner.job_id,
        "job_name": job.description.job_name,
        "replica_name": daemon.jobs.replica_name(runner),
        "phase": job.phase,
        "phase_reason": job.phase_reason,
        "last_notice": job.notices.last,
        "last_notice_iterations_ago": None if job.notices.last_at is None else job.num_iterations - job.notices.last_at,
        "is_given_up": job.is_given_up,
        "retry_in_iterations": job.retry_in_iterations,
        "num_faults": job.faults.num_faults,
        "policy": job.description.policy,
        "policy_source": _option_source(job, registration, "policy"),
        "expectation": "; ".join(filter(None, (expectation(job, is_member=runner.is_member), power_limit_text(job)))),
        "outcome": outcome.kind,
        "outcome_reason": outcome.reason,
        "advice": plain(job.advice),
        "advice_text": outcome.advice or None,
        "schedule": job.description.schedule_name,
        "num_ranks": job.description.num_ranks,
        "num_stage_ranks": job.description.num_stage_ranks,
        "num_microbatches": job.description.num_microbatches,
        "captured": next((s.captured for s in sessions if s.captured), None),
        "num_iterations": job.num_iterations,
        "num_estimated_iterations": runner.recorder.num_estimated,
        "plan_id": plan.plan_id,
        "plan_purpose": plan.purpose,
        "plan_reason": plan.reason,
        **{figure.value: plan.figure(figure) for figure in SwingFigure},
        **order_fields(job.current_plan.orders, job.knowledge.reordering.advice),
        "num_baseline_iterations": job.knowledge.num_iterations_for[PlanPurpose.BASELINE],
        "num_tuned_iterations": job.knowledge.num_iterations_for[PlanPurpose.TUNED],
        **_estimate(job.estimate()),
        "watts_saved": saved_w.estimate if saved_w else None,
        "watts_saved_interval": _bounds(saved_w),
        "num_iterations_of_plan": measured.num_iterations,
        "num_trial_iterations": job.knowledge.num_iterations_for[PlanPurpose.TRIAL],
        "num_profile_iterations": job.knowledge.num_iterations_for[PlanPurpose.PROFILE],
        **account_fields(job.account),
        **runner.recorder.figures.totals.status_fields(),
        "max_slowdown_ratio": job.target.max_slowdown_ratio,
        "max_slowdown_source": _option_source(job, registration, "max_slowdown_ratio"),
        "priority": job.description.priority,
        "is_paused": job.is_paused,
        "orders": plain(job.orders),
        "predicted_iteration_time_s": predicted.iteration_time_s if predicted else None,
        "predicted_energy_j": predicted.energy_j if predicted else None,
        "lower_bound_j": predicted.lower_bound_j if predicted else None,
        "plan_iteration_time_s": measured.iteration_time_s,
        "plan_energy_j": measured.energy_j,
        **_predicted_saving(runner),
        **daemon.jobs.replicas.status(runner),
        **_carbon(daemon, None if runner.is_member else runner),
        "is_suspended": runner.leases.is_suspended,
        "is_pipeline_member": runner.is_member,
        **_pipeline(daemon, runner.job_id),
        "age_s": _age_s(runner.created_mono_ns),
        "last_report_age_s": _age_s(runner.last_report_mono_ns) if runner.last_report_mono_ns else None,
        "ranks": [
            {name: getattr(s, name) for name in ("pp_rank", "stage_rank", "gpu_uuid")}
            | {"pid": s.peer.pid, "uid": s.peer.uid}
            for s in sessions
        ],
    }


def account_fields(account: TimeAccount | None) -> dict[str, Any]:
    """Return the time that the daemon has cost a training and may still cost it; None for members of a pipeline."""
    return {
        "cost_s": account.cost_s if account else None,
        "cost_ratio": account.cost_ratio if account else None,
        "client_cost_s": account.client_cost_s if account else None,
        "account_income_s": account.income_s if account else None,
        "account_left_s": account.left_s if account else None,
        "num_experiments": account.num_experiments if account else None,
    }


def _option_source(job: Job, registration: RankRegistration, name: str) -> OptionSource:
    """Return where the policy or the permitted slowdown of a job comes from now."""
    return OptionSource.OPERATOR if getattr(job.orders, name) is not None else option_source(registration, name)


def _carbon(daemon: StatusSource, runner: RunningJob | None) -> Mapping[str, Any]:
    """Return target and emissions of a job; None for members of a pipeline, whose leader reports them for all."""
    watcher = daemon.jobs.services.watcher
    return {"target": None, "carbon": None} if watcher is None or runner is None else watcher.status(runner)


def _pipeline(daemon: StatusSource, job_id: str) -> Mapping[str, Any]:
    """Return the status of the pipeline across hosts that a job leads, and of its last refused message, or None."""
    pipelines = daemon.jobs.pipelines
    return {"pipeline": None, "pipeline_refusal": None} if pipelines is None else pipelines.status(job_id)


def _ended_job(ended: EndedJob) -> dict[str, Any]:
    return {
        "job_id": ended.job_id,
        "job_name": ended.job_name,
        "replica_name": ended.replica_name,
        "ended_age_s": _age_s(ended.ended_mono_ns),
        "outcome": ended.outcome.kind,
        "outcome_reason": ended.outcome.reason,
        "summary": ended.line,
        **_estimate(ended.estimate),
    }


def _estimate(estimate: SavingEstimate | None) -> dict[str, Any]:
    """Return the values of a job at full speed and under plans; None if not measured."""
    saving, slowdown = estimate.ratios if estimate else (None, None)
    return {
        "baseline_time_s": estimate.baseline_time_s if estimate else None,
        "baseline_energy_j": estimate.baseline_energy_j if estimate else None,
        "iteration_time_s": estimate.iteration_time_s if estimate else None,
        "energy_j": estimate.energy_j if estimate else None,
        "saving_ratio": saving.estimate if saving else None,
        "saving_interval": _bounds(saving),
        "is_saving_significant": saving.is_significant if saving else None,
        "slowdown_ratio": slowdown.estimate if slowdown else None,
        "slowdown_interval": _bounds(slowdown),
    }


def _saved_power_w(runner: JobRunner) -> Interval | None:
    """Return the power that a job saves now; None unless a tuned plan is in force."""
    job, is_saving = runner.job, runner.job.phase is JobPhase.TUNED and not runner.leases.is_suspended
    return saved_power_w(job.knowledge.saving(), job.baseline) if is_saving else None


def _total_saved_power(runners: Jobs) -> dict[str, Any]:
    """Return the power that all jobs with a significant saving save now; None if there is none."""
    total = sum_of_significant([saved for runner in runners if (saved := _saved_power_w(runner)) is not None])
    return {"watts_saved_w": total.estimate if total else None, "watts_saved_interval": _bounds(total)}


def _predicted_saving(runner: JobRunner) -> dict[str, Any]:
    """Return the predicted saving in observe mode and its basis; None in control mode."""
    plan = runner.prediction
    saving = plan.predicted_saving if plan else None
    return {
        "is_observing": runner.is_observing,
        "predicted_saving_ratio": saving.ratio if saving else None,
        "predicted_saving_low_ratio": saving.low_ratio if saving else None,
        "predicted_saving_high_ratio": saving.high_ratio if saving else None,
        "predicted_saving_basis": plan.reason if plan else None,
    }


def _bounds(interval: Interval | None) -> tuple[float, float] | None:
    return None if interval is None else (interval.low, interval.high)


def _age_s(mono_ns: int) -> float:
    return max(0.0, (time.monotonic_ns() - mono_ns) / 1e9)
