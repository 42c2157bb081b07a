"""Names of a training's jobs for people: of a data-parallel training each replica is a job of its own."""

from collections.abc import Iterable


def replica_name(job_name: str, *, num_ranks: int, dp_rank: int, tags: Iterable[tuple[str, str]]) -> str:
    """Return the name of a job with its rank where the training has several jobs of this name.

    A job of one process is a rank, as of a plain loop or of a pipeline across hosts; another one is a replica of a
    pipeline. The size of the training is the tag `world_size`.
    """
    known = dict(tags)
    world_size = known.get("world_size", "")
    is_whole = dp_rank == 0 and not (world_size.isdecimal() and int(world_size) > num_ranks)
    if "pp_rank" in known:  # a member of a pipeline across hosts
        replica = f" replica {dp_rank}" if dp_rank else ""
        return f"{job_name}{replica} rank {known['pp_rank']}"
    if is_whole:
        return job_name
    return f"{job_name} {'rank' if num_ranks == 1 else 'replica'} {dp_rank}"
