"""The profiling design and the fit, tested against known times and powers."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import check_plan
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.profiling.design import (
    DesignPoint,
    clock_levels,
    design_points,
    kinds_of_ranks,
    profile_plan,
    wait_levels,
)
from gpuenergyd_policies.profiling.fit import FittedProfile, NotEnoughDataError, fit_profile
from gpuenergyd_policies.profiling.times import fit_times, monotone_times_s
from tests.support.virtual_loop import loop_schedule

F, B = InstructionKind.F, InstructionKind.B
CLOCKS = tuple(range(1410, 209, -15))
GPU = GpuView("GPU-0", "A100 (virtual)", CLOCKS, 0.006)
TIME_PARTS_S = {F: (0.012, 0.038), B: (0.027, 0.066)}
SWITCHED_J = {F: 14.0, B: 26.0}
COUNT = {F: 8, B: 8}


def true_time_s(kind: InstructionKind, clock: int) -> float:
    memory_s, compute_s = TIME_PARTS_S[kind]
    return memory_s + compute_s * CLOCKS[0] / clock


def true_energy_j(kind: InstructionKind, clock: int) -> float:
    return 34.6 * true_time_s(kind, clock) + SWITCHED_J[kind] * (1 + 0.213 * max(0, clock - 1104) / 306) ** 2


def waiting_power_w(clock: int) -> float:
    return 34.6 + 0.0236 * clock * (1 + 0.213 * max(0, clock - 1104) / 306) ** 2


def observation(clocks: dict[InstructionKind, int], *, waiting_s: float = 0.4, index: int = 0) -> IterationObservation:
    samples = tuple(
        InstructionSample(0, kind, (ClockShare(clock, true_time_s(kind, clock)),), COUNT[kind])
        for kind, clock in clocks.items()
    )
    time_at = (
        TimeAtClock(None, clocks[F], waiting_s),
        *(TimeAtClock(kind, clock, COUNT[kind] * true_time_s(kind, clock)) for kind, clock in clocks.items()),
    )
    energy_j = waiting_power_w(clocks[F]) * waiting_s + sum(
        COUNT[kind] * true_energy_j(kind, clock) for kind, clock in clocks.items()
    )
    window_s = sum(share.time_s for share in time_at)
    return IterationObservation(index, f"p{index}", window_s, samples, (RankEnergy(0, window_s, energy_j, time_at),))


def fit_of_design() -> FittedProfile:
    levels = clock_levels(CLOCKS)
    observations = [observation({F: levels[0], B: levels[0]}, waiting_s=0.2 + 0.1 * k) for k in range(3)]
    for number, point in enumerate(design_points([(F, B)], len(levels))[: 2 * len(levels)]):
        clocks = {kind: levels[level] for kind, level in point.levels[0].items()}
        observations.append(observation(clocks, waiting_s=0.3 + 0.05 * (number % 4), index=number + 1))
    return fit_profile(observations, [GPU])


def of_many_ranks(observed: IterationObservation, weights: list[float]) -> IterationObservation:
    """Return an iteration of as many ranks, whose instructions draw more or less power by these weights."""
    (only,) = observed.ranks
    static_w = 34.6
    return replace(
        observed,
        instruction_samples=tuple(
            replace(s, pp_rank=rank) for rank in range(len(weights)) for s in observed.instruction_samples
        ),
        ranks=tuple(
            replace(
                only, pp_rank=rank, energy_j=static_w * only.window_s + weight * (only.energy_j or 0.0)
                - weight * static_w * only.window_s,
            )
            for rank, weight in enumerate(weights)
        ),
    )  # fmt: skip


def test_the_power_of_many_ranks_is_fitted_to_each_of_them() -> None:
    weights = [0.7 + 0.6 * rank / 23 for rank in range(24)]
    levels = clock_levels(CLOCKS)
    seen = [observation({F: levels[0], B: levels[0]}, waiting_s=0.2 + 0.1 * k) for k in range(3)]
    for number, point in enumerate(design_points([(F, B)], len(levels))[: 2 * len(levels)]):
        clocks = {kind: levels[level] for kind, level in point.levels[0].items()}
        seen.append(observation(clocks, waiting_s=0.3 + 0.05 * (number % 4), index=number + 1))

    profile = fit_profile([of_many_ranks(own, weights) for own in seen], [GPU] * len(weights)).profile

    for rank, weight in enumerate(weights):
        for kind in (F, B):
            for option in profile[InstructionClass(rank, kind)].options[::8]:
                time_s = true_time_s(kind, option.sm_clock_mhz)
                dynamic_j = true_energy_j(kind, option.sm_clock_mhz) - 34.6 * time_s
                assert option.energy_j == pytest.approx(34.6 * time_s + weight * dynamic_j, rel=0.02)


def test_standard_errors_of_times_are_those_of_the_noise_whatever_the_number_of_instructions() -> None:
    random = np.random.default_rng(3)
    true_s = {clock: true_time_s(F, clock) for clock in CLOCKS[::12]}
    noise_ratio = 0.002  # of an iteration: common to all its instructions, however many
    errors, sigmas = [], []
    for _ in range(40):
        samples = [
            observation({F: clock, B: clock}, index=k)
            for k, clock in enumerate(clock for clock in true_s for _ in range(3))
        ]
        noisy = [
            replace(
                own,
                instruction_samples=tuple(
                    replace(
                        s, count=512,
                        shares=tuple(replace(p, time_s=p.time_s * (1 + noise_ratio * random.standard_normal()))
                                     for p in s.shares),
                    )
                    for s in own.instruction_samples
                ),
            )
            for own in samples
        ]  # fmt: skip
        curve = fit_times(noisy)[InstructionClass(0, F)]
        errors += [float(curve.times_s([clock])[0]) / true - 1 for clock, true in true_s.items()]
        sigmas += curve.measured_sigmas_ratio(list(true_s)).tolist()

    assert 0.5 < np.sqrt(np.mean(np.square(errors))) / np.sqrt(np.mean(np.square(sigmas))) < 2.0


def test_levels_are_supported_clocks_from_the_maximum_down() -> None:
    levels = clock_levels(CLOCKS)

    assert levels[0] == CLOCKS[0]
    assert set(levels) <= set(CLOCKS)
    assert all(a > b for a, b in pairwise(levels))


@given(num_levels=st.integers(2, 7), num_ranks=st.integers(1, 5), seed=st.text(max_size=3))
def test_each_block_contains_every_level_of_every_kind_once(num_levels: int, num_ranks: int, seed: str) -> None:
    points = design_points([(F, B)] * num_ranks, num_levels, seed=seed)

    for begin in range(0, len(points), num_levels + 1):
        block = points[begin : begin + num_levels]
        for rank in range(num_ranks):
            for kind in (F, B):
                assert sorted(p.levels[rank][kind] for p in block) == list(range(num_levels))


@given(num_levels=st.integers(2, 7), seed=st.text(max_size=3))
def test_the_whole_design_pairs_every_forward_clock_with_every_backward_clock(num_levels: int, seed: str) -> None:
    points = design_points([(F, B)], num_levels, seed=seed)

    pairs = {(p.levels[0][F], p.levels[0][B]) for p in points}
    assert len(pairs) == num_levels**2


def test_an_iteration_at_full_speed_separates_two_blocks() -> None:
    points = design_points([(F, B), (F, B)], 5, seed="job")

    assert [n for n, p in enumerate(points) if all(set(own.values()) == {0} for own in p.levels)][:2] == [5, 11]


def test_a_profile_plan_fits_its_pipeline() -> None:
    schedule = one_forward_one_backward(3, 4)
    levels = [clock_levels(CLOCKS)] * 3
    point = design_points(kinds_of_ranks(schedule), 5)[3]

    plan = profile_plan("p", point, schedule, levels, reason="test")

    check_plan(plan, schedule, [CLOCKS] * 3)
    for rank in plan.ranks:
        assert rank.changes[0].instruction == schedule.orders[rank.pp_rank][0]


def test_phases_that_wait_are_profiled_at_lower_clocks() -> None:
    schedule = loop_schedule()
    (kinds,) = kinds_of_ranks(schedule)
    levels, waits = [clock_levels(CLOCKS)], [{kind: wait_levels(CLOCKS, 6, kind) for kind in kinds if kind.is_wait}]
    lowest = DesignPoint((dict.fromkeys(kinds, 5),))

    plan = profile_plan("p", lowest, schedule, levels, reason="test", wait_levels_mhz=waits)

    check_plan(plan, schedule, [CLOCKS])
    lowest_mhz = {InstructionKind.C: 420, InstructionKind.D: min(CLOCKS)}
    assert plan.ranks[0].sm_clocks_mhz == tuple(lowest_mhz.get(kind, levels[0][5]) for kind in kinds)


@given(
    st.integers(1, 8),
    st.lists(st.integers(300, 2000), min_size=2, max_size=40, unique=True),
    st.sampled_from([InstructionKind.C, InstructionKind.D]),
)
def test_waits_have_as_many_levels_as_other_phases(
    num_levels: int, clocks_mhz: list[int], kind: InstructionKind
) -> None:
    levels = wait_levels(clocks_mhz, num_levels, kind)

    assert len(levels) == num_levels
    assert levels[0] == max(clocks_mhz)
    assert sorted(levels, reverse=True) == list(levels)


def test_held_clocks_of_a_profile_plan_change_once_within_an_iteration() -> None:
    schedule = one_forward_one_backward(3, 4)
    levels = [clock_levels(CLOCKS)] * 3
    point = DesignPoint(({F: 1, B: 4},) * 3)

    plan = profile_plan("p", point, schedule, levels, reason="test", held_ranks={1})

    check_plan(plan, schedule, [CLOCKS] * 3)
    low, high = levels[1][4], levels[1][1]
    assert plan.ranks[1].sm_clocks_mhz == (high,) * 4 + (low,) * 4
    assert [change.sm_clock_mhz for change in plan.ranks[1].changes] == [high, low]
    assert len(plan.ranks[0].changes) > 2
    assert len(plan.ranks[2].changes) > 2


@pytest.mark.parametrize("kind", [F, B])
def test_fitted_times_are_accurate_between_measured_clocks(kind: InstructionKind) -> None:
    options = fit_of_design().profile[InstructionClass(0, kind)].options

    assert max(abs(o.time_s / true_time_s(kind, o.sm_clock_mhz) - 1) for o in options) < 0.003


@pytest.mark.parametrize("kind", [F, B])
def test_fitted_energy_differences_are_accurate_at_all_clocks(kind: InstructionKind) -> None:
    options = fit_of_design().profile[InstructionClass(0, kind)].options
    top = options[0]

    for option in options:
        fitted_j = top.energy_j - option.energy_j
        true_j = true_energy_j(kind, top.sm_clock_mhz) - true_energy_j(kind, option.sm_clock_mhz)
        assert fitted_j == pytest.approx(true_j, abs=0.01 * true_energy_j(kind, top.sm_clock_mhz))


def test_waiting_power_is_fitted_apart_from_working_power() -> None:
    assert fit_of_design().profile.blocking_power_w == pytest.approx(waiting_power_w(1410), rel=0.1)


def test_no_clock_below_the_lowest_measured_one_is_offered() -> None:
    options = fit_of_design().profile[InstructionClass(0, F)].options

    assert min(o.sm_clock_mhz for o in options) == clock_levels(CLOCKS)[-1]


def test_an_instruction_with_a_clock_change_inside_still_counts() -> None:
    levels = clock_levels(CLOCKS)
    high, low = levels[0], levels[-1]
    late_s = 0.006
    done = late_s / true_time_s(F, high)
    mixed = InstructionSample(
        0, F, (ClockShare(high, late_s), ClockShare(low, (1 - done) * true_time_s(F, low))), count=8
    )
    steady = observation({F: high, B: high})
    changed = observation({F: high, B: low}, index=1)
    both = IterationObservation(2, "p2", 1.0, (mixed,), (), is_regular=True)

    fitted = fit_profile([steady, changed, both], [GPU])

    assert fitted.profile[InstructionClass(0, F)].at_clock(low).time_s == pytest.approx(true_time_s(F, low), rel=1e-3)


def test_missing_energy_is_an_error_and_not_estimated() -> None:
    seen = observation({F: 1410, B: 1410})
    blind = IterationObservation(
        0, "p", seen.iteration_time_s, seen.instruction_samples, (RankEnergy(0, 1.0, None, seen.ranks[0].time_at),)
    )

    with pytest.raises(NotEnoughDataError, match=r"ranks \[0\]"):
        fit_profile([blind], [GPU])


@pytest.mark.fault(13)
def test_a_power_cap_limits_the_effective_clock() -> None:
    cap = 1180

    def capped_time_s(clock: int) -> float:
        return true_time_s(F, min(clock, cap))

    samples = tuple(
        InstructionSample(0, F, (ClockShare(clock, capped_time_s(clock)),), count=8) for clock in clock_levels(CLOCKS)
    )
    seen = [IterationObservation(k, "p", 1.0, (sample,), ()) for k, sample in enumerate(samples)]

    curve = fit_times(seen)[InstructionClass(0, F)]

    assert curve.cap_mhz == pytest.approx(cap, rel=0.01)
    for clock in CLOCKS:
        if clock >= curve.lowest_mhz:
            assert float(curve.times_s([clock])[0]) == pytest.approx(capped_time_s(clock), rel=0.005)
    assert curve.effective_mhz(1410) == pytest.approx(cap, rel=0.01)
    assert curve.effective_mhz(1000) == 1000


def test_without_a_power_cap_no_bend_is_fitted() -> None:
    samples = tuple(
        InstructionSample(0, F, (ClockShare(clock, true_time_s(F, clock)),), count=8) for clock in clock_levels(CLOCKS)
    )
    seen = [IterationObservation(k, "p", 1.0, (sample,), ()) for k, sample in enumerate(samples)]

    assert fit_times(seen)[InstructionClass(0, F)].cap_mhz is None


def test_times_that_rise_with_the_clock_are_averaged_by_weight() -> None:
    smooth = monotone_times_s(np.array([0.10, 0.08, 0.081, 0.05]), np.array([1.0, 3.0, 1.0, 1.0]))

    assert smooth[0] == pytest.approx(0.10)
    assert smooth[1] == smooth[2] == pytest.approx(0.08**0.75 * 0.081**0.25)
    assert smooth[3] == pytest.approx(0.05)
