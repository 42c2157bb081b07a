"""Services that decide the targets of jobs: the contract of `IterationWatcher`."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.core.job.messages import TargetChanged
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.ports import IterationWatcher, RunningJob
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_carbon.service import CarbonService
from tests.support.api_server import parts_of
from tests.support.job_stage import Stage


class EvenTarget:
    """A stranger's service: every job may be 3 % slower at all times."""

    def iteration_done(self, runner: RunningJob, *_: object, **__: object) -> None:
        runner.handle(TargetChanged(PerformanceTarget(0.03)))

    def job_ended(self, *_: object, **__: object) -> None: ...

    target_posted = follow = charge_others = job_ended

    def plan_excess_s(self, runner: RunningJob) -> float:
        return 0.0 * runner.job.num_iterations

    def status(self, runner: RunningJob) -> Mapping[str, Any]:
        return {"target": {"reason": f"always for {runner.job_id}"}, "carbon": None}


def watched_by(name: str, folder: Path) -> tuple[Stage, IterationWatcher]:
    """Return a host on which one service decides targets."""
    stage = Stage()
    if name == "carbon":
        return stage, CarbonService(parts_of(stage, load_settings(state_dir=folder, carbon_zone="GB"))).targets
    stage.jobs.watch(watcher := EvenTarget(), "GB")
    return stage, watcher


@pytest.mark.parametrize("name", ["even", "carbon"])
def test_one_service_decides_targets_and_gives_fields_of_each_job(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        stage, watcher = watched_by(name, tmp_path)
        runner = stage.jobs.runner(stage.join())
        assert runner is not None
        await stage.iterate(times=3)

        assert {*watcher.status(runner)} == {"target", "carbon"}
        assert watcher.plan_excess_s(runner) == 0.0
        assert runner.job.target.max_slowdown_ratio == (0.03 if name == "even" else 0.0)
        assert stage.jobs.services.carbon_zone == "GB"
        with pytest.raises(GpuEnergyError, match="another service decides the targets of jobs already"):
            stage.jobs.watch(EvenTarget(), "DE")
        await stage.jobs.close("the test ends")

    asyncio.run(scenario())
