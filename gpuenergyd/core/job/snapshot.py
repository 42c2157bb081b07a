"""Snapshot of a job's state machine, which a daemon leaves to the next one when it restarts."""

from dataclasses import dataclass, field

from gpuenergyd.core.job.control.faults import Faults
from gpuenergyd.core.job.control.plan_control import PlanControlSnapshot
from gpuenergyd.core.job.measurements.knowledge import KnowledgeSnapshot
from gpuenergyd.core.job.measurements.rank_reports import RankReportsSnapshot
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.operator_orders import OperatorOrders
from gpuenergyd.core.job.story import Notices
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.policy_api.policy import BaselineView, GpuView
from gpuenergyd.core.policy_api.target import PerformanceTarget


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """All state of a `Job` but its description, its rules and its story."""

    phase: JobPhase
    phase_reason: str
    target: PerformanceTarget
    baseline: BaselineView | None
    profiling_refusal: str | None
    orders: dict[int, tuple[Instruction, ...]]
    gpus: dict[int, GpuView]
    """The GPU of each rank, by `JobDescription.rank_index`."""
    reports: RankReportsSnapshot
    knowledge: KnowledgeSnapshot
    control: PlanControlSnapshot
    faults: Faults
    notices: Notices
    changed_ranks: dict[int, tuple[int, tuple[Instruction, ...]]] = field(default_factory=dict)
    """See `JobRanks.changed_ranks`."""
    orders_of_operators: OperatorOrders = field(default_factory=OperatorOrders)
    as_registered: OperatorOrders | None = None
    """What the job was registered with; None in the state of a daemon without operators' orders."""
