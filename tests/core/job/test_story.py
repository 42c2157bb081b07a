"""A job's story and notices: bounded, readable, and rate-limited."""

from gpuenergyd.core.job.messages import IterationObserved, RankReleased, RecordIteration
from gpuenergyd.core.job.story import MAX_STORY_LINES, Notices
from tests.support.job_run import JobRun, plan


def test_a_story_lists_each_event_with_its_commands() -> None:
    run = JobRun().asked()
    run.decide(plan())

    assert run.story.lines()[-4:] == (
        "PlanDecided plan_id=tuned reason=why tuned",
        "  -> LeaseGpus",
        "  -> SendPlan plan_epoch=1 apply_at_iteration=14 plan_id=tuned reason=why tuned",
        "  -> RecordPhase phase=tuned reason=why tuned",
    )


def test_a_story_is_bounded_and_keeps_the_newest() -> None:
    run = JobRun()
    for _ in range(MAX_STORY_LINES):
        run.pass_one()

    story = run.story.lines()
    assert len(story) == MAX_STORY_LINES
    assert any(f"iteration_index={run.index - 1}" in line for line in story[-3:])


def test_the_same_kind_of_notice_is_repeated_after_a_number_of_iterations_only() -> None:
    notices = Notices()

    added = [notices.add_rarely("pause", f"at {n}", n, every=10) for n in (0, 9, 10)]

    assert added == [True, False, True]
    assert (notices.last, notices.last_at) == ("at 10", 10)
    assert notices.add_rarely("order", "another kind", 11, every=10)


def test_every_iteration_is_recorded_as_the_job_counts_it() -> None:
    run = JobRun().following(plan())
    run.records.clear()
    run.pass_one(energy_j=50.0)

    (record,) = run.records
    assert isinstance(record, RecordIteration)
    assert (record.observation.plan_id, record.purpose) == ("tuned", plan().purpose)
    assert record.observation is run.job.observations[-1]
    assert run.job.knowledge.num_iterations_for[plan().purpose] == 1
    assert run.job.knowledge.tuned_medians() == (1.0, 50.0)


def test_iterations_still_being_observed_at_the_end_are_recorded() -> None:
    run = JobRun().following(plan())
    run.feed(RankReleased(0))
    last = run.job.observations[-1]

    (record,) = run.job.handle(IterationObserved(last))
    assert isinstance(record, RecordIteration)
