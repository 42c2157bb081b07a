"""What is kept of a job's plans when there are ever more of them."""

import random
from dataclasses import replace

from gpuenergyd.core.job.issued_plans import MAX_PLANS_KEPT, PROOF_PLAN_ID, IssuedPlans
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.state import JobSnapshot
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.job_run import SCHEDULE, WORK

MAX_REMEMBERED = JobRules().max_observations
NEWEST = 128


def tuned(number: int) -> ClockPlan:
    return ClockPlan(f"tuned-{number}", PlanPurpose.TUNED)


def test_the_number_of_kept_plans_is_bounded_and_needed_plans_are_kept() -> None:
    rng = random.Random(0)
    plans = IssuedPlans()
    issued: list[ClockPlan] = []
    remembered: list[str] = []
    for number in range(3000):
        purpose = rng.choice([PlanPurpose.TUNED] * 8 + [PlanPurpose.BASELINE, PlanPurpose.TRIAL])
        again = issued and rng.random() < 0.2
        plan = rng.choice(issued[-50:]) if again else ClockPlan(f"{purpose}-{number}", purpose)
        plans.add(plan, remembered)
        plans.record_target(plan.plan_id, 1.0, is_forced=rng.random() < 0.5)
        issued.append(plan)
        remembered = rng.sample([*remembered, plan.plan_id], k=min(MAX_REMEMBERED, len(remembered) + 1))

        assert len(plans.kept) <= MAX_PLANS_KEPT
        assert plans.current is plan
        assert len(plans.kept) + sum(plans.num_dropped.values()) == len(issued)
        known = plans.purposes()
        assert all(known[plan_id] is plans.purpose_of(plan_id) for plan_id in remembered[-3:])
        assert set(remembered) | {own.plan_id for own in issued[-NEWEST:]} <= known.keys()
        assert len(plans.target_when_made_s) <= MAX_PLANS_KEPT
        assert len(plans._for_straggler) <= MAX_PLANS_KEPT


def test_profiling_plans_are_dropped_last() -> None:
    plans = IssuedPlans()
    tried = [ClockPlan(f"profile-{number}", PlanPurpose.TRIAL) for number in range(40)]
    for plan in [*tried, *(tuned(number) for number in range(2000))]:
        plans.add(plan, ())

    assert plans.kept[:40] == tried
    assert tuned(0) not in plans.kept


def test_the_newest_plan_in_the_registered_order_is_kept_however_many_follow_in_another_one() -> None:
    plans = IssuedPlans()
    for plan in (tuned(0), tuned(1)):
        plans.add(plan, ())
    for number in range(2, 2000):
        plans.add(replace(tuned(number), orders=SCHEDULE.orders), ())

    assert plans.by_id("tuned-0") is None
    assert plans.by_id("tuned-1") == tuned(1)


def test_the_number_of_kept_profiling_plans_is_bounded() -> None:
    plans = IssuedPlans()
    for number in range(2000):
        plans.add(ClockPlan(f"profile-{number}", PlanPurpose.TRIAL), ())

    assert len(plans.kept) == MAX_PLANS_KEPT


def test_profiling_from_the_beginning_keeps_full_speed_plans() -> None:
    plans = IssuedPlans()
    plans.add(ClockPlan("full-speed-1", PlanPurpose.BASELINE), ())
    plans.add(tuned(1), ())

    plans.begin_anew()

    assert [plan.plan_id for plan in plans.kept] == ["full-speed-1"]
    assert plans.purpose_of("tuned-1") is None
    assert plans.purpose_of(PROOF_PLAN_ID) is PlanPurpose.BASELINE


class _NeverContent:
    """Has another plan each time, numbered as the plugin API says."""

    def __init__(self) -> None:
        self.views: list[JobView] = []

    def next_plan(self, view: JobView) -> ClockPlan:
        self.views.append(view)
        return ClockPlan(view.plan_id(f"tuned-{view.num_issued(PlanPurpose.TUNED) + 1}"), PlanPurpose.TUNED)


def test_plan_numbers_continue_after_dropped_plans_and_after_a_restart() -> None:
    policy = _NeverContent()
    run = VirtualTraining(SCHEDULE, WORK, policy, rules=JobRules(max_observations=24))
    run.run(MAX_PLANS_KEPT + 60)

    view = policy.views[-1]
    job = run.job
    again = Job(job.description, job.rules)
    again.restore(decode(encode(job.snapshot()), JobSnapshot, max_bytes=2**26))
    assert len(view.issued_plans) == MAX_PLANS_KEPT
    assert view.issued_plans[-1].plan_id == f"tuned-{len(policy.views) - 1}"
    assert again.snapshot() == job.snapshot()


def test_no_plan_of_a_kept_iteration_is_dropped() -> None:
    plans = IssuedPlans()
    all_of_them = [tuned(number) for number in range(MAX_PLANS_KEPT + 5)]
    for plan in all_of_them:
        plans.add(plan, [each.plan_id for each in all_of_them])

    assert plans.kept == all_of_them
    assert not plans.num_dropped


def test_before_the_first_plan_full_speed_is_in_force_under_epoch_0() -> None:
    plans = IssuedPlans()

    assert (plans.current.plan_id, plans.last_apply_at) == ("baseline", 0)
    assert (plans.id_of(0), plans.id_of(1), plans.id_of(None)) == ("baseline", None, None)
    assert plans.purpose_of("baseline") is PlanPurpose.BASELINE
    assert plans.purpose_of(None) is None


def test_a_plan_is_sent_three_iterations_ahead_and_after_the_one_before() -> None:
    plans = IssuedPlans()

    sent = [
        plans.send(tuned(1), last_reported=10),
        plans.send(tuned(2), last_reported=10),
        plans.send(tuned(3), last_reported=10, after=4),
        plans.send(tuned(4), last_reported=30),
    ]

    assert [(one.plan_epoch, one.apply_at_iteration) for one in sent] == [(1, 13), (2, 14), (3, 18), (4, 33)]
    assert plans.id_of(3) == "tuned-3"


def test_the_last_sixty_four_epochs_are_known() -> None:
    plans = IssuedPlans()
    for number in range(1, 71):
        plans.send(tuned(number), last_reported=number)

    assert [plans.id_of(epoch) for epoch in (6, 7, 70, 71)] == [None, "tuned-7", "tuned-70", None]


def test_a_plan_is_fast_enough_up_to_a_thousandth() -> None:
    plans = IssuedPlans()
    plans.record_target("tuned-1", 1.0, is_forced=False)

    assert plans.is_fast_enough(tuned(1), 0.9992)
    assert not plans.is_fast_enough(tuned(1), 0.9989)
    assert not plans.is_fast_enough(tuned(2), 99.0)  # nobody knows what that one was made for
    assert not plans.is_for_straggler("tuned-1")
    plans.record_target("tuned-2", 1.0, is_forced=True)
    assert plans.is_for_straggler("tuned-2")


def test_the_newest_tuned_plan_that_is_fast_enough_is_found() -> None:
    plans = IssuedPlans()
    for number, target_s in ((1, 1.0), (2, 1.1), (3, 1.3)):
        plans.add(tuned(number), ())
        plans.record_target(f"tuned-{number}", target_s, is_forced=False)
    plans.add(ClockPlan("probe", PlanPurpose.TRIAL), ())
    plans.record_target("probe", 0.5, is_forced=False)

    assert [plans.newest_fast_enough(target_s) for target_s in (0.9, 1.0, 1.2, 1.3)] == [
        None,
        tuned(1),
        tuned(2),
        tuned(3),
    ]


def test_profiling_from_the_beginning_keeps_the_count_of_dropped_full_speed_plans_only() -> None:
    plans = IssuedPlans(num_dropped={PlanPurpose.BASELINE: 2, PlanPurpose.TUNED: 5})
    plans.record_target("tuned-1", 1.0, is_forced=True)

    plans.begin_anew()

    assert plans.num_dropped == {PlanPurpose.BASELINE: 2}
    assert not plans.is_for_straggler("tuned-1")
    assert not plans.is_fast_enough(tuned(1), 9.0)
    untouched = IssuedPlans(num_dropped={PlanPurpose.TUNED: 5})
    untouched.begin_anew()
    assert untouched.num_dropped == {}


def test_the_oldest_unneeded_plan_is_dropped_first() -> None:
    plans = IssuedPlans()
    for number in range(MAX_PLANS_KEPT):
        plans.add(tuned(number), ())
    assert len(plans.kept) == MAX_PLANS_KEPT
    plans.record_target("tuned-2", 1.0, is_forced=True)

    plans.add(tuned(MAX_PLANS_KEPT), ("tuned-0", "tuned-1"))

    assert [plan.plan_id for plan in plans.kept[:3]] == ["tuned-0", "tuned-1", "tuned-3"]
    assert plans.num_dropped == {PlanPurpose.TUNED: 1}
    assert not plans.is_for_straggler("tuned-2")
    plans.add(tuned(MAX_PLANS_KEPT + 1), ())
    assert plans.num_dropped == {PlanPurpose.TUNED: 2}


def test_a_repeated_plan_is_dropped_first_and_stays_known() -> None:
    plans = IssuedPlans()
    for number in (*range(300), *[299] * 84):
        plans.add(tuned(number), ())
    plans.record_target("tuned-299", 1.0, is_forced=True)

    plans.add(tuned(299), [f"tuned-{number}" for number in range(300)])

    assert plans.by_id("tuned-299") == tuned(299)
    assert plans.is_for_straggler("tuned-299")
    assert plans.num_dropped == {PlanPurpose.TUNED: 1}
