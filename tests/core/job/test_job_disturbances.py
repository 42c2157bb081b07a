"""Iterations that something disturbed, as ranks report them: what is said, how often, when clocks go back."""

import pytest

from gpuenergyd.core.job.messages import (
    Command,
    IterationObserved,
    JobPhase,
    ObserveIteration,
    RankReported,
    RecordNotice,
)
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import MeasuredInstruction, RankIteration
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from tests.support.job_run import APPLIED, SCHEDULE, TRIAL, JobRun, joined, kinds, new_job, plan


def report(rank: int, index: int, *, in_order: bool = True, gap_ns: int = 10**7, epoch: int = 0) -> RankIteration:
    """Return a tenth of a second of an iteration, and a hundredth until the next."""
    begin_ns = 10**9 + index * 11 * 10**7
    order = SCHEDULE.orders[rank] if in_order else SCHEDULE.orders[rank][::-1]
    ran = tuple(MeasuredInstruction(one, begin_ns + k, begin_ns + k + 1) for k, one in enumerate(order))
    return RankIteration(rank, index, epoch, begin_ns, begin_ns + 10**8, begin_ns + 10**8 + gap_ns, ran)


def both_report(run: JobRun, *, in_order: bool = True, gap_ns: int = 10**7) -> tuple[Command, ...]:
    """Let both ranks report an iteration, and observe it."""
    run.feed(RankReported(report(0, run.index, gap_ns=gap_ns, epoch=run.epoch)))
    commands = run.feed(RankReported(report(1, run.index, in_order=in_order, gap_ns=gap_ns, epoch=run.epoch)))
    run.index += 1
    seen = commands[0]
    assert isinstance(seen, ObserveIteration)
    observation = IterationObservation(run.index - 1, seen.plan_id, 1.0, (), (), is_regular=seen.is_regular)
    return (*commands[1:], *run.feed(IterationObserved(observation)))


def test_the_same_disturbance_is_recorded_after_twenty_five_iterations_and_then_ever_more_rarely() -> None:
    run = JobRun()
    for _ in range(4):
        both_report(run)

    noticed = [
        index for index in range(4, 60) if any(isinstance(c, RecordNotice) for c in both_report(run, in_order=False))
    ]

    assert noticed == [4, 29, 59]
    assert run.job.notices.last == (
        "iteration 59 ran other instructions, or in another order, than were registered: it is not planned for"
    )


def test_a_pause_is_named_with_its_length_and_the_iterations_around_it() -> None:
    run = JobRun()
    for _ in range(4):
        both_report(run)

    commands = both_report(run, gap_ns=10**7 + 2 * 10**9)

    assert commands[0] == RecordNotice(
        "2 s passed between iterations 4 and 5 (evaluation, checkpoint, waiting for others): not counted"
    )


def test_a_pause_and_another_order_are_different_disturbances() -> None:
    run = JobRun()
    for _ in range(4):
        both_report(run)

    assert kinds(both_report(run, in_order=False))[:1] == ["RecordNotice"]
    assert kinds(both_report(run, gap_ns=10**9))[:1] == ["RecordNotice"]


@pytest.mark.parametrize("purpose", [PlanPurpose.TUNED, TRIAL])
def test_three_consecutive_iterations_in_another_order_end_the_plan(purpose: PlanPurpose) -> None:
    run = JobRun().asked()
    run.decide(plan("made", purpose))
    run.pass_until(APPLIED)

    commands = [kinds(both_report(run, in_order=False)) for _ in range(3)]

    assert "RestoreGpus" not in commands[0] + commands[1]
    assert "RestoreGpus" in commands[2]
    assert run.job.phase_reason.startswith("3 iterations in a row ran other instructions")
    assert run.job.faults.num_faults == 0


def test_without_planned_clocks_another_order_is_only_recorded() -> None:
    run = JobRun().following(ClockPlan("un", PlanPurpose.BASELINE))

    commands = [kinds(both_report(run, in_order=False)) for _ in range(8)]

    assert all("RecordPhase" not in one for one in commands)
    assert run.job.phase is JobPhase.TUNED


def test_reports_before_all_ranks_have_joined_are_ignored() -> None:
    job = new_job()
    job.handle(joined(0))

    assert job.handle(RankReported(report(0, 0))) == ()
    assert (job.num_iterations, job.reports.last_index) == (0, -1)


def test_a_disturbance_is_recorded_again_after_a_long_time() -> None:
    run = JobRun()
    for _ in range(4):
        both_report(run)
    assert kinds(both_report(run, in_order=False))[:1] == ["RecordNotice"]
    for _ in range(40):
        both_report(run)

    assert kinds(both_report(run, in_order=False))[:1] == ["RecordNotice"]


def test_a_plan_ends_at_once_if_the_other_order_ran_for_long_before() -> None:
    run = JobRun().asked()
    for _ in range(6):
        both_report(run, in_order=False)
    run.decide(plan())
    assert run.job.phase is JobPhase.TUNED

    assert "RestoreGpus" in kinds(both_report(run, in_order=False))
    assert run.job.phase_reason.startswith("7 iterations in a row")
