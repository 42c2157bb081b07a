"""Plans prepared for a suspected straggler: asked for once, used if the straggler is confirmed, else without effect."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.jobs.plan_source import SuspectedPacePlan
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from tests.support.job_run import JobRun
from tests.support.job_stage import FakePolicy, plan, settle

SUSPECTED_S, PREPARED_S = 1.2, 1.2 * 0.995
SLOWER = plan("slower", 900)


def a_view() -> JobView:
    view = JobRun().asked().job.view()
    assert view is not None
    return view


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
