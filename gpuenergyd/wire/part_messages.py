"""What is said of a pipeline whose ranks sit on several hosts: each rank's daemon measures and sets, one daemon plans.

    POST /v1/parts        PartQuestion   -> PartState       a rank asks its own daemon what it has measured of it
    POST /v1/pipelines    PipelineReport -> PipelineReply   rank 0 hands its daemon all parts' states, and gets a plan
    POST /v1/parts/plan   PartPlan       -> IterationReply  a rank has its own daemon check and install its slice

Training processes carry these between hosts as they are, without looking inside. No instant of one host's clock is in
them: durations, energies and clocks only.
"""

from dataclasses import dataclass

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.wire.messages import ChangeRow, OrderRow


@dataclass(frozen=True, slots=True)
class PartQuestion:
    """A rank asks for what its daemon knows of it."""

    rank_token: str


@dataclass(frozen=True, slots=True)
class PartState:
    """One rank as its own daemon sees it; the last few observations, each of this rank alone."""

    gpu: GpuView
    order: tuple[OrderRow, ...]
    observations: tuple[IterationObservation, ...]
    phase: str


@dataclass(frozen=True, slots=True)
class PostedPlan:
    """One rank's slice of a plan for the whole pipeline; no clocks: un-tuned, the GPU is given back."""

    plan_id: str
    purpose: PlanPurpose
    sm_clocks_mhz: tuple[int | None, ...]
    changes: tuple[ChangeRow, ...]
    reason: str = ""
    straggler_time_s: float | None = None
    """What the slowest replica imposes on the whole pipeline: nobody calls the plan too slow for keeping that pace."""


@dataclass(frozen=True, slots=True)
class PartPlan:
    """A rank posts the slice that it got through the job's store."""

    rank_token: str
    plan: PostedPlan


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """One part: where it stands in the pipeline, and how it is."""

    pp_rank: int
    tp_rank: int
    state: PartState


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """All parts of a pipeline; `rank_token` is that of the rank that leads it."""

    rank_token: str
    parts: tuple[PipelinePart, ...]
    num_pp_ranks: int
    num_tp_ranks: int = 1
    slowest_other_time_s: float | None = None
    """What the slowest other replica of this training takes by itself for an iteration, `age_s` ago."""
    age_s: float = 0.0
    is_news: bool = True
    """Whether it is a reading that no report before has told of."""


@dataclass(frozen=True, slots=True)
class PipelineReply:
    """The plan to follow, as one slice for each pipeline rank; no id: none yet."""

    pipeline_id: str
    phase: str
    plan_id: str | None
    slices: tuple[PostedPlan, ...] = ()
    own_time_s: float | None = None
    """What this pipeline takes by itself: at full speed and without waiting for other replicas."""
    num_readings: int = 0
    """How often `own_time_s` has been read."""
    straggler_time_s: float | None = None
