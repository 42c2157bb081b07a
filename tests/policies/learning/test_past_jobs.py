"""Past jobs: the same work teaches a job, other work and wrong curves do not, and what wrong ones cost is bounded."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.learned_curves import CurvePoint, StagesAtClock, problem_of_curves
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.learning.job_curves import FittedCurves, fit_curves
from gpuenergyd_policies.learning.past_jobs import PastCurves, of_same_model, prior_view
from gpuenergyd_policies.learning.risk import caution_within_risk, late_ratios
from gpuenergyd_policies.learning.seen import TimeSeen
from gpuenergyd_policies.learning.shape import GENERIC
from gpuenergyd_policies.learning.summary import summary_of
from gpuenergyd_policies.planning.plan_evaluation import baseline
from tests.policies.learning.test_job_curves import CLOCKS, FULL_SPEED_S, KEYS, WAITING, classes, energies, time_s
from tests.support.examples import examples
from tests.support.past_jobs import LIES, TRIED_MHZ, changed, half_the_slope, no_slower, past_job

F = InstructionKind.F
GRAPH = dependency_graph(one_forward_one_backward(3, 6))
GPUS = [GpuView(f"GPU-{r}", "A100", CLOCKS, 0.0) for r in range(3)]
EXPONENT = 1.5


def here(job: PastJob, gpu_uuid: str = "GPU-2") -> PastJob:
    """Return a past job as measured on a GPU, by default one of the job's."""
    return replace(job, gpu_uuids=(gpu_uuid,))


def used(*jobs: PastJob) -> list[PastCurves]:
    return of_same_model(jobs, classes(), "A100", 300.0, [gpu.gpu_uuid for gpu in GPUS])


def fitted(share: float, *jobs: PastJob, clocks: tuple[int, ...] = ()) -> FittedCurves:
    times = [TimeSeen(key, ((clock, time_s(key, clock, share)),), 0.004) for key in KEYS for clock in clocks]
    seen = energies(dict.fromkeys(KEYS, 1410), share, EXPONENT)
    for clock in clocks:
        seen += energies(dict.fromkeys(KEYS, clock), share, EXPONENT)
    alone, found = (fit_curves(classes(), GENERIC, times, seen, WAITING, past=past) for past in ((), used(*jobs)))
    return found.within_reach_of(alone)


def error_at(found: FittedCurves, share: float, clock: int) -> float:
    key = InstructionClass(1, F)
    return abs(found.profile()[key].at_clock(clock).time_s / time_s(key, clock, share) - 1)


@given(share=st.floats(0.7, 1.0))
@settings(max_examples=examples(15), deadline=None)
def test_a_job_under_another_name_starts_from_what_it_showed_before(share: float) -> None:
    known, alone = fitted(share, here(past_job(share=share))), fitted(share)

    for clock in (1275, 1095, 915):
        assert error_at(known, share, clock) < 0.012
    k = known.index_of()[InstructionClass(1, F), 1005]
    assert known.time.sigma[k] < 0.4 * alone.time.sigma[k]


@given(share=st.floats(0.4, 0.7))
@settings(max_examples=examples(15), deadline=None)
def test_a_job_far_faster_than_others_at_low_clocks_starts_with_times_that_are_too_long(share: float) -> None:
    known, alone = fitted(share, here(past_job(share=share))), fitted(share)

    for clock in (1275, 1095, 915):
        key = InstructionClass(1, F)
        assert known.profile()[key].at_clock(clock).time_s > (1 - 0.012) * time_s(key, clock, share)
        assert error_at(known, share, clock) <= error_at(alone, share, clock) + 1e-9


def test_the_same_work_measured_elsewhere_makes_times_only_a_little_surer() -> None:
    known, alone = fitted(0.8, past_job()), fitted(0.8)

    k = known.index_of()[InstructionClass(1, F), 1005]
    assert 0.6 * alone.time.sigma[k] < known.time.sigma[k] < 0.9 * alone.time.sigma[k]


@pytest.mark.parametrize(
    "other",
    [
        past_job(gpu_model_name="V100"),
        past_job(power_w=280.0),
        past_job(times_s=(0.05, 0.105)),
        past_job(num_stages=6, times_s=(0.04, 0.085)),
        replace(past_job(), learned=replace(past_job().learned, max_sm_clock_mhz=1380)),
    ],
)
def test_other_work_is_not_used(other: PastJob) -> None:
    assert used(here(other)) == []


@pytest.mark.parametrize(
    ("num_stages", "forward_s", "faster_sigmas"), [(3, 0.05, 2.0), (6, 0.025, 2.0), (3, 0.06, 0.5), (6, 0.05, 0.5)]
)
def test_other_layers_take_other_times_by_one_factor_and_may_shorten_times_by_less(
    num_stages: int, forward_s: float, faster_sigmas: float
) -> None:
    (found,) = used(here(past_job(num_stages=num_stages, times_s=(forward_s, 2 * forward_s))))

    assert found.max_faster_sigmas == faster_sigmas


@pytest.mark.parametrize(("before_mhz", "num_used"), [(1410.0, 1), (1305.0, 1), (1215.0, 0)])
def test_other_layers_run_at_the_same_clocks_where_power_limits_both(before_mhz: float, num_used: int) -> None:
    other = past_job(times_s=(0.06, 0.12))
    curves = tuple(replace(curve, full_speed_mhz=before_mhz) for curve in other.learned.curves)
    other = here(replace(other, learned=replace(other.learned, curves=curves)))

    assert len(of_same_model([other], classes(1290.0), "A100", 300.0, ["GPU-2"])) == num_used


def test_what_was_measured_on_the_jobs_gpus_comes_first_then_the_same_work_then_the_newest_or_most_alike() -> None:
    newest, imported = past_job("newest"), replace(here(past_job("imported", share=0.7)), is_imported=True)
    own, older = here(past_job("own", share=0.81), "GPU-0"), here(past_job("older"), "GPU-1")
    unlike, alike = (here(past_job(times_s=(0.06, backward_s))) for backward_s in (0.122, 0.121))

    found = used(newest, imported, unlike, alike, own, older)

    assert [job.learned for job in found] == [job.learned for job in (own, older, alike, unlike, newest, imported)]
    assert [job.is_measured_here for job in found] == [True] * 4 + [False] * 2


def test_the_job_itself_before_it_changed_comes_first() -> None:
    before = past_job(share=0.7).learned

    found = of_same_model([here(past_job())], classes(), "A100", 300.0, ["GPU-2"], curves_before=before)

    assert [own.learned for own in found] == [before, past_job().learned]
    assert found[0].is_measured_here


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("gpu_uuid", ["GPU-2", "GPU-7"])
def test_a_lie_loses_its_weight_when_the_first_plan_contradicts_it(lie: str, gpu_uuid: str) -> None:
    liar = here(changed(past_job(), LIES[lie]), gpu_uuid)
    share = 0.9 if lie == "another GPU model" else 0.8

    found, alone = fitted(share, liar, clocks=(1275, 1050)), fitted(share, clocks=(1275, 1050))

    assert found.past is None
    for clock in (1140, 915):
        assert error_at(found, share, clock) < error_at(alone, share, clock) + 0.01
    key = found.index_of()[InstructionClass(1, F), 1050]
    assert abs(found.power.mean[key] - alone.power.mean[key]) < 0.02


@pytest.mark.parametrize("clocks", [(), (1275, 1050)])
@pytest.mark.parametrize("num", [1, 6])
def test_an_honest_job_is_used_beside_lies_that_the_prior_rules_out(clocks: tuple[int, ...], num: int) -> None:
    liars = (here(changed(past_job(f"liar-{k}"), no_slower)) for k in range(num))
    honest = here(past_job("honest"))

    found = fitted(0.8, *liars, honest, clocks=clocks)

    assert found.past is not None
    assert found.past.learned is honest.learned
    assert error_at(found, 0.8, 915) < 0.012


def test_single_clocks_off_the_curve_do_not_make_an_honest_job_doubtful() -> None:
    def off(point: CurvePoint, ratio: float) -> CurvePoint:
        return replace(point, time_ratio=point.time_ratio * (0.97 if 0.7 < ratio < 0.75 else 1.0))

    for clocks in ((), (1275, 1050)):
        assert fitted(0.8, here(changed(past_job(), off)), clocks=clocks).past is not None


@pytest.mark.parametrize("lie", [*LIES, "half the slope"])
@pytest.mark.parametrize(("gpu_uuid", "late_ratio"), [("GPU-7", 0.01), ("GPU-2", 0.04)])
@pytest.mark.parametrize("num", [1, 6])
def test_a_first_plan_from_lies_is_expected_to_be_late_by_no_more_than_the_budget(
    lie: str, gpu_uuid: str, late_ratio: float, num: int
) -> None:
    claimed = LIES.get(lie, half_the_slope)
    liars = [here(changed(past_job(f"liar-{k}"), claimed), gpu_uuid) for k in range(num)]
    believed, alone = fitted(0.8, *liars), fitted(0.8)
    deadline_s = baseline(GRAPH, alone.profile()).iteration_time_s

    caution = caution_within_risk(GRAPH, believed, deadline_s=deadline_s, random=np.random.default_rng(1))

    draws_s = alone.drawn_times_s(48, np.random.default_rng(2))
    profile = believed.profile(caution_sigmas=caution.sigmas)
    assert np.median(late_ratios(GRAPH, profile, alone, draws_s, deadline_s)) <= late_ratio


def with_stages(job: PastJob, slope_of: dict[int, float], clocks: tuple[int, ...] = (1110, 900)) -> PastJob:
    """Return a job whose stages differ in slope from their mean."""
    stages = tuple(
        StagesAtClock(clock, tuple((slope * math.log(1410 / clock), 0.002) for slope in slope_of.values()))
        for clock in clocks
    )
    curves = tuple(replace(curve, stages=stages) for curve in job.learned.curves)
    return replace(job, learned=replace(job.learned, curves=curves))


@pytest.mark.parametrize("slope", [0.03, 0.1])
def test_stages_of_a_past_job_show_those_of_a_job_with_as_many(slope: float) -> None:
    job = with_stages(here(past_job()), {0: slope, 1: 0.0, 2: -slope})

    known, plain = fitted(0.8, job), fitted(0.8, here(past_job()))

    assert list(np.diff(stage_means(known)) < -slope / 5) == [True, True]
    assert list(np.abs(np.diff(stage_means(plain))) < 0.001) == [True, True]
    k = known.index_of()[InstructionClass(0, F), 960]
    assert known.time.sigma[k] < plain.time.sigma[k]


def stage_means(found: FittedCurves, clock: int = 960) -> list[float]:
    index = found.index_of()
    return [float(found.time.mean[index[InstructionClass(rank, F), clock]]) for rank in range(3)]


def recut(num_stages: int, work_ratio: float = 1.0) -> PastJob:
    """Return a past job with so many stages that did a share of the work in all."""
    forward_s, backward_s = (work_ratio * 3 * FULL_SPEED_S[kind] / num_stages for kind in (F, InstructionKind.B))
    return here(past_job(num_stages=num_stages, times_s=(forward_s, backward_s)))


@pytest.mark.parametrize("slopes", [(0.06, -0.0, 0.02, -0.02, -0.01, -0.05), (0.02, -0.02)])
def test_stages_of_a_past_job_show_those_cut_from_the_same_work_in_another_number(slopes: tuple[float, ...]) -> None:
    job = recut(len(slopes))

    known, plain = fitted(0.8, with_stages(job, dict(enumerate(slopes)))), fitted(0.8, job)

    assert list(np.diff(stage_means(known)) < -0.002) == [True, True]
    assert list(np.abs(np.diff(stage_means(plain))) < 0.001) == [True, True]


def test_a_stage_of_twice_the_layers_is_the_mean_of_two_before() -> None:
    halves = with_stages(recut(6), dict(enumerate((0.06, 0.0, 0.02, -0.02, -0.01, -0.05))))
    wholes = with_stages(here(past_job()), dict(enumerate((0.03, 0.0, -0.03))))

    assert stage_means(fitted(0.8, halves)) == pytest.approx(stage_means(fitted(0.8, wholes)), abs=0.003)


def test_a_clock_that_one_stage_alone_ran_at_is_known_better_in_this_stage_than_in_the_mean() -> None:
    job = here(past_job())
    stages = (StagesAtClock(1005, ((0.0, 0.003), (0.0, 0.0048), (0.0, 0.0048))),)
    curves = tuple(replace(curve, stages=stages) for curve in job.learned.curves)

    known = fitted(0.8, replace(job, learned=replace(job.learned, curves=curves)))

    of_first, of_second = (known.time.sigma[known.index_of()[InstructionClass(rank, F), 1005]] for rank in (0, 1))
    assert of_first < 0.65 * of_second


def test_stages_of_other_layers_that_took_as_long_as_a_jobs_are_taken_for_them_in_order() -> None:
    job = with_stages(recut(6, work_ratio=2.0), {0: 0.2, 1: 0.06, 2: 0.0, 3: 0.0, 4: -0.06, 5: -0.2})
    log_times = (0.1, 0.01, -0.2, 0.0, -0.01, 0.1)
    at_top = StagesAtClock(1410, tuple((log, 0.002) for log in log_times))
    curves = tuple(replace(curve, stages=(at_top, *curve.stages)) for curve in job.learned.curves)
    job = replace(job, learned=replace(job.learned, curves=curves))

    (found,) = used(job)

    assert (found.ranks, found.max_faster_sigmas) == ((3, 0, 5, 1, 2, 8), 2.0)
    assert list(np.diff(stage_means(fitted(0.8, job))) < -0.01) == [True, True]


def test_stages_of_other_layers_show_by_how_much_stages_differ_but_not_which() -> None:
    job = recut(6, work_ratio=2.0)

    uneven, even = (fitted(0.8, with_stages(job, {k: s * (k - 2.5) for k in range(6)})) for s in (0.03, 0.0))

    k = even.index_of()[InstructionClass(1, F), 960]
    assert 1.5 * even.time.sigma[k] < uneven.time.sigma[k] < 0.5 * fitted(0.8).time.sigma[k]
    assert np.allclose(np.diff(stage_means(uneven)), 0.0, atol=1e-6)
    assert error_at(uneven, 0.8, 915) < 0.012


def test_stages_of_a_past_job_that_the_job_contradicts_are_not_used() -> None:
    job = with_stages(here(past_job()), {0: 0.2, 1: 0.0, 2: -0.2})

    assert fitted(0.8, job, clocks=(1275, 1050)).past is None


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
        assert [own.sm_clock_mhz for own in curve.stages] == [1410, *clocks]
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
