"""Segment kernels: an iteration with late reductions matches a reference, and annealing finds small optima."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionClass, dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd_policies.planning.compiled import ints
from gpuenergyd_policies.planning.switching.annealing import Annealing, Segments
from gpuenergyd_policies.planning.switching.segments import SegmentSearch, common_clocks
from tests.policies.planning.pipelines import B, F, Pipeline
from tests.policies.planning.profiles import forward_backward_profile
from tests.support.examples import examples

BLOCKING_W = 10.0


@st.composite
def _small_pipelines(draw: st.DrawFn) -> Pipeline:
    """Return 1F1B of one to three ranks with three clocks; a lower clock need not be slower."""
    num_ranks = draw(st.integers(1, 3))
    classes = {}
    for rank in range(num_ranks):
        for kind in (F, B):
            times_s = [draw(st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.5])) for _ in range(3)]
            classes[InstructionClass(rank, kind)] = instruction_profile(
                [ClockOption(mhz, t, t * w) for mhz, t, w in zip((900, 700, 500), times_s, (90, 60, 40), strict=True)],
                where="small",
            )
    schedule = one_forward_one_backward(num_ranks, draw(st.integers(1, 4)))
    graph = dependency_graph(schedule, communication_latency_s=draw(st.sampled_from([0.0, 0.25])))
    epilogues_s = [draw(st.sampled_from([0.0, 0.0, 0.5])) for _ in range(num_ranks)]
    return graph.with_epilogues(epilogues_s), PipelineProfile(classes, BLOCKING_W)


def _slowly_run(pipeline: Pipeline, clocks_mhz: Sequence[int], lower_s: float) -> tuple[list[float], float, float]:
    """Return finishes and the sums of energies and times: a reference with late reductions and raises in time."""
    graph, profile = pipeline
    finish_s = [0.0] * len(graph.instructions)
    energy_j = time_s = 0.0
    active: dict[int, int] = {}
    for v, instruction in enumerate(graph.instructions):
        active[instruction.pp_rank] = clocks_mhz[v]  # the last of each rank, which the iteration before left
    coming: dict[int, list[tuple[float, int]]] = {rank: [] for rank in active}
    for v in graph.topological_order:
        rank = graph.instructions[v].pp_rank
        table = profile[graph.instructions[v].instruction_class]
        begin_s = now_s = max((finish_s[u] + gap for u, gap in graph.predecessors[v]), default=0.0)
        while coming[rank] and coming[rank][0][0] <= now_s:
            active[rank] = coming[rank].pop(0)[1]
        wanted = clocks_mhz[v]
        if wanted >= active[rank]:
            active[rank] = wanted
            coming[rank] = []
        else:
            kept = [(at, mhz) for at, mhz in coming[rank] if mhz >= wanted]
            lower = [(at, mhz) for at, mhz in coming[rank] if mhz < wanted]
            if lower:  # what was to come lower comes as high as is wanted now
                kept.append((lower[0][0], wanted))
            elif not kept or kept[-1][1] != wanted:
                kept.append((begin_s + lower_s, wanted))
            coming[rank] = kept
        left = 1.0
        while left > 0.0:
            option = table.interpolated(active[rank])
            until_s = coming[rank][0][0] if coming[rank] else math.inf
            if now_s + left * option.time_s <= until_s:
                now_s += left * option.time_s
                energy_j += left * option.energy_j
                break
            done = (until_s - now_s) / option.time_s
            energy_j += done * option.energy_j
            left -= done
            now_s, active[rank] = coming[rank].pop(0)
        finish_s[v] = now_s
        time_s += now_s - begin_s
    return finish_s, energy_j, time_s


def _segments(bounds: Sequence[int], clocks: Sequence[int]) -> Segments:
    return Segments(ints(bounds), ints(clocks))


def _values(found: Segments | None) -> tuple[list[int], list[int]] | None:
    return None if found is None else ([int(b) for b in found.bounds], [int(c) for c in found.clocks])


@settings(max_examples=examples(50), deadline=None)
@given(pipeline=_small_pipelines(), lower_s=st.sampled_from([0.0, 0.25, 1.0, 4.0]), data=st.data())
def test_reductions_take_effect_late_and_raises_in_time(
    pipeline: Pipeline, lower_s: float, data: st.DataObject
) -> None:
    graph = pipeline[0]
    clocks = [data.draw(st.integers(0, 2)) for _ in graph.instructions]
    search = SegmentSearch(*pipeline, latency=lower_s)

    finish_s, (makespan_s, energy_j, time_s) = search.iteration(clocks)

    known_s, known_j, spent_s = _slowly_run(pipeline, [(500, 700, 900)[k] for k in clocks], lower_s)
    assert finish_s == pytest.approx(known_s, rel=1e-12)
    is_over_s = max(end_s + epilogue_s for end_s, epilogue_s in zip(known_s, graph.epilogues_s, strict=True))
    assert (makespan_s, energy_j, time_s) == pytest.approx((is_over_s, known_j, spent_s), rel=1e-12)


def _many_clocks(num: int) -> Pipeline:
    """Return one rank whose microbatches could each run at another of many clocks."""
    table = InstructionProfile(tuple(ClockOption(100 * k, 1.0, 10.0 * k) for k in range(num, 0, -1)))
    profile = PipelineProfile({InstructionClass(0, kind): table for kind in (F, B)}, BLOCKING_W)
    return dependency_graph(one_forward_one_backward(1, num // 2)), profile


def test_a_ninth_pending_reduction_replaces_the_last_one() -> None:
    """Twelve ever lower clocks, each due twenty seconds late: eight are remembered, the last of them the lowest."""
    pipeline = _many_clocks(12)
    search = SegmentSearch(*pipeline, latency=20.0)

    finish_s, (_, energy_j, _) = search.iteration([11, *range(10, 0, -1), 11])

    assert finish_s == [float(k + 1) for k in range(12)]
    assert energy_j == pytest.approx(12 * 120.0)  # none has come by then


def test_successive_reductions_all_take_effect() -> None:
    pipeline = _many_clocks(8)
    search = SegmentSearch(*pipeline, latency=1.5)

    _, (_, energy_j, _) = search.iteration([7, 6, 5, 4, 3, 2, 1, 7])

    # each comes one and a half seconds after its begin: in the middle of the instruction behind
    watts = [8.0, 8.0, (8 + 7) / 2, (7 + 6) / 2, (6 + 5) / 2, (5 + 4) / 2, (4 + 3) / 2, 8.0]
    assert energy_j == pytest.approx(10 * sum(watts))


def _all_segments(n: int, num_clocks: int, max_segments: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield every way to cut one rank's instructions into segments and to choose their clocks."""
    for cuts in combinations_with_replacement(range(n + 1), max_segments - 1):
        for clocks in product(range(num_clocks), repeat=max_segments):
            yield [0, *cuts, n], list(clocks)


def _node_clocks(bounds: Sequence[int], clocks: Sequence[int]) -> list[int]:
    return [clock for k, clock in enumerate(clocks) for _ in range(bounds[k], bounds[k + 1])]


@pytest.mark.parametrize("lower_s", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("slowdown", [0.0, 0.1, 0.4, 2.0])
@pytest.mark.parametrize("waiting_power_w", [0.0, BLOCKING_W, 45.0])
def test_annealing_finds_the_cheapest_segments_that_meet_the_deadline(
    lower_s: float, slowdown: float, waiting_power_w: float
) -> None:
    classes = {
        InstructionClass(0, kind): instruction_profile(
            [ClockOption(mhz, work * t, work * j) for mhz, t, j in ((900, 1.0, 90), (700, 1.2, 75), (500, 1.6, 70))],
            where="hand",
        )
        for kind, work in ((F, 1.0), (B, 2.0))
    }
    pipeline = dependency_graph(one_forward_one_backward(1, 2)), PipelineProfile(classes, BLOCKING_W)
    search = SegmentSearch(*pipeline, latency=lower_s)
    deadline_s = 6.0 * (1 + slowdown)
    costs_j = {}
    for bounds, clocks in _all_segments(4, 3, 2):
        _, (makespan_s, energy_j, time_s) = search.iteration(_node_clocks(bounds, clocks))
        if makespan_s <= deadline_s:
            costs_j[tuple(bounds), tuple(clocks)] = energy_j - BLOCKING_W * time_s + waiting_power_w * makespan_s

    found = search.anneal(
        _segments([0, 2, 4], [2, 2]),
        Annealing(
            blocking_power=BLOCKING_W, waiting_power=waiting_power_w, deadline=deadline_s, overtime_price=100.0,
            temperature=60.0, steps=1500, seed=3,
        ),
    )  # fmt: skip

    assert found is not None
    assert costs_j[tuple(found.bounds), tuple(found.clocks)] == pytest.approx(min(costs_j.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("seed", "bounds", "clocks"),
    [
        (1, [0, 0, 6, 6, 0, 1, 4, 6], [7, 5, 7, 7, 5, 7]),
        (2, [0, 1, 6, 6, 0, 1, 2, 6], [4, 4, 7, 7, 7, 6]),
        (3, [0, 4, 4, 6, 0, 2, 2, 6], [5, 2, 3, 7, 0, 6]),
        (4, [0, 2, 3, 6, 0, 0, 4, 6], [3, 5, 4, 4, 6, 7]),
    ],
)
def test_annealing_ends_at_the_pinned_segments(seed: int, bounds: list[int], clocks: list[int]) -> None:
    """With too few steps to find the optimum, the result depends on every move: update it when moves change."""
    pipeline = dependency_graph(one_forward_one_backward(2, 3)), forward_backward_profile([1.0, 1.1])
    search = SegmentSearch(*pipeline, latency=0.1)
    deadline_s = 1.08 * search.plan(search.full_speed()).simulated.iteration_time_s

    found = search.anneal(
        _segments([0, 2, 4, 6] * 2, [7] * 6),
        Annealing(
            blocking_power=pipeline[1].blocking_power_w, waiting_power=160.0, deadline=deadline_s,
            overtime_price=400.0, temperature=20.0, steps=300, seed=seed,
        ),
    )  # fmt: skip

    assert _values(found) == (bounds, clocks)


@pytest.mark.parametrize(("deadline_s", "steps", "is_met"), [(3.9, 50, False), (3.99, 1, False), (4.0, 1, True)])
def test_annealing_reports_whether_any_segments_meet_the_deadline(
    deadline_s: float, steps: int, *, is_met: bool
) -> None:
    search = SegmentSearch(*_many_clocks(4), latency=0.0)

    found = search.anneal(
        _segments([0, 1, 4], [3, 2]),
        Annealing(
            blocking_power=BLOCKING_W, waiting_power=0.0, deadline=deadline_s, overtime_price=1.0, temperature=1.0,
            steps=steps, seed=1,
        ),
    )  # fmt: skip

    assert (found is not None) is is_met


def test_a_rank_uses_the_clocks_that_all_its_classes_share_or_else_all_clocks() -> None:
    def table(*clocks_mhz: int) -> InstructionProfile:
        return InstructionProfile(tuple(ClockOption(mhz, 1000.0 / mhz, 1.0) for mhz in clocks_mhz))

    forward, backward = InstructionClass(0, F), InstructionClass(0, B)
    common = PipelineProfile({forward: table(900, 700, 500), backward: table(900, 500, 300)}, 0.0)
    apart = PipelineProfile({forward: table(900), backward: table(800, 300)}, 0.0)

    assert common_clocks([forward, backward], common) == [500, 900]
    assert common_clocks([forward, backward], apart) == [300, 800, 900]
    assert common_clocks([], apart) == []


def test_the_cheapest_segments_weigh_effective_energy_against_the_price_of_time() -> None:
    """A second more saves 60 J and 10 W of waiting: the lower clock pays at a price of 69 W, and not at 71."""
    options = (ClockOption(900, 1.0, 200.0), ClockOption(500, 2.0, 140.0))
    profile = PipelineProfile({InstructionClass(0, kind): InstructionProfile(options) for kind in (F, B)}, BLOCKING_W)
    graph = dependency_graph(one_forward_one_backward(1, 2))
    search = SegmentSearch(graph, profile, latency=0.0)

    assert _values(search.cheapest_at([69.0, 69.0, 71.0, 71.0], 2)) == ([0, 2, 4], [0, 1])
    assert _values(search.cheapest_at([71.0, 71.0, 69.0, 69.0], 2)) == ([0, 2, 4], [1, 0])


def test_the_cheapest_segments_use_each_instructions_own_times_and_energies() -> None:
    """Forwards are cheapest at 700 MHz and backwards at 500, at the price of time that both are asked with."""
    forward = (ClockOption(900, 1.0, 200.0), ClockOption(700, 1.5, 120.0), ClockOption(500, 3.0, 110.0))
    backward = (ClockOption(900, 1.0, 200.0), ClockOption(700, 2.0, 190.0), ClockOption(500, 2.5, 60.0))
    profile = PipelineProfile(
        {InstructionClass(0, F): InstructionProfile(forward), InstructionClass(0, B): InstructionProfile(backward)},
        BLOCKING_W,
    )
    graph = dependency_graph(gpipe(1, 2))

    def cheapest(max_segments: int, prices_w: Sequence[float]) -> tuple[list[int], list[int]] | None:
        return _values(SegmentSearch(graph, profile, latency=0.0).cheapest_at(prices_w, max_segments))

    assert cheapest(2, [40.0] * 4) == ([0, 2, 4], [1, 0])
    assert cheapest(3, [40.0] * 4) == ([0, 2, 4, 4], [1, 0, 0])
    assert cheapest(1, [150.0, 150.0, 200.0, 200.0]) == ([0, 4], [2])


def test_full_speed_is_one_segment_at_the_highest_clock_of_every_rank() -> None:
    options = (ClockOption(900, 1.0, 200.0), ClockOption(500, 2.0, 140.0))
    profile = PipelineProfile(
        {InstructionClass(r, kind): InstructionProfile(options[r:]) for r in (0, 1) for kind in (F, B)}, BLOCKING_W
    )
    graph = dependency_graph(one_forward_one_backward(2, 2))

    search = SegmentSearch(graph, profile, latency=0.1)
    plan = search.plan(search.full_speed())

    by_rank = {i.pp_rank: mhz for i, mhz in zip(graph.instructions, plan.sm_clocks_mhz, strict=True)}
    assert by_rank == {0: 900, 1: 500}
    assert [len(rank_changes) for rank_changes in plan.changes] == [1, 1]


def test_segments_become_a_clock_for_each_instruction() -> None:
    search = SegmentSearch(*_many_clocks(6), latency=0.0)

    plan = search.plan(_segments([0, 2, 3, 6], [5, 1, 5]))

    assert plan.sm_clocks_mhz == (600, 600, 200, 600, 600, 600)
    assert [span.end_s for span in plan.planned.spans] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
