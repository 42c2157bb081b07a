"""What a pipeline leader's commands act on: plans from the policy host, slices for the members, audit log.

A leader has no GPU. Each member's own daemon leases and restores its GPU and records its iterations.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import Event, JobPhase, PlanDecided, PolicyFailed, RecordPhase, SendPlan
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.jobs.audit_log import AuditLog
from gpuenergyd.daemon.jobs.plan_source import HELD_ITERATIONS, SuspectedPacePlan
from gpuenergyd.daemon.ports import PolicyPort
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd_across_hosts.rules.plan_mix import may_be_mixed, node_clocks_mhz

log = logging.getLogger(__name__)

_HELD_ITERATIONS = 48
"""Longest time, in iterations, that a request to the policy waits for the newest plan to be tried."""
_EPOCHS_KEPT = 64
"""Number of plans whose epochs are remembered; only the newest few are in use."""
_MAY_BE_IN_FORCE = 2
"""Number of plans before the newest one that members may still follow."""


@dataclass(frozen=True, slots=True)
class LeaderAudit(AuditLog):
    """Audit log of a pipeline, kept with the leader's own job; the actor is the pipeline."""

    def record_phase(self, command: RecordPhase) -> None:
        """Record that the pipeline entered a phase."""
        log.info("%s: %s (%s)", self.actor, command.phase, command.reason)
        self.record("phase", self.actor, command.reason, after=f"pipeline {command.phase}")


@dataclass(slots=True)
class LeaderDelivery:
    """The newest plan of a pipeline, delivered in the replies to the leading rank's reports."""

    job: Job
    audit: LeaderAudit
    generation: str = field(default_factory=lambda: secrets.token_hex(2))
    """Makes plan ids differ between daemons, since a rank ignores a plan whose id it has already installed."""
    sent: SendPlan | None = None
    target: PerformanceTarget | None = None
    """The target that the newest plan was made for."""
    answering: PerformanceTarget | None = None
    """The target for which the policy made the plan being handled; the job's target may have changed since."""
    plan_id: str | None = None
    """The id under which members follow the newest plan; None before the first plan."""
    block: tuple[str, int] | None = None
    """Id, and length in iterations, of the last block at full speed during the newest plan."""
    replaces: tuple[str, ...] = ()
    """Ids of earlier plans that some ranks may follow while others follow the newest; only for a straggler's pace."""
    _before: deque[tuple[str, ClockPlan]] = field(default_factory=lambda: deque(maxlen=_MAY_BE_IN_FORCE))
    _epoch_of_plan: dict[str, int] = field(default_factory=lambda: {BASELINE_PLAN_ID: 0})

    def send(self, command: SendPlan) -> None:
        """Replace the newest plan, or interrupt it for a block of iterations at full speed.

        The plan windows have a gap for the block, so members keep their plan installed. After the block it is sent
        again under a newer epoch, and members treat it as the same plan.
        """
        plan = command.plan
        if command.num_iterations is not None:
            self.block = self._new_id(command), command.num_iterations
            length = count_text(command.num_iterations, "iteration")
            self.audit.record("plan", self.audit.actor, plan.reason, after=f"{length} at full speed")
            return
        if self.plan_id is None or self.sent is None or plan.plan_id != self.sent.plan.plan_id:
            if self.plan_id is not None and self.sent is not None:
                self._before.append((self.plan_id, self.sent.plan))
            self.replaces = self._mixable(plan)
            self.plan_id, self.block = self._new_id(command), None
            self.target = self.answering or self.job.target
            after = f"epoch {command.plan_epoch}: {plan.plan_id}"
            self.audit.record("plan", self.audit.actor, plan.reason, after=after)
        self.sent = command
        self._epoch_of_plan.pop(self.plan_id, None)
        self._epoch_of_plan[self.plan_id] = command.plan_epoch
        for plan_id in list(self._epoch_of_plan)[1:-_EPOCHS_KEPT]:  # the first entry is full speed
            del self._epoch_of_plan[plan_id]

    def schedule_changed(self) -> None:
        """Forget the plans before the newest one, which were for another number of microbatches."""
        self._before.clear()

    def _new_id(self, command: SendPlan) -> str:
        return f"{self.job.description.job_id}.{self.generation}.{command.plan_epoch}"

    def _mixable(self, plan: ClockPlan) -> tuple[str, ...]:
        """Return the ids of earlier plans that may share an iteration with `plan`; empty unless for a straggler's pace.

        Plans with different orders of instructions are never mixed: in an iteration, all ranks run one plan's order.
        """
        ranks, full_speed = self.job.ranks, self.job.knowledge.full_speed()
        if not self.job.target.is_forced or plan.purpose is not PlanPurpose.TUNED or not full_speed:
            return ()
        assert ranks.schedule is not None
        top_mhz, schedule = [max(clocks) for clocks in ranks.supported_sm_clocks_mhz], plan.schedule(ranks.schedule)
        next_mhz, graph = node_clocks_mhz(schedule, plan), ranks.graph_in(plan.orders)
        return tuple(
            plan_id
            for plan_id, before in self._before
            if before.purpose is PlanPurpose.TUNED
            and before.orders == plan.orders
            and may_be_mixed(graph, full_speed[-1], node_clocks_mhz(schedule, before), next_mhz, top_mhz)
        )

    def epoch_of(self, plan_id: str | None) -> int | None:
        """Return the epoch of a plan that members followed; None if they followed different ones."""
        return self._epoch_of_plan.get(plan_id) if plan_id is not None else None

    def planned_mhz(self, plan_epoch: int | None) -> Sequence[int | None] | None:
        """Return the clocks of the plan that an iteration followed, rank by rank in program order.

        None for the baseline and for forgotten plans. Iterations follow the previous plan until all ranks have agreed
        on the new one.
        """
        plans, schedule = self.job.knowledge.plans, self.job.ranks.schedule
        plan = plans.by_id(plans.id_of(plan_epoch)) if plan_epoch else None
        if plan is None or schedule is None:
            return None
        return node_clocks_mhz(plan.schedule(schedule), plan)


@dataclass(slots=True)
class LeaderPlans:
    """Requests plans from the policy host once the newest one was tried: policies answer faster than ranks agree."""

    job: Job
    host: PolicyPort
    delivery: LeaderDelivery
    handle: Callable[[Event], Awaitable[None]]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    is_observing: bool
    newest_index: int = -1
    """The newest merged iteration."""
    newest_epoch: int | None = None
    """The plan epoch of that iteration."""
    prepared: SuspectedPacePlan = field(init=False)
    _held: JobView | None = None
    _held_at: int = -1

    def __post_init__(self) -> None:
        job = self.job
        self.prepared = SuspectedPacePlan(job.description.job_id, lambda: job.description.policy, self.host, self.spawn)

    def ask(self, view: JobView) -> None:
        """Request a plan once the newest one was tried; request none where clocks may not be set."""
        if not self.is_observing:
            self._held, self._held_at = view, self.newest_index
            self.ask_in_time()

    def ask_in_time(self) -> None:
        """Send the held request if the newest plan was tried, the target has changed, or it was held for long enough.

        While a plan for a suspected straggler is being prepared, other requests wait.
        """
        view, newest = self._held, self.delivery.sent
        if view is None:
            return
        # Full speed needs no trial, and members that measure it again follow no plan.
        is_tried = newest is None or not newest.plan.ranks or newest.plan_epoch == self.newest_epoch
        num_held = self.newest_index - self._held_at
        if self.prepared.is_pending and not view.target.is_forced:
            if num_held < HELD_ITERATIONS:
                return
            self.prepared.drop()
        is_late = num_held >= _HELD_ITERATIONS
        if is_tried or is_late or view.target != self.delivery.target:
            self._held = None
            fresh = self.job.view() or view
            self.spawn(self._answer(replace(fresh, target=view.target)))

    async def straggler_changed(self) -> None:
        """Request a plan for the present straggler's pace at once.

        An older held request is answered with the plan in force, so that the job asks again.
        """
        view, job = self._held, self.job
        is_outdated = view is not None and view.target.straggler_time_s != job.target.straggler_time_s
        if is_outdated and job.phase is JobPhase.TUNED:
            self._held = None
            await self.handle(PlanDecided(job.current_plan))
        await asyncio.sleep(0)  # lets the reply to this report include a prepared plan

    async def _answer(self, view: JobView) -> None:
        job_id, policy = self.job.description.job_id, self.job.description.policy
        answer = await self.prepared.plan_for(view) or await self.host.next_plan(job_id, policy, view)
        self.delivery.answering = view.target
        await self.handle(PolicyFailed(answer.reason) if isinstance(answer, PolicyFailure) else PlanDecided(answer))
        self.delivery.answering = None
