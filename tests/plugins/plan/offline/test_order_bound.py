"""The bound over any order: valid for every order of tiny pipelines, and tight where it should be."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionClass,
    InstructionKind,
    Schedule,
    dependency_graph,
    gpipe,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.errors import ScheduleError, TargetError
from gpuenergyd_plan.offline import order_bound as bound_module
from gpuenergyd_plan.offline.load_bound import load_bound_j, shared_load, stage_loads
from gpuenergyd_plan.offline.order_bound import any_order_bound, cell_starts
from gpuenergyd_plan.offline.order_choice import plan_order
from gpuenergyd_policies.planning.exact.tables import HullChain, under_hull
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.orders.relaxation import OrderTask
from gpuenergyd_policies.planning.plan_evaluation import baseline
from tests.policies.planning.orders.cases import POWER_W, full_speed_time_s, split_profile
from tests.policies.planning.pipelines import tables
from tests.policies.planning.profiles import forward_backward_profile
from tests.support.examples import examples

CLOCKS_MHZ = (1400, 1200, 1000, 800)


def _words(pp_rank: int, num_microbatches: int, limit: int) -> Iterator[tuple[Instruction, ...]]:
    """Yield every order of one rank, whole and split, that holds at most `limit` microbatches."""

    def grow(word: tuple[Instruction, ...], kinds: str) -> Iterator[tuple[Instruction, ...]]:
        if len(word) == len(kinds) * num_microbatches:
            yield word
            return
        done = {kind: sum(i.kind == kind for i in word) for kind in kinds}
        released = done[kinds[-1]]
        for at, kind in enumerate(kinds):
            before = num_microbatches if at == 0 else done[kinds[at - 1]]
            if done[kind] < before and (at > 0 or done[kind] - released < limit):
                yield from grow((*word, Instruction(pp_rank, InstructionKind(kind), done[kind])), kinds)

    for kinds in ("FB", "FIW"):
        yield from grow((), kinds)


@pytest.mark.parametrize(
    ("weights", "num_microbatches", "limits", "overhead"),
    [
        ((1.0, 1.0), 2, (2, 1), 0.0),
        ((1.0, 1.1), 2, (2, 2), 0.0),
        ((1.1, 1.0), 3, (2, 1), 0.0),
        ((1.0, 1.0), 2, (2, 1), 0.1),
    ],
)
def test_no_order_of_a_tiny_pipeline_needs_less_than_the_bound(
    weights: tuple[float, ...], num_microbatches: int, limits: tuple[int, ...], overhead: float
) -> None:
    num_ranks = len(weights)
    profile = split_profile(weights, overhead=overhead, clocks_mhz=CLOCKS_MHZ)
    deadline_s = full_speed_time_s(profile, num_ranks, num_microbatches)
    bound = any_order_bound(OrderTask(num_microbatches, profile, deadline_s, limits))
    assert bound is not None

    energies_j = []
    words = [list(_words(r, num_microbatches, limits[r])) for r in range(num_ranks)]
    for orders in product(*words):
        try:
            graph = dependency_graph(Schedule("any", num_microbatches, orders))
            energies_j.append(solve(graph, profile, deadline_s=deadline_s).energy_j)
        except (ScheduleError, TargetError):
            continue

    assert bound <= min(energies_j) * (1 + 1e-9)
    assert min(energies_j) <= 1.06 * bound
    chosen = plan_order(OrderTask(num_microbatches, profile, deadline_s, limits))
    assert chosen.solved.energy_j <= 1.01 * min(energies_j)


@settings(max_examples=examples(20), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.8, 1.0, 1.1]), min_size=1, max_size=3),
    num_microbatches=st.integers(1, 6),
    extra=st.integers(0, 3),
    more_time=st.sampled_from([1.0, 1.05, 1.5]),
)
def test_without_split_backwards_the_bound_holds_for_whole_ones(
    weights: list[float], num_microbatches: int, extra: int, more_time: float
) -> None:
    num_ranks = len(weights)
    profile = forward_backward_profile(weights)
    ahead = [min(extra * (num_ranks - 1 - r), max(0, num_microbatches - num_ranks + r)) for r in range(num_ranks)]

    for schedule in (
        one_forward_one_backward(num_ranks, num_microbatches),
        one_forward_one_backward(num_ranks, num_microbatches, ahead),
        gpipe(num_ranks, num_microbatches),
    ):
        graph = dependency_graph(schedule)
        deadline_s = more_time * baseline(graph, profile).iteration_time_s
        bound = any_order_bound(OrderTask(num_microbatches, profile, deadline_s, [num_microbatches] * num_ranks))
        assert bound is not None
        assert bound <= solve(graph, profile, deadline_s=deadline_s).energy_j * (1 + 1e-9)


def test_one_stage_with_whole_backwards_reaches_its_bound() -> None:
    """Two microbatches are four instructions of 1 s and 400 J, or 2 s and 450 J; waiting draws 100 W."""
    options = [ClockOption(2000, 1.0, 400.0), ClockOption(1000, 2.0, 450.0)]
    kinds = (InstructionKind.F, InstructionKind.B)
    profile = PipelineProfile(
        {InstructionClass(0, kind): instruction_profile(options, where="hand") for kind in kinds}, 100.0
    )

    for deadline_s, energy_j in ((4.0, 1600.0), (6.0, 1600.0 + 2 * 50.0), (8.0, 1800.0)):
        bound = any_order_bound(OrderTask(2, profile, deadline_s, [2], forced=True))
        assert bound is not None
        assert bound == pytest.approx(energy_j, rel=1e-3)


def test_grouping_microbatches_loosens_the_bound_but_keeps_it_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = split_profile([1.0, 1.0, 1.05], overhead=0.02, clocks_mhz=CLOCKS_MHZ)
    deadline_s = full_speed_time_s(profile, 3, 24)
    fine = any_order_bound(OrderTask(24, profile, deadline_s, [3, 3, 3]))

    monkeypatch.setattr(bound_module, "MOST_CELLS", 120)
    monkeypatch.setattr(bound_module, "FEW_CELLS", 120)
    coarse = any_order_bound(OrderTask(24, profile, deadline_s, [3, 3, 3]))

    assert fine is not None
    assert coarse is not None
    assert 0.97 * fine <= coarse <= fine * (1 + 1e-6)
    assert coarse != fine, "microbatches were grouped"


def test_more_memory_never_raises_the_bound() -> None:
    profile = split_profile([1.0, 1.0, 1.05])
    deadline_s = full_speed_time_s(profile, 3, 9)

    bounds = [
        any_order_bound(OrderTask(9, profile, deadline_s, limits)) for limits in ([3, 2, 1], [3, 3, 3], [9, 9, 9])
    ]

    energies_j = [bound for bound in bounds if bound is not None]
    assert len(energies_j) == 3
    assert energies_j[0] > energies_j[1]
    assert energies_j[1] >= energies_j[2] * (1 - 1e-6)


@settings(max_examples=examples(20), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.8, 1.0, 1.1]), min_size=1, max_size=3),
    num_microbatches=st.integers(1, 6),
    overhead=st.sampled_from([0.0, 0.1]),
    more_time=st.sampled_from([1.0, 1.1, 3.0]),
    forced=st.booleans(),
)
def test_the_load_of_gpus_is_a_looser_bound(
    weights: list[float], num_microbatches: int, overhead: float, more_time: float, *, forced: bool
) -> None:
    num_ranks = len(weights)
    profile = split_profile(weights, overhead=overhead)
    deadline_s = more_time * full_speed_time_s(profile, num_ranks, num_microbatches)
    waiting_w = POWER_W * num_ranks

    tight = any_order_bound(
        OrderTask(num_microbatches, profile, deadline_s, [num_microbatches] * num_ranks, forced=forced)
    )
    by_rank = load_bound_j(stage_loads(profile, num_microbatches), waiting_w, deadline_s, forced=forced)
    shared = load_bound_j([shared_load(profile, num_ranks, num_microbatches)], waiting_w, deadline_s, forced=forced)

    assert tight is not None
    assert shared <= by_rank * (1 + 1e-9)
    assert by_rank <= tight * (1 + 1e-3)
    graph = dependency_graph(one_forward_one_backward(num_ranks, num_microbatches))
    planned = solve(graph, profile, deadline_s=deadline_s, forced=forced)
    until_end_j = waiting_w * (deadline_s - planned.iteration_time_s) if forced else 0.0
    assert by_rank <= (planned.energy_j + until_end_j) * (1 + 1e-9)


def test_deep_pipelines_are_bounded_by_their_loads() -> None:
    profile = split_profile([1.0] * 41)
    deadline_s = full_speed_time_s(profile, 41, 50)

    bound = any_order_bound(OrderTask(50, profile, deadline_s, [41] * 41))

    assert bound is not None
    full_speed_j = baseline(dependency_graph(one_forward_one_backward(41, 50)), profile).energy_j
    assert 0.3 * full_speed_j < bound < full_speed_j


@settings(max_examples=examples(50), deadline=None)
@given(tables())
def test_under_estimates_of_hulls_lie_at_or_below_them(profile: InstructionProfile) -> None:
    hull = profile.lower_hull(POWER_W)
    times_s, costs_j = np.array([(o.time_s, o.effective_energy_j(POWER_W)) for o in hull]).T
    below = under_hull(HullChain(times_s, costs_j), 2e-4 * min(o.energy_j for o in hull))

    assert below.times_s[0] == hull[0].time_s
    assert below.times_s[-1] == hull[-1].time_s
    for option in hull:
        at = float(sum_at(below.times_s.tolist(), below.costs_j.tolist(), option.time_s))
        assert at <= option.effective_energy_j(POWER_W) + 1e-9 * option.energy_j


def sum_at(times_s: list[float], costs_j: list[float], time_s: float) -> float:
    """Return the cost of a chain at a time, linear between its vertices."""
    for (a_s, a_j), (b_s, b_j) in zip(
        zip(times_s, costs_j, strict=True), zip(times_s[1:], costs_j[1:], strict=True), strict=False
    ):
        if a_s <= time_s <= b_s:
            return a_j + (b_j - a_j) * (time_s - a_s) / (b_s - a_s)
    return costs_j[0]


def test_cells_cover_all_microbatches_and_are_single_at_both_ends() -> None:
    starts = cell_starts(100, 30).tolist()

    assert starts == sorted(set(starts))
    assert starts[:10] == list(range(10))
    assert starts[-10:] == list(range(90, 100))
    assert cell_starts(8, 30).tolist() == list(range(8))
