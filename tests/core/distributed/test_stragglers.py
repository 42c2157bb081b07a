"""Straggler detection among replicas."""

import random

import pytest

from gpuenergyd.core.distributed.straggler_savings import StragglerSavingEstimator
from gpuenergyd.core.distributed.stragglers import Pace, ReplicaGroup, StragglerChange
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.plan import PlanPurpose

TUNED = PlanPurpose.TUNED


def group(*job_ids: str) -> ReplicaGroup:
    found = ReplicaGroup()
    for job_id in job_ids:
        found.join(job_id)
    return found


def reported(replicas: ReplicaGroup, at_s: float, **own_times_s: float) -> list[StragglerChange]:
    """Let every replica say what it takes; return what that changes."""
    return [
        change
        for job, own_time_s in own_times_s.items()
        for change in replicas.update_pace(Pace(own_time_s, job, at_s))
    ]


def straggler_pace_s(change: StragglerChange) -> float | None:
    return change.pace.own_time_s if change.pace is not None else None


def test_a_replica_slower_in_two_readings_becomes_the_straggler_of_all_others() -> None:
    replicas = group("a", "b", "c")
    reported(replicas, 1.0, a=1.0, b=1.0, c=1.0)

    first = reported(replicas, 2.0, a=1.0, b=1.0, c=1.2)
    second = reported(replicas, 3.0, a=1.0, b=1.0, c=1.21)

    assert first == []
    assert [(change.job_id, straggler_pace_s(change)) for change in second] == [("a", 1.2), ("b", 1.2)]
    assert "c takes 1.2 s" in second[0].reason


@pytest.mark.parametrize(("lasts_s", "waits"), [(1.0, False), (1.1, False), (1.4, True)])
def test_replicas_that_do_not_wait_for_each_other_have_no_straggler(lasts_s: float, waits: bool) -> None:  # noqa: FBT001  a parameter
    replicas = group("a", "b")
    replicas.update_pace(Pace(1.0, "a", 0.0, 1.0))  # the last iteration before the other becomes slow

    changes = [
        (pace.at_mono_s, pace.replica, straggler_pace_s(change))
        for at_s in range(1, 20)
        for pace in (Pace(1.4, "b", float(at_s), 1.4), Pace(1.0, "a", float(at_s), lasts_s))
        for change in replicas.update_pace(pace)
    ]

    assert changes == ([(2.0, "b", 1.4)] if waits else [])


@pytest.mark.parametrize("after_s", [1.04, 1.1, 1.3])
def test_a_pace_that_has_changed_once_is_followed_once(after_s: float) -> None:
    """The readings before the change do not bring the former pace back, nor do messages without a new reading."""
    replicas = group("a", "b")
    for at_s in range(20):
        reported(replicas, float(at_s), a=1.0, b=1.2)

    changes = [reported(replicas, 20.0 + step, b=after_s, a=1.0) for step in range(20)]
    changes += [list(replicas.expire_paces(40.0)) for _ in range(5)]

    assert [straggler_pace_s(change) for step in changes for change in step] == [after_s]


def test_a_slower_replica_that_has_left_is_not_followed_again() -> None:
    replicas = group("a", "b", "c")
    for at_s in range(20):
        reported(replicas, float(at_s), a=1.0, b=1.1, c=1.3)

    changes = list(replicas.leave("c", 20.0))
    for step in range(20):
        changes += reported(replicas, 21.0 + step, a=1.0, b=1.1)

    assert [(change.job_id, straggler_pace_s(change)) for change in changes] == [("a", 1.1), ("b", None)]


def test_an_expired_pace_from_elsewhere_is_ignored() -> None:
    replicas = group("a")
    reported(replicas, 100.0, a=1.0)

    changes = [replicas.update_pace_elsewhere("a", Pace(1.2, "elsewhere", 80.0 + k), 100.0 + k) for k in range(5)]

    assert not any(changes)


def test_a_repeated_pace_from_elsewhere_extends_its_lifetime_without_a_reading() -> None:
    replicas = group("a")
    reported(replicas, 1.0, a=1.0)
    slow = [Pace(1.2, "elsewhere", at_s) for at_s in (2.0, 3.0, 4.0)]

    first = replicas.update_pace_elsewhere("a", slow[0], 2.0)
    repeated = replicas.update_pace_elsewhere("a", slow[1], 3.0, is_news=False)
    second = replicas.update_pace_elsewhere("a", slow[2], 4.0)
    alive = [
        replicas.update_pace_elsewhere("a", Pace(1.2, "elsewhere", at_s), at_s, is_news=False) for at_s in (13.0, 22.0)
    ]

    assert (first, repeated) == ((), ())
    assert [straggler_pace_s(change) for change in second] == [1.2]
    assert alive == [(), ()]
    assert [change.pace for change in replicas.expire_paces(40.0)] == [None]


def first_straggler_pace(*paces_s: float) -> float | None:
    """Return what is imposed on a replica of 1 s by the readings of another."""
    replicas = group("a", "b")
    reported(replicas, 0.0, a=1.0)
    changes: list[StragglerChange] = []
    for at_s, own_time_s in enumerate(paces_s):
        changes += reported(replicas, float(at_s), b=own_time_s)
    return straggler_pace_s(changes[-1]) if changes else None


def test_two_readings_more_than_3_percent_slower_make_a_straggler() -> None:
    assert first_straggler_pace(1.031, 1.031) == 1.031
    assert first_straggler_pace(1.029, 1.029) is None
    assert first_straggler_pace(1.1, 1.029) is None
    assert first_straggler_pace(1.1) is None
    assert first_straggler_pace(1.1, 1.0, 1.1) is None  # one that was as fast between them begins the count anew
    assert first_straggler_pace(1.1, 1.2) == 1.1  # never more than every one says


def test_a_straggler_recovers_below_one_and_a_half_percent() -> None:
    assert first_straggler_pace(1.1, 1.1, 1.016) == 1.016
    assert first_straggler_pace(1.1, 1.1, 1.014) is None


def test_pace_changes_of_1_percent_are_followed_down_at_once_and_up_after_two_readings() -> None:
    assert first_straggler_pace(1.2, 1.2, 1.189) == 1.2
    assert first_straggler_pace(1.2, 1.2, 1.187) == 1.187
    assert first_straggler_pace(1.2, 1.2, 1.213) == 1.2
    assert first_straggler_pace(1.2, 1.2, 1.213, 1.213) == 1.213
    assert first_straggler_pace(1.2, 1.2, 1.211, 1.211) == 1.2
    assert first_straggler_pace(1.2, 1.2, 1.211, 1.3) == 1.2


@pytest.mark.parametrize(("own_time_s", "counts_s"), [(1.5, 10.0), (2.0, 10.0), (4.0, 20.0)])
def test_a_pace_lives_ten_seconds_or_five_of_its_iterations(own_time_s: float, counts_s: float) -> None:
    replicas = group("a", "b")
    assert replicas.rules.counts_for_s(own_time_s) == counts_s
    reported(replicas, 0.0, a=1.0, b=own_time_s)
    assert reported(replicas, 1.0, a=1.0, b=own_time_s) != []

    assert replicas.expire_paces(1.0 + counts_s) == ()
    (change,) = replicas.expire_paces(1.0 + counts_s + 0.001)
    assert (change.job_id, change.pace) == ("a", None)
    assert "sends no reports or has left" in change.reason


def test_the_slowest_of_several_sets_the_pace() -> None:
    replicas = group("a", "b", "c")
    for at_s in (0.0, 1.0, 2.0):
        reported(replicas, at_s, a=1.0, b=1.3, c=1.2)
    changes = reported(replicas, 3.0, b=1.0)

    assert {change.job_id: straggler_pace_s(change) for change in changes} == {"a": 1.2, "c": None}


def test_a_pace_from_elsewhere_ends_with_its_straggler() -> None:
    replicas = group("a")
    reported(replicas, 0.0, a=1.0)
    for at_s in (0.0, 2.0):
        replicas.update_pace_elsewhere("a", Pace(1.2, "far", at_s), at_s)

    (gone,) = replicas.update_pace_elsewhere("a", None, 3.0)
    assert gone.pace is None


def test_unknown_jobs_get_no_changes_and_leaving_ends_the_straggler_pace() -> None:
    replicas = group("a", "b")
    for at_s in (0.0, 1.0):
        reported(replicas, at_s, a=1.0, b=1.2, stranger=0.5)

    assert replicas.job_ids == {"a", "b"}
    (change,) = replicas.leave("b", 1.0)
    assert (change.job_id, change.pace) == ("a", None)
    assert replicas.job_ids == {"a"}
    assert replicas.leave("never here", 1.0) == ()


def test_only_slower_replicas_are_stragglers() -> None:
    assert first_straggler_pace(2.0, 2.0) == 2.0
    assert first_straggler_pace(3.5, 3.5) == 3.5
    assert first_straggler_pace(1.1, 1.1, 0.9) is None
    assert first_straggler_pace(0.5, 0.5, 0.5) is None


def noisy(seed: int, *, noise_ratio: float, slower_ratio: float = 0.0, readings: int = 400) -> list[StragglerChange]:
    """Return what two replicas whose paces scatter change for each other."""
    draw, replicas = random.Random(seed), group("a", "b")
    changes: list[StragglerChange] = []
    for at_s in range(readings):
        own_times_s = {job: draw.gauss(1.0, noise_ratio) for job in ("a", "b")}
        own_times_s["b"] *= 1 + slower_ratio
        changes += reported(replicas, float(at_s), **own_times_s)
    return changes


@pytest.mark.parametrize("noise_ratio", [0.005, 0.01, 0.03, 0.1])
def test_noise_makes_no_straggler(noise_ratio: float) -> None:
    assert max(len(noisy(seed, noise_ratio=noise_ratio)) for seed in range(5)) <= 4


@pytest.mark.parametrize("noise_ratio", [0.005, 0.01, 0.03, 0.1])
def test_a_straggler_with_noise_does_not_come_and_go(noise_ratio: float) -> None:
    num_changes = [len(noisy(seed, noise_ratio=noise_ratio, slower_ratio=0.05)) for seed in range(5)]

    assert max(num_changes) <= 24


def test_a_straggler_beyond_the_noise_is_followed_soon_near_its_pace_and_left_at_once() -> None:
    draw, replicas = random.Random(1), group("a", "b")
    followed, left = [], []
    for at_s in range(120):
        is_slow = 40 <= at_s < 80
        changes = reported(
            replicas, float(at_s), a=draw.gauss(1.0, 0.01), b=draw.gauss(1.0, 0.01) * (1.2 if is_slow else 1.0)
        )
        followed += [(at_s, straggler_pace_s(change)) for change in changes if change.pace is not None]
        left += [at_s for change in changes if change.pace is None]

    assert followed[0][0] <= 42
    assert left == [80]
    assert all(pace_s == pytest.approx(1.2, rel=0.03) for _, pace_s in followed)
    assert len(followed) <= 3


def test_stragglers_that_come_and_go_need_ever_more_readings() -> None:
    replicas = group("a", "b")
    changes = [
        change
        for at_s in range(400)
        for change in reported(replicas, float(at_s), a=1.0, b=1.2 if at_s % 4 < 2 else 1.0)
    ]

    assert len(changes) == 2


def test_a_replica_is_suspected_after_one_slow_reading_until_it_is_a_straggler_or_fast_again() -> None:
    replicas = group("a", "b")
    seen = []
    for at_s, slower_s in enumerate([1.0, 1.001, 1.0, 1.001, 1.0, 1.2, 1.02, 1.2, 1.2, 1.0]):
        reported(replicas, float(at_s), a=1.0, b=slower_s)
        seen.append(replicas.suspected_time_s("a", float(at_s)))

    assert seen == [None] * 5 + [1.2, None, 1.2, None, None]
    assert replicas.suspected_time_s("b", 9.0) is None
    assert replicas.suspected_time_s("unknown", 9.0) is None


def test_noise_is_no_suspicion() -> None:
    draw, replicas = random.Random(3), group("a", "b")
    seen = []
    for at_s in range(400):
        reported(replicas, float(at_s), a=draw.gauss(1.0, 0.05), b=draw.gauss(1.0, 0.05))
        seen.append(replicas.suspected_time_s("a", float(at_s)))

    assert sum(pace_s is not None for pace_s in seen[16:]) < 0.05 * len(seen)


@pytest.mark.parametrize("noise_ratio", [0.03, 0.05])
def test_a_straggler_in_noise_is_followed_after_a_few_readings(noise_ratio: float) -> None:
    waited = []
    for seed in range(20):
        draw, replicas = random.Random(seed), group("a", "b")
        for at_s in range(80):
            slower = 1.2 if at_s >= 40 else 1.0
            changes = reported(
                replicas, float(at_s), a=draw.gauss(1.0, noise_ratio), b=slower * draw.gauss(1.0, noise_ratio)
            )
            if at_s >= 40 and any(change.pace is not None for change in changes):
                waited.append(at_s - 39)
                break

    assert len(waited) == 20
    assert sorted(waited)[18] <= 10, waited


def test_a_stall_of_one_iteration_is_no_straggler_in_noise() -> None:
    draw, replicas = random.Random(5), group("a", "b")
    changes: list[StragglerChange] = []
    for at_s in range(400):
        stalled = 1.3 if at_s % 40 == 39 else 1.0
        changes += reported(replicas, float(at_s), a=draw.gauss(1.0, 0.01), b=stalled * draw.gauss(1.0, 0.01))

    assert changes == []


def iteration(time_s: float, energy_j: float | None, *, waited_s: float = 0.0) -> IterationObservation:
    return IterationObservation(
        iteration_index=0, plan_id="plan", iteration_time_s=time_s, instruction_samples=(),
        ranks=(RankEnergy(0, time_s, energy_j, ()),), is_regular=not waited_s, waited_s=waited_s,
    )  # fmt: skip


def gauge_of(*figures: tuple[float, float | None, float, bool]) -> StragglerSavingEstimator:
    """Return a gauge that has seen (time, energy, wait, whether the plan was made for the straggler)."""
    gauge = StragglerSavingEstimator()
    for time_s, energy_j, waited_s, is_for_straggler in figures:
        seen = iteration(time_s, energy_j, waited_s=waited_s)
        gauge.add(seen, TUNED, is_plan_for_straggler=is_for_straggler)
    return gauge


def test_following_is_compared_with_waiting_for_the_same_straggler() -> None:
    gauge = gauge_of(
        (1.0, 300.0, 0.0, False),
        (1.21, 340.0, 0.2, False),
        (1.20, 344.0, 0.2, False),
        (1.20, 306.0, 0.0, True),
        (1.20, 310.0, 0.01, True),
        (1.19, 308.0, 0.0, True),
    )

    saving = gauge.saving

    assert saving is not None
    assert (saving.waiting_energy_j, saving.following_energy_j) == (342.0, 308.0)
    assert saving.saving_ratio == pytest.approx(1 - 308 / 342)


@pytest.mark.parametrize(("permitted_ratio", "is_compared"), [(0.0, False), (0.05, True)])
def test_following_may_be_longer_by_the_permitted_slowdown(permitted_ratio: float, *, is_compared: bool) -> None:
    gauge = StragglerSavingEstimator()
    for time_s, energy_j, waited_s, is_following in [(1.2, 340.0, 0.2, False)] * 3 + [(1.26, 306.0, 0.0, True)] * 3:
        seen = iteration(time_s, energy_j, waited_s=waited_s)
        gauge.add(seen, TUNED, is_plan_for_straggler=is_following, permitted_ratio=permitted_ratio)

    assert (gauge.saving is not None) == is_compared


def test_following_faster_than_waiting_is_not_compared_whatever_is_permitted() -> None:
    gauge = StragglerSavingEstimator()
    for time_s, waited_s, is_following in [(1.2, 0.2, False)] * 3 + [(1.14, 0.0, True)] * 3:
        seen = iteration(time_s, 300.0, waited_s=waited_s)
        gauge.add(seen, TUNED, is_plan_for_straggler=is_following, permitted_ratio=0.05)

    assert gauge.saving is None


def test_waits_at_another_pace_are_not_compared() -> None:
    waited = [(1.5, 400.0, 0.5, False)] * 3
    followed = [(1.2, 308.0, 0.0, True)] * 3

    assert gauge_of(*waited, *followed).saving is None


@pytest.mark.parametrize("num_following", [0, 1])
def test_two_iterations_of_each_kind_are_required(num_following: int) -> None:
    waited = [(1.2, 340.0, 0.2, False)] * 3

    assert gauge_of(*waited, *[(1.2, 308.0, 0.0, True)] * num_following).saving is None


def test_iterations_without_energy_profiling_and_pauses_are_ignored() -> None:
    gauge = gauge_of((1.2, 340.0, 0.2, False), (1.2, None, 0.2, False), (1.2, 308.0, 0.0, True))
    gauge.add(iteration(3.0, 900.0, waited_s=2.0), TUNED, is_plan_for_straggler=False)
    gauge.add(iteration(1.2, 340.0, waited_s=0.2), PlanPurpose.TRIAL, is_plan_for_straggler=False)
    gauge.add(iteration(1.2, 308.0), TUNED, is_plan_for_straggler=True)

    assert gauge.saving is None


def test_waits_at_full_speed_count_only_without_waits_of_a_tuned_plan() -> None:
    gauge = StragglerSavingEstimator()
    for _ in range(3):
        gauge.add(iteration(1.2, 360.0, waited_s=0.2), PlanPurpose.BASELINE, is_plan_for_straggler=False)
        gauge.add(iteration(1.2, 306.0), TUNED, is_plan_for_straggler=True)
    at_full_speed = gauge.saving
    for _ in range(3):
        gauge.add(iteration(1.2, 340.0, waited_s=0.2), TUNED, is_plan_for_straggler=False)
    by_plan = gauge.saving

    assert at_full_speed is not None
    assert at_full_speed.saving_ratio == pytest.approx(1 - 306 / 360)
    assert by_plan is not None
    assert by_plan.saving_ratio == pytest.approx(1 - 306 / 340)


def test_the_last_saving_remains_when_a_new_pace_has_no_comparison() -> None:
    gauge = gauge_of(*[(1.2, 340.0, 0.2, False)] * 3, *[(1.2, 306.0, 0.0, True)] * 3)
    before = gauge.saving
    for _ in range(4):
        gauge.add(iteration(1.5, 400.0, waited_s=0.5), TUNED, is_plan_for_straggler=False)

    assert before is not None
    assert gauge.saving == before


def test_iterations_within_3_percent_of_the_pace_are_compared() -> None:
    """Waited for 1 s; what followed at 1.029 and 0.971 s counts, at 1.031 and 0.969 s not."""
    waited = [(1.0, 100.0, 0.2, False)] * 3

    near = gauge_of(*waited, (1.029, 80.0, 0.0, True), (0.971, 80.0, 0.0, True)).saving
    far = gauge_of(*waited, (1.031, 80.0, 0.0, True), (0.971, 80.0, 0.0, True), (0.969, 80.0, 0.0, True)).saving

    assert near is not None
    assert near.saving_ratio == pytest.approx(0.2)
    assert far is None


def test_the_pace_is_the_median_of_the_last_three_waits() -> None:
    """Five waits for 1 s and three for 2 s: the slower pace counts, of which there must be two and its followers."""
    early, late = [(1.0, 100.0, 0.2, False)] * 5, [(2.0, 150.0, 0.2, False)] * 3
    followed = [(1.0, 80.0, 0.0, True)] * 2 + [(2.0, 120.0, 0.0, True)] * 2

    saving = gauge_of(*followed, *early, *late).saving
    assert saving is not None
    assert (saving.waiting_energy_j, saving.following_energy_j) == (150.0, 120.0)
    before = gauge_of(*followed, *early, *late[:1]).saving
    assert before is not None
    assert before.waiting_energy_j == 100.0


def test_the_last_8_waiting_and_64_following_iterations_are_kept() -> None:
    """Of nine waits the first is gone: of the eight left, four cost 100 J and four 200 J, 150 J between them."""
    waits = [(1.0, 100.0, 0.2, False)] * 5 + [(1.0, 200.0, 0.2, False)] * 4
    followed = [(1.0, 50.0, 0.0, True)] * 33 + [(1.0, 70.0, 0.0, True)] * 32

    saving = gauge_of(*followed, *waits).saving

    assert saving is not None
    assert (saving.waiting_energy_j, saving.following_energy_j) == (150.0, 60.0)
