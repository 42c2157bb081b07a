"""Messages between a training process and the daemon; instants are the host's monotonic clock in ns.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    POST /v1/ranks           RankRegistration -> RankRegistered
    POST /v1/iterations      IterationReport, or an array of them  -> IterationReply
    POST /v1/pace            PaceReport       -> PaceReply
    POST /v1/release         RankRelease      -> ReleaseReply
    GET  /v1/status          the daemon's status, see daemon/api/status.py
"""

from dataclasses import dataclass

InstructionRow = tuple[str, int, int, int, int]
"""kind, microbatch index, chunk index, start and end in ns."""

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
    replicas are separate pipelines. The tensor-, context- and expert-parallel ranks of a stage run the same
    instructions together and follow one plan; each has its own GPU.
    `order` lists the rank's instructions of one iteration; a plain loop has the single instruction F0, or its phases:
    forward F, backward B, gradient communication C, optimizer step O, wait for data D. `tags` group jobs in reports.
    The length of the job is optional: its iterations, its hours at full speed, or its deadline (ISO 8601, UTC). Tags
    and length are taken from the first rank to register.
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
    """Whether the rank belongs to a pipeline across hosts, whose plans its leader posts."""
    from_environment: tuple[str, ...] = ()
    """Which of `policy` and `max_slowdown_ratio` come from the environment instead of the program."""
    num_dp_ranks: int = 1
    """Number of processes, on all hosts, of a plain loop that end each iteration together; each is a separate job."""
    stage_rank: int = 0
    """Index of this rank among those of its stage."""
    num_stage_ranks: int = 1
    """Number of ranks per stage, all on this host."""
    allow_reorder: bool = False
    """Whether the user allows plans with another order of instructions."""
    reorder_refusal: str = "the order of this schedule cannot be changed from outside"
    """Why the rank cannot run another order, even if the user allows it; empty if it can."""


@dataclass(frozen=True, slots=True)
class RankRegistered:
    """Reply to a registration; `rank_token` (32 hex digits) authenticates the rank in later messages."""

    job_id: str
    rank_token: str
    clock_socket_path: str
    protocol_version: int
    message: str = ""
    """One line for the user: the job's policy and permitted slowdown, where each was set, and what to expect."""


@dataclass(slots=True)
class IterationReport:
    """Report of one rank on one iteration, sent when the next one begins on its GPU; `plan_epoch` 0 means no plan.

    Not frozen: the training process makes one per iteration, and a frozen one takes it several times as long.

    All times are those of the GPU. `end_mono_ns` is the end of the step, `next_begin_mono_ns` the start of the next
    one, 0 if there is none. The program may have launched later iterations already, which follow older plans:
    `launched_iteration_index` is the newest of them, -1 if unknown.
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
    """Bytes free at peak memory use, bytes that a microbatch takes, and bytes of the GPU; empty if not measured."""
    reorder_refusal: str = ""
    """Why the rank no longer accepts other orders, for instance after it ran out of memory; empty if it does."""
    client_cost_s: float | None = None
    """Time per iteration that the training thread spends in the client's calls, from the newest sampled iteration of
    this kind; None if none was sampled."""
    is_in_order: bool | None = None
    """For an iteration that was not timed and so has no `instructions`: whether the rank ran the instructions of its
    plan or registration in that order. None if `instructions` lists all that ran."""
    true_clocks: tuple[TrueClockRow, ...] = ()
    """Clocks that the GPU itself has counted since the last report, where the program permits it."""
    num_tokens: int | None = None
    """Tokens (or samples) that the job processed in this iteration; None if the program does not say."""
    num_together: int = 1
    """Iterations that this report is on: the one with its index and those directly before it. It begins with the first
    and ends with the last. Without a plan, for a daemon that `takes_together`; for one that `takes_spans`,
    `instructions` has one row for each, with its start and end."""


@dataclass(frozen=True, slots=True)
class PlanSlice:
    """One rank's slice of a plan, to follow from the start of iteration `apply_at_iteration`.

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
class JobFigures:
    """Measured figures of a rank's job, for the program's own log; None where not known yet.

    Energy and power are those of all the job's GPUs. Iterations without measured energy are left out.
    """

    phase: str = ""
    iteration_energy_j: float | None = None
    """Mean energy of the iterations since the previous figures."""
    power_w: float | None = None
    """Mean power in these iterations."""
    energy_j: float | None = None
    """Energy of all iterations so far."""
    saving_ratio: float | None = None
    saving_low_ratio: float | None = None
    """The ends of the 95 % interval of the saving."""
    saving_high_ratio: float | None = None
    slowdown_ratio: float | None = None
    cost_s: float | None = None
    """Time that the daemon has cost the training so far."""
    num_tokens: int | None = None
    """Tokens of all iterations that report them and have measured energy."""
    tokens_per_j: float | None = None
    """Tokens per joule in such iterations since the previous figures."""


@dataclass(frozen=True, slots=True)
class IterationReply:
    """Plans that are new to the rank, oldest first; a plan may be repeated, because replies can be lost.

    Energy and power are those of the newest measured iteration of the rank's job; None before the first.
    """

    plans: tuple[PlanSlice, ...] = ()
    energy_per_gpu_j: float | None = None
    """Energy of the iteration divided by the number of GPUs."""
    power_per_gpu_w: float | None = None
    """Energy per GPU divided by the iteration time."""
    takes_several: bool = False
    """Whether one message may be an array of reports of this rank, in order."""
    takes_untimed: bool = False
    """Whether the daemon needs no instruction times in most iterations."""
    figures: JobFigures | None = None
    """The job's figures if they are newer than those that the rank has received."""
    takes_together: bool = False
    """Whether the daemon needs no times of single iterations, in most of those that follow no plan."""
    takes_spans: bool = False
    """Whether one report may be on several iterations, with the times of each."""


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """What a replica has read about its training's slowdown budget, which the first replica's host keeps.

    Ratios are relative to the baseline. All values come from the `BudgetShare` that each replica publishes.
    """

    is_first: bool
    """Whether this replica is the first one, which decides for all."""
    permitted_slowdown_ratio: float | None = None
    """Slowdown that the first replica permits the others; None for itself, and before its first message."""
    is_decided: bool = False
    """Whether the first replica's host decides targets; if not, this is the registered slowdown."""
    age_s: float = 0.0
    """Age of the first replica's message."""
    excess_s: float = 0.0
    """Upper bound of the time that other replicas' plans have cost in total, for the first replica's account."""
    num_replicas: int = 1
    """Number of replicas that exchange budgets, including this one; for a data-parallel loop, one per host."""
    others_spent_s: float = 0.0
    """Time that the others have spent from the training's account, or may spend on experiments that have begun."""
    others_age_s: float = 0.0
    """Age of the oldest message of the others."""


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """What a replica publishes to the others for the slowdown budget of their training."""

    permitted_slowdown_ratio: float
    """Slowdown that its target permits now: 0 before the baseline, then the registered one until a plan is tuned."""
    is_decided: bool = False
    """Whether its host decides targets, from a carbon account."""
    excess_s: float = 0.0
    """Total time beyond full speed that its own plans have cost."""
    spent_s: float = 0.0
    """Time that it has spent from the training's account, or may spend on experiments that have begun."""


@dataclass(frozen=True, slots=True)
class PaceReport:
    """Pace of the slowest replica of this training on other hosts, read `age_s` ago.

    `slowest_other_time_s` is that replica's iteration time at full speed without waits, from its own `PaceReply`; None
    if there are no other replicas left. A pace expires after five such iterations, but not before 10 s; a repeated pace
    extends its lifetime. `is_news` is False if it is not a new reading (same `num_readings`).
    """

    rank_token: str
    slowest_other_time_s: float | None
    age_s: float = 0.0
    is_news: bool = True
    least_other_overhead_s: float | None = None
    """Shortest time per iteration that a replica on another host spends outside its instructions."""
    budget: TrainingBudget | None = None
    covers_host: bool = False
    """Whether the report is for all of the training's replicas on this host, and the reply about the slowest of them.
    In loops, every rank is a replica, and one rank of each host sends the paces of all."""


@dataclass(frozen=True, slots=True)
class PaceReply:
    """Pace of this replica (None while unknown) and the straggler's pace that it follows (None without one).

    If the report covers the host, the pace is that of its slowest replica.
    """

    own_time_s: float | None
    straggler_time_s: float | None
    num_readings: int = 0
    """How often `own_time_s` has been estimated."""
    overhead_s: float | None = None
    """Time per iteration in which no instruction runs, without known waits for other replicas."""
    budget: BudgetShare | None = None


@dataclass(frozen=True, slots=True)
class RankRelease:
    """Message of a training process that leaves its job in an orderly way."""

    rank_token: str
    reorder_refusal: str = ""
    """Why the rank no longer accepted other orders, as in `IterationReport`, since a failed program reports no more."""


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """Reply to a release."""

    message: str = ""
    """One line for the user that says what the job has saved, or why it has saved nothing."""
