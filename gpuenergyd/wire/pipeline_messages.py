"""Messages of pipelines across hosts: each rank's daemon measures and sets clocks, the leader's daemon plans.

    POST /v1/members        MemberQuery    -> MemberReport    a rank gets its own daemon's measurements of it
    POST /v1/pipelines      PipelineReport -> PipelineReply   the leading rank sends all members' reports, gets a plan
    POST /v1/members/plan   MemberPlan     -> IterationReply  a rank has its own daemon validate and install its slice

Training processes forward these messages between hosts unchanged. The messages contain durations, energies and clocks,
but no instants: clocks of two hosts are not comparable.
"""

from dataclasses import dataclass

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.wire.messages import ChangeRow, OrderRow


@dataclass(frozen=True, slots=True)
class MemberQuery:
    """Request of a rank for its own daemon's measurements of it."""

    rank_token: str


@dataclass(frozen=True, slots=True)
class MemberReport:
    """Measurements of one rank by its own daemon; `observations` are the last few, each of this rank alone."""

    gpu: GpuView
    order: tuple[OrderRow, ...]
    observations: tuple[IterationObservation, ...]
    phase: str


@dataclass(frozen=True, slots=True)
class PostedPlan:
    """One rank's slice of a plan for the whole pipeline; without clocks the GPU's original state is restored."""

    plan_id: str
    purpose: PlanPurpose
    sm_clocks_mhz: tuple[int | None, ...]
    changes: tuple[ChangeRow, ...]
    reason: str = ""
    straggler_time_s: float | None = None
    """Straggler pace of the whole pipeline, so that the slowdown guard accepts it; None without a straggler."""


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """A rank's slice of a plan, received through the job's store, for its own daemon to install."""

    rank_token: str
    plan: PostedPlan


@dataclass(frozen=True, slots=True)
class ReportedMember:
    """A pipeline member with its report."""

    pp_rank: int
    tp_rank: int
    state: MemberReport


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Reports of all members of a pipeline; `rank_token` is the leading rank's."""

    rank_token: str
    members: tuple[ReportedMember, ...]
    num_pp_ranks: int
    num_tp_ranks: int = 1
    slowest_other_time_s: float | None = None
    """Iteration time by itself of the slowest other replica of this training; None if unknown."""
    age_s: float = 0.0
    """Age of `slowest_other_time_s`."""
    is_news: bool = True
    """Whether `slowest_other_time_s` is a new reading."""


@dataclass(frozen=True, slots=True)
class PipelineReply:
    """The plan to follow, as one slice for each pipeline rank; `plan_id` is None while there is no plan."""

    pipeline_id: str
    phase: str
    plan_id: str | None
    slices: tuple[PostedPlan, ...] = ()
    own_time_s: float | None = None
    """Iteration time of this pipeline by itself: at full speed and without waits for other replicas."""
    num_readings: int = 0
    """Number of estimates of `own_time_s` so far."""
    straggler_time_s: float | None = None
    """Straggler pace of the pipeline; None without a straggler."""
