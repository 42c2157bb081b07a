"""A training in virtual time whose job lives in a daemon's real shell: jobs, history, past jobs, policy.

Only the GPU worker is faked, and time: what each iteration took and cost is arithmetic, put where the worker's readings
would be. So nothing depends on how busy the host is.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from gpuenergyd.core.job.messages import Event, RankJoined, RankReported
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.jobs import registry
from gpuenergyd.daemon.jobs.past_jobs import PastJobStore
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.ports import HistoryPort, JobServices, PastJobPort, WorkerPort
from gpuenergyd.daemon.processes.plugins import PolicyNames
from gpuenergyd.daemon.registration import checked_iteration
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.wire.messages import IterationReport, PlanSlice, RankRegistration, RankRelease
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ
from tests.support.job_stage import ME, settle
from tests.support.waiting import LIMIT_S

LATENCY_S = 0.006
"""Of clock changes, as published for the GPU and as they are."""
_BEGAN_AGO_S = 180.0
"""Virtual instants lie in the daemon's past: longer ago than the longest run takes."""


@dataclass
class PolicyInProcess:
    """Answers as the policy host would, one policy per job."""

    make: type[ClockPolicy]
    views: dict[str, list[JobView]] = field(default_factory=dict)
    _policies: dict[str, ClockPolicy] = field(default_factory=dict)

    activity = None

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan:
        assert policy == "under-test"
        self.views.setdefault(job_id, []).append(view)
        return self._policies.setdefault(job_id, self.make()).next_plan(view)

    async def preload(self, policy: str) -> None:
        """Know it already."""
        assert policy == "under-test"

    async def drop_job(self, job_id: str) -> None:
        self._policies.pop(job_id, None)


@dataclass(frozen=True)
class CountingPastJobs(PastJobStore):
    """The past jobs of a history, which keep whom they were read for: until then no iteration is observed."""

    read_for: list[int] = field(default_factory=list)

    async def recall(self, uid: int, gpu_model_name: str) -> tuple[PastJob, ...]:
        try:
            return await super().recall(uid, gpu_model_name)
        finally:
            self.read_for.append(uid)


def virtual_daemon(
    policy: PolicyInProcess, worker: WorkerPort, history: HistoryPort, past_jobs: PastJobPort, num_gpus: int
) -> Jobs:
    """Return the jobs of a daemon with so many GPUs of one model."""
    gpus = Gpus()
    gpus.update(
        GpuIdentity(f"GPU-{r}", r, "A100 (virtual)", CLOCKS_MHZ, is_simulated=True, switch_latency_s=LATENCY_S)
        for r in range(num_gpus)
    )
    services = JobServices(
        worker=worker, policy=policy, history=history, gpus=gpus, observation_limit_s=60.0, past_jobs=past_jobs
    )
    return Jobs(
        services=services, rules=JobRules(), default_policy="under-test", default_max_slowdown_ratio=0.0,
        policies=PolicyNames(lambda: ("under-test",)), clock_socket_path="/clock", max_ranks_per_user=8,
        max_jobs_per_user_per_h=1000, silence_limit_s=3600.0,
    )  # fmt: skip


class DaemonTraining(VirtualTraining):
    """A virtual training that registers with a daemon's jobs, reports to them and follows the plans they reply."""

    def join(self, jobs: Jobs, run_key: str, begin_s: float | None = None) -> JobRunner:
        """Register all ranks as the next run of one job, which begins at an instant after those of earlier runs."""
        self._jobs = jobs
        self._tokens: list[str] = []
        self._parts: dict[int, dict[int, PlanSlice]] = {}
        self.has_lease = True
        self.now_s = max(1.0, time.monotonic() - _BEGAN_AGO_S) if begin_s is None else begin_s
        for r, order in enumerate(self.schedule.orders):
            gpu = jobs.services.gpus[f"GPU-{r}"]
            self.clocks[r], self.counters[r] = gpu.clocks, gpu.counter
            gpu.clocks.record(self._ns(self.now_s), self.clocks_mhz[0])
            gpu.counter.interrupt()
            gpu.counter.record(self._ns(self.now_s), self.total_j[r])
            registration = RankRegistration(
                protocol_version=1,
                job_name="virtual",
                run_key=run_key,
                pp_rank=r,
                num_pp_ranks=self.schedule.num_ranks,
                dp_rank=0,
                schedule_name=self.schedule.name,
                num_microbatches=self.schedule.num_microbatches,
                num_chunks=1,
                order=tuple((str(i.kind), i.microbatch_index, i.chunk_index) for i in order),
                gpu_uuid=f"GPU-{r}",
            )
            self._tokens.append(jobs.register(registration, ME, os.pidfd_open(ME.pid)).rank_token)
        (runner,) = jobs
        return runner

    async def train(self, num_iterations: int) -> None:
        """Train for so many iterations, letting the daemon work after each."""
        for _ in range(num_iterations):
            self.run(1)
            await settle()

    def leave(self) -> None:
        """End the run in order."""
        self._jobs.release(RankRelease(self._tokens[0]), ME)

    def feed(self, event: Event) -> None:
        match event:
            case RankJoined():
                pass  # by join()
            case RankReported():
                self._report(event.report)
            case _:
                super().feed(event)

    def _report(self, report: RankIteration) -> None:
        rows = tuple(
            (str(m.instruction.kind), m.instruction.microbatch_index, 0, m.begin_ns, m.end_ns)
            for m in report.instructions
        )
        message = IterationReport(
            rank_token=self._tokens[report.pp_rank],
            iteration_index=report.iteration_index,
            plan_epoch=report.plan_epoch,
            begin_mono_ns=report.begin_ns,
            end_mono_ns=report.end_ns,
            next_begin_mono_ns=report.next_begin_ns,
            instructions=rows,
        )
        with patch.object(registry, "checked_iteration", _arrived_at_once):
            reply = self._jobs.handle_report(message, ME)
        for plan_slice in reply.plans if reply is not None else ():
            parts = self._parts.setdefault(plan_slice.plan_epoch, {})
            # A plan may be given again: replies get lost.
            is_new = report.pp_rank not in parts
            parts[report.pp_rank] = plan_slice
            if is_new and len(parts) == self.schedule.num_ranks:
                changes = tuple(_changes(r, parts[r]) for r in sorted(parts))
                apply_at = plan_slice.apply_at_iteration
                self.slices.append((apply_at, plan_slice.plan_epoch, plan_slice.plan_id, changes))


def _arrived_at_once(message: IterationReport, pp_rank: int, stage_rank: int) -> RankIteration:
    """Return a report whose arrival in the daemon's time says nothing about how late virtual reports are."""
    return replace(checked_iteration(message, pp_rank, stage_rank), arrived_ns=0)


def _changes(pp_rank: int, plan_slice: PlanSlice) -> tuple[ClockChange, ...]:
    return tuple(
        ClockChange(Instruction(pp_rank, InstructionKind(kind), microbatch, chunk), offset_ns / 1e9, clock)
        for kind, microbatch, chunk, offset_ns, clock in plan_slice.changes
    )


async def until(predicate: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
    """Wait for what happens in another thread."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110  a thread sets no asyncio.Event
            await asyncio.sleep(0.005)
