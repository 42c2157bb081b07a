"""The memory of each stage as options of `gpuenergyd plan` give it: as microbatches that fit, or in bytes."""

from gpuenergyd.core.pipeline.graph import Schedule
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError, UsageError


def order_limits(
    text: str | None, free: str | None, activations: str | None, schedule: Schedule
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return how many microbatches each rank may hold, and a note if that is assumed."""
    num_ranks = schedule.num_ranks
    plain = tuple(schedule.peak_inflight(rank) // schedule.num_chunks for rank in range(num_ranks))
    extra = extra_caps(free, activations, schedule)
    limits = _per_stage("--memory-limit-microbatches", text, num_ranks, least=1) if text is not None else ()
    if extra:
        roomy = tuple(held + more for held, more in zip(plain, extra, strict=True))
        limits = tuple(map(min, limits, roomy)) if limits else roomy
    if limits:
        return limits, ()
    held = ", ".join(map(str, plain))
    return plain, (f"memory is assumed to hold what 1F1B holds per stage, {held}: set --memory-limit-microbatches",)


def memory_limits(text: str | None, schedule: Schedule) -> tuple[int, ...]:
    """Return the number of microbatches that fit in the memory of each rank; empty if unlimited."""
    if text is None:
        return ()
    limits = _per_stage("--memory-limit-microbatches", text, schedule.num_ranks, least=1)
    for pp_rank, limit in enumerate(limits):
        # Each chunk stores an equal part of the activations of its rank.
        needed = schedule.peak_inflight(pp_rank) / schedule.num_chunks
        if needed > limit:
            raise ScheduleError(
                f"schedule {schedule.name!r} needs {count_text(needed, 'microbatch')} in flight on stage {pp_rank},"
                f" but only {limit} fit in memory"
            )
    return limits


def extra_caps(free: str | None, activations: str | None, schedule: Schedule) -> tuple[int, ...]:
    """Return how many more microbatches fit on each rank than the plain schedule holds there."""
    if free is None and activations is None:
        return ()
    if free is None or activations is None:
        raise UsageError("--free-memory-bytes and --activation-bytes: give both or neither")
    free_bytes = _per_stage("--free-memory-bytes", free, schedule.num_ranks, least=0)
    activation_bytes = _per_stage("--activation-bytes", activations, schedule.num_ranks, least=1)
    return tuple(room // size for room, size in zip(free_bytes, activation_bytes, strict=True))


def check_memory(extra_inflight: int, limits: tuple[int, ...], caps: tuple[int, ...], schedule: Schedule) -> None:
    """Raise ScheduleError if the extra microbatches do not fit in memory on a stage that would use them."""
    for pp_rank in range(schedule.num_ranks - 1):  # the last stage never runs ahead
        inflight = schedule.peak_inflight(pp_rank)
        rooms = ([caps[pp_rank]] if caps else []) + ([limits[pp_rank] - inflight] if limits else [])
        usable = min(extra_inflight, schedule.num_microbatches - inflight)
        if rooms and min(rooms) < usable:
            raise ScheduleError(
                f"--extra-inflight {extra_inflight}: stage {pp_rank} has memory for {min(rooms)} more than the"
                f" {count_text(inflight, 'microbatch')} of schedule {schedule.name!r}; `--extra-inflight auto` uses"
                " what fits"
            )


def _per_stage(option: str, text: str, num_ranks: int, *, least: int) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) == 1:
        values *= num_ranks
    if len(values) != num_ranks or min(values) < least:
        raise UsageError(
            f"{option} {text}: must be one whole number >= {least}, or one for each of the"
            f" {count_text(num_ranks, 'stage')},"
            " separated by commas"
        )
    return values
