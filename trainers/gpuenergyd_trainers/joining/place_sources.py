"""The place of a rank from its framework: Megatron's parallel state, DeepSpeed's grid, torch's DeviceMesh or groups."""

import importlib
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.joining.place import Place, RankGroups, place_from_groups

_PIPELINE_AXES = frozenset({"pp", "pipe", "pipeline"})
_TENSOR_AXES = frozenset({"tp", "model", "tensor"})
_CONTEXT_AXES = frozenset({"cp", "context"})
_EXPERT_AXES = frozenset({"ep", "expert", "dp_shard_in_ep"})
"""Names of axes in meshes and topologies; all other axes count as data-parallel."""


def megatron_place(state: Any = None) -> Place:
    """Return the place of this process from Megatron-core's `parallel_state`, or from a module like it.

    Raises:
        UsageError: its groups do not form stages.
        AssertionError: Megatron has not initialised its groups.
    """
    state = importlib.import_module("megatron.core.parallel_state") if state is None else state

    def ranks(name: str, *, is_optional: bool = False) -> tuple[int, ...]:
        """Return the global ranks of a group; empty if this version of Megatron, or the model, has no such group."""
        find = getattr(state, name, None)
        if find is None and is_optional:
            return ()
        group = find(check_initialized=False) if is_optional else find()  # type: ignore[misc]  # a function of Megatron
        return _ranks_of(group) if group is not None else ()

    return place_from_groups(
        RankGroups(
            own=_own_rank(),
            pipeline=ranks("get_pipeline_model_parallel_group"),
            data=ranks("get_data_parallel_group"),
            tensor=ranks("get_tensor_model_parallel_group"),
            context=ranks("get_context_parallel_group", is_optional=True),
            expert=ranks("get_expert_model_parallel_group", is_optional=True),
            expert_tensor=ranks("get_expert_tensor_parallel_group", is_optional=True),
        )
    )


def deepspeed_place(grid: Any, *, expert_ranks: Iterable[int] = ()) -> Place:
    """Return the place of this process from DeepSpeed's PipelineParallelGrid.

    Args:
        grid: the grid of the engine.
        expert_ranks: the global ranks of this process's largest expert-parallel group; empty without experts.

    Raises:
        UsageError: the topology has no axis "pipe", or its groups do not form stages.
    """
    topology, own = grid.topology(), int(grid.global_rank)
    axes = list(topology.get_axis_names())
    at = topology.get_coord(own)._asdict()  # a named tuple

    def along(axis: str) -> list[int]:
        return [int(topology.get_rank(**{**at, axis: k})) for k in range(topology.get_dim(axis))]

    return _place_on_axes(own, {axis: along(axis) for axis in axes}, tuple(sorted(expert_ranks)))


def mesh_place(mesh: Any) -> Place:
    """Return the place of this process in a DeviceMesh with named dimensions, for instance ("pp", "dp", "tp").

    The dimensions "pp", "tp", "cp" and "ep" (or longer names of these) are pipeline-, tensor-, context- and
    expert-parallel; all others are data-parallel.

    Raises:
        UsageError: the mesh has no names or no dimension "pp", or this process is not in it.
    """
    names, at = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names:
        raise UsageError("the DeviceMesh has no mesh_dim_names; give it names such as ('pp', 'dp', 'tp')")
    if at is None:
        raise UsageError("this process is not in the DeviceMesh")
    ranks = mesh.mesh.tolist()

    def rank_at(position: Iterable[int]) -> int:
        entry = ranks
        for index in position:
            entry = entry[index]
        return int(entry)

    axes = {
        name: [rank_at([*at[:k], other, *at[k + 1 :]]) for other in range(size)]
        for k, (name, size) in enumerate(zip(names, mesh.mesh.shape, strict=True))
    }
    return _place_on_axes(rank_at(at), axes, ())


def pipeline_group_place(group: Any, *, tp_rank: int = 0, num_tp_ranks: int = 1) -> Place:
    """Return the place of this process from the process group of its pipeline.

    Args:
        group: the pipeline's process group; None for all processes.
        tp_rank: number of the rank in its stage; the ranks of a stage must have consecutive global ranks.
        num_tp_ranks: number of ranks of a stage.

    Raises:
        UsageError: `tp_rank` is out of range.
    """
    import torch.distributed as dist  # noqa: PLC0415  loaded already by the caller's schedule

    if not 0 <= tp_rank < num_tp_ranks:
        raise UsageError(f"tp_rank {tp_rank} must be in [0, num_tp_ranks {num_tp_ranks})")
    own = _own_rank()
    first = own - tp_rank
    members = _ranks_of(group if group is not None else dist.group.WORLD)
    return place_from_groups(RankGroups(own=own, pipeline=members, tensor=tuple(range(first, first + num_tp_ranks))))


def _place_on_axes(own: int, axes: Mapping[str, list[int]], expert: tuple[int, ...]) -> Place:
    """Return the place of a rank, given for each axis of a mesh the ranks along that axis through this rank."""

    def along(names: Iterable[str]) -> tuple[int, ...]:
        """Return the ranks whose position differs from that of the own rank in these axes only."""
        chosen = [axes[name] for name in axes if name in names]
        return tuple(sum(ranks) - (len(chosen) - 1) * own for ranks in product(*chosen)) if chosen else ()

    pipeline = [name for name in axes if name in _PIPELINE_AXES]
    if not pipeline:
        raise UsageError(
            f"no pipeline among the dimensions {', '.join(axes)}; one of them must be named 'pp' or 'pipe'"
        )
    known = _PIPELINE_AXES | _TENSOR_AXES | _CONTEXT_AXES | _EXPERT_AXES
    return place_from_groups(
        RankGroups(
            own=own,
            pipeline=along(_PIPELINE_AXES),
            data=along(axes.keys() - known),
            tensor=along(_TENSOR_AXES),
            context=along(_CONTEXT_AXES),
            expert=expert or along(_EXPERT_AXES),
        )
    )


def _own_rank() -> int:
    import torch.distributed as dist  # noqa: PLC0415  loaded already by the framework

    return int(dist.get_rank())


def _ranks_of(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist  # noqa: PLC0415  loaded already by the framework

    return tuple(int(rank) for rank in dist.get_process_group_ranks(group))
