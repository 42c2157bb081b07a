"""Pins the types of the public API: checked by mypy and pyright, never run.

A change that breaks a call or an implementation in this file breaks programs of users: it needs an entry in the
changelog.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any, assert_type

import gpuenergyd
import gpuenergyd_trainers.deepspeed
import gpuenergyd_trainers.huggingface
import gpuenergyd_trainers.lightning
import gpuenergyd_trainers.megatron
import gpuenergyd_trainers.torch_pipelining
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.loop import LoopJob
from gpuenergyd.core.carbon.intensity import CarbonSignal
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import (
    ClockPolicy,
    FrontierPoint,
    FrontierPolicy,
    JobView,
    OfflinePlan,
    OfflinePlanner,
    OfflineRequest,
)
from gpuenergyd.core.policy_api.prior_policy import PriorPolicy, PriorView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetPolicy, TargetView
from gpuenergyd.core.policy_api.testing import SimulatedJob, job_view, pipeline_profile
from gpuenergyd_carbon.sources.source import CarbonSource, SourceOptions, SourceReply
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.loop import iterations

# --- training programs ---


def plain_loop(batches: Iterable[str]) -> None:
    """A plain training loop, with and without options."""
    with gpuenergyd.job("resnet") as job:
        assert_type(job, LoopJob)
        for _ in batches:
            assert_type(job.iteration(), AbstractContextManager[None])
            with job.iteration():
                pass
        job.pause()
    gpuenergyd.job(
        "resnet", gpu_uuid="GPU-0", socket_path="/run/gpuenergyd/gpuenergyd.sock", run_key="run-1",
        policy="bubble-aware", max_slowdown_ratio=0.05, num_iterations=1000,
    )  # fmt: skip
    assert_type(iterations(batches, job="resnet"), Iterator[str])


def pipelines(schedule: object, engine: object, config: object) -> None:
    """Every adapter for a pipeline framework returns a handle."""
    handle = gpuenergyd_trainers.torch_pipelining.attach(
        schedule, job="gpt-1.3b", gpu_uuid="GPU-0", num_microbatches=8, socket_path=None, run_key="run-1", dp_rank=0,
        policy="bubble-aware", max_slowdown_ratio=0.0, across_hosts=False, tp_rank=0, num_tp_ranks=1,
    )  # fmt: skip
    assert_type(handle, Handle)
    assert_type(handle.is_attached, bool)
    assert_type(handle.plan_epoch, int)
    assert_type(handle.num_errors, int)
    handle.detach()
    assert_type(gpuenergyd_trainers.deepspeed.attach(engine, job="gpt"), Handle)
    assert_type(gpuenergyd_trainers.megatron.attach(config, job="gpt", num_microbatches=32), Handle)


def callbacks() -> None:
    """Frameworks with callbacks get an object of their own callback class."""
    assert_type(gpuenergyd_trainers.lightning.gpuenergy_callback("resnet"), Any)
    assert_type(gpuenergyd_trainers.huggingface.gpuenergy_callback("bert"), Any)


# --- policies ---


class OneStepDown:
    """A clock policy that also returns its frontier."""

    def next_plan(self, view: JobView) -> ClockPlan:
        """Run every GPU at its second-highest clock."""
        ranks = [
            RankClocks(pp_rank, (gpu.supported_sm_clocks_mhz[1],) * len(order), constant_clock_changes(order, 1200))
            for pp_rank, (gpu, order) in enumerate(zip(view.gpus, view.schedule.orders, strict=True))
        ]
        return ClockPlan(
            plan_id=view.plan_id("one-step-down"),
            purpose=PlanPurpose.TUNED,
            ranks=tuple(ranks),
            reason="one step below the highest clock",
        )

    def prior(self, gpu_model_name: str, past_jobs: Sequence[PastJob]) -> PriorView:
        """Know nothing."""
        return PriorView(gpu_model_name, "nothing", len(past_jobs), ())

    def frontier(self, view: JobView) -> tuple[FrontierPoint, ...]:
        """Return no points."""
        assert_type(view.target, PerformanceTarget)
        return ()


class TwoPercent:
    """A target policy."""

    def next_target(self, view: TargetView) -> PerformanceTarget:
        """Allow a slowdown of 2 %."""
        assert_type(view.now_at, datetime)
        return PerformanceTarget(max_slowdown_ratio=0.02)


def plan_offline(request: OfflineRequest) -> OfflinePlan:
    """An offline planner is a function."""
    raise AssertionError(request)


CLOCK_POLICY: ClockPolicy = OneStepDown()
FRONTIER_POLICY: FrontierPolicy = OneStepDown()
PRIOR_POLICY: PriorPolicy = OneStepDown()
TARGET_POLICY: TargetPolicy = TwoPercent()


def test_my_policy(schedule: Schedule) -> None:
    """A unit test of a policy."""
    view = job_view(schedule, supported_sm_clocks_mhz=(1410, 1395), max_slowdown_ratio=0.05, baseline_energy_j=None)
    assert_type(CLOCK_POLICY.next_plan(view), ClockPlan)
    job = SimulatedJob(schedule, pipeline_profile(schedule, scales=(1.0, 1.1)), max_slowdown_ratio=0.05)
    assert_type(job.run_policy(CLOCK_POLICY, 20), ClockPlan)
    job.run(job.plans[-1], 3, delay_ratio=0.1, is_regular=False)
    assert_type(job.view(), JobView)
    assert_type(job.baseline.energy_j, float | None)


PLANNER: OfflinePlanner = plan_offline


def schedules() -> None:
    """Schedules are made by name, and consist of instructions."""
    schedule = make_schedule("1f1b", 4, 8)
    assert_type(schedule, Schedule)
    assert_type(schedule.orders[0][0], Instruction)
    assert_type(schedule.orders[0][0].kind, InstructionKind)


# --- carbon sources ---


class FixedSource:
    """A carbon source for one zone."""

    def __init__(self, options: SourceOptions) -> None:
        self._zone = options.zone

    @property
    def signal(self) -> CarbonSignal:
        """Which quantity the values are."""
        raise AssertionError(self._zone)

    @property
    def period_s(self) -> float:
        """How often there is a new value."""
        return 3600.0

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return no values."""
        del now_at
        return SourceReply(samples=())


def make_source(options: SourceOptions) -> CarbonSource:
    """An entry point of the group `gpuenergyd.carbon_sources`."""
    return FixedSource(options)


# --- tools ---


def tools(folder: Path) -> None:
    """The daemon's HTTP client and simulated GPUs."""
    client = DaemonClient(str(folder / "gpuenergyd.sock"))
    assert_type(client.get("/v1/status"), dict[str, Any])
    client.close()
    assert_type(SimulatedHost.create(folder / "world", ["a100-sxm"]), SimulatedHost)
