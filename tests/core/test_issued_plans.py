"""What is kept of a job's plans when there are ever more of them."""

import random

from gpuenergyd.core.issued_plans import MAX_PLANS_KEPT, PROOF_PLAN_ID, IssuedPlans
from gpuenergyd.core.job_rules import JobRules
from gpuenergyd.core.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy import JobView
from gpuenergyd.daemon.hand_over import memory_of, recalled
from tests.core.test_job import SCHEDULE, WORK
from tests.support.virtual_training import VirtualTraining

MAX_REMEMBERED = JobRules().max_observations
NEWEST = 128


def tuned(number: int) -> ClockPlan:
    return ClockPlan(f"tuned-{number}", PlanPurpose.TUNED)


def test_what_is_kept_of_any_number_of_plans_is_bounded_and_all_that_is_needed() -> None:
    rng = random.Random(0)
    plans = IssuedPlans()
    issued: list[ClockPlan] = []
    remembered: list[str] = []
    for number in range(3000):
        purpose = rng.choice([PlanPurpose.TUNED] * 8 + [PlanPurpose.BASELINE, PlanPurpose.PROFILE])
        again = issued and rng.random() < 0.2
        plan = rng.choice(issued[-50:]) if again else ClockPlan(f"{purpose}-{number}", purpose)
        plans.add(plan, remembered)
        plans.note_owed(plan.plan_id, 1.0, is_forced=rng.random() < 0.5)
        issued.append(plan)
        if plan.purpose is PlanPurpose.TUNED and rng.random() < 0.1:
            plans.proven_id = plan.plan_id
        remembered = rng.sample([*remembered, plan.plan_id], k=min(MAX_REMEMBERED, len(remembered) + 1))

        assert len(plans.kept) <= MAX_PLANS_KEPT
        assert plans.current is plan
        assert len(plans.kept) + sum(plans.num_dropped.values()) == len(issued)
        known = plans.purposes()
        assert all(known[plan_id] is plans.purpose_of(plan_id) for plan_id in remembered[-3:])
        assert set(remembered) | {own.plan_id for own in issued[-NEWEST:]} <= known.keys()
        assert plans.proven_id is None or plans.by_id(plans.proven_id) is not None
        assert len(plans._owed_when_made_s) <= MAX_PLANS_KEPT
        assert len(plans._for_straggler) <= MAX_PLANS_KEPT


def test_a_plan_that_profiled_stays_as_long_as_another_can_go() -> None:
    plans = IssuedPlans()
    tried = [ClockPlan(f"profile-{number}", PlanPurpose.PROFILE) for number in range(40)]
    for plan in [*tried, *(tuned(number) for number in range(2000))]:
        plans.add(plan, ())

    assert plans.kept[:41] == [*tried, tuned(0)]


def test_endless_profiling_is_bounded_too() -> None:
    plans = IssuedPlans()
    for number in range(2000):
        plans.add(ClockPlan(f"profile-{number}", PlanPurpose.PROFILE), ())

    assert len(plans.kept) == MAX_PLANS_KEPT


def test_beginning_anew_keeps_what_ran_at_full_speed() -> None:
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


def test_plans_are_numbered_on_when_old_ones_are_left_out_and_after_a_restart() -> None:
    policy = _NeverContent()
    run = VirtualTraining(SCHEDULE, WORK, policy, rules=JobRules(max_observations=24))
    run.run(MAX_PLANS_KEPT + 60)

    view = policy.views[-1]
    job = run.job
    again = recalled(job.description, job.rules, memory_of(job))
    assert len(view.issued_plans) == MAX_PLANS_KEPT
    assert view.issued_plans[-1].plan_id == f"tuned-{len(policy.views) - 1}"
    assert again == job


def test_no_plan_goes_while_iterations_of_each_still_count() -> None:
    plans = IssuedPlans()
    all_of_them = [tuned(number) for number in range(MAX_PLANS_KEPT + 5)]
    for plan in all_of_them:
        plans.add(plan, [each.plan_id for each in all_of_them])

    assert plans.kept == all_of_them
    assert not plans.num_dropped
