"""Messages of pipelines across hosts: each rank's daemon measures and sets clocks, the leader's daemon plans.

    POST /v1/members        MemberQuery    -> MemberReply     a rank asks its own daemon; the daemon merges the ranks of
                                                              a stage on its host, and one of them carries the result
    POST /v1/pipelines      PipelineReport -> PipelineReply   the leading rank sends what is new of all stages, gets a
                                                              plan
    POST /v1/members/plan   MemberPlan     -> IterationReply  a rank has its own daemon validate and install its slice

Training processes forward these messages between hosts unchanged. What never changes travels once (`StageFacts`), then
what is new in each iteration (`StageReport`), with the id of the facts that it refers to: a receiver that does not have
these facts ignores the report and asks for them. The messages contain durations, energies and clocks, but no instants:
clocks of two hosts are not comparable. All hosts of a job run the same version of gpuenergyd; `StageFacts.version`
tells others apart.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.reorder import RankMemory, ReorderOffer
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.wire.messages import BudgetShare, TrainingBudget

PIPELINE_VERSION = 5
"""Version of these messages; 1 sent every rank's whole state in each message, 2 one number of microbatches, 3 times of
instructions as 32-bit floats, 4 no other orders of instructions."""

_MAX_RUN_KEY_CHARS = 200

OrderBlock = tuple[int, tuple[tuple[tuple[str, int], int, int], ...]]
"""Instructions by (kind, chunk), numbered by microbatch; see wire/patterns.py."""
ClockBlock = tuple[int, tuple[tuple[int | None, int, int], ...]]
"""Clocks of instructions in their order; the numbers are 0."""
ChangeBlock = tuple[int, tuple[tuple[tuple[str, int, int, int], int, int], ...]]
"""Clock changes by (kind, chunk, delay in ns, SM clock in MHz), numbered by microbatch."""


def member_run_key(member: str, run_key: str) -> str:
    """Return the key under which a member registers, as a job of its own, of a training with a run key."""
    return f"pp{member},{run_key}"[:_MAX_RUN_KEY_CHARS]


@dataclass(frozen=True, slots=True)
class MemberPlace:
    """Position of a rank in a pipeline across hosts; `run` is the same for all ranks of a training run, and no other's.

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

    The rank that carries its stage's report passes on the `agreement` of the leader, and the id of the facts that it
    has published.
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
    """What seldom changes of a stage's ranks on one host: their GPUs, as one, and their order.

    `tp_ranks` are the ranks on this host; the first one carries. A changed switch latency makes new facts, and so does
    another number of microbatches.
    """

    facts_id: str
    pp_rank: int
    tp_ranks: tuple[int, ...]
    gpu: GpuView
    order: tuple[OrderBlock, ...]
    version: int = PIPELINE_VERSION
    carbon_zone: str | None = None
    """Zone of the host's carbon intensities; None without any."""
    num_microbatches: int = 0
    """Microbatches per iteration of the order; 0 where it is not told."""
    reorder: ReorderOffer = field(default_factory=ReorderOffer)
    """Whether all these ranks may run another order of instructions, by their registration."""
    order_refusal: str = ""
    """Why they take no other order any more; empty while they do."""
    memory: RankMemory | None = None
    """Memory of the rank with the least room; None while it is not known of all."""


class StageReport(NamedTuple):
    """What is new of a stage's ranks on one host, in JSON an array: it travels many times in each iteration."""

    facts_id: str
    """The facts that this report refers to; empty while the daemon does not answer."""
    tp_ranks: tuple[int, ...]
    oldest_iteration: int
    """Iteration of the rank that is farthest behind."""
    newest_iteration: int
    installed: tuple[str, ...]
    """Plans that all these ranks have installed, of those that the leader's agreement names."""
    plan_ids: tuple[str, ...]
    """Plans of the observations."""
    observations: str
    """Merged observations that the leader has not received yet; see wire/compact_observations.py."""


@dataclass(frozen=True, slots=True)
class MemberReply:
    """Reply of its own daemon to a rank; only the rank that carries gets the report, and facts that are new."""

    phase: str
    is_carrier: bool
    report: StageReport | None = None
    """None until the rank's job knows its order."""
    facts: StageFacts | None = None
    agreement: PlanAgreement | None = None
    """What the carrying rank passed on last."""


@dataclass(frozen=True, slots=True)
class PostedPlan:
    """One stage's slice of a plan for the whole pipeline; without clocks the GPU's original state is restored."""

    plan_id: str
    purpose: PlanPurpose
    clocks: tuple[ClockBlock, ...]
    changes: tuple[ChangeBlock, ...]
    reason: str = ""
    straggler_time_s: float | None = None
    """Straggler pace of the whole pipeline, so that the slowdown guard accepts it; None without a straggler."""
    permitted_slowdown_ratio: float | None = None
    """Slowdown that the target of the whole pipeline permits; None for the registered one."""
    num_microbatches: int = 0
    """The plan is for so many microbatches per iteration; 0 where it is not told."""
    order: tuple[OrderBlock, ...] = ()
    """The stage's instructions under this plan; empty for the registered order."""


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """A rank's slice of a plan, received through the job's store, for its own daemon to install."""

    rank_token: str
    plan: PostedPlan


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """What is new of a pipeline's stages; `rank_token` is the leading rank's.

    `parts` lists pipeline rank, carrying tensor-parallel rank, and report. A pipeline with many ranks is reported in
    several messages.
    """

    rank_token: str
    num_pp_ranks: int
    num_tp_ranks: int = 1
    parts: tuple[tuple[int, int, StageReport], ...] = ()
    facts: tuple[StageFacts, ...] = ()
    known_plan_id: str | None = None
    """The newest plan that the leading rank has."""
    slowest_other_time_s: float | None = None
    """Iteration time by itself of the slowest other replica of this training; None if unknown."""
    age_s: float = 0.0
    """Age of `slowest_other_time_s`."""
    is_news: bool = True
    """Whether `slowest_other_time_s` is a new reading."""
    least_other_overhead_s: float | None = None
    """The least time that another replica of this training spends outside its instructions; None if unknown."""
    budget: TrainingBudget | None = None
    """None until the paces of the other replicas can be read."""


@dataclass(frozen=True, slots=True)
class PipelineReply:
    """The plan to follow; `plan_id` is None while there is no plan.

    `slices` holds one slice for each pipeline rank, or nothing if the leading rank has that plan.
    """

    pipeline_id: str
    phase: str
    plan_id: str | None
    slices: tuple[PostedPlan, ...] = ()
    missing_facts: tuple[tuple[int, int], ...] = ()
    """Parts, as pipeline rank and carrying rank, whose report was ignored because their facts are not known."""
    merged_iteration: int = -1
    """The newest iteration that all stages have reported."""
    own_time_s: float | None = None
    """Iteration time of this pipeline by itself: at full speed and without waits for other replicas."""
    num_readings: int = 0
    """Number of estimates of `own_time_s` so far."""
    overhead_s: float | None = None
    """Usual time of an iteration outside instructions, waits for other replicas excluded; None if unknown."""
    straggler_time_s: float | None = None
    """Straggler pace of the pipeline; None without a straggler."""
    block: tuple[str, int] | None = None
    """Id and length of a block: so many iterations at full speed, once, and the same plan again; None without one."""
    replaces: tuple[str, ...] = ()
    """Plans that this one, for a straggler's pace, may replace on one rank before another: no mix is slower than it."""
    budget: BudgetShare | None = None
