"""Disturbed jobs in virtual time: they soon return to their budget, and later to near-optimal plans, with a reason.

Every iteration from the fifth after a disturbance on must be within the budget, profiling or not.

Times are compared with the same training at full speed, energies with the plan made from perfect knowledge of the
disturbed pipeline; both run in the same virtual pipeline.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import pytest

from gpuenergyd.core.job.messages import Event, JobPhase, RankReported, RecordNotice, RecordPhase
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, a100_stages
from tests.support.perfect_knowledge import WAITING_CLOCKS_MHZ, Informed, least_energy_j, true_profile
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.thorough import thorough
from tests.support.virtual_replicas import VirtualReplicas

FROM = 40
"""Iteration of the disturbance, well after the first plan."""
BUDGET_RATIO = 0.01
ITERATIONS_TO_BUDGET = 5
ITERATIONS_TO_OPTIMUM = 32
OPTIMUM_RATIO = 0.01


def training(policy: ClockPolicy, **others: object) -> VirtualTraining:
    schedule, work = one_forward_one_backward(3, 6), a100_stages((1.0, 0.93, 1.10))
    return VirtualTraining(schedule, work, policy, rules=JobRules(proof_iterations=0), **others)  # type: ignore[arg-type]


def output(run: VirtualTraining) -> list[str]:
    """Return the job's records in the history."""
    return [c.reason for c in run.commands if isinstance(c, RecordPhase | RecordNotice)]


def require_soon_inside_budget(run: VirtualTraining, at_full_speed: VirtualTraining, *happened: int) -> None:
    """Assert that all iterations after a disturbance are within budget, except the first five after each."""
    times_s = zip(run.history, at_full_speed.history, strict=True)
    slow = [
        (k, plan, time_s / full_speed_s)
        for k, ((time_s, _, plan), (full_speed_s, _, _)) in enumerate(times_s)
        if k >= happened[0]
        and not any(at <= k < at + ITERATIONS_TO_BUDGET for at in happened)
        and time_s > (1 + BUDGET_RATIO) * full_speed_s
    ]
    assert slow == []


def require_near(run: VirtualTraining, energy_j: float, since: int) -> None:
    settled = [used_j for _, used_j, _ in run.history[since + ITERATIONS_TO_OPTIMUM :]]
    assert settled
    assert median(settled) <= (1 + OPTIMUM_RATIO) * energy_j


@dataclass(frozen=True)
class Slowness:
    """Longer instructions on one rank or on all, from an iteration on, at once or within ten iterations."""

    ratio: float
    rank: int | None = None
    is_gradual: bool = False

    def of(self, rank: int, iteration: int) -> float:
        """Return the factor on all times."""
        share = min(max(iteration - FROM, 0) / 10, 1.0) if self.is_gradual else float(iteration >= FROM)
        return 1.0 + (self.ratio - 1.0) * share * (self.rank in {None, rank})


SLOWNESSES = {
    "first stage 10 % slower": (Slowness(1.1, rank=0), "the job changed: B of rank 0 takes 1.100 times as long"),
    "longest stage 10 % slower": (Slowness(1.1, rank=2), "the job changed: B of rank 2 takes 1.100 times as long"),
    "one GPU throttles": (Slowness(1.12, rank=2, is_gradual=True), "the job changed: F of rank 2 takes 1.1"),
    "larger batch": (Slowness(1.4), "the job changed: "),
    "smaller batch": (Slowness(0.7), "the job changed: "),
}


@pytest.mark.fault(46)
@pytest.mark.parametrize(
    "what",
    [
        "longest stage 10 % slower",
        *thorough("one GPU throttles", "first stage 10 % slower", "larger batch", "smaller batch"),
    ],
)
def test_a_change_of_speed_costs_at_most_five_iterations_and_is_replanned_within_32(what: str) -> None:
    slowness, reason = SLOWNESSES[what]
    run, at_full_speed = (
        training(policy, slowdown_of=slowness.of) for policy in (RememberedBubbleAware(), FullSpeed())
    )
    for own in (run, at_full_speed):
        own.run(FROM + 10 * slowness.is_gradual + ITERATIONS_TO_OPTIMUM + 12)

    require_soon_inside_budget(run, at_full_speed, FROM)
    require_near(run, least_energy_j(training, lambda rank: slowness.of(rank, 1000)), FROM + 10 * slowness.is_gradual)
    assert run.job.phase is JobPhase.TUNED
    assert any(line.startswith(reason) for line in output(run))
    assert (run.job.notices.last or "").startswith("the job changed")


@pytest.mark.thorough
@pytest.mark.fault(46)
def test_a_throttling_gpu_is_planned_at_the_clock_it_reaches_until_it_has_cooled_down() -> None:
    cool_from = FROM + 50

    def ceiling_mhz(rank: int, iteration: int) -> int:
        is_hot = rank == 2 and FROM <= iteration < cool_from
        return max(1260, 1410 - 15 * (iteration - FROM)) if is_hot else 1410

    run, at_full_speed = (training(policy, ceiling_of=ceiling_mhz) for policy in (RememberedBubbleAware(), FullSpeed()))
    for own in (run, at_full_speed):
        own.run(cool_from)
    hot_j = median(used_j for _, used_j, _ in run.history[FROM + 10 + ITERATIONS_TO_OPTIMUM :])
    for own in (run, at_full_speed):
        own.run(ITERATIONS_TO_OPTIMUM + 8)

    require_soon_inside_budget(run, at_full_speed, FROM, cool_from)
    best_j = least_energy_j(training, ceiling_mhz=lambda rank: ceiling_mhz(rank, cool_from - 1))
    assert hot_j <= (1 + OPTIMUM_RATIO) * best_j
    require_near(run, least_energy_j(training), cool_from)
    changes = [line for line in output(run) if line.startswith("the job changed: ")]
    assert [line.split(" takes ")[0] for line in changes] == ["the job changed: F of rank 2"] * 2


@pytest.mark.thorough
@pytest.mark.fault(46)
def test_a_recovered_stage_is_detected_even_if_the_iteration_time_stays() -> None:
    recovers_at = FROM + 26

    def slowness(rank: int, iteration: int) -> float:
        return 1.1 if rank == 2 and FROM <= iteration < recovers_at else 1.0

    run, at_full_speed = (training(policy, slowdown_of=slowness) for policy in (RememberedBubbleAware(), FullSpeed()))
    for own in (run, at_full_speed):
        own.run(recovers_at + ITERATIONS_TO_OPTIMUM + 8)

    require_soon_inside_budget(run, at_full_speed, FROM, recovers_at)
    require_near(run, least_energy_j(training), recovers_at)
    assert any("of rank 2 takes 0.909 times as long as when the plan began" in line for line in output(run))


@pytest.mark.fault(46)
@pytest.mark.parametrize(("memory_ratio", "compute_ratio"), thorough((1.0, 1.4), (0.6, 1.0)))
def test_the_first_plan_adapts_to_a_batch_with_another_compute_share(memory_ratio: float, compute_ratio: float) -> None:
    def with_new_batch(policy: ClockPolicy) -> VirtualTraining:
        run = training(policy)
        run.work = {
            key: replace(
                work,
                memory_time_s=memory_ratio * work.memory_time_s,
                compute_time_s=compute_ratio * work.compute_time_s,
            )
            for key, work in run.work.items()
            if isinstance(work, A100Work)
        }
        return run

    run, at_full_speed = training(RememberedBubbleAware()), training(FullSpeed())
    for own in (run, at_full_speed):
        own.run(FROM)
        own.work = with_new_batch(FullSpeed()).work
        own.run(ITERATIONS_TO_OPTIMUM + 8)

    require_soon_inside_budget(run, at_full_speed, FROM)
    require_near(run, least_energy_j(with_new_batch), FROM)
    assert not any((plan or "").startswith("profile") for _, _, plan in run.history[FROM:])


@pytest.mark.fault(46)
@pytest.mark.thorough
def test_a_plan_for_a_straggler_saves_as_much_as_with_perfect_knowledge() -> None:
    slowness = Slowness(1.2)

    def replicas(policy: ClockPolicy) -> VirtualReplicas:
        def slow(rank: int, iteration: int) -> float:
            return slowness.of(rank, iteration) if iteration < FROM + 20 else 1.0

        return VirtualReplicas((training(FullSpeed(), slowdown_of=slow), training(policy)))

    ours = replicas(RememberedBubbleAware())
    ours.run(FROM + 20 + ITERATIONS_TO_OPTIMUM + 4)
    best_j, usual_j = [], []
    for waiting_clock_mhz in WAITING_CLOCKS_MHZ:
        best = replicas(Informed(true_profile(training(FullSpeed()), lambda _: 1.0, waiting_clock_mhz)))
        best.run(FROM + 18)
        best_j.append(best.replicas[1].history[-1][1])
        usual_j.append(best.replicas[1].history[FROM - 1][1])

    slow, fast = ours.replicas
    full_speed_s = [time_s for time_s, _, _ in slow.history]
    usual_s, slow_s = full_speed_s[FROM - 1], full_speed_s[FROM]
    target_s = [slow_s if FROM <= k < FROM + 20 else usual_s for k in range(len(full_speed_s))]
    late = [k for k, time_s in enumerate(full_speed_s) if k >= FROM and time_s > (1 + BUDGET_RATIO) * target_s[k]]
    assert not [k for k in late if not FROM + 20 <= k < FROM + 20 + 3]
    assert fast.history[-1][1] <= (1 + OPTIMUM_RATIO) * min(usual_j)
    assert fast.history[FROM + 19][1] <= (1 + OPTIMUM_RATIO) * min(best_j)
    assert [change.reason.split(":")[0] for _, change in ours.changes] == ["straggler", "straggler recovered"]
    assert "replica-0 now takes" in (fast.job.notices.last or "")


@pytest.mark.thorough
@pytest.mark.fault(46)
def test_an_evaluation_every_fifty_iterations_changes_no_plan() -> None:
    run = training(RememberedBubbleAware())
    usual_s = run.step_overhead_s
    for _ in range(2 * 50 + 30):
        run.step_overhead_s = usual_s + (2.5 if run.iteration_index % 50 == 49 else 0.0)
        run.run(1)

    assert run.job.faults.num_faults == 0
    assert run.job.baseline is not None
    training_times_s = [time_s for k, (time_s, _, _) in enumerate(run.history) if k % 50 != 49 and k > FROM]
    assert max(training_times_s) <= (1 + BUDGET_RATIO) * run.job.baseline.iteration_time_s
    require_near(run, least_energy_j(training), FROM)
    assert {o.is_regular for o in run.job.observations if o.iteration_index % 50 == 49} == {False}
    assert [line for line in output(run) if "(evaluation" in line] == [
        f"2.5 s passed between iterations {k} and {k + 1} (evaluation, checkpoint, waiting for others): not counted"
        for k in (49, 99)
    ]
    assert "not counted" in (run.job.notices.last or "")


class _Liar:
    """A policy whose first plans are much slower than predicted."""

    def __init__(self, num_lies: int) -> None:
        self._honest = RememberedBubbleAware()
        self._num_lies = num_lies

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return a plan that is too slow, for a limited number of times."""
        if self._num_lies and all(plan.purpose is not PlanPurpose.TUNED for plan in view.issued_plans[-1:]):
            plan = self._honest.next_plan(view)
            if plan.purpose is not PlanPurpose.TUNED:
                return plan
            self._num_lies -= 1
            clock = view.gpus[0].supported_sm_clocks_mhz[20]
            lies = (
                RankClocks(r, (clock,) * len(order), constant_clock_changes(order, clock))
                for r, order in enumerate(view.schedule.orders)
            )
            return replace(plan, ranks=tuple(lies))
        return self._honest.next_plan(view)


@pytest.mark.fault(45)
def test_a_wrong_prediction_costs_five_slow_iterations_and_is_retried() -> None:
    run, at_full_speed = training(_Liar(1)), training(FullSpeed())
    for own in (run, at_full_speed):
        own.run(70)

    lies_from = next(k for k, (_, _, plan) in enumerate(run.history) if plan == "tuned-1")
    require_soon_inside_budget(run, at_full_speed, lies_from)
    require_near(run, least_energy_j(training), lies_from)
    assert any(line.startswith("plan 'tuned-1' takes") and "are allowed" in line for line in output(run))
    assert "are allowed" in (run.job.notices.last or "")


def report_in_changing_orders(run: VirtualTraining, since: int) -> None:
    """Swap two neighbouring instructions on every rank, different ones in each iteration."""
    usual: Callable[[Event], None] = run.feed
    dice = random.Random(3)

    def feed(event: Event) -> None:
        if isinstance(event, RankReported) and event.report.iteration_index >= since:
            rows = list(event.report.instructions)
            k = dice.randrange(len(rows) - 1)
            one, other = rows[k], rows[k + 1]
            rows[k] = replace(one, instruction=other.instruction)
            rows[k + 1] = replace(other, instruction=one.instruction)
            event = RankReported(replace(event.report, instructions=tuple(rows)))
        usual(event)

    run.feed = feed  # type: ignore[method-assign]  # the shell between a training and its job


@pytest.mark.fault(46)
@pytest.mark.parametrize("since", [0, FROM])
def test_a_job_that_never_repeats_an_order_runs_at_full_speed(since: int) -> None:
    run, at_full_speed = training(RememberedBubbleAware()), training(FullSpeed())
    report_in_changing_orders(run, since)
    for own in (run, at_full_speed):
        own.run(since + ITERATIONS_TO_OPTIMUM + 8)

    require_soon_inside_budget(run, at_full_speed, since)
    require_near(run, at_full_speed.history[-1][1], since)
    assert run.job.phase in {JobPhase.WARMUP, JobPhase.FALLBACK}
    assert "in another order, than were registered" in (run.job.notices.last or "")
    assert run.job.notices.last in output(run)
