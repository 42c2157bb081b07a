"""Plain loops whose phases are instructions: savings, and stragglers of data-parallel ranks, in virtual time."""

from dataclasses import dataclass
from statistics import median

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, Work
from tests.support.thorough import thorough
from tests.support.virtual_loop import B, D, DataParallelLoops, F, VirtualLoop, Wait, loop_schedule, phase_work

BEGIN, END = 130, 160
"""Iterations in which one rank is slower."""


@dataclass(frozen=True, slots=True)
class LateBelowTop:
    """Work that takes half a percent longer than it did below the highest clock."""

    usual: Work

    def time_s(self, sm_clock_mhz: int) -> float:
        return self.usual.time_s(sm_clock_mhz) * (1.005 if sm_clock_mhz < CLOCKS_MHZ[0] else 1.0)

    def power_w(self, sm_clock_mhz: int) -> float:
        return self.usual.power_w(sm_clock_mhz)


def figures(run: VirtualLoop, until: int | None = None) -> tuple[float, float]:
    """Return saving and slowdown of the last tuned iterations over the first at full speed."""
    before, after = run.history[2:10], [own for own in run.history[:until][-30:] if (own[2] or "").startswith("tuned")]
    time_s, energy_j = median(own[0] for own in before), median(own[1] for own in before)
    tuned_s, tuned_j = median(own[0] for own in after), median(own[1] for own in after)
    return 1 - tuned_j / energy_j, tuned_s / time_s - 1


@pytest.mark.parametrize(("num_microbatches", "noise_ratio"), [(1, 0.0), *thorough((2, 0.003), (1, 0.003), (2, 0.0))])
def test_waiting_phases_are_slowed_without_a_permitted_slowdown(num_microbatches: int, noise_ratio: float) -> None:
    run = VirtualLoop(schedule=loop_schedule(num_microbatches), policy=BubbleAware(), noise_ratio=noise_ratio, seed=1)
    run.run(100)

    saving_ratio, slowdown_ratio = figures(run)
    assert run.job.phase is JobPhase.TUNED
    assert saving_ratio > (0.03 if num_microbatches == 1 else 0.015)
    assert slowdown_ratio < 0.005


@pytest.mark.thorough
def test_two_percent_more_time_saves_eight_percent_of_the_energy() -> None:
    run = VirtualLoop(policy=BubbleAware(), max_slowdown_ratio=0.02, noise_ratio=0.003, seed=1)
    run.run(120)

    saving_ratio, slowdown_ratio = figures(run)
    assert saving_ratio > 0.08
    assert slowdown_ratio < 0.025


@pytest.mark.thorough
def test_a_plan_that_is_a_little_late_for_long_is_made_faster() -> None:
    run = VirtualLoop(policy=BubbleAware(), max_slowdown_ratio=0.02, noise_ratio=0.002, seed=3)
    run.run(60)
    usual = run.work
    late = dict(usual)
    for kind in (F, B):  # below the highest clock alone, and too little for the guard
        late[0, kind] = LateBelowTop(usual[0, kind])
    run.work = late
    run.run(130)

    _, slowdown_ratio = figures(run)
    assert run.job.phase is JobPhase.TUNED
    assert slowdown_ratio < 0.0215


@pytest.mark.thorough
def test_a_wait_that_is_cut_short_by_late_clocks_ends_at_full_speed_after_a_correction() -> None:
    run = VirtualLoop(policy=BubbleAware(), noise_ratio=0.002, seed=4, switch_latency_s=0.014, assumed_latency_s=0.006)
    run.run(130)

    _, slowdown_ratio = figures(run)
    assert slowdown_ratio < 0.004


@pytest.mark.thorough
def test_a_longer_wait_for_data_is_not_charged_to_the_plan() -> None:
    run = VirtualLoop(policy=BubbleAware(), noise_ratio=0.003, seed=2)
    run.run(80)
    tuned = run.job.current_plan.plan_id
    usual = run.work
    for number in range(20):
        run.work = {**usual, (0, D): Wait(0.5)} if number % 4 == 0 else usual
        run.run(1)

    assert run.job.phase is JobPhase.TUNED
    assert run.job.current_plan.plan_id.startswith("tuned"), tuned
    assert not run.job.faults.retry_at_iteration


@pytest.mark.thorough
def test_a_slower_rank_is_followed_within_eight_iterations_and_left_within_six() -> None:
    def rank(number: int) -> VirtualLoop:
        return VirtualLoop(
            policy=BubbleAware(),
            noise_ratio=0.003,
            seed=number,
            num_dp_ranks=3,
            slowdown_of=lambda _, iteration: 1.2 if number == 0 and BEGIN <= iteration < END else 1.0,
        )

    ranks = tuple(rank(number) for number in range(3))
    training = DataParallelLoops(ranks)
    training.run(END + 40)

    for own in ranks[1:]:
        saving_ratio, slowdown_ratio = figures(own, until=BEGIN)
        assert saving_ratio > 0.03
        assert slowdown_ratio < 0.01
        waited_s = own.waits_s
        assert max(waited_s[BEGIN + 1 : BEGIN + 3]) > 0.015
        # At first as far as clocks that were never tried may be late; then these have been measured.
        assert min(waited_s[BEGIN + 5 : BEGIN + 8]) < 0.6 * waited_s[BEGIN + 1]
        followed = next(i for i in range(BEGIN, END) if waited_s[i] < 0.3 * waited_s[BEGIN + 1])
        assert followed - BEGIN <= 16
        assert own.job.knowledge.straggler_saving.saving is not None
        assert own.job.knowledge.straggler_saving.saving.saving_ratio > 0.02
    slowest_s = [max(times) for times in zip(*([h[0] for h in own.history] for own in ranks), strict=True)]
    usual_s = median(slowest_s[BEGIN - 20 : BEGIN])
    # One iteration may still change over to a plan.
    assert sorted(slowest_s[END + 6 : END + 30])[-2] < 1.02 * usual_s
    assert max(slowest_s[END + 6 : END + 30]) < 1.03 * usual_s
    assert median(slowest_s[-15:]) < 1.004 * usual_s, "the recovered rank is planned for its new times"


def test_a_rank_that_waits_for_a_slower_one_from_the_start_is_planned_for() -> None:
    slow = VirtualLoop(work={**phase_work(), (0, D): Wait(0.070)}, noise_ratio=0.003, seed=1, num_dp_ranks=2)
    fast = VirtualLoop(noise_ratio=0.003, seed=2, num_dp_ranks=2)
    DataParallelLoops((slow, fast)).run(60)

    saving_ratio, slowdown_ratio = figures(fast)
    assert fast.job.phase is JobPhase.TUNED
    assert saving_ratio > 0.06
    assert slowdown_ratio < 0.01


@pytest.mark.thorough
def test_ranks_prove_their_savings_in_the_same_iterations() -> None:
    """With these seeds one of them is ready four iterations before the other."""
    ranks = tuple(VirtualLoop(noise_ratio=0.004, seed=seed, num_dp_ranks=2) for seed in (4, 5))

    DataParallelLoops(ranks).run(42)

    blocks = [[number for number, own in enumerate(run.history) if own[2] == "proof"] for run in ranks]
    assert blocks[0] == blocks[1] != []
