"""Layouts of parallel trainings as frameworks describe them: Megatron's parallel state and DeepSpeed's topology.

They number ranks as the frameworks do: tensor-parallel ranks innermost, then context-, data- and pipeline-parallel
ones; expert-parallel ranks divide the ranks of a stage in their own way.
"""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any


@dataclass(frozen=True)
class MegatronLayout:
    """Sizes of all dimensions; `state_of` returns one rank's parallel state, whose groups are lists of ranks."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def stage_width(self) -> int:
        """Ranks of a stage in all replicas."""
        return self.tp * self.cp * self.dp

    @property
    def num_ranks(self) -> int:
        return self.stage_width * self.pp

    def state_of(self, rank: int) -> "MegatronState":
        j, first = rank % self.stage_width, rank - rank % self.stage_width
        tp, cp, dp = j % self.tp, j // self.tp % self.cp, j // (self.tp * self.cp)
        etp, ep, edp = j % self.etp, j // self.etp % self.ep, j // (self.etp * self.ep)
        block = self.tp * self.cp
        return MegatronState(
            tensor=[first + k + self.tp * (cp + self.cp * dp) for k in range(self.tp)],
            context=[first + tp + self.tp * (k + self.cp * dp) for k in range(self.cp)],
            data=[first + tp + self.tp * cp + block * k for k in range(self.dp)],
            pipeline=[j + self.stage_width * k for k in range(self.pp)],
            expert=[first + etp + self.etp * (k + self.ep * edp) for k in range(self.ep)],
            expert_tensor=[first + k + self.etp * (ep + self.ep * edp) for k in range(self.etp)],
        )


@dataclass(frozen=True)
class MegatronState:
    """What `megatron.core.parallel_state` returns on one rank."""

    tensor: list[int]
    context: list[int]
    data: list[int]
    pipeline: list[int]
    expert: list[int]
    expert_tensor: list[int]

    def get_tensor_model_parallel_group(self) -> list[int]:
        return self.tensor

    def get_context_parallel_group(self, *, check_initialized: bool = True) -> list[int]:
        del check_initialized
        return self.context

    def get_data_parallel_group(self) -> list[int]:
        return self.data

    def get_pipeline_model_parallel_group(self) -> list[int]:
        return self.pipeline

    def get_expert_model_parallel_group(self, *, check_initialized: bool = True) -> list[int]:
        del check_initialized
        return self.expert

    def get_expert_tensor_parallel_group(self, *, check_initialized: bool = True) -> list[int]:
        del check_initialized
        return self.expert_tensor


class SimpleTopology:
    """A topology as DeepSpeed's ProcessTopology: ranks in row-major order of its axes."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        self._dims = dict(dims)
        coordinate: Any = namedtuple("coordinate", list(dims))  # type: ignore[misc]  # noqa: PYI024  axes known at run time
        self._ranks = {coordinate(*at): rank for rank, at in enumerate(product(*map(range, dims.values())))}

    def get_axis_names(self) -> list[str]:
        return list(self._dims)

    def get_dim(self, axis: str) -> int:
        return self._dims[axis]

    def get_coord(self, rank: int) -> Any:
        return next(at for at, own in self._ranks.items() if own == rank)

    def get_rank(self, **at: int) -> int:
        return self._ranks[tuple(at[axis] for axis in self._dims)]  # type: ignore[index]  # tuples compare equal
