"""The outcome of a job: one reason for what it saved or did not save, and what to expect of its kind of workload."""

import pytest

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.measurements.savings import Interval, MeasuredSaving
from gpuenergyd.core.job.messages import (
    AskPolicy,
    ControlLost,
    IterationObserved,
    PlanDecided,
    PolicyFailed,
    RankReleased,
    RecordIteration,
)
from gpuenergyd.core.job.outcome import OutcomeKind, _result_text, expectation, find_outcome, outcome_line
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.story import MAX_STORY_LINES, Notices
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.core.pipeline.plan import baseline_plan
from gpuenergyd.core.policy_api.target import PerformanceTarget
from tests.support.job_run import APPLIED, TRIAL, JobRun, joined, new_job, plan

NO_PROOF = JobRules(proof_iterations=0)


def ended(run: JobRun) -> tuple[OutcomeKind, str]:
    run.feed(RankReleased(0))
    outcome = find_outcome(run.job)
    return outcome.kind, outcome.reason


def tuned(energies_j: list[float], baseline_j: float = 100.0) -> JobRun:
    """Return a run with a baseline and then iterations of these energies under a plan, with proof blocks between."""
    run = JobRun()
    for k in range(12):
        run.pass_one(1.0 + 0.0001 * (k % 3), energy_j=baseline_j + 0.1 * (k % 3))
    run.decide(plan())
    while run.index < APPLIED:
        run.pass_one(energy_j=baseline_j)
    left = list(energies_j)
    while left:
        energy_j = baseline_j + 0.1 * (run.index % 3) if run.is_at_full_speed else left.pop(0)
        run.pass_one(1.0 + 0.0001 * (run.index % 3), energy_j=energy_j)
    return run


def loop(max_slowdown_ratio: float = 0.0) -> Job:
    job = new_job(num_pp_ranks=1, num_microbatches=1, target=PerformanceTarget(max_slowdown_ratio))
    job.handle(joined(0, order=(Instruction(0, InstructionKind.F, 0),)))
    return job


def test_a_job_that_ends_before_a_plan_names_what_it_was_doing() -> None:
    early, profiling = JobRun(NO_PROOF), JobRun(NO_PROOF).asked()
    for _ in range(5):
        early.pass_one()
    waiting = JobRun(NO_PROOF).asked()
    profiling.decide(plan("p", TRIAL))
    profiling.pass_one()

    assert find_outcome(early.job, waits_for="compiling").reason == "measuring the baseline, after 5 iterations"
    assert ended(early) == (OutcomeKind.TOO_EARLY, "ended while measuring the baseline, after 5 iterations")
    assert ended(profiling) == (OutcomeKind.TOO_EARLY, "ended while trying settings, after 13 iterations")
    assert ended(waiting) == (OutcomeKind.TOO_EARLY, "ended while waiting for the policy's plan, after 12 iterations")
    assert ended(JobRun()) == (OutcomeKind.TOO_EARLY, "ended while warming up, after 0 iterations")


def test_a_job_that_waits_for_a_plan_names_what_the_policy_host_does_first() -> None:
    waiting = JobRun(NO_PROOF).asked()

    found = find_outcome(waiting.job, waits_for="compiling the planner, once")

    assert found.reason == "compiling the planner, once, after 12 iterations"


def test_a_policy_that_failed_is_the_reason_also_if_the_job_profiles_again() -> None:
    failed, again = JobRun(NO_PROOF).asked(), JobRun(NO_PROOF).asked()
    failed.feed(PolicyFailed("ValueError: no idea"))
    again.feed(PolicyFailed("ValueError: no idea"))
    again.first(AskPolicy)
    again.decide(plan("p", TRIAL))
    again.pass_one()

    assert ended(failed) == (OutcomeKind.AT_FULL_SPEED, "policy p failed: ValueError: no idea")
    kind, reason = ended(again)
    assert kind is OutcomeKind.TOO_EARLY
    assert reason.endswith("; before that: policy p failed: ValueError: no idea")


def test_a_policy_that_keeps_full_speed_gives_the_reason() -> None:
    run = JobRun(NO_PROOF).asked()
    run.feed(PlanDecided(baseline_plan("noisy", reason="too noisy to plan: times vary by 40 %")))

    assert ended(run) == (OutcomeKind.AT_FULL_SPEED, "too noisy to plan: times vary by 40 %")


def test_lost_control_of_clocks_is_a_reason_for_no_saving() -> None:
    run = JobRun(NO_PROOF).asked()
    run.feed(ControlLost("GPU-0 is lost"))

    assert ended(run) == (OutcomeKind.AT_FULL_SPEED, "GPU-0 is lost")


def test_observe_mode_is_a_reason_for_no_saving() -> None:
    assert find_outcome(tuned([80.0] * 8).job, is_observing=True).kind is OutcomeKind.OBSERVED_ONLY


@pytest.mark.parametrize(
    ("energies_j", "kind", "reason"),
    [
        ([80.0, 80.2, 79.9] * 8, OutcomeKind.SAVED, "24 iterations under a plan"),
        ([120.0, 120.2, 119.9] * 8, OutcomeKind.USED_MORE, "24 iterations under a plan used more energy"),
        ([90.0, 112.0, 99.0] * 8, OutcomeKind.NOT_SIGNIFICANT, "24 iterations under a plan: no significant saving"),
        (
            [80.0],
            OutcomeKind.NOT_MEASURED,
            "1 iteration under a plan: too few comparable blocks at full speed to measure a saving",
        ),
    ],
)
def test_a_plan_saves_energy_only_beyond_chance(energies_j: list[float], kind: OutcomeKind, reason: str) -> None:
    found_kind, found_reason = ended(tuned(energies_j))

    assert found_kind is kind
    assert found_reason.startswith(reason)


def test_the_line_for_the_user_has_the_saving_with_its_interval_and_the_reason() -> None:
    line = outcome_line(tuned([80.0, 80.2, 79.9] * 8).job)

    assert line.startswith("20.1 % less energy (95 %: 19.9 % to 20.3 % less), ")
    cost = "cost so far: 0.0 s (0.00 %), the client's own not measured"
    assert line.endswith(f"; 24 iterations under a plan; {cost}")


def test_the_line_for_the_user_makes_no_claim_that_may_be_chance() -> None:
    line = outcome_line(tuned([90.0, 112.0, 99.0] * 8).job)

    assert line.startswith("no significant saving (95 %: ")
    assert "; 24 iterations under a plan: no significant saving; cost so far: 0.0 s" in line
    by_chance = MeasuredSaving(Interval(0.01, -0.05, 0.07), Interval(0.035, -0.01, 0.084), 15, 24)
    assert _result_text(by_chance).endswith("5.0 % more to 7.0 % less energy), at most 8.4 % slower")


def test_savings_before_a_fall_back_count_and_its_reason_is_added() -> None:
    run = tuned([80.0, 80.2, 79.9] * 8)
    run.feed(ControlLost("GPU-0 is lost"))

    assert ended(run) == (OutcomeKind.SAVED, "24 iterations under a plan; then at full speed: GPU-0 is lost")


def test_what_to_expect_depends_on_waiting_time_and_permitted_slowdown() -> None:
    stage = new_job(num_pp_ranks=1)
    stage.handle(joined(0))

    assert expectation(loop()) == (
        "nothing can be saved at the same speed: one instruction per iteration, so no waiting time to use, and no"
        " slowdown permitted; permit some with --max-slowdown"
    )
    assert expectation(stage).startswith("nothing can be saved at the same speed: a single pipeline stage")
    assert expectation(loop(0.05)) == "saves energy by running up to 5 % slower"
    assert expectation(new_job()) == "saves energy at the same speed while stages wait for each other"
    assert expectation(new_job(target=PerformanceTarget(0.02))).endswith("more by running up to 2 % slower")
    assert expectation(loop(), is_member=True) == expectation(new_job())


def test_data_parallel_ranks_of_a_loop_stay_at_full_speed_with_or_without_a_permitted_slowdown() -> None:
    def ranks(max_slowdown_ratio: float) -> Job:
        job = new_job(num_pp_ranks=1, num_microbatches=1, num_dp_ranks=4, target=PerformanceTarget(max_slowdown_ratio))
        job.handle(joined(0, order=(Instruction(0, InstructionKind.F, 0),)))
        return job

    assert expectation(ranks(0.0)) == expectation(loop())
    assert expectation(ranks(0.05)) == "stays at full speed: 4 data-parallel ranks are not planned together yet"


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


def test_the_same_kind_of_notice_is_repeated_ever_more_rarely() -> None:
    notices = Notices()

    added = [n for n in range(3, 200) if notices.add_rarely("pause", f"at {n}", n, every=10)]

    assert added == [3, 13, 26, 52, 104]
    assert (notices.last, notices.last_at) == ("at 104", 104)
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
