"""The power service: targets from the frontiers of jobs, cuts at once, limits for the unknown, and all restored."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import FrontierPoint
from gpuenergyd.core.policy_api.power import PowerDecision
from gpuenergyd.daemon.capped_worker import CappedWorker
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.processes.power_queries import PowerQuery
from gpuenergyd.daemon.settings import REFUSED_IN_OBSERVE, load_settings
from gpuenergyd.errors import JobError, UsageError
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd_power.job_views import priority_of
from gpuenergyd_power.messages import PowerBudgetRequest
from gpuenergyd_power.service import PowerService
from gpuenergyd_power.water_fill import WaterFill
from tests.support.api_server import parts_of
from tests.support.job_stage import FakeWorker, Stage, plan, play, settle

FRONTIER = tuple(FrontierPoint(t, e, None) for t, e in ((0.010, 6.0), (0.011, 5.5), (0.014, 5.2)))
"""At full speed 600 W, at least 371 W."""
NS = 1_000_000_000


@dataclass
class Divider:
    """The policy host: water-filling with one frontier for all jobs that follow targets."""

    queries: list[PowerQuery] = field(default_factory=list)
    failure: str | None = None

    async def divide_power(self, query: PowerQuery) -> PowerDecision | PolicyFailure:
        """Return the division, or fail."""
        self.queries.append(query)
        if self.failure is not None:
            return PolicyFailure(self.failure)
        jobs = tuple(
            replace(job, frontier=FRONTIER if job.can_follow else (), slows_for_power=True) for job in query.view.jobs
        )
        decision: PowerDecision = WaterFill().divide(replace(query.view, jobs=jobs))
        return decision


class Host:
    """A stage of two ranks with a power service."""

    def __init__(self, state_dir: Path, *answers: ClockPlan, **given: Any) -> None:
        self.stage = Stage(*(answers or (plan("tuned", 1200),)))
        self.worker = FakeWorker()
        settings = load_settings(state_dir=state_dir, **({"mode": "control"} | given))
        self.capped = CappedWorker(self.worker, self.stage.gpus)
        self.stage.jobs.services = replace(self.stage.jobs.services, worker=self.capped)
        self.divider = Divider()
        divide_power = self.divider.divide_power
        self.power = PowerService(parts_of(self.stage, settings, capped=self.capped, divide_power=divide_power))
        self.now_ns = time.monotonic_ns()

    def sample(self, *powers_w: float | None, seconds: float = 0.1) -> None:
        """Let time pass with these readings of the GPUs."""
        for _ in range(round(seconds / 0.1)):
            self.now_ns += NS // 10
            samples = [
                GpuSample(f"GPU-{k}", self.now_ns, w, None, None, 1410, None, None) for k, w in enumerate(powers_w)
            ]
            self.stage.jobs.handle_samples(samples)
            self.power.handle_samples(samples)

    async def put(self, budget_w: float | None) -> None:
        self.power.put(PowerBudgetRequest(budget_w, reason="test"), "administrator")
        await self.check()

    async def check(self) -> None:
        """Let the periodic check run once, and what it starts."""
        await self.power._check()
        for _ in range(3):
            await settle()
        await self.capped.settled()

    def is_cut(self) -> bool:
        """Return whether the only job knows of a cut."""
        (runner,) = self.stage.jobs
        return runner.job.reports.cut.is_cut

    @property
    def power_time_s(self) -> float | None:
        (runner,) = self.stage.jobs
        return runner.job.target.power_time_s


def on_host(*answers: ClockPlan, **given: Any) -> Callable[[Callable[[Host], Awaitable[None]]], Callable[[Path], None]]:
    def test_of(scenario: Callable[[Host], Awaitable[None]]) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            async def run() -> None:
                host = Host(tmp_path, *answers, **given)
                await scenario(host)

            play(run)

        test.__name__ = test.__qualname__ = scenario.__name__
        return test

    return test_of


@on_host()
async def test_a_tuned_job_gets_a_target_that_fits_the_budget_and_loses_it_again(host: Host) -> None:
    host.stage.join()
    await host.stage.iterate(times=4)
    assert host.stage.phase == "tuned"
    host.sample(250.0, 250.0, 50.0)
    await host.put(555.0)
    view = host.divider.queries[-1].view
    assert view.other_power_w == pytest.approx(50.0)
    assert host.power_time_s == pytest.approx(5.5 / 505, rel=0.02)
    state = host.power.state()
    assert state.predicted_w == pytest.approx(555.0)
    assert state.jobs[0].job_name == "job"
    assert host.stage.policy.views[-1].target.power_time_s == host.power_time_s
    await host.put(None)
    assert host.power_time_s is None
    assert host.power.state().power_budget_w is None
    assert [event.after for event in host.stage.events("power-budget")][:1] == ["555 W"]


@on_host(plan("tuned", 1200), plan("slower", 900, PlanPurpose.TRIAL))
async def test_a_job_keeps_its_target_while_its_policy_measures_slower_clocks_for_it(host: Host) -> None:
    host.stage.join()
    await host.stage.iterate(times=2)
    host.sample(250.0, 250.0, 50.0)
    await host.put(555.0)
    assert host.stage.phase == "trial"
    before_s = host.power_time_s
    assert before_s is not None
    await host.put(556.0)
    assert host.power_time_s == pytest.approx(before_s, rel=0.01)
    assert host.power.state().jobs[0].limit_w is None


@on_host()
async def test_measured_power_above_a_new_budget_is_cut_at_once_and_the_jobs_know(host: Host) -> None:
    host.stage.join()
    await host.stage.iterate(times=4)
    host.sample(300.0, 300.0, 50.0)
    await host.put(500.0)
    host.sample(300.0, 300.0, 50.0)
    await host.capped.settled()
    assert host.power.state().is_cutting
    assert host.is_cut()
    lowest = min(mhz for _, mhz, _ in host.worker.requested_clocks)
    assert lowest < 1410
    await host.put(None)
    assert not host.is_cut()
    assert ("restore", ("GPU-2",)) in host.worker.calls
    events = [(event.before, event.after) for event in host.stage.events("power-budget")]
    assert ("planned", "lowered") in events


@on_host(power_budget_w=640.0)
async def test_a_job_that_nobody_knows_gets_a_limit_until_it_is_tuned(host: Host) -> None:
    host.sample(60.0, 60.0, 40.0)
    host.stage.join()
    await host.check()
    await host.check()
    assert host.worker.power_limits[-2:] == [("GPU-0", 300.0), ("GPU-1", 300.0)]
    assert host.power.state().jobs[0].limit_w == pytest.approx(300.0)
    await host.stage.iterate(times=4)
    await host.check()
    assert host.power.state().jobs[0].limit_w is None
    assert host.worker.power_limits[-1][1] is None


@on_host()
async def test_limits_go_with_the_budget_although_the_backstop_never_acted(host: Host) -> None:
    host.sample(60.0, 60.0, 40.0)
    host.stage.join()
    await host.put(640.0)
    await host.check()
    assert not host.power.state().is_cutting
    assert host.worker.power_limits[-2:] == [("GPU-0", 300.0), ("GPU-1", 300.0)]
    num_restored = host.worker.calls.count(("restore", ("GPU-0",)))
    host.power.put(PowerBudgetRequest(None), "administrator")
    await host.capped.settled()
    assert host.worker.calls.count(("restore", ("GPU-0",))) == num_restored + 1


@on_host()
async def test_a_policy_that_fails_is_reported_and_the_backstop_still_holds(host: Host) -> None:
    host.divider.failure = "ZeroDivisionError"
    host.stage.join()
    host.sample(300.0, 300.0, 50.0)
    await host.put(400.0)
    host.sample(300.0, 300.0, 50.0)
    trouble = host.power.trouble
    assert trouble is not None
    assert "'water-fill' failed: ZeroDivisionError" in trouble
    assert host.power.state().is_cutting


@on_host()
async def test_a_budget_that_plans_cannot_reach_is_reported_with_the_least(host: Host) -> None:
    host.stage.join()
    await host.stage.iterate(times=4)
    host.sample(200.0, 150.0, 50.0)
    await host.put(300.0)
    trouble = host.power.trouble
    assert trouble is not None
    assert "power budget of 300 W: 421 W is the least that plans can reach" in trouble


def test_a_requested_budget_outlives_the_daemon_and_observing_daemons_refuse_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = Host(tmp_path)
        await host.put(700.0)
        again = Host(tmp_path)
        await again.check()
        assert again.power.state().power_budget_w == 700.0
        observing = Host(tmp_path, mode="observe")
        await observing.check()
        assert observing.power.state().power_budget_w is None
        assert observing.power.trouble == f"not in force: power budget of 700 W: {REFUSED_IN_OBSERVE}"
        with pytest.raises(JobError, match="mode = 'observe'"):
            observing.power.put(PowerBudgetRequest(500.0), "administrator")
        with pytest.raises(UsageError, match="-1 W"):
            again.power.put(PowerBudgetRequest(-1.0), "administrator")
        assert again.power.state().power_budget_w == 700.0

    play(scenario)


@on_host()
async def test_a_flood_of_budgets_leaves_the_last_in_force_and_decides_once(host: Host) -> None:
    host.stage.join()
    await host.stage.iterate(times=4)
    host.sample(150.0, 150.0, 50.0)
    for budget_w in range(500, 800):
        host.power.put(PowerBudgetRequest(float(budget_w)), "administrator")
    await asyncio.sleep(0)
    await host.check()
    assert host.power.state().power_budget_w == 799.0
    assert len(host.divider.queries) <= 3
    assert host.divider.queries[-1].view.budget_w == 799.0


@pytest.mark.parametrize(
    ("text", "priority"), [("0", 0), ("9", 9), ("", 5), ("-1", 5), ("10", 5), ("high", 5), ("²", 5), ("٣", 5)]
)
def test_only_a_digit_is_a_priority(text: str, priority: int) -> None:
    assert priority_of({"priority": text}) == priority
    assert priority_of({}) == 5
