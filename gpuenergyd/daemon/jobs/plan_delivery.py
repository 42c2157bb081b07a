"""Delivery of plans to the ranks: the plan slices that each rank has yet to receive, and its last one."""

import time
from dataclasses import dataclass, field

from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.messages import SendPlan
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.audit_log import DAEMON, AuditLog
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.store.records import PlanRecord
from gpuenergyd.wire.messages import ChangeRow, OrderRow, PlanSlice


@dataclass(frozen=True, slots=True)
class DeliverySnapshot:
    """The state of `PlanDelivery`, by `JobDescription.rank_index`."""

    last_epoch: int
    waiting: dict[int, list[PlanSlice]]
    delivered: dict[int, PlanSlice]


@dataclass(slots=True)
class PlanDelivery:
    """The slices of one job's plans; all ranks of a stage get the same slice, each at its next report."""

    ranks: JobRanks
    history: HistoryPort
    audit: AuditLog
    last_epoch: int = 0
    """The epoch of the plan that was sent last."""
    _waiting: dict[int, list[PlanSlice]] = field(default_factory=dict)
    _delivered: dict[int, PlanSlice] = field(default_factory=dict)

    def send(self, command: SendPlan) -> None:
        """Cut a plan into one slice per stage, queue it for each rank of the stage, and record the plan."""
        plan, before = command.plan, self.last_epoch
        self.last_epoch = command.plan_epoch
        for pp_rank, gpu in self.ranks.gpus.items():
            rows = tuple(change_row(change) for change in plan.changes_of(pp_rank))
            order = tuple(order_row(i) for i in plan.orders[pp_rank]) if plan.orders else ()
            plan_slice = PlanSlice(
                plan.plan_id,
                command.plan_epoch,
                command.apply_at_iteration,
                rows,
                max(gpu.supported_sm_clocks_mhz, default=0),
                order,
            )
            for stage_rank in range(self.ranks.description.num_stage_ranks):
                index = self.ranks.description.rank_index(pp_rank, stage_rank)
                self._waiting.setdefault(index, []).append(plan_slice)
        now = utc_at(time.monotonic_ns())
        self.history.write(PlanRecord(self.audit.job_id, command.plan_epoch, plan, now, command.apply_at_iteration))
        self.audit.record(
            "plan",
            self._actor(plan),
            plan.reason,
            before=f"epoch {before}",
            after=f"epoch {command.plan_epoch}: {plan.plan_id}",
        )

    def end(self) -> None:
        """Send the remaining ranks of an ended job back to full speed."""
        for index in self.ranks.own_gpus:
            self._waiting[index] = [PlanSlice("ended", self.last_epoch + 1, 0, ())]

    def pop(self, rank_index: int) -> tuple[PlanSlice, ...]:
        """Return the slices that a rank has yet to receive, oldest first, and mark them as delivered."""
        new = tuple(self._waiting.pop(rank_index, ()))
        if new:
            self._delivered[rank_index] = new[-1]
        return new

    def reply_to(self, iteration: RankIteration) -> tuple[PlanSlice, ...]:
        """Return the slices for the reply to a rank's report.

        A reply may be lost. The newest delivered slice is therefore repeated to a rank that ran one of its iterations
        under an older plan; a rank ignores a slice that it has received before.
        """
        index = self.ranks.description.rank_index(iteration.pp_rank, iteration.stage_rank)
        delivered = self._delivered.get(index)
        new = self.pop(index)
        is_lost = (
            delivered is not None
            and iteration.plan_epoch < delivered.plan_epoch
            and iteration.iteration_index >= delivered.apply_at_iteration
        )
        return (delivered, *new) if delivered is not None and is_lost else new

    def snapshot(self) -> DeliverySnapshot:
        """Return the state for the next daemon."""
        return DeliverySnapshot(self.last_epoch, dict(self._waiting), dict(self._delivered))

    def restore(self, snapshot: DeliverySnapshot) -> None:
        """Replace the state with that of an earlier daemon."""
        self.last_epoch = snapshot.last_epoch
        self._waiting, self._delivered = dict(snapshot.waiting), dict(snapshot.delivered)

    def _actor(self, plan: ClockPlan) -> str:
        is_by_policy = plan.purpose is not PlanPurpose.BASELINE
        return f"policy {self.ranks.description.policy}" if is_by_policy else DAEMON


def order_row(instruction: Instruction) -> OrderRow:
    """Return an instruction in the form used in plan slices."""
    return str(instruction.kind), instruction.microbatch_index, instruction.chunk_index


def change_row(change: ClockChange) -> ChangeRow:
    """Return a clock change in the form used in plan slices."""
    return (*order_row(change.instruction), round(change.offset_s * 1e9), change.sm_clock_mhz)
