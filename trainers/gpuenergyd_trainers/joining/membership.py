"""Joining a pipeline rank to the daemon of its host: options, membership, and the attachment itself.

A pipeline on one host is a single job of that host's daemon. If a pipeline spans hosts, each of its ranks is a job of
its own for the daemon of its host, and the ranks agree on plans through the job's store. `Membership` holds this
difference, and `place` says where a rank is, so that the adapters of frameworks need to know neither.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

from gpuenergyd.client.environment import find_allow_reorder, find_gpu_uuid, find_job_options, find_run_key
from gpuenergyd.client.exchanges import Membership, find_pipeline_membership, start_pace_exchange
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.timing.recorder import InstructionTimer
from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire.messages import OrderRow
from gpuenergyd_trainers.joining.attached import AttachedObjects
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.joining.memory import MemoryMeter
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, timer_for
from gpuenergyd_trainers.joining.place import Place

logger = safe_logger("gpuenergyd.trainers")
_attached: AttachedObjects[Handle] = AttachedObjects()


class JoinKeywords(TypedDict, total=False):
    """Keyword arguments that the `attach` of each pipeline framework accepts; `JoinOptions` describes them."""

    gpu_uuid: str | None
    socket_path: str | None
    run_key: str | None
    policy: str | None
    max_slowdown_ratio: float | None
    tokens_per_iteration: int | None
    timer: InstructionTimer | None
    memory: MemoryMeter | None
    allow_reorder: bool | None
    place: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Options for joining a job, the same for all pipeline frameworks."""

    job: str | None = None
    """Name of the job in reports, the same on all ranks; by default from GPUENERGYD_JOB or the program."""
    gpu_uuid: str | None = None
    """This rank's GPU; by default from GPUENERGYD_GPU_UUID or the CUDA device in use."""
    socket_path: str | None = None
    """Path of the daemon's socket; by default from GPUENERGYD_SOCKET or the usual places."""
    run_key: str | None = None
    """A key that differs between runs of the same name; by default from the launcher's variables."""
    policy: str | None = None
    """Name of the clock policy; by default from GPUENERGYD_JOB_POLICY, else the daemon's."""
    max_slowdown_ratio: float | None = None
    """Permitted slowdown against full speed; by default from GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO, else the daemon's."""
    tokens_per_iteration: int | None = None
    """Tokens (or samples) that this replica of the pipeline processes per iteration, for tokens per joule; by default
    what the framework reports, else unknown."""
    timer: InstructionTimer | None = None
    """The timer of this rank's instructions; by default one for its device."""
    memory: MemoryMeter | None = None
    """Reads the memory of this rank's GPU; by default uses torch's allocator for its CUDA device."""
    allow_reorder: bool | None = None
    """Whether plans may change the order of instructions, if the framework's schedule permits it; by default from
    GPUENERGYD_JOB_ALLOW_REORDER, else not."""
    place: Place | None = None
    """This rank's place in the training; by default the one that the framework reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """A rank of a pipeline as its framework describes it."""

    framework: str
    schedule_name: str
    expected_order: tuple[OrderRow, ...] | None
    """The instructions of one iteration, in order; None if they must be learned."""
    num_microbatches: int
    num_chunks: int = 1
    place: Place
    device: Any
    """The torch device that runs the instructions."""
    tokens_per_iteration: int | None = None
    order_of: Callable[[int], tuple[OrderRow, ...]] | None = None
    """Returns the instructions of an iteration with another number of microbatches; None if that number is fixed."""
    reorder_refusal: str = "the order of this schedule cannot be changed from outside"
    """Why the order of instructions cannot change while the program runs; empty if it can."""


def find_membership(place: Place, run_key: str) -> Membership:
    """Return the membership of a rank; a pipeline across hosts whose ranks cannot agree on plans stays at full speed.

    Raises:
        UsageError: a stage of the pipeline is on several hosts.
    """
    place.require_stages_on_one_host()
    rank = RankDescription(
        run_key=run_key,
        pp_rank=place.pipeline.rank,
        num_pp_ranks=place.pipeline.size,
        dp_rank=place.replica,
        stage_rank=place.stage.rank,
        num_stage_ranks=place.stage.size,
        is_first=place.is_first,
    )
    if place.is_across_hosts:
        return find_pipeline_membership(rank) or Membership(rank=rank)
    if not place.leads_replica:
        return Membership(rank=rank)
    start = partial(start_pace_exchange, "replica", run_key=run_key, dp_rank=place.replica)
    return Membership(rank=rank, start_exchange=start)


def join(
    options: JoinOptions,
    describe: Callable[[], PipelineRank],
    make_handle: Callable[[OrderedRank], Handle],
    *,
    target: object,
    target_name: str,
) -> Handle:
    """Attach a pipeline rank to the daemon; on any failure, log one warning and leave the program unchanged.

    For an object that is already attached, its handle is returned.

    Args:
        options: the user's options.
        describe: returns the rank as the framework describes it; may raise anything.
        make_handle: wraps the framework's objects and returns their handle.
        target: the attached object.
        target_name: its name in messages.
    """
    if (known := _attached.find(target, target_name)) is not None:
        return known
    try:
        rank = describe()
        run_key = find_run_key(options.run_key, num_processes=rank.place.pipeline.size * rank.place.stage.size)
        membership = find_membership(rank.place, run_key)
        client = _open_client(options, rank, membership)
        log_name = f"job {client.job_name}, rank {rank.place.name}"
        ordered = OrderedRank(client, expected_order=rank.expected_order, log_name=log_name, order_of=rank.order_of)
        handle = make_handle(ordered)

        def start_exchange() -> None:
            stop = membership.start_exchange(client, options.socket_path)
            if stop is not None:
                handle.on_detach.append(stop)

        handle.shielded(start_exchange)
        _attached.add(target, handle)
        handle.on_detach.append(partial(_attached.remove, target))
    except Exception as error:  # noqa: BLE001  with an unsupported framework, training must continue unchanged
        logger.warning(
            "gpuenergyd: job %s: %s cannot be joined, training continues at full speed: %r",
            find_job_options(options.job).job_name,
            target_name,
            error,
        )
        return Handle()
    return handle


def _open_client(options: JoinOptions, rank: PipelineRank, membership: Membership) -> RankClient:
    timer = options.timer
    if rank.reorder_refusal and find_allow_reorder(options.allow_reorder):
        logger.warning("gpuenergyd: the order of instructions stays as it is: %s", rank.reorder_refusal)
    is_cuda = getattr(rank.device, "type", None) == "cuda"
    description = replace(
        membership.rank,
        job_name=options.job,
        gpu_uuid=find_gpu_uuid(options.gpu_uuid, device=rank.device if is_cuda else None),
        schedule_name=rank.schedule_name,
        num_microbatches=rank.num_microbatches,
        num_chunks=rank.num_chunks,
        framework=rank.framework,
        policy=options.policy,
        max_slowdown_ratio=options.max_slowdown_ratio,
        tokens_per_iteration=options.tokens_per_iteration or rank.tokens_per_iteration,
        allow_reorder=options.allow_reorder,
        reorder_refusal=rank.reorder_refusal,
    )
    return RankClient(
        description,
        socket_path=options.socket_path,
        timer=timer if timer is not None else timer_for(rank.device, rank.num_microbatches, rank.num_chunks),
        agreed_plans=membership.plans,
    )
