"""Shares of a power budget from the policy host: frontiers are those of the jobs' policies, failures spoil nothing."""

from dataclasses import replace

import pytest

from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView
from gpuenergyd.core.policy_api.power import PowerJobView, PowerView
from gpuenergyd.core.policy_api.testing import job_view
from gpuenergyd.daemon.processes.policy_host import PlanAnswer, PlanRequest, PolicyHost
from gpuenergyd.daemon.processes.power_queries import PowerQuery, answer_power
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_power.water_fill import WaterFill

JOB = PowerJobView("job-1", 2, can_follow=True, power_limit_range_w=(100.0, 400.0))
QUERY = PowerQuery("water-fill", PowerView(900.0, (JOB,), other_power_w=100.0))
POINTS = (FrontierPoint(1.0, 1000.0, None), FrontierPoint(1.2, 900.0, None), FrontierPoint(2.0, 950.0, None))


class WithFrontiers(FullSpeed):
    """A policy with a frontier, and one for power that goes on beyond the least energy."""

    def frontier(self, view: JobView) -> tuple[FrontierPoint, ...]:
        """Return points up to the least energy."""
        assert view.job_id
        return POINTS[:2]

    def power_frontier(self, view: JobView) -> tuple[FrontierPoint, ...]:
        assert view.job_id
        return POINTS


class Broken(FullSpeed):
    """A policy whose frontier cannot be computed."""

    def power_frontier(self, view: JobView) -> tuple[FrontierPoint, ...]:
        raise ZeroDivisionError(view.job_id)


def test_query_and_answer_survive_the_channel() -> None:
    request = decode(encode(PlanRequest(1, "", "water-fill", power=QUERY)), PlanRequest, max_bytes=10_000)
    assert request.power == QUERY
    answer = PolicyHost().answer(request)
    assert answer.error is None
    again = decode(encode(answer), PlanAnswer, max_bytes=10_000)
    assert again.power is not None
    assert again.power.shares[0].limit_w is None
    assert again.power.predicted_w == 900.0


def test_an_unknown_power_target_is_an_error() -> None:
    answer = PolicyHost().answer(PlanRequest(1, "", "greedy", power=PowerQuery("greedy", QUERY.view)))
    assert answer.error is not None
    assert "no power target policy 'greedy'; installed: water-fill" in answer.error


def test_the_frontier_for_power_goes_beyond_the_least_energy() -> None:
    view = replace(job_view(), job_id="job-1")
    low = replace(QUERY, view=replace(QUERY.view, budget_w=700.0))
    decision = answer_power(WaterFill(), low, {"job-1": WithFrontiers()}, {"job-1": view})
    (share,) = decision.shares
    assert share.power_w == pytest.approx(600.0)
    assert share.iteration_time_s is not None
    assert 1.2 < share.iteration_time_s < 2.0


def test_a_policy_that_fails_makes_its_job_unknown() -> None:
    view = replace(job_view(), job_id="job-1")
    low = replace(QUERY, view=replace(QUERY.view, budget_w=700.0))
    decision = answer_power(WaterFill(), low, {"job-1": Broken()}, {"job-1": view})
    assert decision.shares[0].limit_w == pytest.approx(300.0)
