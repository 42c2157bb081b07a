"""Messages of pipelines across hosts: each rank's daemon measures and sets clocks, the leader's daemon plans.

    POST /v1/members        MemberQuery    -> MemberReply     a rank asks its own daemon; the daemon merges the ranks of
                                                              a stage on its host, and one of them carries the result
    POST /v1/pipelines      PipelineReport -> PipelineReply   the leading rank sends what is new of all stages, gets a
                                                              plan
    POST /v1/members/plan   MemberPlan     -> IterationReply  a rank has its own daemon validate and install its slice

Training processes forward these messages between hosts unchanged. What seldom changes is sent once (`StageFacts`), then
what is new in each iteration (`StageReport`), with the id of its facts. A receiver without these facts ignores the
report and asks for them. The messages contain durations, energies and GPU clocks but no instants, since the time of two
hosts is not comparable. All hosts of a job must run the same version of gpuenergyd, which `StageFacts.version` checks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.reorder import RankMemory, ReorderOffer
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.wire.messages import BudgetShare, TrainingBudget

PIPELINE_VERSION = 5
"""Version of these messages. 1 sent every rank's whole state in each message, 2 had a fixed number of microbatches, 3
sent instruction times as 32-bit floats, 4 had no reordering."""

_MAX_RUN_KEY_CHARS = 200

OrderBlock = tuple[int, tuple[tuple[tuple[str, int], int, int], ...]]
"""Instructions by (kind, chunk), numbered by microbatch; see messages/patterns.py."""
ClockBlock = tuple[int, tuple[tuple[int | None, int, int], ...]]
"""Clocks of instructions in program order; all numbers are 0."""
ChangeBlock = tuple[int, tuple[tuple[tuple[str, int, int, int], int, int], ...]]
"""Clock changes by (kind, chunk, delay in ns, SM clock in MHz), numbered by microbatch."""


def member_run_key(member: str, run_key: str) -> str:
    """Return the run key with which a member of a training registers as a separate job."""
    return f"pp{member},{run_key}"[:_MAX_RUN_KEY_CHARS]


@dataclass(frozen=True, slots=True)
class MemberPlace:
    """Position of a rank in a pipeline across hosts; `run` is unique to a training run and shared by all its ranks.

    The tensor-parallel ranks of a pipeline rank are the siblings of one stage. `dp_rank` differs between replicas.
    """

    run: str
    dp_rank: int
    pp_rank: int
    num_pp_ranks: int
    tp_rank: int = 0
    num_tp_ranks: int = 1


@dataclass(frozen=True, slots=True)
class PlanAgreement:
    """What the pipeline leader publishes: the plan to install, plan windows, and what it has received.

    `windows` lists plan id, first iteration, and the iteration after the last. `revoked` is a plan to stop following
    before its window ends. Observations up to `merged_iteration` need not be sent again.
    """

    wanted: str | None = None
    windows: tuple[tuple[str, int, int], ...] = ()
    revoked: str | None = None
    merged_iteration: int = -1


@dataclass(frozen=True, slots=True)
class MemberQuery:
    """Request of a rank to its own daemon, with what the rank knows.

    The rank that sends its stage's report (the carrier) passes on the leader's `agreement`, and the id of the facts
    that it has published.
    """

    rank_token: str
    place: MemberPlace | None = None
    iteration_index: int = -1
    installed: tuple[str, ...] = ()
    """Plans that the rank has installed."""
    agreement: PlanAgreement | None = None
    known_facts: str | None = None


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Seldom-changing facts of a stage's ranks on one host: their GPUs, described as one GPU, and their order.

    `tp_ranks` are the ranks on this host; the first one is the carrier. A changed switch latency or number of
    microbatches makes new facts.
    """

    facts_id: str
    pp_rank: int
    tp_ranks: tuple[int, ...]
    gpu: GpuView
    order: tuple[OrderBlock, ...]
    version: int = PIPELINE_VERSION
    carbon_zone: str | None = None
    """Carbon-intensity zone of the host; None if not configured."""
    num_microbatches: int = 0
    """Microbatches per iteration; 0 if not given."""
    reorder: ReorderOffer = field(default_factory=ReorderOffer)
    """Whether all these ranks registered as able and allowed to run another order of instructions."""
    order_refusal: str = ""
    """Why they no longer accept other orders; empty if they do."""
    memory: RankMemory | None = None
    """Memory of the rank with the least free memory; None until it is known for all."""


class StageReport(NamedTuple):
    """News of a stage's ranks on one host; encoded as a JSON array, since it is sent many times per iteration."""

    facts_id: str
    """Id of the facts that this report refers to; empty while the daemon does not answer."""
    tp_ranks: tuple[int, ...]
    oldest_iteration: int
    """Current iteration of the rank that is farthest behind."""
    newest_iteration: int
    installed: tuple[str, ...]
    """Plans named by the leader's agreement that all these ranks have installed."""
    plan_ids: tuple[str, ...]
    """Plans that the observations refer to."""
    observations: str
    """Merged observations that the leader has not received yet; see messages/compact_observations.py."""


@dataclass(frozen=True, slots=True)
class MemberReply:
    """Reply of a rank's own daemon; only the rank that reports for its stage (the carrier) gets report and facts."""

    phase: str
    is_carrier: bool
    report: StageReport | None = None
    """None until the rank's job knows its order."""
    facts: StageFacts | None = None
    agreement: PlanAgreement | None = None
    """The agreement that the carrier passed on last."""


@dataclass(frozen=True, slots=True)
class PostedPlan:
    """One stage's slice of a plan for the whole pipeline; a slice without clocks restores the GPU."""

    plan_id: str
    purpose: PlanPurpose
    clocks: tuple[ClockBlock, ...]
    changes: tuple[ChangeBlock, ...]
    reason: str = ""
    straggler_time_s: float | None = None
    """Straggler's pace that the pipeline follows, which the slowdown guard must accept; None without a straggler."""
    permitted_slowdown_ratio: float | None = None
    """Slowdown that the pipeline's target permits; None for the registered target."""
    num_microbatches: int = 0
    """Microbatches per iteration for which the plan was made; 0 if not given."""
    order: tuple[OrderBlock, ...] = ()
    """The stage's instructions under this plan; empty for the registered order."""


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """A rank's slice of a plan, received through the job's store, for its own daemon to install."""

    rank_token: str
    plan: PostedPlan


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """News of a pipeline's stages, sent by the leading rank, whose token is `rank_token`.

    `parts` lists pipeline rank, tensor-parallel rank of the carrier, and report. A pipeline with many ranks is reported
    in several messages.
    """

    rank_token: str
    num_pp_ranks: int
    num_tp_ranks: int = 1
    parts: tuple[tuple[int, int, StageReport], ...] = ()
    facts: tuple[StageFacts, ...] = ()
    known_plan_id: str | None = None
    """The newest plan that the leading rank has."""
    slowest_other_time_s: float | None = None
    """Iteration time, without waits, of the slowest other replica of this training; None if unknown."""
    age_s: float = 0.0
    """Age of `slowest_other_time_s`."""
    is_news: bool = True
    """Whether `slowest_other_time_s` is a new reading."""
    least_other_overhead_s: float | None = None
    """Shortest time that another replica of this training spends outside its instructions; None if unknown."""
    budget: TrainingBudget | None = None
    """None until the paces of the other replicas can be read."""


@dataclass(frozen=True, slots=True)
class PipelineReply:
    """The plan to follow; `plan_id` is None while there is no plan.

    `slices` holds one slice for each pipeline rank; it is empty if the leading rank has the plan already.
    """

    pipeline_id: str
    phase: str
    plan_id: str | None
    slices: tuple[PostedPlan, ...] = ()
    missing_facts: tuple[tuple[int, int], ...] = ()
    """Parts, as pipeline rank and carrier, whose report was ignored because their facts are not known."""
    merged_iteration: int = -1
    """The newest iteration that all stages have reported."""
    own_time_s: float | None = None
    """Iteration time of this pipeline at full speed, without waits for other replicas."""
    num_readings: int = 0
    """How often `own_time_s` has been estimated."""
    overhead_s: float | None = None
    """Usual time per iteration outside instructions, without waits for other replicas; None if unknown."""
    straggler_time_s: float | None = None
    """The straggler's pace that the pipeline follows; None without a straggler."""
    block: tuple[str, int] | None = None
    """Id, and length in iterations, of a block at full speed, after which the plan resumes; None without one."""
    replaces: tuple[str, ...] = ()
    """For a straggler's pace: plans that this one may replace rank by rank, since no mix of them is slower than it."""
    budget: BudgetShare | None = None
