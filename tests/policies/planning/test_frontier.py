"""The frontier is exact, convex and proven; plans never miss the target; shared instances reach their known optima."""

import json
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionClass, graph_from_edges
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.errors import ProfileError, TargetError
from gpuenergyd_policies.planning import frontier as frontier_module
from gpuenergyd_policies.planning.frontier import (
    Effort,
    SolvedPlan,
    frontier,
    least_energies_j,
    min_iteration_time_s,
    solve,
    solve_with_frontier,
)
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks
from gpuenergyd_policies.planning.problem import make_problem
from tests.policies.planning.pipelines import (
    B,
    Pipeline,
    gpt3,
    least_energy_j,
    plain_pipeline,
    random_pipelines,
    shared_instance,
)
from tests.support.examples import examples
from tests.support.measured_tables import DATA
from tests.support.processes import finished
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[3]
SMALL_INSTANCES = ["s4m8_1f1b_a100", "s4m8_gpipe_a40", "s4m8_zbh1_h200", "s4m32_1f1b_a40noisy", "s8m32_1f1b_a100"]
fractions = st.floats(0.0, 1.1)


def _deadline_s(pipeline: Pipeline, fraction: float) -> float:
    """Return a deadline from T_min (0) to T_slow (1) and beyond."""
    problem = make_problem(*pipeline)
    return problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)


def _idle_w(pipeline: Pipeline) -> float:
    graph, profile = pipeline
    return profile.blocking_power_w * graph.num_ranks


def _check_plan(pipeline: Pipeline, solved: SolvedPlan, deadline_s: float) -> None:
    graph, profile = pipeline
    evaluated = evaluate_clocks(graph, profile, solved.sm_clocks_mhz)
    assert evaluated.iteration_time_s <= deadline_s
    assert solved.iteration_time_s == evaluated.iteration_time_s
    assert solved.energy_j == pytest.approx(evaluated.energy_j, rel=1e-12)
    assert solved.lower_bound_j <= solved.energy_j * (1 + 1e-12)


@settings(max_examples=examples(60), deadline=None)
@given(pipeline=random_pipelines(), fraction=fractions)
def test_bound_is_the_optimum_of_the_relaxation(pipeline: Pipeline, fraction: float) -> None:
    """HiGHS finds the same value from the raw options, non-monotone, single-clock and identical tables included."""
    deadline_s = _deadline_s(pipeline, fraction)
    solved = solve(*pipeline, deadline_s=deadline_s, forced=True, effort=Effort.QUICK)
    optimum_j = least_energy_j(*pipeline, deadline_s)

    bound_j = solved.lower_bound_j + _idle_w(pipeline) * (deadline_s - solved.iteration_time_s)

    assert bound_j <= optimum_j * (1 + 1e-9) + 1e-9
    assert bound_j == pytest.approx(optimum_j, rel=1e-6, abs=1e-6)


@settings(max_examples=examples(60), deadline=None)
@given(pipeline=random_pipelines(), fraction=fractions, forced=st.booleans())
def test_plans_meet_every_target_and_report_their_true_energy(
    pipeline: Pipeline, fraction: float, *, forced: bool
) -> None:
    deadline_s = _deadline_s(pipeline, fraction)

    for effort in Effort:
        solved = solve(*pipeline, deadline_s=deadline_s, forced=forced, effort=effort)

        _check_plan(pipeline, solved, deadline_s)


@settings(max_examples=examples(40), deadline=None)
@given(pipeline=random_pipelines())
def test_frontier_is_convex_monotone_and_non_dominated(pipeline: Pipeline) -> None:
    whole = frontier(*pipeline, num_points=16)
    deadlines_s = [*np.linspace(whole.min_time_s, whole.slowest_time_s, 9).tolist(), whole.min_energy_time_s]

    prices_w, costs_j = [], []
    for deadline_s in deadlines_s:
        solved = solve(*pipeline, deadline_s=deadline_s, forced=True, effort=Effort.QUICK)
        prices_w.append(solved.price_w)
        costs_j.append(solved.lower_bound_j - _idle_w(pipeline) * solved.iteration_time_s)
    assert prices_w[:-1] == sorted(prices_w[:-1], reverse=True)
    rounding_j = 1e-6 * max(map(abs, costs_j))
    for deadline_s, price_w, cost_j in zip(deadlines_s, prices_w, costs_j, strict=True):
        for other_s, other_j in zip(deadlines_s, costs_j, strict=True):
            assert other_j >= cost_j - price_w * (other_s - deadline_s) - rounding_j  # convex, and the price its slope
    assert all(later <= cost + rounding_j for cost, later in pairwise(costs_j[:-1]))
    energies_j = [cost + _idle_w(pipeline) * at_s for at_s, cost in zip(deadlines_s, costs_j, strict=True)]
    assert energies_j[-1] <= min(energies_j) + rounding_j
    fast = [p for p in whole.points if p.iteration_time_s <= whole.min_energy_time_s]
    for p, q in pairwise(fast):
        assert p.iteration_time_s < q.iteration_time_s
        assert p.energy_j > q.energy_j
    for point in whole.points:
        assert point.lower_bound_j is not None
        assert point.lower_bound_j <= point.energy_j * (1 + 1e-12)


@settings(max_examples=examples(30), deadline=None)
@given(pipeline=random_pipelines(), fraction=fractions, clock=st.integers(50, 2000), data=st.data())
def test_another_option_never_raises_the_bound(
    pipeline: Pipeline, fraction: float, clock: int, data: st.DataObject
) -> None:
    graph, profile = pipeline
    deadline_s = _deadline_s(pipeline, fraction)
    key = data.draw(st.sampled_from(sorted(profile.classes)))
    more = ClockOption(clock * 1000, data.draw(st.floats(0.001, 0.5)), data.draw(st.floats(0.1, 50)))
    richer = PipelineProfile(
        {**profile.classes, key: InstructionProfile((more, *profile.classes[key].options))}, profile.blocking_power_w
    )

    def bound_j(tables: PipelineProfile) -> float:
        solved = solve(graph, tables, deadline_s=deadline_s, forced=True, effort=Effort.QUICK)
        return solved.lower_bound_j - _idle_w(pipeline) * solved.iteration_time_s

    assert bound_j(richer) <= bound_j(profile) + 1e-6 * abs(bound_j(profile))


def test_numbering_of_instructions_changes_nothing() -> None:
    graph, profile = plain_pipeline(4, 6, weights=(1.0, 1.2, 0.9, 1.1), latency_s=0.002)
    n = len(graph.instructions)
    moved = [(v * 7 + 3) % n for v in range(n)]
    instructions = [graph.instructions[moved.index(v)] for v in range(n)]
    edges = [(moved[u], moved[v], lat) for v in range(n) for u, lat in graph.predecessors[v]]
    renumbered = graph_from_edges(instructions, edges, num_ranks=graph.num_ranks)
    deadline_s = 1.03 * min_iteration_time_s(graph, profile)

    here, there = (solve(g, profile, deadline_s=deadline_s) for g in (graph, renumbered))

    assert here.lower_bound_j == pytest.approx(there.lower_bound_j, rel=1e-9)
    assert here.min_time_s == there.min_time_s


def test_identical_stages_take_no_more_augmentations_than_different_ones() -> None:
    """Ties are broken by a fixed jitter: without it identical stages cost hundreds of times as many augmentations."""
    same = make_problem(*plain_pipeline(6, 12))
    varied = make_problem(*plain_pipeline(6, 12, weights=(1.0, 1.03, 0.98, 1.05, 0.97, 1.01)))

    paths = [
        problem.sweep(np.array([problem.min_time_s]), stop_early=False).num_augmentations for problem in (same, varied)
    ]

    assert paths[0] <= paths[1]


def test_pipeline_of_single_clocks_runs_at_them() -> None:
    graph, profile = plain_pipeline(3, 4)
    single = PipelineProfile({k: InstructionProfile(p.options[:1]) for k, p in profile.classes.items()}, 85.0)

    solved = solve(graph, single, deadline_s=10.0)

    assert set(solved.sm_clocks_mhz) == {1410}
    assert solved.energy_j == pytest.approx(solved.lower_bound_j, rel=1e-9)
    assert solved.min_time_s == solved.slowest_time_s == solved.iteration_time_s


def test_the_error_for_a_target_below_t_min_names_t_min() -> None:
    graph, profile = plain_pipeline(2, 3)
    t_min_s = min_iteration_time_s(graph, profile)

    with pytest.raises(TargetError, match=rf"T_min = {t_min_s!r} s"):
        solve(graph, profile, deadline_s=t_min_s * 0.99)
    with pytest.raises(TargetError):
        solve(graph, profile, deadline_s=float("nan"))


@settings(max_examples=examples(40), deadline=None)
@given(pipeline=random_pipelines(), fraction=fractions)
def test_the_bound_holds_for_every_plan_that_meets_the_deadline(pipeline: Pipeline, fraction: float) -> None:
    """Also for faster plans: the relaxed optimum at any time up to the deadline is no less."""
    deadline_s = _deadline_s(pipeline, fraction)
    problem = make_problem(*pipeline)

    bound_j = solve(*pipeline, deadline_s=deadline_s, effort=Effort.QUICK).lower_bound_j

    for earlier in (0.0, 0.25, 0.6, 0.9, 1.0):
        time_s = problem.min_time_s + earlier * (deadline_s - problem.min_time_s)
        assert bound_j <= least_energy_j(*pipeline, max(time_s, problem.min_time_s)) * (1 + 1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_bound_is_exact_for_very_short_and_very_long_instructions(scale: float) -> None:
    graph, profile = plain_pipeline(3, 4, weights=(1.0, 1.1, 0.95))
    scaled = PipelineProfile(
        {
            key: InstructionProfile(
                tuple(ClockOption(o.sm_clock_mhz, o.time_s * scale, o.energy_j * scale) for o in table.options)
            )
            for key, table in profile.classes.items()
        },
        profile.blocking_power_w,
    )
    deadline_s = 1.05 * min_iteration_time_s(graph, scaled)

    solved = solve(graph, scaled, deadline_s=deadline_s)

    assert solved.iteration_time_s <= deadline_s
    assert solved.lower_bound_j == pytest.approx(
        scale * solve(graph, profile, deadline_s=deadline_s / scale).lower_bound_j, rel=1e-6
    )


def test_a_class_missing_from_the_profile_is_named_in_the_error() -> None:
    graph, profile = plain_pipeline(2, 3)
    partial = PipelineProfile({k: v for k, v in profile.classes.items() if k != InstructionClass(1, B)}, 85.0)

    with pytest.raises(ProfileError, match="no profile for B of stage 1"):
        solve(graph, partial, deadline_s=10.0)


def test_deadlines_are_used_up_to_t_star_and_forced_waits_up_to_t_slow() -> None:
    pipeline = plain_pipeline(4, 8)
    permitted = solve(*pipeline, deadline_s=100.0)
    forced = solve(*pipeline, deadline_s=100.0, forced=True)

    assert permitted.deadline_s == permitted.min_energy_time_s
    at_t_star = solve(*pipeline, deadline_s=permitted.deadline_s)
    assert permitted.lower_bound_j == pytest.approx(at_t_star.lower_bound_j, rel=1e-9)
    assert permitted.iteration_time_s < forced.iteration_time_s
    assert permitted.energy_j < forced.energy_j
    assert forced.iteration_time_s == forced.slowest_time_s
    waiting_w = _idle_w(pipeline)
    assert forced.energy_j - waiting_w * forced.iteration_time_s < permitted.energy_j - (
        waiting_w * permitted.iteration_time_s
    )


@pytest.mark.parametrize("forced", [False, True])
def test_one_sweep_gives_the_same_plan_as_solving_alone(*, forced: bool) -> None:
    graph, profile = plain_pipeline(4, 8, weights=(1.0, 1.1, 0.9, 1.0))
    deadline_s = 1.02 * min_iteration_time_s(graph, profile)

    alone = solve(graph, profile, deadline_s=deadline_s, forced=forced)
    together, whole = solve_with_frontier(graph, profile, deadline_s=deadline_s, forced=forced, num_points=8)

    assert together == alone
    assert whole.points[-1].iteration_time_s <= whole.min_energy_time_s
    assert whole == frontier(graph, profile, num_points=8, until_slowest=False)


@pytest.mark.parametrize("is_large", [False, True])
@settings(max_examples=examples(40), deadline=None)
@given(pipeline=random_pipelines(), fraction=fractions)
def test_one_sweep_gives_the_bounds_of_solving_for_each_deadline(
    pipeline: Pipeline, fraction: float, *, is_large: bool
) -> None:
    deadlines_s = [_deadline_s(pipeline, own) for own in (0.0, fraction, 1.1)]
    with pytest.MonkeyPatch.context() as patch:
        if is_large:
            patch.setattr(frontier_module, "TOO_LARGE", 0)
        alone = [solve(*pipeline, deadline_s=own_s, effort=Effort.QUICK).lower_bound_j for own_s in deadlines_s]

        assert least_energies_j(*pipeline, [0.0, *deadlines_s]) == (alone[0], *alone)


def test_thinned_hulls_still_give_a_valid_bound_with_a_small_loss() -> None:
    graph, profile = plain_pipeline(3, 6, weights=(1.0, 1.05, 0.95))
    dense = PipelineProfile(
        {
            key: InstructionProfile(
                tuple(
                    ClockOption(mhz, 0.3 + 700 / mhz, 40 + mhz**2 / 20000)
                    for mhz in range(1400 + 10 * key.pp_rank, 700, -15)
                )
            )
            for key in profile.classes
        },
        85.0,
    )
    deadline_s = 1.05 * min_iteration_time_s(graph, dense)

    exact, thin = (solve(graph, dense, deadline_s=deadline_s, thin_tolerance=tol) for tol in (0.0, 1e-3))

    assert thin.lower_bound_j <= exact.lower_bound_j * (1 + 1e-9)
    assert thin.lower_bound_j == pytest.approx(exact.lower_bound_j, rel=1e-3)
    assert thin.energy_j == pytest.approx(exact.energy_j, rel=2e-3)


@pytest.mark.thorough
def test_plans_are_the_same_without_numba() -> None:
    """The kernels are one source: compiled or plain, every clock and bound agrees."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.policies.planning.pipelines import plain_pipeline\n"
        "from gpuenergyd_policies.planning import compiled\n"
        "from gpuenergyd_policies.planning.frontier import frontier, solve\n"
        "pipeline = plain_pipeline(3, 6, weights=(1.0, 1.1, 0.95), latency_s=0.001)\n"
        "solved = solve(*pipeline, deadline_s=1.3)\n"
        "whole = frontier(*pipeline, num_points=6)\n"
        "print(compiled.IS_COMPILED, solved.sm_clocks_mhz, solved.energy_j, solved.lower_bound_j, whole.points)\n"
    )

    def output(disable_jit: str) -> str:
        return finished(
            [sys.executable, "-c", script, str(ROOT)],
            env={**os.environ, "NUMBA_DISABLE_JIT": disable_jit},
            cwd=ROOT,
            check=True,
        ).stdout

    compiled, plain = output("0").split(maxsplit=1), output("1").split(maxsplit=1)

    assert plain[0] == "False"
    assert plain[1] == compiled[1]


@pytest.mark.parametrize("name", [*SMALL_INSTANCES[:-1], *thorough(SMALL_INSTANCES[-1])])
def test_shared_instances_reach_their_known_optimum_at_every_deadline(name: str) -> None:
    graph, profile = shared_instance(name)
    known: dict[str, Any] = json.loads((DATA / "instances" / "bounds.json").read_text())[name]
    limit = 0.6e-2 if "noisy" in name else 0.3e-2
    gaps = []

    for point in known["points"]:
        is_forced = point["T_s"] > known["T_min_energy_s"]
        deadline_s = max(point["T_s"], min_iteration_time_s(graph, profile))
        solved = solve(graph, profile, deadline_s=deadline_s, forced=is_forced)
        _check_plan((graph, profile), solved, deadline_s)
        bound_j = solved.lower_bound_j
        if is_forced:
            bound_j += _idle_w((graph, profile)) * (deadline_s - solved.iteration_time_s)
        assert bound_j == pytest.approx(point["E_fractional_J"], rel=1e-6)
        gaps.append(solved.energy_j / solved.lower_bound_j - 1)

    assert max(gaps) <= limit
    assert np.mean(gaps) <= 0.15e-2 or "noisy" in name
    assert solved.min_time_s == pytest.approx(known["T_min_s"], rel=1e-9)
    assert solved.min_energy_time_s == pytest.approx(known["T_min_energy_s"], rel=1e-6)


@pytest.mark.parametrize(("gpu", "at_least", "bound"), [("a100-sxm", 0.143, 0.1452), ("a40", 0.103, 0.1092)])
def test_gpt3_reaches_the_known_saving_at_full_speed(gpu: str, at_least: float, bound: float) -> None:
    graph, profile = gpt3(gpu, 32)
    full_speed = baseline(graph, profile)

    solved = solve(graph, profile, deadline_s=full_speed.iteration_time_s)

    _check_plan((graph, profile), solved, full_speed.iteration_time_s)
    assert 1 - solved.energy_j / full_speed.energy_j >= at_least
    assert 1 - solved.lower_bound_j / full_speed.energy_j == pytest.approx(bound, abs=1e-4)


@pytest.mark.thorough
def test_gpt3_optimum_and_best_known_plans_are_reached_at_every_slowdown() -> None:
    for gpu in ("a100-sxm", "a40"):
        graph, profile = gpt3(gpu, 32)
        known = json.loads((DATA / "profiles" / "bounds.json").read_text())[f"gpt3-175b_{gpu}_s8_1f1b_m32"]
        for point in known["points"]:
            solved = solve(graph, profile, deadline_s=point["target_s"])
            assert solved.lower_bound_j == pytest.approx(point["optimum_j"], rel=1e-6)
            assert solved.energy_j <= point["best_known_j"] * 1.001


def test_fractional_durations_and_prices_satisfy_complementary_slackness() -> None:
    """An instruction is at its fastest only if time is dear there, at its slowest only if time is free."""
    graph, profile = plain_pipeline(4, 8, weights=(1.0, 1.1, 0.9, 1.0))
    solved = solve(graph, profile, deadline_s=1.04 * min_iteration_time_s(graph, profile))

    durations_s = np.array(solved.fractional_durations_s)
    finish_s = timeline(graph, durations_s.tolist()).iteration_time_s
    assert finish_s == pytest.approx(solved.deadline_s, rel=1e-6)
    for v, instruction in enumerate(graph.instructions):
        options = profile[instruction.instruction_class].lower_hull(profile.blocking_power_w)
        if solved.prices_w[v] == 0.0:
            assert durations_s[v] == pytest.approx(options[-1].time_s, abs=2e-9)
    starts = [v for v in range(len(graph.instructions)) if not graph.predecessors[v]]
    assert sum(solved.prices_w[v] for v in starts) == pytest.approx(solved.price_w, rel=1e-9)
    assert replace(solved).price_w > _idle_w((graph, profile))
