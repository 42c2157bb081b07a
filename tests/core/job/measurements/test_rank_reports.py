"""Which iterations of a job are whole, which count, and what disturbed the others."""

import random
from dataclasses import replace

import pytest

from gpuenergyd.core.job.measurements.rank_reports import RankReports, WholeIteration
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.telemetry import MeasuredInstruction, RankIteration
from gpuenergyd.core.pipeline.graph import one_forward_one_backward

ORDERS = dict(enumerate(one_forward_one_backward(2, 2).orders))
MS = 1_000_000
STEP_NS, GAP_NS = 100 * MS, 10 * MS


def report(rank: int, index: int, *, epoch: int = 1, gap_ns: int = GAP_NS, in_order: bool = True) -> RankIteration:
    """Return 100 ms of an iteration and 10 ms until the next."""
    begin_ns = 1 + index * (STEP_NS + GAP_NS)
    order = ORDERS[rank] if in_order else ORDERS[rank][::-1]
    ran = tuple(MeasuredInstruction(one, begin_ns + k * MS, begin_ns + (k + 1) * MS) for k, one in enumerate(order))
    end_ns = begin_ns + STEP_NS
    return RankIteration(rank, index, epoch, begin_ns, end_ns, end_ns + gap_ns, ran)


def whole(reports: RankReports, *ranks: RankIteration, counts_from: int = 0) -> WholeIteration | None:
    """Return what the last of these reports completes."""
    done = None
    for one in ranks:
        done = reports.add(one, ORDERS, lambda epoch: f"plan {epoch}", counts_from=counts_from)
    return done


def both(reports: RankReports, index: int, **given: int) -> WholeIteration:
    done = whole(reports, report(1, index), report(0, index, gap_ns=given.get("gap_ns", GAP_NS)))
    assert done is not None
    return done


def warm() -> RankReports:
    reports = RankReports(JobRules())
    for index in range(4):
        both(reports, index)
    return reports


def test_an_iteration_is_whole_once_all_ranks_have_reported_it_in_any_order() -> None:
    reports = RankReports(JobRules())

    assert whole(reports, report(1, 0), report(1, 1)) is None
    done = whole(reports, report(0, 1))

    assert done is not None
    assert [rank.pp_rank for rank in done.ranks] == [0, 1]
    assert (done.iteration_index, done.plan_id, reports.num_iterations) == (1, "plan 1", 1)
    assert whole(reports, report(0, 1)) is None  # it is done with


@pytest.mark.parametrize("first", [0, 500])
def test_the_first_two_iterations_are_warm_up(first: int) -> None:
    reports = RankReports(JobRules(warmup_iterations=2))

    assert [both(reports, first + k).is_regular for k in range(4)] == [False, False, True, True]


def test_merged_iterations_count_towards_the_warm_up() -> None:
    reports = RankReports(JobRules(warmup_iterations=2))

    assert [reports.count(k) for k in range(4)] == [False, False, True, True]
    assert (reports.num_iterations, reports.last_index) == (4, 3)
    assert both(reports, 4).is_regular


def test_iterations_before_the_first_counted_one_are_not_regular() -> None:
    reports = warm()

    early = whole(reports, report(0, 4), report(1, 4), counts_from=5)
    due = whole(reports, report(0, 5), report(1, 5), counts_from=5)

    assert early is not None
    assert due is not None
    assert (early.is_regular, due.is_regular) == (False, True)


def test_an_iteration_under_different_plans_has_no_plan() -> None:
    done = whole(warm(), report(0, 4, epoch=1), report(1, 4, epoch=2))

    assert done is not None
    assert done.plan_id is None
    assert not done.is_regular


def test_consecutive_iterations_in_another_order_are_counted() -> None:
    reports = warm()
    seen = []
    for index, in_order in enumerate((False, False, True, False), start=4):
        done = whole(reports, report(0, index), report(1, index, in_order=in_order))
        assert done is not None
        seen.append((reports.num_foreign_orders, done.is_in_order, done.is_regular))

    assert seen == [(1, False, False), (2, False, False), (0, True, True), (1, False, False)]


def test_a_gap_longer_than_usual_by_5_percent_of_an_iteration_is_a_pause() -> None:
    chance, pause = both(warm(), 4, gap_ns=GAP_NS + 5 * MS), both(warm(), 4, gap_ns=GAP_NS + 6 * MS)

    assert (chance.pause_s, chance.is_regular) == (None, True)
    assert pause.pause_s == pytest.approx(0.006)
    assert not pause.is_regular


def test_the_last_iteration_of_a_job_is_not_regular() -> None:
    last = replace(report(0, 4), next_begin_ns=0)

    done = whole(warm(), last, report(1, 4))

    assert done is not None
    assert (done.is_regular, done.pause_s) == (False, None)


def test_an_incomplete_iteration_is_dropped_after_sixteen_more() -> None:
    kept, lost = RankReports(JobRules()), RankReports(JobRules())
    whole(kept, report(0, 0), report(0, 16))
    whole(lost, report(0, 0), report(0, 17))

    assert whole(kept, report(1, 0)) is not None
    assert whole(lost, report(1, 0)) is None


def test_without_reports_there_is_no_iteration() -> None:
    fresh = RankReports(JobRules())

    assert (fresh.last_index, fresh.num_iterations, fresh.num_foreign_orders) == (-1, 0, 0)


def test_an_iteration_of_one_rank_is_whole_with_its_report() -> None:
    order = {0: one_forward_one_backward(1, 2).orders[0]}

    done = RankReports(JobRules()).add(report(0, 3), order, str, counts_from=0)

    assert done is not None
    assert done.iteration_index == 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("swapped", [(0, 1), (2, 3)])
def test_every_order_other_than_the_registered_one_is_detected(rank: int, swapped: tuple[int, int]) -> None:
    reports = warm()
    ran = list(report(rank, 4).instructions)
    a, b = swapped
    ran[a], ran[b] = (replace(ran[a], instruction=ran[b].instruction), replace(ran[b], instruction=ran[a].instruction))

    done = whole(reports, report(1 - rank, 4), replace(report(rank, 4), instructions=tuple(ran)))

    assert done is not None
    assert not done.is_in_order


def test_instructions_may_be_reported_in_any_order_as_long_as_they_ran_in_the_registered_one() -> None:
    shuffled = replace(report(0, 4), instructions=report(0, 4).instructions[::-1])

    done = whole(warm(), report(1, 4), shuffled)

    assert done is not None
    assert done.is_in_order


def test_the_usual_gap_is_the_median_of_the_last_32() -> None:
    """Sixteen long ones and sixteen short ones: their mean. One more or less of the long ones would be seen."""
    reports = RankReports(JobRules(warmup_iterations=0))
    long_ns, short_ns = 40 * MS, 10 * MS
    for index in range(36):
        both(reports, index, gap_ns=long_ns if index < 20 else short_ns)

    pause = both(reports, 36, gap_ns=125 * MS)

    assert pause.pause_s == pytest.approx(0.1, rel=1e-12)


def test_uncounted_iterations_do_not_change_the_usual_gap() -> None:
    reports = warm()
    for index in range(4, 30):
        whole(reports, report(0, index, gap_ns=90 * MS), report(1, index), counts_from=99)

    assert both(reports, 30, gap_ns=90 * MS).pause_s == pytest.approx(0.08)


def test_the_newest_report_of_any_rank_is_the_newest_iteration() -> None:
    reports = RankReports(JobRules())
    whole(reports, report(1, 7))
    whole(reports, report(0, 6))

    assert (reports.last_index, reports.num_iterations) == (7, 0)
    assert not reports.count(5)
    assert (reports.last_index, reports.num_iterations) == (7, 1)


def test_the_run_ahead_is_the_most_that_any_program_has_launched_of_late() -> None:
    reports = RankReports(JobRules())
    assert reports.run_ahead == 0
    for rank, index, launched in ((0, 0, 1), (1, 0, 4), (0, 1, 2), (1, 1, -1)):
        whole(reports, replace(report(rank, index), launched_iteration_index=launched))

    assert reports.run_ahead == 3
    restored = RankReports(JobRules())
    restored.restore(reports.snapshot())
    assert restored.run_ahead == 3
    for index in range(2, 40):
        whole(reports, report(0, index), report(1, index))
    assert reports.run_ahead == 0


def test_replies_as_slow_as_the_newest_reports_count_as_run_ahead() -> None:
    for launched, taken_ms, run_ahead in ((0, 40, 0), (0, 80, 1), (0, 120, 2), (3, 350, 3)):  # the last had to queue
        reports, slow = warm(), report(0, 4)
        arrived_ns = slow.next_begin_ns + taken_ms * MS
        whole(reports, replace(slow, launched_iteration_index=5 + launched, arrived_ns=arrived_ns))
        assert reports.run_ahead == run_ahead


def test_gaps_that_scatter_as_on_a_busy_host_are_no_pauses_but_long_ones_are() -> None:
    reports, draw = RankReports(JobRules()), random.Random(1)
    pauses = [both(reports, index, gap_ns=int(MS * draw.uniform(5, 25))).pause_s for index in range(80)]
    evaluation = both(reports, 80, gap_ns=60 * MS)

    assert sum(pause_s is not None for pause_s in pauses[20:]) <= 1
    assert evaluation.pause_s is not None


def untimed(rank: int, index: int, *, in_order: bool = True) -> RankIteration:
    return replace(report(rank, index), instructions=(), is_in_order=in_order)


def test_an_iteration_without_times_of_instructions_counts_like_any_other() -> None:
    reports = warm()
    done = whole(reports, untimed(0, 4), untimed(1, 4))

    assert done is not None
    assert (done.is_regular, done.is_in_order, done.pause_s) == (True, True, None)
    paused = whole(reports, replace(untimed(0, 5), next_begin_ns=untimed(0, 5).end_ns + 90 * MS), untimed(1, 5))
    assert paused is not None
    assert paused.pause_s


def test_an_untimed_iteration_in_another_order_does_not_count() -> None:
    reports = warm()
    done = whole(reports, untimed(0, 4), untimed(1, 4, in_order=False))

    assert done is not None
    assert (done.is_regular, done.is_in_order, reports.num_foreign_orders) == (False, False, 1)


def test_times_of_some_ranks_are_left_out_where_others_have_none() -> None:
    done = whole(warm(), report(0, 4), untimed(1, 4))

    assert done is not None
    assert done.is_regular
    assert [(rank.instructions, rank.is_timed) for rank in done.ranks] == [((), False)] * 2


def test_a_report_without_instructions_that_says_nothing_of_their_order_is_in_none() -> None:
    done = whole(warm(), report(0, 4), replace(report(1, 4), instructions=()))

    assert done is not None
    assert not done.is_in_order
