"""Places of ranks: who shares a stage and a replica, from Megatron's state, DeepSpeed's grid, meshes and numbers."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.joining import place_sources
from gpuenergyd_trainers.joining.membership import JoinOptions, PipelineRank, join
from gpuenergyd_trainers.joining.place import Coordinate, Place, RankGroups, given_place, place_from_groups
from gpuenergyd_trainers.joining.place_sources import deepspeed_place, megatron_place, mesh_place
from tests.trainers.parallel_layouts import MegatronLayout, SimpleTopology

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SIZES = st.integers(1, 3)


def groups_of(layout: MegatronLayout, rank: int) -> RankGroups:
    return RankGroups(
        own=rank, environ={}, **{name: tuple(group) for name, group in vars(layout.state_of(rank)).items()}
    )


@given(tp=SIZES, cp=SIZES, dp=st.integers(1, 4), pp=SIZES, ep=st.integers(1, 4), etp=st.integers(1, 2))
def test_every_rank_has_one_place_and_all_ranks_of_a_stage_agree_on_it(
    tp: int, cp: int, dp: int, pp: int, ep: int, etp: int
) -> None:
    layout = MegatronLayout(tp, cp, dp, pp, ep, etp)
    block, experts = tp * cp, ep * etp
    assume(layout.stage_width % experts == 0 and (experts % block == 0 or block % experts == 0))
    places = {rank: place_from_groups(groups_of(layout, rank)) for rank in range(layout.num_ranks)}

    members = defaultdict(list)
    for rank, place in places.items():
        members[place.replica, place.pipeline.rank].append(rank)
        assert place.siblings[place.stage.rank] == rank
    for (_, pp_rank), ranks in members.items():
        assert all(places[rank].siblings == tuple(ranks) for rank in ranks)
        assert [places[rank].stage for rank in ranks] == [Coordinate(k, len(ranks)) for k in range(len(ranks))]
        assert {places[rank].pipeline for rank in ranks} == {Coordinate(pp_rank, pp)}
        assert len(ranks) == math.lcm(block, experts)
    assert {replica for replica, _ in members} == set(range(layout.stage_width // math.lcm(block, experts)))
    for rank, place in places.items():
        assert place.stages == tuple(tuple(members[place.replica, k]) for k in range(pp))
        state = layout.state_of(rank)
        assert place.tensor == Coordinate(state.tensor.index(rank), tp)
        assert place.context == Coordinate(state.context.index(rank), cp)
        assert place.data == Coordinate(state.data.index(rank), dp)
        assert place.expert == Coordinate(state.expert.index(rank), ep)
    assert sum(place.is_first for place in places.values()) == 1


def test_expert_groups_that_cut_through_tensor_parallel_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="do not consist of whole tensor- and context-parallel groups"):
        place_from_groups(groups_of(MegatronLayout(tp=2, dp=3, ep=3), 0))


def test_megatron_without_experts_or_context_has_tensor_parallel_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    known = MegatronLayout(tp=2, dp=2, pp=2).state_of(5)
    names = ("tensor_model", "data", "pipeline_model")
    old = SimpleNamespace(**{n: getattr(known, n) for n in (f"get_{name}_parallel_group" for name in names)})
    monkeypatch.setattr(place_sources, "_own_rank", lambda: 5)
    monkeypatch.setattr(place_sources, "_ranks_of", tuple)

    for state in (known, old):  # versions before context and expert parallelism have no such groups
        place = megatron_place(state)

        assert (place.name, place.replica, place.stages) == ("1.1", 0, ((0, 1), (4, 5)))


def test_the_axis_model_of_a_deepspeed_grid_is_a_stage_and_experts_join_it() -> None:
    topology = SimpleTopology({"pipe": 2, "data": 2, "model": 2})
    grid = SimpleNamespace(global_rank=7, topology=lambda: topology)

    place = deepspeed_place(grid)
    with_experts = deepspeed_place(grid, expert_ranks=[5, 7])

    assert (place.name, place.replica, place.data) == ("1.1", 1, Coordinate(1, 2))
    assert place.stages == ((2, 3), (6, 7))
    assert (with_experts.name, with_experts.replica, with_experts.expert) == ("1.3", 0, Coordinate(1, 2))
    assert with_experts.stages == ((0, 1, 2, 3), (4, 5, 6, 7))


def mesh(shape: tuple[int, ...], names: tuple[str, ...] | None, rank: int) -> SimpleNamespace:
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    at = (ranks == rank).nonzero()
    return SimpleNamespace(mesh=ranks, mesh_dim_names=names, get_coordinate=lambda: at[0].tolist() if len(at) else None)


def test_a_device_mesh_names_its_dimensions() -> None:
    place = mesh_place(mesh((2, 2, 2, 2), ("pp", "dp_replicate", "cp", "tp"), 13))
    experts = mesh_place(mesh((2, 2, 2), ("pp", "dp", "ep"), 3))

    assert (place.name, place.replica, place.siblings) == ("1.1", 1, (12, 13, 14, 15))
    assert (place.context, place.tensor, place.data) == (Coordinate(0, 2), Coordinate(1, 2), Coordinate(1, 2))
    assert (experts.name, experts.replica, experts.siblings) == ("0.1", 1, (2, 3))


@pytest.mark.parametrize(
    ("given_mesh", "message"),
    [
        (mesh((2, 2), ("dp", "tp"), 0), "no pipeline among the dimensions dp, tp"),
        (mesh((2, 2), None, 0), "the DeviceMesh has no mesh_dim_names; give it names"),
        (mesh((2, 2), ("pp", "tp"), 9), "not in the DeviceMesh"),
    ],
)
def test_a_mesh_without_a_pipeline_is_refused(given_mesh: SimpleNamespace, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mesh_place(given_mesh)


def test_a_pipeline_is_across_hosts_if_its_ranks_are_and_a_stage_must_not_be(caplog: pytest.LogCaptureFixture) -> None:
    def place_on(per_host: str, rank: int = 0) -> Place:
        state = MegatronLayout(tp=2, pp=2).state_of(rank)
        return place_from_groups(
            RankGroups(
                own=rank,
                pipeline=tuple(state.pipeline),
                tensor=tuple(state.tensor),
                environ={"LOCAL_WORLD_SIZE": per_host},
            )
        )

    assert [place_on(per_host).is_across_hosts for per_host in ("", "4", "2", "1")] == [False, False, True, True]
    assert [place_on("2", rank).host for rank in range(4)] == [0, 0, 1, 1]
    assert place_on("").host is None
    place_on("2").require_stages_on_one_host()
    rank = PipelineRank(
        framework="f", schedule_name="s", expected_order=None, num_microbatches=1, place=place_on("1"), device=None
    )
    handle = join(
        JoinOptions(job="gpt"),
        lambda: rank,
        lambda _rank: pytest.fail("joined"),
        target=object(),
        target_name="this schedule",
    )

    assert not handle.is_attached
    assert "job gpt: this schedule cannot be joined, training continues at full speed" in caplog.text
    assert (
        "the ranks of pipeline stage 0 are on 2 hosts: all tensor-, context- and expert-parallel ranks" in caplog.text
    )


def test_a_given_place_is_checked() -> None:
    place = given_place(pp_rank=1, num_pp_ranks=2, dp_rank=3, tp_rank=1, num_tp_ranks=2)

    assert (place.name, place.replica, place.siblings, place.host) == ("1.1", 3, (), None)
    with pytest.raises(UsageError, match="rank 2 of 2"):
        given_place(pp_rank=2, num_pp_ranks=2)
    with pytest.raises(UsageError, match="not in its own tensor-parallel group"):
        place_from_groups(RankGroups(own=4, tensor=(0, 1), environ={}))
