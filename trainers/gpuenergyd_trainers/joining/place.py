"""A rank's place in its training: in every dimension of parallelism, on its host, and among the ranks of its stage.

A training runs replicas of a pipeline, a replica has stages, and a stage has ranks. The ranks of a stage exchange parts
of every layer (tensor and context parallelism) or of every expert layer (expert parallelism): they run each instruction
together, so they follow one plan. Replicas wait for each other only at the end of an iteration.
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
    """The position among all ranks of the stage: tensor-, context- and expert-parallel ones."""
    replica: int = 0
    """A number that no other replica of the pipeline has."""
    stages: tuple[tuple[int, ...], ...] = ()
    """The global ranks of each stage of this replica; empty if unknown."""
    ranks_per_host: int | None = None
    """Ranks of the training on each host; None if unknown."""
    is_across_hosts: bool = False
    """Whether the ranks of this replica are on several hosts."""

    @property
    def name(self) -> str:
        """Name in messages: the stage, and the number in the stage if it has several ranks."""
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
        """The global ranks of this rank's stage, itself included; empty if unknown."""
        return self.stages[self.pipeline.rank] if self.stages else ()

    @property
    def host(self) -> int | None:
        """The number of this rank's host; None if unknown."""
        return self.siblings[self.stage.rank] // self.ranks_per_host if self.stages and self.ranks_per_host else None

    def require_stages_on_one_host(self) -> None:
        """Check that no stage is on several hosts.

        Raises:
            UsageError: a stage is; the message names it.
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

    Groups of the other ranks of the replica are taken to be laid out in the same way, as frameworks do it.
    """

    own: int
    pipeline: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    """Ranks with the same tensor-, context- and pipeline-parallel rank. Empty also if unknown."""
    tensor: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    """Ranks that hold other experts of the same layers; usually some of the data-parallel ones."""
    expert_tensor: tuple[int, ...] = ()
    """Ranks that hold other parts of the same experts."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """The launcher's variables."""


def place_from_groups(groups: RankGroups) -> Place:
    """Return the place of a rank from its groups of global ranks.

    Raises:
        UsageError: a group lacks the rank, or the groups do not form stages.
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


def given_place(
    *,
    pp_rank: int,
    num_pp_ranks: int,
    dp_rank: int = 0,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
) -> Place:
    """Return a place from numbers that the user has given; whether it is on several hosts is unknown.

    Args:
        pp_rank: number of the pipeline stage.
        num_pp_ranks: number of pipeline stages.
        dp_rank: a number that no other replica of the pipeline has.
        tp_rank: number of the rank in its stage: tensor-, context- and expert-parallel ranks together.
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
    """Return the global ranks that run instructions together with a rank, itself included."""
    own = groups.own
    block = _combined(own, groups.tensor, groups.context)
    experts = _combined(own, groups.expert, groups.expert_tensor)
    # Expert parallelism usually divides the data-parallel ranks: each of them brings its own block.
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
    """Return a number that no other replica has, given the ranks of a stage and of the whole replica.

    Replicas are counted by their data-parallel ranks, or else by their global ranks, if those of each follow one
    another.
    """
    numbers = {k for k, rank in enumerate(data) if rank in stage} or everyone
    is_contiguous = max(numbers) - min(numbers) == len(numbers) - 1
    return min(numbers) // len(numbers) if is_contiguous else min(numbers)


def _ranks_per_host(environ: Mapping[str, str]) -> int | None:
    per_host = environ.get("LOCAL_WORLD_SIZE", "")
    return int(per_host) if per_host.isdecimal() and int(per_host) >= 1 else None
