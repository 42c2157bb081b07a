"""What a training process and the daemon's core say to each other. Instants are the host's monotonic clock in ns.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    POST /v1/ranks        RankRegistration -> RankRegistered
    POST /v1/iterations   IterationReport  -> IterationReply
    POST /v1/pace         PaceReport       -> PaceReply
    POST /v1/release      RankRelease      -> {}
    POST /v1/parts        PartQuestion     -> PartState         pipelines across hosts: wire/part_messages.py
    POST /v1/parts/plan   PartPlan         -> IterationReply
    POST /v1/pipelines    PipelineReport   -> PipelineReply
    POST /v1/leases       LeaseRequest     -> LeaseGranted     an administrator's, outside any job
    POST /v1/leases/release  LeaseRelease  -> LeaseReleased
    GET  /v1/status       -> the daemon's state, see daemon/api/server.py
"""

from dataclasses import dataclass

InstructionRow = tuple[str, int, int, int, int]
"""kind, microbatch index, chunk index, begin and end in ns."""

OrderRow = tuple[str, int, int]
"""kind, microbatch index, chunk index."""

ChangeRow = tuple[str, int, int, int, int]
"""kind, microbatch index, chunk index of the instruction; delay after its begin in ns; SM clock in MHz."""


@dataclass(frozen=True, slots=True)
class RankRegistration:
    """One training process joins a job.

    Ranks of one job agree on `job_name` and `run_key` (what tells two runs of one name apart). A pipeline of
    `num_pp_ranks` is complete when each pp_rank has registered; data-parallel replicas are pipelines of their own.
    `order` is what this rank runs in one iteration; a plain loop reports the single instruction F0. `tags` are names
    and values that group jobs in reports; those of the rank that came first are kept. How long the job will be, if
    anybody knows: its iterations, its hours at full speed, or the instant (ISO 8601, UTC) by which it has to end; what
    the rank says that came first counts.
    """

    protocol_version: int
    job_name: str
    run_key: str
    pp_rank: int
    num_pp_ranks: int
    dp_rank: int
    schedule_name: str
    num_microbatches: int
    num_chunks: int
    order: tuple[OrderRow, ...]
    gpu_uuid: str
    framework: str = ""
    policy: str | None = None
    max_slowdown_ratio: float | None = None
    tags: tuple[tuple[str, str], ...] = ()
    job_iterations: int | None = None
    job_hours: float | None = None
    job_deadline: str | None = None
    is_part: bool = False
    """One rank of a pipeline that is planned as a whole elsewhere: its plans are posted, see wire/part_messages.py."""


@dataclass(frozen=True, slots=True)
class RankRegistered:
    """The core's answer: `rank_token` (32 hex digits) authenticates this rank from now on."""

    job_id: str
    rank_token: str
    clock_socket_path: str
    protocol_version: int


@dataclass(frozen=True, slots=True)
class IterationReport:
    """One iteration of one rank, posted when the next begins; `plan_epoch` is what the rank followed (0: un-tuned).

    `end_mono_ns` is when the step returned, `next_begin_mono_ns` when the next began (0: there was no next).
    """

    rank_token: str
    iteration_index: int
    plan_epoch: int
    begin_mono_ns: int
    end_mono_ns: int
    next_begin_mono_ns: int
    instructions: tuple[InstructionRow, ...]
    num_records_dropped: int = 0
    num_client_errors: int = 0


@dataclass(frozen=True, slots=True)
class PlanSlice:
    """One rank's part of a plan: follow it from iteration `apply_at_iteration` on, at a boundary, never inside.

    No changes means un-tuned: the rank sends nothing.
    """

    plan_id: str
    plan_epoch: int
    apply_at_iteration: int
    changes: tuple[ChangeRow, ...]
    full_speed_sm_clock_mhz: int = 0
    """What a part of a pipeline wishes for when the time agreed for the plan is over; 0 for every other job."""


@dataclass(frozen=True, slots=True)
class IterationReply:
    """Plans this rank does not have, oldest first; usually none or one. It may be given one again: replies get lost."""

    plans: tuple[PlanSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class PaceReport:
    """What the slowest replica of this training that runs elsewhere takes for an iteration by itself, `age_s` ago.

    By itself: at full speed and without waiting, which is what a `PaceReply` said to that replica. None: no replica
    elsewhere is known any more. What is not repeated counts for five such iterations, and for 10 s at least. What is
    repeated without being a new reading (`num_readings` of that replica's `PaceReply`) is no news.
    """

    rank_token: str
    slowest_other_time_s: float | None
    age_s: float = 0.0
    is_news: bool = True
    least_other_overhead_s: float | None = None
    """The least time of an iteration that any replica elsewhere spends outside its instructions."""


@dataclass(frozen=True, slots=True)
class PaceReply:
    """What this replica takes for an iteration by itself (None: not known yet), and what others impose on it."""

    own_time_s: float | None
    straggler_time_s: float | None
    num_readings: int = 0
    """How often `own_time_s` has been read."""
    overhead_s: float | None = None
    """Time of an iteration in which no instruction of it runs, waits for others left out as far as they are known."""


@dataclass(frozen=True, slots=True)
class RankRelease:
    """One training process leaves in order."""

    rank_token: str


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """An administrator locks a GPU's clock, limits its power, or both; `gpu` is a UUID or an index."""

    gpu: str
    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    lifetime_s: float | None = None
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """What the GPU is held at now, or would be; without `remaining_s` until released or the daemon stops."""

    gpu_uuid: str
    lease_id: str | None
    sm_clock_mhz: int | None
    power_limit_w: float | None
    remaining_s: float | None
    is_dry_run: bool


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """An administrator gives a GPU back, its clock lock and its power limit together."""

    gpu: str
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """What became of each control that the lease had changed."""

    gpu_uuid: str
    lease_id: str
    outcomes: tuple[str, ...]
    is_dry_run: bool
