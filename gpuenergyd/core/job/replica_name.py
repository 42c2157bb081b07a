"""Names of a training's jobs for people; in data-parallel trainings each replica is a job."""

from collections.abc import Iterable


def replica_name(job_name: str, *, num_ranks: int, dp_rank: int, tags: Iterable[tuple[str, str]]) -> str:
    """Return the name of a job, with its rank or replica if the training has several jobs of this name.

    A job of one process, such as a plain loop or a member of a pipeline across hosts, is called a rank; any other is
    a replica of a pipeline. The tag `world_size` gives the size of the training.
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
