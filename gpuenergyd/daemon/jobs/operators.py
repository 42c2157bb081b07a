"""Operators' orders for running jobs, which are checked, stored, audited and passed on; and their queries.

An order changes a job's policy, permitted slowdown or priority, or pauses it. Orders outlive the daemon: a job that is
handed over keeps them, and one that registers again after a crash gets them from the file. They end with the job.
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.core.job.messages import OperatorOrdered
from gpuenergyd.core.job.operator_orders import LOWEST_PRIORITY, OperatorOrders
from gpuenergyd.core.pipeline.fitted import FittedPipeline
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.target import slowdown_problem
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.registry import JobKey, Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import AccessError, GpuEnergyError, GpuNotFoundError, JobError, UnknownPolicyError, UsageError
from gpuenergyd.store.records import ControlEventRecord
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd.wire.operator_messages import JobFit, JobPatch, JobPatched

log = logging.getLogger(__name__)

_MAX_STORED = 256
_MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class StoredOrders:
    """The orders for one job, identified by what its program registers with."""

    key: JobKey
    orders: OperatorOrders


@dataclass(slots=True)
class OrderFile:
    """The file with the orders for jobs that have not ended, oldest first; the next daemon reads it."""

    path: Path
    _orders: dict[JobKey, OperatorOrders] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            with self.path.open("rb") as file:
                is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
                stored = decode(file.read(_MAX_BYTES), tuple[StoredOrders, ...], max_bytes=_MAX_BYTES)
        except FileNotFoundError:
            return
        except (OSError, GpuEnergyError) as error:
            log.warning("orders of operators for running jobs are lost: %s", error)
            return
        if is_ours:
            self._orders = {saved.key: saved.orders for saved in stored}

    def of(self, key: JobKey) -> OperatorOrders:
        """Return the orders for a job; empty without any."""
        return self._orders.get(key, OperatorOrders())

    def store(self, key: JobKey, orders: OperatorOrders) -> None:
        """Store the orders for a job, or delete them if they are empty.

        Raises:
            GpuEnergyError: the file cannot be written; it is unchanged.
        """
        kept = {known: order for known, order in self._orders.items() if known != key}
        if orders != OperatorOrders():
            kept[key] = orders
        if kept == self._orders:
            return
        kept = dict(list(kept.items())[-_MAX_STORED:])
        try:
            replace_file(self.path, encode([StoredOrders(*item) for item in kept.items()]))
        except OSError as error:
            raise GpuEnergyError(f"the order cannot be stored: {self.path}: {error.strerror}") from None
        self._orders = kept


@dataclass(slots=True)
class Operators:
    """Takes operators' orders for the jobs of this daemon; owned by the event loop."""

    jobs: Jobs
    check_policy: Callable[[str], Awaitable[str | None]]
    """Tries to create a policy with its options; returns why that failed, or None."""
    file: OrderFile
    is_stopping: bool = False
    """Whether jobs end because the daemon stops; their orders are then kept for the next daemon."""

    def __post_init__(self) -> None:
        self.jobs.stored_orders = self._stored_orders
        self.jobs.on_end.append(self._job_ended)

    async def change(self, job_id: str, patch: JobPatch, peer: PeerCredentials, rules: AccessRules) -> JobPatched:
        """Change a running job at once.

        Raises:
            GpuNotFoundError: no such job runs.
            AccessError: the caller is neither an administrator nor the user of the job.
            UsageError: a value is out of range, or there is no such policy.
            JobError: the job is led on another host, has already ended, or is changed too often.
            GpuEnergyError: the order cannot be stored.
        """
        runner = self.jobs.runner(job_id)
        if runner is None:
            running = ", ".join(job.job_id for job in self.jobs) or "none"
            raise GpuNotFoundError(f"no job {job_id[:100]!r}; running: {running}")
        _require_right(runner, patch, peer, rules)
        _check_amounts(patch)
        if is_counted := not rules.is_administrator(peer):
            self.jobs.require_rate(peer.uid)
        ordered = self._ordered_job(runner)
        policy = None
        if patch.policy is not None:
            policy = self.jobs.full_policy_name(patch.policy)
            if (error := await self.check_policy(policy)) is not None:
                raise UnknownPolicyError(f"policy {policy!r}: {error}")
        if runner.job.is_ended:
            raise JobError(f"job {job_id} has ended")
        if is_counted:
            self.jobs.rates.count(peer.uid)
        before = ordered.job.orders
        orders = OperatorOrders()
        if not patch.is_released:
            later = OperatorOrders(policy, patch.max_slowdown_ratio, patch.priority, patch.is_paused)
            orders = before.followed_by(later)
        self.file.store(self.jobs.key_of(runner), orders)
        return self._pass_on(runner, ordered, orders, str(peer))

    def _pass_on(self, runner: JobRunner, ordered: RunningJob, orders: OperatorOrders, actor: str) -> JobPatched:
        job, before = ordered.job, ordered.job.choices()
        after = job.choices_under(orders)
        changes = after.changes_from(before)
        reason = f"{', '.join(f'{name} {old} -> {new}' for name, old, new in changes)}, ordered by {actor}"
        for name, old, new in changes:
            self.jobs.services.history.write(
                ControlEventRecord(
                    utc_at(time.monotonic_ns()),
                    "order",
                    actor,
                    runner.job_id,
                    None,
                    f"{name} ordered by {actor}",
                    f"{name} {old}",
                    f"{name} {new}",
                )
            )
        if orders != job.orders or changes:
            log.info("job %s: %s", runner.job_id, reason if changes else f"orders of {actor}, which change nothing")
            ordered.handle(OperatorOrdered(orders, reason))
        return JobPatched(
            job_id=runner.job_id,
            job_name=job.description.job_name,
            phase=job.phase,
            policy=job.description.policy,
            max_slowdown_ratio=job.description.target.max_slowdown_ratio,
            priority=job.description.priority,
            is_paused=job.is_paused,
            changes=tuple(f"{name} {old} -> {new}" for name, old, new in changes),
        )

    def _ordered_job(self, runner: JobRunner) -> RunningJob:
        if not runner.is_member:
            return runner
        leader = self.jobs.leader(runner.job_id)
        if leader is None:
            raise JobError(
                f"job {runner.job_id} is a rank of a pipeline across hosts; give the order on the host that leads it,"
                " where status shows the pipeline"
            )
        return leader

    def _stored_orders(self, runner: JobRunner) -> OperatorOrdered | None:
        """Return the orders that an earlier daemon stored for a job that registers again; None if there are none."""
        orders = self.file.of(self.jobs.key_of(runner))
        if orders == OperatorOrders():
            return None
        return OperatorOrdered(orders, "orders that an operator gave to the daemon before")

    def _job_ended(self, runner: JobRunner) -> None:
        if self.is_stopping:
            return
        try:
            self.file.store(self.jobs.key_of(runner), OperatorOrders())
        except GpuEnergyError as error:
            log.warning("%s", error)


def _require_right(runner: JobRunner, patch: JobPatch, peer: PeerCredentials, rules: AccessRules) -> None:
    if rules.is_administrator(peer):
        return
    rules.require_control(peer)
    if peer.uid != runner.owner.uid:
        raise AccessError(
            f"{peer} may not change job {runner.job_id} of uid {runner.owner.uid};"
            f" allowed: that user, {rules.administrators_text()}"
        )
    if patch.priority is not None:
        raise AccessError(f"{peer} may not change the priority of a job; allowed: {rules.administrators_text()}")


def _check_amounts(patch: JobPatch) -> None:
    if patch.max_slowdown_ratio is not None and (problem := slowdown_problem(patch.max_slowdown_ratio)) is not None:
        raise UsageError(f"max_slowdown_ratio {problem}")
    if patch.priority is not None and not 0 <= patch.priority <= LOWEST_PRIORITY:
        raise UsageError(f"priority {patch.priority}: must be 0, the highest, to {LOWEST_PRIORITY}")


@dataclass(frozen=True, slots=True)
class JobFits:
    """Answers queries for fitted models, for this daemon's jobs and the pipelines that it leads."""

    jobs: Jobs
    ask_policy: Callable[[str, str, JobView], Awaitable[FittedPipeline | PolicyFailure]]
    """Returns the model that a job's policy has fitted to its view; called with job id and policy."""

    async def fit(self, job_id: str) -> JobFit:
        """Return the fitted pipeline of a job with the plan in force.

        Raises:
            GpuNotFoundError: no such job runs.
            JobError: the job is led on another host, has no baseline yet, or its policy has fitted nothing.
        """
        runner = self.jobs.runner(job_id)
        if runner is None:
            running = ", ".join(job.job_id for job in self.jobs) or "none"
            raise GpuNotFoundError(f"no job {job_id[:100]!r}; running: {running}")
        leader = self.jobs.leader(job_id)
        if runner.is_member and leader is None:
            raise JobError(f"job {job_id} is a rank of a pipeline across hosts; ask on the host that leads it")
        job = (leader or runner).job
        view = job.view()
        if view is None:
            raise JobError(f"job {job_id} has no baseline yet: {job.phase}, {job.phase_reason}")
        fitted = await self.ask_policy(job.description.job_id, job.description.policy, view)
        if isinstance(fitted, PolicyFailure):
            raise JobError(f"job {job_id}: {fitted.reason}")
        return JobFit(
            job_id=job_id,
            job_name=job.description.job_name,
            policy=job.description.policy,
            phase=job.phase,
            phase_reason=job.phase_reason,
            plan=job.current_plan,
            fitted=fitted,
        )
