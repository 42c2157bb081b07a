"""Sources of plans: what each answers, and when."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpuenergyd.core.distributed.pace import PaceEstimator
from gpuenergyd.core.job.messages import Event, PlanDecided, PolicyFailed
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd.daemon.jobs import plan_source
from gpuenergyd.daemon.jobs.plan_source import (
    HELD_ITERATIONS,
    PermittedPlans,
    PolicyHostPlans,
    PostedPlans,
    PredictionOnly,
    SuspectedPacePlan,
)
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from tests.support.job_run import JobRun
from tests.support.job_stage import ME, FakeHistory, FakePolicy, Stage, plan, play, registration, settle

TUNED = plan("tuned", 1200)
SUSPECTED_S, PREPARED_S = 1.2, 1.2 * 0.995
SLOWER = plan("slower", 900)


def a_view() -> JobView:
    view = JobRun().asked().job.view()
    assert view is not None
    return view


def permitted(host: FakePolicy, handle: Callable[[Event], None], may_set: Callable[[], bool]) -> PermittedPlans:
    return PermittedPlans(
        PolicyHostPlans("j", lambda: "scripted", host, handle),
        PredictionOnly("j", lambda: "scripted", host, FakeHistory(), lambda: 12),
        lambda: frozenset(Lever) if may_set() else frozenset(),
    )


def test_the_policy_host_answers_with_a_plan_or_a_failure() -> None:
    events: list[Event] = []

    async def scenario() -> None:
        source = permitted(FakePolicy([TUNED, PolicyFailure("late")]), events.append, lambda: True)
        for _ in range(2):
            source.ask(a_view())
            await settle()
        await source.close()

    asyncio.run(scenario())

    assert events == [PlanDecided(TUNED), PolicyFailed("late")]


def test_while_a_straggler_is_suspected_a_question_waits_for_the_outcome() -> None:
    events: list[Event] = []
    slower = plan("slower", 900)
    host = FakePolicy([slower, TUNED, slower])

    async def scenario() -> None:
        tuning, view = permitted(host, events.append, lambda: True).tuning, a_view()
        tuning.prepared.prepare(lambda: view, 1.2)
        tuning.ask(view)
        await settle()
        assert (len(host.views), events) == (1, []), "only the plan for the straggler was asked for"
        tuning.release_in_time()
        await settle()
        assert events == []
        tuning.prepared.prepare(lambda: view, None)
        tuning.release_in_time()
        await settle()
        assert events == [PlanDecided(TUNED)]

        tuning.prepared.prepare(lambda: view, 1.2)
        tuning.ask(view)
        pace_s = tuning.prepared.usable_time_s(1.2)
        tuning.release(TUNED)
        assert events[1:] == [PlanDecided(TUNED)], "the plan in force, at once"
        tuning.ask(replace(view, target=replace(view.target, straggler_time_s=pace_s)))
        tuning.release()
        await settle()
        await tuning.close()

    asyncio.run(scenario())

    assert events[2:] == [PlanDecided(slower)]
    assert len(host.views) == 3


def test_a_question_does_not_wait_for_long_for_a_suspicion_that_neither_ends_nor_is_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Event] = []
    host = FakePolicy([plan("slower", 900), TUNED, TUNED])

    async def scenario() -> None:
        tuning, view = permitted(host, events.append, lambda: True).tuning, a_view()
        tuning.prepared.prepare(lambda: view, 1.2)
        tuning.ask(view)
        later_s = time.monotonic() + (HELD_ITERATIONS + 1) * view.baseline.iteration_time_s
        monkeypatch.setattr(plan_source, "time", SimpleNamespace(monotonic=lambda: later_s))
        tuning.release_in_time()
        await settle()
        assert events == [PlanDecided(TUNED)]
        tuning.prepared.prepare(lambda: view, 1.2)
        tuning.ask(view)
        await settle()
        assert events == [PlanDecided(TUNED)] * 2, "the same suspicion prepares nothing more"
        await tuning.close()

    asyncio.run(scenario())

    assert len(host.views) == 3


def test_while_clocks_may_not_be_set_the_question_stays_open_and_is_asked_again() -> None:
    events: list[Event] = []
    may_set_clocks: list[bool] = []
    host = FakePolicy([TUNED, TUNED])

    async def scenario() -> None:
        source = permitted(host, events.append, lambda: bool(may_set_clocks))
        source.ask(a_view())
        await settle()
        assert events == []
        assert [view.can_set_clocks for view in host.views] == [False]
        may_set_clocks.append(True)
        source.ask_again(a_view())
        await settle()
        source.ask_again(a_view())
        await settle()

    asyncio.run(scenario())

    assert events == [PlanDecided(TUNED)]
    assert [view.can_set_clocks for view in host.views] == [False, True]


def test_a_prediction_is_repeated_once_the_job_has_run_twice_as_long() -> None:
    host = FakePolicy([TUNED] * 4)
    num_iterations = 12
    asked_at: list[int] = []

    async def scenario() -> None:
        nonlocal num_iterations
        prediction = PredictionOnly("j", lambda: "scripted", host, FakeHistory(), lambda: num_iterations)
        tuning = PolicyHostPlans("j", lambda: "scripted", host, lambda _: None)
        source = PermittedPlans(tuning, prediction, frozenset)
        source.ask(a_view())
        await settle()
        for num_iterations in range(12, 60):
            before = len(host.views)
            source.ask_again(a_view())
            await settle()
            if len(host.views) > before:
                asked_at.append(num_iterations)
        await source.close()

    asyncio.run(scenario())

    assert asked_at == [24, 48]


def test_a_member_waits_at_full_speed_until_its_leader_posts_a_plan() -> None:
    events: list[Event] = []
    source = PostedPlans(lambda: True, events.append)

    source.ask(a_view())
    source.post(TUNED, is_followed=False)
    source.ask(a_view())
    source.post(plan("next", 900), is_followed=True)

    plans = [event.plan for event in events if isinstance(event, PlanDecided)]
    assert [own.plan_id for own in plans] == ["waiting", "tuned", "next"]
    assert plans[0].purpose is PlanPurpose.BASELINE


def test_a_member_whose_clocks_may_not_be_set_stays_at_full_speed() -> None:
    events: list[Event] = []
    source = PostedPlans(lambda: False, events.append, ClockPlan("posted", PlanPurpose.TUNED))

    source.ask(a_view())

    assert [event.plan.plan_id for event in events if isinstance(event, PlanDecided)] == ["waiting"]


def test_a_held_question_is_asked_when_the_pace_of_the_job_is_not_known_any_more() -> None:
    async def scenario() -> None:
        stage = Stage(TUNED)
        runner = await stage.begin(times=4)
        stage.jobs.replicas._with_replicas.add(runner.job_id)
        assert isinstance(runner.plans, PermittedPlans)
        runner.prepare_for_pace(1.2)
        view = runner.job.view()
        assert view is not None
        runner.plans.ask(view)
        await settle()
        num_asked = len(stage.policy.views)
        runner.job.knowledge.pace = PaceEstimator()

        stage.jobs.replicas.compare_pace(runner)
        await settle()

        assert len(stage.policy.views) == num_asked + 1

    play(scenario)


def test_a_member_of_a_pipeline_across_hosts_follows_no_clocks_where_plans_may_only_limit_power() -> None:
    async def scenario() -> None:
        stage = Stage()
        stage.jobs.services = replace(stage.jobs.services, levers=frozenset({Lever.POWER_LIMITS}))
        member = replace(registration(0), num_pp_ranks=1, is_pipeline_member=True)
        stage.jobs.register(member, ME, os.pidfd_open(ME.pid))
        (runner,) = stage.jobs
        assert isinstance(runner.plans, PostedPlans)

        assert not runner.plans.can_set_clocks()

    play(scenario)


def forced(view: JobView, straggler_time_s: float | None) -> JobView:
    return replace(view, target=replace(view.target, straggler_time_s=straggler_time_s))


def prepared(host: FakePolicy, tasks: list[asyncio.Task[None]]) -> SuspectedPacePlan:
    def spawn(asking: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(asking))

    return SuspectedPacePlan("j", lambda: "scripted", host, spawn)


def taken(
    *answers: ClockPlan | PolicyFailure, confirmed_s: float = SUSPECTED_S, later: JobView | None = None
) -> tuple[ClockPlan | None, FakePolicy]:
    """Return the plan that is ready when a suspected straggler is confirmed at a pace."""
    host, view = FakePolicy(list(answers)), a_view()

    async def scenario() -> ClockPlan | None:
        plans = prepared(host, [])
        for _ in range(2):
            plans.prepare(lambda: view, SUSPECTED_S)
        pace_s = plans.usable_time_s(confirmed_s)
        return await plans.plan_for(forced(later or view, pace_s))

    return asyncio.run(scenario()), host


def test_the_plan_for_a_confirmed_straggler_is_ready_and_was_asked_for_once() -> None:
    found, host = taken(SLOWER)

    assert found == SLOWER
    assert [view.target.straggler_time_s for view in host.views] == [pytest.approx(PREPARED_S)]


@pytest.mark.parametrize(("confirmed_s", "is_used"), [(1.2, True), (1.19, True), (1.18, False), (1.22, False)])
def test_a_prepared_pace_is_followed_if_it_is_close_to_the_confirmed_one(confirmed_s: float, *, is_used: bool) -> None:
    found, _ = taken(SLOWER, confirmed_s=confirmed_s)

    assert (found is not None) == is_used


def test_a_failure_and_a_plan_that_tries_clocks_are_no_prepared_plans() -> None:
    assert taken(PolicyFailure("late"))[0] is None
    assert taken(replace(SLOWER, purpose=PlanPurpose.TRIAL))[0] is None


def test_a_plan_prepared_before_another_one_was_issued_is_not_used() -> None:
    view = a_view()

    assert taken(SLOWER, later=replace(view, issued_plans=(*view.issued_plans, plan("other", 1000))))[0] is None
    assert taken(SLOWER, later=replace(view, generation=view.generation + 1))[0] is None


def test_a_suspicion_that_was_not_confirmed_leaves_nothing_behind() -> None:
    host, view = FakePolicy([SLOWER, SLOWER]), a_view()

    async def scenario() -> None:
        tasks: list[asyncio.Task[None]] = []
        plans = prepared(host, tasks)
        plans.prepare(lambda: view, SUSPECTED_S)
        await settle()
        plans.prepare(lambda: view, None)
        assert plans.usable_time_s(SUSPECTED_S) == SUSPECTED_S
        assert plans.usable_time_s(None) is None
        assert await plans.plan_for(forced(view, PREPARED_S)) is None
        plans.prepare(lambda: None, SUSPECTED_S)
        assert len(tasks) == 1, "without a view there is nothing to ask"

    asyncio.run(scenario())


def test_no_prepared_plan_answers_a_question_with_another_target() -> None:
    view = a_view()

    async def scenario() -> ClockPlan | None:
        plans = prepared(FakePolicy([SLOWER]), [])
        plans.prepare(lambda: view, SUSPECTED_S)
        return await plans.plan_for(view)

    assert asyncio.run(scenario()) is None
