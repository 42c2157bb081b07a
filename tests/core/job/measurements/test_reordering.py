"""What a job knows about other orders: offers of its ranks, their memory, and advice that is recorded once."""

from dataclasses import replace

from gpuenergyd.core.job.measurements.reordering import Reordering
from gpuenergyd.core.job.messages import OrdersRefused, RecordNotice, StoreOrderRefusal
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.reorder import OrderAdvice, RankMemory, ReorderOffer, split_in_place
from tests.support.job_run import SCHEDULE, JobRun, joined, new_job, plan

ADVICE = OrderAdvice("split backward in place", 0.24, 0.14, 0.15, (2, 1), 0, is_split_measured=False, refusal="not so")


def report(memory: RankMemory | None, refusal: str = "") -> RankIteration:
    return RankIteration(0, 0, 0, 1, 2, 3, (), memory=memory, reorder_refusal=refusal)


def test_memory_of_1f1b_is_the_least_free_before_the_first_other_order() -> None:
    known = Reordering()
    for free in (50, 40, 45):
        known.record(0, report(RankMemory(free, 60 - free, 100)), is_plain=True)
    known.record(0, report(None), is_plain=True)
    assert known.memory[0] == RankMemory(40, 20, 100)

    known.record(0, report(RankMemory(30, 20, 100)), is_plain=False)
    known.record(0, report(RankMemory(35, 20, 100)), is_plain=False)
    known.record(0, report(RankMemory(25, 20, 100)), is_plain=True)
    assert known.memory[0] == RankMemory(40, 20, 100, free_in_order_bytes=30)


def test_the_view_has_the_tightest_rank_of_each_stage_and_the_first_refusal() -> None:
    known = Reordering({0: ReorderOffer(is_allowed=True, refusal=""), 1: ReorderOffer(is_allowed=True, refusal="")})
    known.memory = {0: RankMemory(40, 10, 100), 1: RankMemory(60, 30, 100)}
    assert known.view(1, 2).memory == (RankMemory(60, 30, 100),)
    assert known.view(1, 2).is_allowed
    assert known.view(2, 2).memory == (RankMemory(60, 30, 100), None)

    known.offers[1] = ReorderOffer(is_allowed=False, refusal="several hosts")
    assert not known.view(1, 2).is_allowed
    assert known.view(1, 2).refusal == "several hosts"
    assert known.bar("out of memory")
    assert not known.bar("again")
    assert known.view(1, 2).refusal == "out of memory"
    assert not Reordering().view(1, 1).is_allowed


def test_a_snapshot_holds_everything() -> None:
    known = Reordering({0: ReorderOffer(is_allowed=True)}, {0: RankMemory(1, 2, 3)}, "barred", ADVICE)
    copy = Reordering()
    copy.restore(known.snapshot())
    assert copy == known


def test_out_of_memory_is_remembered_for_later_runs_once() -> None:
    run = JobRun().following(plan())
    first, second = (run.job.handle(OrdersRefused("out of memory")) for _ in range(2))
    assert StoreOrderRefusal("out of memory") in first
    assert second == ()
    assert run.job.knowledge.reordering.barred == "out of memory"

    later = JobRun()
    assert later.job.handle(OrdersRefused("out of memory (in job a)", is_remembered=True)) == ()
    assert later.job.knowledge.reordering.barred == "out of memory (in job a)"


def test_advice_is_recorded_as_a_notice_once() -> None:
    run = JobRun().following(plan())
    found = []
    for advice in (None, ADVICE, ADVICE, replace(ADVICE, refusal="")):
        run.pass_one()
        found += [c for c in run.decide(replace(plan(), order_advice=advice)) if isinstance(c, RecordNotice)]
    assert [notice.advice for notice in found] == [ADVICE, replace(ADVICE, refusal="")]
    assert run.job.notices.last == replace(ADVICE, refusal="").text
    view = run.job.view()
    assert view is not None
    assert view.reorder.advice == replace(ADVICE, refusal="")


def test_advice_ends_with_the_measurements_that_it_was_computed_from() -> None:
    run = JobRun().following(plan())
    run.pass_one()
    run.decide(replace(plan(), order_advice=ADVICE))

    run.job.knowledge.begin_anew(lambda _: True)

    assert run.job.knowledge.reordering.advice is None


def test_advice_says_savings_memory_and_basis_in_one_line() -> None:
    assert ADVICE.text == (
        "split backward in place: 24 % instead of 14 % (15 % against its own full speed); no more memory;"
        " predicted, input and weight gradients assumed to take half of the backward each; not so"
    )
    more = replace(ADVICE, extra_microbatches=2, is_split_measured=True, refusal="")
    assert "; up to 2 microbatches more in memory; predicted, input and weight gradients measured" in more.text


def test_the_graph_of_an_iteration_is_that_of_its_plans_order() -> None:
    job = new_job()
    for rank in range(2):
        job.handle(joined(rank))
    split = split_in_place(SCHEDULE)
    job.knowledge.add_plan(replace(plan("split", PlanPurpose.TRIAL), orders=split.orders))
    assert job.graph_under("split").instructions == tuple(i for order in split.orders for i in order)
    assert job.graph_under("split") is job.graph_under("split")
    assert job.graph_under("baseline").instructions == tuple(i for order in SCHEDULE.orders for i in order)
    assert job.graph_under(None) is job.ranks.graph
