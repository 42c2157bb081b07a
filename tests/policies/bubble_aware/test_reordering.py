"""A running job that changes its order of instructions: advice, trial, order and clocks together, and the way back."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import median

import pytest

from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.job.messages import JobPhase, RecordNotice
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import InstructionKind, Schedule, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.reorder import OrderAdvice, RankMemory, ReorderOffer, check_orders
from gpuenergyd_policies.bubble_aware.order_choice import caution_of_order, memory_limits, memory_refusal
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, Work, a100_stages
from tests.support.thorough import thorough
from tests.support.virtual_replicas import VirtualReplicas

I, W = InstructionKind.I, InstructionKind.W  # noqa: E741  torch's own names
WEIGHTS = (1.0, 1.08, 1.0, 0.95)
GIB = 2**30
ROOMY = 80 * GIB


def works(split_cost: float = 1.0) -> dict[tuple[int, InstructionKind], Work]:
    """Stages whose input and weight gradients take half of the backward each, times a cost of splitting."""
    found = dict(a100_stages(WEIGHTS))
    for rank, weight in enumerate(WEIGHTS):
        for kind in (I, W):
            found[rank, kind] = A100Work(0.0135 * weight * split_cost, 0.033 * weight * split_cost, 0.27)
    return found


def memory(capacity_bytes: int) -> Callable[[int, Schedule], RankMemory]:
    """Weights take 20 GiB, a microbatch 4 GiB, and so do the gradients between the halves of a split backward."""

    def of(rank: int, schedule: Schedule) -> RankMemory:
        is_split = any(own.kind is I for own in schedule.orders[rank])
        used_bytes = (20 + 4 * (schedule.peak_inflight(rank) + is_split)) * GIB
        return RankMemory(capacity_bytes - used_bytes, 4 * GIB, capacity_bytes)

    return of


def training(
    *,
    allow: bool,
    capacity_bytes: int | None = ROOMY,
    split_cost: float = 1.0,
    refusal: str = "",
    policy: BubbleAware | None = None,
) -> VirtualTraining:
    return VirtualTraining(
        one_forward_one_backward(4, 8),
        works(split_cost),
        policy or BubbleAware(),
        noise_ratio=0.002,
        reorder=ReorderOffer(allow, refusal),
        memory_of=(lambda _rank, _schedule: None) if capacity_bytes is None else memory(capacity_bytes),
    )


@dataclass
class Ran:
    """Iterations of a training: (time, energy, plan id, whether split)."""

    training: VirtualTraining
    rows: list[tuple[float, float, str | None, bool]] = field(default_factory=list)

    def run(self, num_iterations: int) -> None:
        """Train for so many iterations."""
        for _ in range(num_iterations):
            self.training.run(1)
            is_split = any(own.kind is W for order in self.training.running.orders for own in order)
            self.rows.append((*self.training.history[-1], is_split))

    def run_until_in_order(self, most: int = 160) -> None:
        """Run until a tuned plan with an order of its own is settled."""
        while not (self.rows and self.is_tuned_in_order and sum(row[3] for row in self.rows[-12:]) == 12):
            assert len(self.rows) < most, self.training.job.notices
            self.run(1)

    @property
    def is_tuned_in_order(self) -> bool:
        """Whether the plan in force has an order of its own and saves energy."""
        plan = self.training.job.current_plan
        return bool(plan.orders) and plan.purpose is PlanPurpose.TUNED

    @property
    def advice(self) -> OrderAdvice:
        found = self.training.job.knowledge.reordering.advice
        assert found is not None
        return found

    def compared(self, *, is_split: bool) -> tuple[float, float]:
        """Return saving and slowdown of the newest tuned iterations against those at full speed in 1F1B."""
        plan_id = next(row[2] for row in reversed(self.rows) if row[2] != PROOF_PLAN_ID)
        baseline = self.rows[3:10]
        tuned = [row for row in self.rows if row[2] == plan_id and row[3] == is_split][2:]
        return (
            1 - median(row[1] for row in tuned) / median(row[1] for row in baseline),
            median(row[0] for row in tuned) / median(row[0] for row in baseline) - 1,
        )


@pytest.fixture(scope="module")
def settled() -> Ran:
    """A training that runs in its own order; tests that continue it take a copy."""
    ran = Ran(training(allow=True))
    ran.run_until_in_order()
    return ran


@pytest.mark.thorough
def test_an_allowed_job_changes_its_order_by_itself_and_saves_what_was_advised(settled: Ran) -> None:
    allowed, advised = settled, Ran(training(allow=False))
    advised.run(len(allowed.rows))

    saving, slowdown = allowed.compared(is_split=True)
    plain_saving, _ = advised.compared(is_split=False)
    assert saving >= 0.20
    assert saving >= plain_saving + 0.06
    assert slowdown <= 0.01
    assert not any(row[3] for row in advised.rows)
    assert abs(advised.advice.saving_ratio - saving) <= 0.02
    assert abs(advised.advice.plain_saving_ratio - plain_saving) <= 0.02
    assert "allow_reorder=True" in advised.advice.refusal
    assert not allowed.advice.refusal
    assert allowed.advice.is_split_measured
    assert not advised.advice.is_split_measured
    assert allowed.advice.own_order_saving_ratio < allowed.advice.saving_ratio
    check_orders(allowed.training.job.current_plan.orders, allowed.training.schedule)
    notices = [c for c in advised.training.commands if isinstance(c, RecordNotice) and c.advice is not None]
    assert [notice.reason for notice in notices] == [advised.advice.text]


def test_a_job_is_back_in_1f1b_three_iterations_after_split_backwards_became_expensive(settled: Ran) -> None:
    ran = deepcopy(settled)
    while ran.rows[-1][2] != PROOF_PLAN_ID:
        ran.run(1)
    ran.run(JobRules().proof_iterations)  # the next block at full speed is far
    ran.training.work = works(1.5)
    slow_from = len(ran.rows)
    ran.run(8)

    # The first slow iteration is reported during the second one, and the plan that follows is read during the third.
    assert [row[3] for row in ran.rows[slow_from : slow_from + 6]] == [True, True, True, False, False, False]
    assert ran.training.job.phase is JobPhase.TUNED
    assert "become slower" in ran.advice.refusal


def test_after_a_slow_plan_the_next_one_in_another_order_is_more_cautious(settled: Ran) -> None:
    view = settled.training.job.view()
    assert view is not None
    plain = next(plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED)
    settled_ratio = caution_of_order(view, plain)
    plan_id = settled.training.job.current_plan.plan_id
    slow = tuple(
        replace(o, iteration_time_s=1.02 * view.baseline.iteration_time_s) if o.plan_id == plan_id else o
        for o in view.observations
    )

    caution_ratio = caution_of_order(replace(view, observations=slow), plain)
    assert caution_ratio == pytest.approx(settled_ratio + 1.5 * 0.02, abs=1e-3)


@pytest.mark.thorough
def test_an_order_that_costs_more_than_it_saves_is_not_used() -> None:
    ran = Ran(training(allow=True, split_cost=1.25))
    ran.run(90)

    split = [row for row in ran.rows if row[3]]
    assert 4 <= len(split) <= 12
    assert "split backwards take too long" in ran.advice.refusal
    assert ran.training.job.phase is JobPhase.TUNED


@pytest.mark.parametrize(
    ("capacity_bytes", "why"), thorough((40 * GIB, "might not fit into the memory of rank 0"), (None, "is not known"))
)
def test_without_room_or_without_a_known_size_nothing_is_tried(capacity_bytes: int | None, why: str) -> None:
    ran = Ran(training(allow=True, capacity_bytes=capacity_bytes))
    ran.run(70)

    assert not any(row[3] for row in ran.rows)
    assert why in ran.advice.refusal


@pytest.mark.thorough
def test_the_order_holds_no_more_microbatches_than_fit_at_any_instant() -> None:
    capacity_bytes = 44 * GIB
    ran = Ran(training(allow=True, capacity_bytes=capacity_bytes))
    ran.run_until_in_order()

    schedule = ran.training.running
    for rank in range(schedule.num_ranks):
        assert memory(capacity_bytes)(rank, schedule).free_bytes >= 0.05 * capacity_bytes


@pytest.mark.thorough
def test_a_rank_that_ran_out_of_memory_ends_the_order_for_good(settled: Ran) -> None:
    ran = deepcopy(settled)
    ran.training.job.knowledge.reordering.barred = "a GPU ran out of memory in another order than 1F1B"
    ran.run(85)

    assert not any(row[3] for row in ran.rows[-75:])
    assert "ran out of memory" in ran.advice.refusal


@pytest.mark.thorough
def test_too_little_memory_left_in_an_order_ends_it(settled: Ran) -> None:
    ran = deepcopy(settled)
    ran.training.memory_of = lambda _rank, _schedule: RankMemory(GIB, 4 * GIB, ROOMY)
    ran.run(85)

    assert not any(row[3] for row in ran.rows[-75:])
    assert "too little memory was left" in ran.advice.refusal


@pytest.mark.thorough
def test_a_job_whose_order_cannot_change_gets_no_advice() -> None:
    ran = Ran(training(allow=True, refusal="the pipeline is on several hosts"))
    ran.run(60)

    assert ran.training.job.knowledge.reordering.advice is None
    assert ran.training.job.view().reorder.refusal == "the pipeline is on several hosts"  # type: ignore[union-attr]


def test_limits_leave_a_margin_and_room_for_the_gradients_between_both_halves() -> None:
    roomy = RankMemory(24 * GIB, 4 * GIB, 80 * GIB)  # 4 GiB of margin, five more microbatches, one for the gradients
    tight = RankMemory(7 * GIB, 4 * GIB, 80 * GIB)
    assert memory_limits((roomy, roomy), 2) == (4, 4)
    assert memory_limits((tight, None), 2) == (2, 1)
    assert memory_refusal((roomy, roomy), 2) == ""
    assert "rank 1" in memory_refusal((roomy, tight), 2)
    assert "not known" in memory_refusal((roomy, None), 2)
    assert "not known" in memory_refusal((), 2)


# --- replicas ---


def replicas(*, refusal: str = "") -> VirtualReplicas:
    """Two replicas of a training, of which the second may refuse other orders."""
    return VirtualReplicas(
        tuple(
            VirtualTraining(
                one_forward_one_backward(4, 8),
                works(),
                BubbleAware(),
                noise_ratio=0.002,
                seed=number,
                reorder=ReorderOffer(is_allowed=True, refusal=refusal if number else ""),
                memory_of=memory(ROOMY),
            )
            for number in range(2)
        )
    )


def is_split(replica: VirtualTraining) -> bool:
    """Return whether the last iteration ran split backwards."""
    return any(own.kind is W for order in replica.running.orders for own in order)


@pytest.mark.thorough
def test_each_replica_changes_its_order_by_itself_and_back() -> None:
    both = replicas()
    ran = []
    for _ in range(110):
        both.run(1)
        ran.append(tuple(is_split(replica) for replica in both.replicas))
        if ran[-16:].count((True, True)) == 16:
            break
    baseline_j, settled_j = (
        sum(median(row[1] for row in rows) for rows in parts)
        for parts in (
            [replica.history[3:10] for replica in both.replicas],
            [replica.history[-10:] for replica in both.replicas],
        )
    )
    both.replicas[1].work = works(1.5)
    for _ in range(6):
        both.run(1)
        ran.append(tuple(is_split(replica) for replica in both.replicas))

    assert 1 - settled_j / baseline_j >= 0.20
    assert ran[-6:] == [(True, True)] * 3 + [(True, False)] * 3
    assert "become slower" in both.replicas[1].job.knowledge.reordering.advice.refusal  # type: ignore[union-attr]


@pytest.mark.thorough
def test_a_replica_runs_its_order_although_another_one_stays_in_1f1b() -> None:
    both = replicas(refusal="parameters have gradient hooks, which split backwards do not call")
    ran = []
    for _ in range(110):
        both.run(1)
        ran.append(tuple(is_split(replica) for replica in both.replicas))

    assert not any(other for _, other in ran)
    assert ran[-16:].count((True, False)) >= 10
