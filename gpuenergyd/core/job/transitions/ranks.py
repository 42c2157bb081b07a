"""Transitions of a job's ranks: they join, change the number of microbatches, and leave."""

from gpuenergyd.core.job.messages import (
    EndJob,
    GpuViewChanged,
    JobPhase,
    RankChangedMicrobatches,
    RankJoined,
    RankLost,
    RankReleased,
    RecordNotice,
    StageMemoryChanged,
)
from gpuenergyd.core.job.state import Commands, JobState
from gpuenergyd.count_text import count_text


def joined(job: JobState, event: RankJoined) -> Commands:
    """Add a rank; the last one begins the warm-up."""
    is_complete = job.ranks.join(event.pp_rank, event.order, event.gpu, stage_rank=event.stage_rank)
    index = job.description.rank_index(event.pp_rank, event.stage_rank)
    job.knowledge.reordering.offers[index] = event.reorder
    return job.enter(JobPhase.WARMUP, "all ranks joined") if is_complete else ()


def microbatches_changed(job: JobState, event: RankChangedMicrobatches) -> Commands:
    """Return to full speed when the first rank changes its number of microbatches; plan again once all ranks have."""
    before, is_first = job.description.num_microbatches, not job.ranks.changed_ranks
    reason = "the program runs other instructions in an iteration"
    if event.num_microbatches != before:
        reason = f"{before} -> {count_text(event.num_microbatches, 'microbatch')} per iteration"
    is_complete = job.ranks.change_microbatches(
        event.pp_rank, event.order, event.num_microbatches, stage_rank=event.stage_rank
    )
    if job.ranks.schedule is None:
        return ()
    stop: Commands = ()
    if is_first:
        stop = job.control.fall_back(reason, job.faults)
        job.notice(reason)
    if is_complete:
        job.description = job.ranks.description
        job.reports.num_foreign_orders = 0
        job.knowledge.change_schedule(job.baseline, first_iteration=job.reports.last_index + 1)
        job.control.has_changed()
    if job.phase is JobPhase.WARMUP or job.is_given_up:
        return (*stop, RecordNotice(reason)) if is_first else stop
    return (*stop, *job.enter(JobPhase.BASELINE, f"{reason}: measuring full speed again"))


def gpu_view_changed(job: JobState, event: GpuViewChanged) -> Commands:
    job.ranks.update_gpu(event.pp_rank, event.gpu, stage_rank=event.stage_rank)
    return ()


def stage_memory_changed(job: JobState, event: StageMemoryChanged) -> Commands:
    job.knowledge.reordering.record_stage(job.description.rank_index(event.pp_rank, 0), event.memory)
    return ()


def released(job: JobState, event: RankReleased) -> Commands:
    return _end(job, f"{job.description.rank_name(event.pp_rank, event.stage_rank)} {event.how}")


def lost(job: JobState, event: RankLost) -> Commands:
    return _end(job, f"{job.description.rank_name(event.pp_rank, event.stage_rank)} was lost: {event.reason}")


def _end(job: JobState, reason: str) -> Commands:
    job.before_end = job.last_activity
    job.control.experiments.account.leave(job.description.job_id)
    return (*job.control.release(reason), *job.enter(JobPhase.ENDED, reason), EndJob(reason))
