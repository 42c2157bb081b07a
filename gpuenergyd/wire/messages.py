"""Messages between a training process and the daemon; instants are the host's monotonic clock in ns.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    POST /v1/ranks           RankRegistration -> RankRegistered
    POST /v1/iterations      IterationReport, or an array of them  -> IterationReply
    POST /v1/pace            PaceReport       -> PaceReply
    POST /v1/release         RankRelease      -> ReleaseReply
    POST /v1/members         MemberQuery      -> MemberReport     pipelines across hosts: wire/pipeline_messages.py
    POST /v1/members/plan    MemberPlan       -> IterationReply
    POST /v1/pipelines       PipelineReport   -> PipelineReply
    POST /v1/leases          LeaseRequest     -> LeaseGranted     manual leases of administrators
    POST /v1/leases/release  LeaseRelease     -> LeaseReleased
    POST /v1/calibrations    CalibrationRequest -> CalibrationStarted   wire/calibration_messages.py
    GET  /v1/status          the daemon's status, see daemon/api/status.py
"""

from dataclasses import dataclass

InstructionRow = tuple[str, int, int, int, int]
"""kind, microbatch index, chunk index, begin and end in ns."""

TrueClockRow = tuple[int, int, int]
"""Bounds of the instant at which a clock was counted, in ns, and the clock in MHz."""

OrderRow = tuple[str, int, int]
"""kind, microbatch index, chunk index."""

ChangeRow = tuple[str, int, int, int, int]
"""kind, microbatch index, chunk index of the instruction; delay after its begin in ns; SM clock in MHz."""


@dataclass(frozen=True, slots=True)
class RankRegistration:
    """Registration of a rank (one training process) with a job.

    All ranks of a job send the same `job_name` and `run_key`; the key differs between runs of the same name. A pipeline
    of `num_pp_ranks` stages is complete when all `num_stage_ranks` ranks of each stage have registered; data-parallel
    replicas are separate pipelines. The ranks of a stage, tensor-, context- and expert-parallel ones, run the same
    instructions together and follow one plan; each has its own GPU.
    `order` lists the rank's instructions of one iteration; a plain loop has the single instruction F0, or its phases:
    forward F, backward B, gradient communication C, optimizer step O, wait for data D. `tags` group jobs in reports.
    The length of the job is optional: its iterations, its hours at full speed, or its deadline (ISO 8601, UTC). Tags
    and length of the first rank to register count.
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
    is_pipeline_member: bool = False
    """Whether the rank belongs to a pipeline across hosts, whose plans are posted: see wire/pipeline_messages.py."""
    from_environment: tuple[str, ...] = ()
    """Which of `policy` and `max_slowdown_ratio` the environment gave, not the program."""
    num_dp_ranks: int = 1
    """Processes of a plain loop that end each iteration together, on all hosts; each one is a job of its own."""
    stage_rank: int = 0
    """Number of this rank among those of its stage."""
    num_stage_ranks: int = 1
    """Ranks of each stage, all on this host."""
    allow_reorder: bool = False
    """Whether the user allows plans with another order of instructions."""
    reorder_refusal: str = "the order of this schedule cannot be changed from outside"
    """Why the rank takes no other order, whatever the user allows; empty if it does."""


@dataclass(frozen=True, slots=True)
class RankRegistered:
    """Reply to a registration; `rank_token` (32 hex digits) authenticates the rank in later messages."""

    job_id: str
    rank_token: str
    clock_socket_path: str
    protocol_version: int
    message: str = ""
    """One line for the user: the job's policy and permitted slowdown, where they come from, and what to expect."""


@dataclass(frozen=True, slots=True)
class IterationReport:
    """Report of one rank on one iteration, posted when the next begins on its GPU; `plan_epoch` 0 means no plan.

    All times are those of the GPU. `end_mono_ns` is the end of the step, `next_begin_mono_ns` the begin of the next
    one, 0 if there is none. The program may have launched later iterations already, which follow older plans:
    `launched_iteration_index` is the newest of them; -1 in reports that do not say it.
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
    launched_iteration_index: int = -1
    captured: str = ""
    """How the clocks of a replayed graph are set, `timetable` or `one clock`; empty for any other iteration."""
    memory_bytes: tuple[int, ...] = ()
    """Memory that was free at the peak so far, that a microbatch takes, and of the whole GPU; empty if not measured."""
    reorder_refusal: str = ""
    """Why the rank takes no other order any more, for instance after it ran out of memory; empty if it does."""
    client_cost_s: float | None = None
    """Time that the training thread spends in the client's calls in an iteration, as in the newest one of its kind
    that was sampled; None if none was."""
    is_in_order: bool | None = None
    """Of an iteration without `instructions`, because they were not timed: whether the rank ran those of its
    registration, or of its plan, in that order. None: `instructions` are all that ran."""
    true_clocks: tuple[TrueClockRow, ...] = ()
    """Clocks that the GPU itself has counted since the last report, where the program permits it."""


@dataclass(frozen=True, slots=True)
class PlanSlice:
    """One rank's slice of a plan, to follow from the begin of iteration `apply_at_iteration`.

    Without changes the rank requests no clocks.
    """

    plan_id: str
    plan_epoch: int
    apply_at_iteration: int
    changes: tuple[ChangeRow, ...]
    full_speed_sm_clock_mhz: int = 0
    """The GPU's highest clock, which the rank requests in pauses, and after the end of a plan window."""
    order: tuple[OrderRow, ...] = ()
    """The rank's instructions under this plan; empty for the registered order."""


@dataclass(frozen=True, slots=True)
class IterationReply:
    """Plans that are new to the rank, oldest first; a plan may be repeated, because replies can be lost.

    With it comes the energy of the newest measured iteration of the rank's job; None while there is none.
    """

    plans: tuple[PlanSlice, ...] = ()
    energy_per_gpu_j: float | None = None
    """Energy of an iteration divided by the number of GPUs."""
    power_per_gpu_w: float | None = None
    """The same divided by the time of the iteration."""
    takes_several: bool = False
    """Whether one message may be an array of reports of this rank, in order."""
    takes_untimed: bool = False
    """Whether the daemon can do without the times of instructions in most iterations."""


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """What a replica has read of the slowdown budget of its training, which the host of the first replica keeps.

    Ratios are relative to the baseline. All of it is what replicas have published of their `BudgetShare`.
    """

    is_first: bool
    """Whether this replica is the first one, which decides for all."""
    permitted_slowdown_ratio: float | None = None
    """What the first replica permits all others; None before it was heard, and for itself."""
    is_decided: bool = False
    """Whether the first replica's host decides targets, so that this is not the registered slowdown."""
    age_s: float = 0.0
    """Age of the first replica's message."""
    excess_s: float = 0.0
    """Time that plans of other replicas have cost so far, at most; for the first replica's account."""
    num_replicas: int = 1
    """Replicas that exchange budgets, one for each host of a data-parallel loop; this one included."""
    others_spent_s: float = 0.0
    """What the others have spent of the training's time account, or may spend on experiments that have begun."""
    others_age_s: float = 0.0
    """Age of the oldest of their messages."""


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """What a replica publishes to the others for the slowdown budget of their training."""

    permitted_slowdown_ratio: float
    """What its target permits now; before its first tuned plan what is registered, and 0 before its baseline."""
    is_decided: bool = False
    """Whether its host decides targets, from a carbon account."""
    excess_s: float = 0.0
    """Time beyond full speed that its own plans have cost so far."""
    spent_s: float = 0.0
    """What it has spent of the training's time account, or may spend on experiments that have begun."""


@dataclass(frozen=True, slots=True)
class PaceReport:
    """Pace of the slowest replica of this training on other hosts, read `age_s` ago.

    `slowest_other_time_s` is the replica's iteration time at full speed and without waits, from its own `PaceReply`;
    None means that there is no replica elsewhere any more. A pace expires after five such iterations, at the earliest
    after 10 s; a repeated one extends its lifetime. `is_news` is False if it is no new reading (same `num_readings`).
    """

    rank_token: str
    slowest_other_time_s: float | None
    age_s: float = 0.0
    is_news: bool = True
    least_other_overhead_s: float | None = None
    """Least time per iteration that any replica elsewhere spends outside of its instructions."""
    budget: TrainingBudget | None = None
    covers_host: bool = False
    """Whether the report is for all replicas of the training on this host, and the reply of the slowest of them: loops
    have a replica per rank, and one rank of each host carries the paces of all."""


@dataclass(frozen=True, slots=True)
class PaceReply:
    """Pace of this replica (None while unknown) and the straggler pace that it has to keep (None without one).

    If the report covers the host, the pace is that of its slowest replica.
    """

    own_time_s: float | None
    straggler_time_s: float | None
    num_readings: int = 0
    """Number of estimates of `own_time_s` so far."""
    overhead_s: float | None = None
    """Time of an iteration without a running instruction, known waits for other replicas excluded."""
    budget: BudgetShare | None = None


@dataclass(frozen=True, slots=True)
class RankRelease:
    """Orderly leave of a training process."""

    rank_token: str
    reorder_refusal: str = ""
    """Why the rank took no other order any more, as in `IterationReport`: a program that fails reports no more."""


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """Reply to a release."""

    message: str = ""
    """One line for the user: what the job has saved, or why it has saved nothing."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Manual lease of an administrator: locks a GPU's clock, limits its power, or both; `gpu` is a UUID or an index."""

    gpu: str
    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    lifetime_s: float | None = None
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Controls of a granted lease; without `remaining_s` it lasts until its release or the daemon's stop."""

    gpu_uuid: str
    lease_id: str | None
    sm_clock_mhz: int | None
    power_limit_w: float | None
    remaining_s: float | None
    is_dry_run: bool


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """Release of a manual lease: clock lock and power limit together."""

    gpu: str
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """Outcome for each control that the lease had changed."""

    gpu_uuid: str
    lease_id: str
    outcomes: tuple[str, ...]
    is_dry_run: bool
