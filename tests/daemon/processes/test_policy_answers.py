"""Answers of the policy host to each kind of request, without its process."""

import io
import os
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.intensity import HOUR
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetView
from gpuenergyd.daemon.processes.policy_host import (
    MAX_LINE_BYTES,
    PlanAnswer,
    PlanRequest,
    PolicyHost,
    ServiceTask,
    run,
)
from gpuenergyd.daemon.processes.target_queries import EncodedSeries, TargetQuery
from gpuenergyd.daemon.processes.view_delta import ViewSender
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_carbon.forecasting import TASK, ForecastQuery, ForecastReply, TimingValueQuery
from tests.daemon.processes.test_policy_host import view
from tests.support.carbon_traces import made_up_trace

TRACE = made_up_trace(num_days=35, seed=3)


@pytest.fixture(autouse=True)
def _hostile_policies_are_installed(hostile_distribution: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(hostile_distribution))


def request(policy: str, job_id: str = "a", request_id: int = 1) -> PlanRequest:
    return PlanRequest(request_id, job_id, policy, ViewSender().difference(view(job_id)))


def target_question(target_policy: str) -> PlanRequest:
    asked = TargetView(
        "a", TRACE.end_at, 0.1, baseline=BaselineView(1.0, 100.0, 10), num_iterations_done=10, active_time_s=10.0
    )
    return PlanRequest(7, "a", "polite", target=TargetQuery(target_policy, asked, EncodedSeries.of(TRACE)))


def plan_id(answer: PlanAnswer) -> str:
    assert isinstance(answer.plan, ClockPlan), answer.error
    return answer.plan.plan_id


def test_each_job_keeps_its_policy_until_it_is_discarded() -> None:
    host = PolicyHost()
    sender = ViewSender()
    known = view("a")

    asked = [host.answer(PlanRequest(k, "a", "polite", sender.difference(known))) for k in range(2)]
    other = host.answer(request("polite", "b"))
    forgotten = host.answer(PlanRequest(8, "a", ""))
    anew = host.answer(request("polite", "a"))

    assert [plan_id(answer) for answer in asked] == ["polite-a-1", "polite-a-2"]
    assert plan_id(other) == "polite-b-1"
    assert (forgotten.request_id, forgotten.plan, forgotten.error) == (8, None, None)
    assert plan_id(anew) == "polite-a-1"


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("raises", "RuntimeError: no idea"),
        ("garbage", "next_plan returned dict, not a ClockPlan"),
        ("no-policy", "has no method next_plan"),
        ("nope", "no policy 'nope'; installed: "),
    ],
)
def test_a_policy_failure_is_one_line_and_the_next_job_is_served(policy: str, error: str) -> None:
    host = PolicyHost()

    bad = host.answer(request(policy, "bad"))

    assert bad.plan is None
    assert bad.error is not None
    assert error in bad.error
    assert "\n" not in bad.error
    assert plan_id(host.answer(request("polite"))) == "polite-a-1"


def test_preloading_a_policy_answers_with_an_import_error() -> None:
    host = PolicyHost()

    errors = [host.answer(PlanRequest(3, "", policy)).error for policy in ("polite", "broken-import", "nope")]

    assert errors[0] is None
    assert "ModuleNotFoundError" in (errors[1] or "")
    assert (errors[2] or "").startswith("UnknownPolicyError: no policy 'nope'; installed: ")


def test_every_request_is_answered_under_its_id_and_unencodable_results_with_the_error() -> None:
    requests = [request("unsendable", "x", 11), request("polite", "a", 12), PlanRequest(13, "x", "")]
    answers = io.BytesIO()

    run(io.BytesIO(b"".join(encode(one) + b"\n" for one in requests)), answers)

    reported = [decode(line, PlanAnswer, max_bytes=MAX_LINE_BYTES) for line in answers.getvalue().splitlines()]
    assert [answer.request_id for answer in reported] == [11, 12, 13]
    assert (reported[0].error or "").startswith("the result cannot be encoded: ")
    assert plan_id(reported[1]) == "polite-a-1"
    assert reported[2] == PlanAnswer(13, host_pid=os.getpid())


def test_a_carbon_query_does_not_change_the_jobs_policy() -> None:
    host, sender = PolicyHost(), ViewSender()
    known = view("a")
    host.answer(PlanRequest(1, "a", "polite", sender.difference(known)))

    replies = [host.answer(target_question("constant-slowdown")) for _ in range(2)]

    assert [reply.error for reply in replies] == [None, None]
    assert replies[0].target is not None
    assert replies[0].target == replies[1].target
    assert replies[0].target.decision.target == PerformanceTarget(max_slowdown_ratio=0.1)
    assert plan_id(host.answer(PlanRequest(2, "a", "polite", sender.difference(known)))) == "polite-a-2"


def test_an_unknown_target_policy_is_a_one_line_error() -> None:
    answer = PolicyHost().answer(target_question("nope"))

    assert answer.target is None
    assert "'nope'" in (answer.error or "")


def answer_to(query: ForecastQuery) -> ForecastReply:
    answer = PolicyHost().answer(PlanRequest(1, "", "", task=ServiceTask(TASK, encode(query).decode())))
    assert answer.result is not None, answer.error
    return decode(answer.result.text.encode(), ForecastReply, max_bytes=MAX_LINE_BYTES)


def test_a_task_of_a_service_returns_a_forecast_and_the_timing_value_if_requested() -> None:
    history = EncodedSeries.of(TRACE)
    worth = TimingValueQuery(max_slowdown_ratio=0.1, job_hours=24.0, host_power_w=100.0)

    plain, both = (answer_to(query) for query in (ForecastQuery(history), ForecastQuery(history, worth)))

    assert plain.forecast.hours[0].target_at == TRACE.end_at
    assert plain.forecast.hours[-1].target_at == TRACE.end_at + 71 * HOUR
    assert plain.timing_value is None
    assert both.timing_value is not None
    assert both.timing_value.max_slowdown_ratio == 0.1
    assert both.timing_value.is_frontier_assumed


def test_an_unknown_task_is_a_one_line_error() -> None:
    answer = PolicyHost().answer(PlanRequest(1, "", "", task=ServiceTask("nope", "")))

    assert answer.error == "UnknownPolicyError: no entry point 'nope' in gpuenergyd.tasks"
