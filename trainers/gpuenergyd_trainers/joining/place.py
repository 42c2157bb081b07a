"""The place of a rank in its training: in each dimension of parallelism, on its host, and within its stage.

A training runs replicas of a pipeline, a replica consists of stages, and a stage of ranks. The ranks of a stage
exchange parts of every layer (tensor and context parallelism) or of every expert layer (expert parallelism). So they
run each instruction together and follow one plan. Replicas wait for each other only at the end of an iteration.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The position of a rank in one dimension of parallelism."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(
                f"rank {self.rank} of {self.size}: it must be at least 0 and less than the number of ranks"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a rank in its training."""

    pipeline: Coordinate = Coordinate()
    data: Coordinate = Coordinate()
    tensor: Coordinate = Coordinate()
    context: Coordinate = Coordinate()
    expert: Coordinate = Coordinate()
    stage: Coordinate = Coordinate()
    """The position among all ranks of the stage, which are tensor-, context- and expert-parallel."""
    replica: int = 0
    """A number that differs between the replicas of the pipeline."""
    stages: tuple[tuple[int, ...], ...] = ()
    """The global ranks of each stage of this replica; empty if unknown."""
    ranks_per_host: int | None = None
    """Number of the training's ranks on each host; None if unknown."""
    is_across_hosts: bool = False
    """Whether the ranks of this replica are on several hosts."""

    @property
    def name(self) -> str:
        """Name in messages: the stage, followed by the number within the stage if it has several ranks."""
        return f"{self.pipeline.rank}" if self.stage.size == 1 else f"{self.pipeline.rank}.{self.stage.rank}"

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the training."""
        return (self.pipeline.rank, self.stage.rank, self.replica) == (0, 0, 0)

    @property
    def leads_replica(self) -> bool:
        """Whether this is the first rank of its replica."""
        return (self.pipeline.rank, self.stage.rank) == (0, 0)

    @property
    def siblings(self) -> tuple[int, ...]:
        """The global ranks of this rank's stage, including itself; empty if unknown."""
        return self.stages[self.pipeline.rank] if self.stages else ()

    @property
    def host(self) -> int | None:
        """The number of this rank's host; None if unknown."""
        return self.siblings[self.stage.rank] // self.ranks_per_host if self.stages and self.ranks_per_host else None

    def require_stages_on_one_host(self) -> None:
        """Check that no stage is on several hosts.

        Raises:
            UsageError: a stage is on several hosts; the message names the stage.
        """
        for pp_rank, ranks in enumerate(self.stages if self.ranks_per_host else ()):
            hosts = {rank // (self.ranks_per_host or 1) for rank in ranks}
            if len(hosts) > 1:
                raise UsageError(
                    f"the ranks of pipeline stage {pp_rank} are on {count_text(len(hosts), 'host')}: all tensor-,"
                    " context- and expert-parallel ranks of a stage must be on one host"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The groups of global ranks that a rank belongs to, one per dimension; empty for a dimension that is not used.

    The groups of the replica's other ranks are assumed to have the same layout, as frameworks create them.
    """

    own: int
    pipeline: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    """Ranks with the same tensor-, context- and pipeline-parallel rank; also empty if unknown."""
    tensor: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    """Ranks that hold other experts of the same layers, usually some of the data-parallel ranks."""
    expert_tensor: tuple[int, ...] = ()
    """Ranks that hold other parts of the same experts."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """The launcher's variables."""


def place_from_groups(groups: RankGroups) -> Place:
    """Return the place of a rank from its groups of global ranks.

    Raises:
        UsageError: a group does not contain the rank, or the groups do not form stages.
    """
    own = groups.own
    stage = _stage(groups)
    pipeline = groups.pipeline or (own,)
    stages = tuple(tuple(sorted(rank + first - own for rank in stage)) for first in pipeline)
    per_host = _ranks_per_host(groups.environ)
    everyone = {rank for ranks in stages for rank in ranks}
    return Place(
        pipeline=_coordinate(groups.pipeline, own, "pipeline"),
        data=_coordinate(groups.data, own, "data"),
        tensor=_coordinate(groups.tensor, own, "tensor"),
        context=_coordinate(groups.context, own, "context"),
        expert=_coordinate(groups.expert, own, "expert"),
        stage=Coordinate(sorted(stage).index(own), len(stage)),
        replica=_replica(groups.data, stage, everyone),
        stages=stages,
        ranks_per_host=per_host,
        is_across_hosts=per_host is not None and len({rank // per_host for rank in everyone}) > 1,
    )


def given_place(*, pp_rank: int, num_pp_ranks: int, dp_rank: int = 0, tp_rank: int = 0, num_tp_ranks: int = 1) -> Place:
    """Return the place that the user's numbers describe; whether the replica spans hosts is unknown.

    Args:
        pp_rank: number of the pipeline stage.
        num_pp_ranks: number of pipeline stages.
        dp_rank: a number that differs between the replicas of the pipeline.
        tp_rank: number of the rank in its stage, which has all tensor-, context- and expert-parallel ranks.
        num_tp_ranks: number of ranks of a stage.

    Raises:
        UsageError: a number is out of range.
    """
    stage = Coordinate(tp_rank, num_tp_ranks)
    return Place(pipeline=Coordinate(pp_rank, num_pp_ranks), tensor=stage, stage=stage, replica=dp_rank)


def _coordinate(group: Sequence[int], own: int, name: str) -> Coordinate:
    if not group:
        return Coordinate()
    if own not in group:
        raise UsageError(f"rank {own} is not in its own {name}-parallel group, {list(group)}")
    return Coordinate(list(group).index(own), len(group))


def _stage(groups: RankGroups) -> set[int]:
    """Return the global ranks that run each instruction together with a rank, including itself."""
    own = groups.own
    block = _combined(own, groups.tensor, groups.context)
    experts = _combined(own, groups.expert, groups.expert_tensor)
    # Expert parallelism usually divides the data-parallel ranks; each of these stands for a block of ranks like our
    # own.
    blocks = [{rank + other - own for rank in block} for other in groups.data or (own,)]
    if not experts <= {rank for ranks in blocks for rank in ranks}:
        return {rank + other - own for rank in block for other in experts}
    stage = {rank for ranks in blocks if ranks & experts for rank in ranks}
    if len(experts) > len(block) and len(stage) % len(experts):
        raise UsageError(
            f"expert-parallel ranks {sorted(experts)} do not consist of whole tensor- and context-parallel groups"
            f" such as {sorted(block)}"
        )
    return stage


def _combined(own: int, first: Sequence[int], second: Sequence[int]) -> set[int]:
    return {rank + other - own for rank in first or (own,) for other in second or (own,)}


def _replica(data: Sequence[int], stage: set[int], everyone: set[int]) -> int:
    """Return a number that differs between replicas, given the ranks of a stage and of the whole replica.

    Replicas are numbered by their data-parallel ranks, or else by their global ranks, if these are consecutive.
    """
    numbers = {k for k, rank in enumerate(data) if rank in stage} or everyone
    is_contiguous = max(numbers) - min(numbers) == len(numbers) - 1
    return min(numbers) // len(numbers) if is_contiguous else min(numbers)


def _ranks_per_host(environ: Mapping[str, str]) -> int | None:
    per_host = environ.get("LOCAL_WORLD_SIZE", "")
    return int(per_host) if per_host.isdecimal() and int(per_host) >= 1 else None
