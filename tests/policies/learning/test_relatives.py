"""Relatives of a job: like ones teach it, unlike and lying ones lose their weight, and doubt bounds what they cost."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.learned_curves import MAX_STAGE_DEVIATIONS, CurvePoint, StagesAtClock, problem_of_curves
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.learning.checks import AGREEING_FACTOR
from gpuenergyd_policies.learning.doubt import (
    DOUBTED,
    MEASURED_HERE,
    limit_of,
    towards,
    within_doubt,
)
from gpuenergyd_policies.learning.job_curves import FittedCurves, fit_curves
from gpuenergyd_policies.learning.relatives import (
    LEAST_DISTANCE,
    MAX_RELATIVES,
    Relative,
    relatives_of,
)
from gpuenergyd_policies.learning.risk import late_ratios
from gpuenergyd_policies.learning.seen import TimeSeen
from gpuenergyd_policies.learning.shape import GENERIC
from gpuenergyd_policies.learning.shown import prior_view
from gpuenergyd_policies.learning.summary import summary_of
from gpuenergyd_policies.planning.plan_evaluation import baseline
from tests.policies.learning.test_job_curves import (
    CLOCKS,
    FULL_SPEED_S,
    KEYS,
    WAITING,
    classes,
    energies,
    time_s,
)
from tests.support.examples import examples
from tests.support.past_jobs import LIES, TRIED_MHZ, changed, half_the_slope, no_slower, past_job

F = InstructionKind.F
GRAPH = dependency_graph(one_forward_one_backward(3, 6))
GPUS = [GpuView(f"GPU-{r}", "A100", CLOCKS, 0.0) for r in range(3)]
EXPONENT = 1.5


def relatives(*jobs: PastJob, power_w: float = 300.0) -> tuple[Relative, ...]:
    return relatives_of(jobs, classes(), "A100", power_w, [gpu.gpu_uuid for gpu in GPUS])


def fitted(share: float, *jobs: PastJob, clocks: tuple[int, ...] = (), exponent: float = EXPONENT) -> FittedCurves:
    times = [TimeSeen(key, ((clock, time_s(key, clock, share)),), 0.004) for key in KEYS for clock in clocks]
    seen = energies(dict.fromkeys(KEYS, 1410), share, exponent)
    for clock in clocks:
        seen += energies(dict.fromkeys(KEYS, clock), share, exponent)
    return fit_curves(classes(), GENERIC, times, seen, WAITING, relatives=relatives(*jobs))


def error_at(found: FittedCurves, share: float, clock: int) -> float:
    key = InstructionClass(1, F)
    return abs(found.profile()[key].at_clock(clock).time_s / time_s(key, clock, share) - 1)


@given(share=st.floats(0.4, 1.0))
@settings(max_examples=examples(15), deadline=None)
def test_a_job_under_another_name_starts_from_what_it_showed_before(share: float) -> None:
    known, alone = fitted(share, past_job(share=share)), fitted(share)

    for clock in (1275, 1095, 915):
        assert error_at(known, share, clock) < 0.012
    k = known.index_of()[InstructionClass(1, F), 1005]
    assert known.time.sigma[k] < 0.4 * alone.time.sigma[k]


def names_of(found: Sequence[Relative], *jobs: PastJob) -> list[str]:
    """Return the names of the jobs that relatives are, in their order."""
    return [next(job.job_name for job in jobs if job.learned is own.learned) for own in found]


def test_jobs_count_the_more_the_more_alike_they_are() -> None:
    same, other_stages, other_power, other_mix = (
        past_job("same"),
        past_job("stages", num_stages=12),
        past_job("power", power_w=280.0),
        past_job("mix", times_s=(0.05, 0.105)),
    )

    jobs = other_power, other_mix, same, other_stages
    near = relatives(*jobs)
    found = dict(zip(names_of(near, *jobs), [own.distance for own in near], strict=True))

    assert found["same"] == pytest.approx(LEAST_DISTANCE)
    assert found["same"] < found["stages"] < found["power"]
    assert found["same"] < found["mix"]


def test_jobs_on_another_gpu_model_or_too_different_ones_are_none() -> None:
    assert relatives(past_job(gpu_model_name="V100")) == ()
    assert relatives(past_job(power_w=60.0)) == ()
    assert relatives_of([past_job()], classes()[:0] or classes(), "H100", 300.0) == ()
    many = relatives(*(past_job(f"job-{k}") for k in range(3 * MAX_RELATIVES)))
    assert len(many) == MAX_RELATIVES


def test_many_runs_of_one_job_count_little_more_than_one() -> None:
    one, many = fitted(0.8, past_job()), fitted(0.8, *(past_job(f"job-{k}") for k in range(MAX_RELATIVES)))

    k = one.index_of()[InstructionClass(1, F), 1005]
    assert 0.35 * one.time.sigma[k] < many.time.sigma[k] <= one.time.sigma[k]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_loses_its_weight_when_the_first_plan_contradicts_it(lie: str) -> None:
    liar = changed(past_job(), LIES[lie])
    share = 0.9 if lie == "another GPU model" else 0.8

    found, alone = fitted(share, liar, clocks=(1275, 1050)), fitted(share, clocks=(1275, 1050))

    assert max(found.doubts[0]) >= 10.0
    for clock in (1140, 915):
        assert error_at(found, share, clock) < error_at(alone, share, clock) + 0.01
    key = found.index_of()[InstructionClass(1, F), 1050]
    assert abs(found.power.mean[key] - alone.power.mean[key]) < 0.02


def test_an_honest_relative_keeps_its_weight_beside_a_liar() -> None:
    jobs = past_job("honest"), changed(past_job(), no_slower, name="liar")

    found = fitted(0.8, *jobs, clocks=(1275, 1050))

    by_name = dict(zip(names_of(relatives(*jobs), *jobs), found.doubts, strict=True))
    assert by_name["honest"][0] <= AGREEING_FACTOR
    assert by_name["liar"][0] >= 10.0
    assert error_at(found, 0.8, 915) < 0.01


def test_relatives_that_contradict_one_another_lose_their_weight_together_before_any_plan() -> None:
    found = fitted(0.8, past_job("one", share=0.8), past_job("other", share=0.65))

    assert min(time for time, _ in found.doubts) > AGREEING_FACTOR


@pytest.mark.parametrize("num", [1, MAX_RELATIVES])
def test_a_lie_that_the_prior_rules_out_has_no_weight_however_often_it_is_repeated(num: int) -> None:
    jobs = past_job("honest"), *(changed(past_job(f"liar-{k}"), no_slower, name=f"liar-{k}") for k in range(num))

    found = fitted(0.8, *jobs)

    by_name = dict(zip(names_of(relatives(*jobs), *jobs), found.doubts, strict=True))
    assert max(by_name.pop("honest")) <= AGREEING_FACTOR
    assert min(max(own) for own in by_name.values()) > AGREEING_FACTOR
    assert error_at(found, 0.8, 1005) < 0.02


def test_single_clocks_off_the_curve_do_not_make_an_honest_job_doubtful() -> None:
    def off(point: CurvePoint, ratio: float) -> CurvePoint:
        return replace(point, time_ratio=point.time_ratio * (0.97 if 0.7 < ratio < 0.75 else 1.0))

    for clocks in ((), (1275, 1050)):
        found = fitted(0.8, changed(past_job(), off), clocks=clocks)

        assert max(found.doubts[0]) <= AGREEING_FACTOR


def test_unlike_jobs_do_not_make_a_like_one_doubtful() -> None:
    others = [past_job(f"other-{k}", share=0.65, power_w=280.0) for k in range(3)]

    found = fitted(0.8, past_job("same", share=0.8), *others)

    assert max(found.doubts[0]) <= AGREEING_FACTOR
    assert error_at(found, 0.8, 1005) < 0.012


def test_the_limit_of_doubt_ends_with_confirmation() -> None:
    liar = changed(past_job(), no_slower)

    assert limit_of(fitted(0.8, past_job())) == DOUBTED
    assert limit_of(fitted(0.8, past_job(), clocks=(1275, 1050))) is None
    assert limit_of(fitted(0.8, liar, clocks=(1275, 1050))) == DOUBTED


def test_the_limit_of_doubt_is_wider_for_what_was_measured_on_these_gpus_and_agrees() -> None:
    here, elsewhere = on_gpus(past_job(), "GPU-2"), on_gpus(past_job(), "GPU-7")
    unlike = on_gpus(past_job(power_w=303.0, times_s=(0.06, 0.1)), "GPU-2")

    assert limit_of(fitted(0.8, here)) == MEASURED_HERE
    assert limit_of(fitted(0.8, elsewhere)) == DOUBTED
    assert limit_of(fitted(0.8, replace(here, is_imported=True))) == DOUBTED
    assert limit_of(fitted(0.8, on_gpus(changed(past_job(), no_slower), "GPU-2"))) == DOUBTED
    assert limit_of(fitted(0.8, unlike)) == DOUBTED


def test_jobs_from_elsewhere_are_not_used_beside_one_that_was_measured_here() -> None:
    liars = [replace(changed(past_job(f"liar-{k}"), no_slower), is_imported=True) for k in range(MAX_RELATIVES)]
    here, unlike = on_gpus(past_job("here"), "GPU-0"), on_gpus(past_job(power_w=303.0, times_s=(0.06, 0.1)), "GPU-0")

    assert [own.learned for own in relatives(*liars, here)] == [here.learned]
    assert len(relatives(*liars, unlike)) == MAX_RELATIVES


def on_gpus(job: PastJob, *gpu_uuids: str) -> PastJob:
    return replace(job, gpu_uuids=gpu_uuids)


def test_two_thirds_that_agree_outvote_a_liar_before_any_plan() -> None:
    honest = [past_job(f"honest-{k}") for k in range(4)]

    found = fitted(0.8, *honest, changed(past_job(), no_slower, name="liar"))

    assert sum(time > AGREEING_FACTOR for time, _ in found.doubts) == 1
    assert error_at(found, 0.8, 1005) < 0.02


@pytest.mark.parametrize("lie", [*LIES, "half the slope"])
@pytest.mark.parametrize("num", [1, MAX_RELATIVES])
def test_a_first_plan_from_lies_is_expected_to_be_late_by_no_more_than_the_budget(lie: str, num: int) -> None:
    claimed = LIES.get(lie, half_the_slope)
    liars = [changed(past_job(f"liar-{k}"), claimed, name=f"liar-{k}") for k in range(num)]
    believed, alone = fitted(0.8, *liars), fitted(0.8)
    deadline_s = baseline(GRAPH, alone.profile()).iteration_time_s

    bounded = within_doubt(
        GRAPH,
        believed.profile(),
        alone,
        limit=limit_of(believed),
        deadline_s=deadline_s,
        random=np.random.default_rng(1),
    )

    draws_s = alone.drawn_times_s(48, np.random.default_rng(2))
    assert np.median(late_ratios(GRAPH, bounded, alone, draws_s, deadline_s)) <= DOUBTED.late_ratio


def test_times_move_towards_doubt_and_never_below_what_they_were() -> None:
    believed, alone = fitted(0.8, changed(past_job(), no_slower)), fitted(0.8)

    half = towards(believed.profile(), alone.profile(), 0.5)

    for key, own in half.classes.items():
        for option, a, b in zip(
            own.options, believed.profile()[key].options, alone.profile()[key].options, strict=True
        ):
            assert option.time_s >= a.time_s - 1e-15
            assert option.time_s <= max(a.time_s, b.time_s) + 1e-15


def with_stages(job: PastJob, slope_of: dict[int, float], clocks: tuple[int, ...] = (1110, 900)) -> PastJob:
    """Return a job whose stages differ in slope from their mean."""
    stages = tuple(
        StagesAtClock(clock, tuple((slope * math.log(1410 / clock), 0.002) for slope in slope_of.values()))
        for clock in clocks
    )
    curves = tuple(replace(curve, stages=stages) for curve in job.learned.curves)
    return replace(job, learned=replace(job.learned, curves=curves))


def test_stages_of_a_past_job_show_those_of_a_job_with_as_many() -> None:
    job = with_stages(past_job(), {0: 0.03, 1: 0.0, 2: -0.03})

    known, plain = fitted(0.8, job), fitted(0.8, past_job())

    index = known.index_of()
    entries = [index[InstructionClass(rank, F), 960] for rank in range(3)]
    assert list(np.diff(known.time.mean[entries]) < -0.005) == [True, True]
    assert list(np.abs(np.diff(plain.time.mean[entries])) < 0.001) == [True, True]
    assert known.time.sigma[entries[0]] < plain.time.sigma[entries[0]]


def test_stages_that_differ_by_percents_are_believed_unless_the_job_contradicts_them() -> None:
    job = with_stages(past_job(), {0: 0.1, 1: 0.0, 2: -0.1})

    known = fitted(0.8, job)

    index = known.index_of()
    entries = [index[InstructionClass(rank, F), 960] for rank in range(3)]
    assert list(np.diff(known.time.mean[entries]) < -0.02) == [True, True]


def stage_means(found: FittedCurves, clock: int = 960) -> list[float]:
    index = found.index_of()
    return [float(found.time.mean[index[InstructionClass(rank, F), clock]]) for rank in range(3)]


def recut(num_stages: int, work_ratio: float = 1.0) -> PastJob:
    """Return a past job with so many stages that did a share of the work in all."""
    forward_s, backward_s = (work_ratio * 3 * FULL_SPEED_S[kind] / num_stages for kind in (F, InstructionKind.B))
    return past_job(num_stages=num_stages, times_s=(forward_s, backward_s))


@pytest.mark.parametrize("slopes", [(0.06, -0.0, 0.02, -0.02, -0.01, -0.05), (0.02, -0.02)])
def test_stages_of_a_past_job_show_those_cut_from_the_same_work_in_another_number(slopes: tuple[float, ...]) -> None:
    job = recut(len(slopes))

    known, plain = fitted(0.8, with_stages(job, dict(enumerate(slopes)))), fitted(0.8, job)

    assert list(np.diff(stage_means(known)) < -0.002) == [True, True]
    assert list(np.abs(np.diff(stage_means(plain))) < 0.001) == [True, True]


def test_a_stage_of_twice_the_layers_is_the_mean_of_two_before() -> None:
    halves = with_stages(recut(6), dict(enumerate((0.06, 0.0, 0.02, -0.02, -0.01, -0.05))))
    wholes = with_stages(past_job(), dict(enumerate((0.03, 0.0, -0.03))))

    assert stage_means(fitted(0.8, halves)) == pytest.approx(stage_means(fitted(0.8, wholes)), abs=0.003)


def test_stages_of_a_past_job_of_twice_the_work_show_nothing_of_half_as_many() -> None:
    job = recut(6, work_ratio=2.0)

    known, plain = fitted(0.8, with_stages(job, {k: 0.03 - 0.012 * k for k in range(6)})), fitted(0.8, job)

    assert np.allclose(known.time.mean, plain.time.mean)


@pytest.mark.parametrize("num_stages", [0, MAX_STAGE_DEVIATIONS // 2 + 1])
def test_impossible_numbers_of_stages_are_refused(num_stages: int) -> None:
    job = with_stages(past_job(), dict.fromkeys(range(num_stages), 0.0))

    assert "are valid" in (problem_of_curves(job.learned) or "")


def test_stages_of_a_past_job_that_the_job_contradicts_are_not_used() -> None:
    job = with_stages(past_job(), {0: 0.2, 1: 0.0, 2: -0.2})

    found, plain = fitted(0.8, job, clocks=(1275, 1050)), fitted(0.8, past_job(), clocks=(1275, 1050))

    assert np.allclose(found.time.mean, plain.time.mean)


def test_a_job_leaves_the_clocks_that_it_tried_with_honest_errors() -> None:
    share, clocks = 0.7, (1275, 1050)
    found = fitted(share, clocks=clocks)
    times = [TimeSeen(key, ((clock, time_s(key, clock, share)),), 0.004) for key in KEYS for clock in clocks]

    learned = summary_of(found, times, GPUS)

    assert learned is not None
    assert problem_of_curves(learned) is None
    assert (learned.gpu_model_name, learned.num_stages) == ("A100", 3)
    for curve in learned.curves:
        assert [point.sm_clock_mhz for point in curve.points] == [1410, *clocks]
        assert [own.sm_clock_mhz for own in curve.stages] == list(clocks)
        for own in curve.stages:
            assert abs(sum(deviation for deviation, _ in own.deviations)) < 1e-4
            assert all(abs(deviation) < 3 * sigma + 0.002 for deviation, sigma in own.deviations)
        for point in curve.points[1:]:
            true = time_s(InstructionClass(0, curve.kind), point.sm_clock_mhz, share) / FULL_SPEED_S[curve.kind]
            assert abs(math.log(point.time_ratio / true)) < 3 * point.time_sigma_ratio + 0.002
            assert 0 < point.time_sigma_ratio < 0.02


def test_a_job_that_never_lowered_a_clock_or_has_several_gpu_models_leaves_nothing() -> None:
    times = [TimeSeen(key, ((1050, time_s(key, 1050, 0.8)),), 0.004) for key in KEYS]
    mixed = [*GPUS[:2], GpuView("GPU-2", "V100", CLOCKS, 0.0)]

    assert summary_of(fitted(0.8), [], GPUS) is None
    assert summary_of(fitted(0.8, clocks=(1050,)), times, mixed) is None


def test_the_prior_that_is_shown_has_errors_that_past_jobs_reduce() -> None:
    plain, known = prior_view("A100", []), prior_view("A100", [past_job(clocks_mhz=TRIED_MHZ)])

    assert (plain.num_past_jobs, known.num_past_jobs) == (0, 1)
    for before, after in zip(plain.curves, known.curves, strict=True):
        assert before.kind is after.kind
        assert before.points[0].time_ratio == pytest.approx(1.0)
        for a, b in zip(before.points[1:], after.points[1:], strict=True):
            assert b.time_sigma_ratio < a.time_sigma_ratio
            assert b.power_sigma_ratio < a.power_sigma_ratio
