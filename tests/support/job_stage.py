"""A job of two ranks in this process, with fakes of the GPU worker, the policy host and the history database."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import AccountRules
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.jobs.clock_requests import Admission
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.processes.plugins import PolicyNames
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import LeaseOwner
from gpuenergyd.gpu.restore.executor import RestoreOutcome, RestoreResult
from gpuenergyd.gpu.restore.journal import Control
from gpuenergyd.store.records import ControlEventRecord, Record
from gpuenergyd.wire.clock_request import RankClockRequest
from gpuenergyd.wire.messages import IterationReport, PlanSlice, RankRegistration
from gpuenergyd_across_hosts.host.pipeline_member import PipelineMembers
from tests.support.closing import AT_END, close_all
from tests.support.worker_link import WorkerByMethods

CLOCKS_MHZ = (1410, 1200, 900)
DEFAULT_LIMIT_W = 400.0
SCHEDULE = one_forward_one_backward(2, 2)
ME = PeerCredentials(os.getpid(), os.geteuid(), os.getegid())
"""A process that outlives the tests: this one, or that which has forked it."""


@dataclass
class FakeWorker(WorkerByMethods):
    """Records its calls; `refusal` makes it refuse leases."""

    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    requested_clocks: list[tuple[str, int, int]] = field(default_factory=list)
    timetables: list[tuple[int, ...]] = field(default_factory=list)
    """All later clocks of each request."""
    refusal: str | None = None
    owner: LeaseOwner | None = None
    sets_clocks: bool | None = None
    """Of the last lease."""
    power_limits: list[tuple[str, float | None]] = field(default_factory=list)
    limit_refusal: str | None = None
    """Refuses power limits and power profiles."""
    restore_refusal: str | None = None
    restore_result: RestoreResult = RestoreResult.RESTORED
    power_profiles: list[tuple[str, int | None]] = field(default_factory=list)
    may_lease: asyncio.Event | None = None
    """Leases are recorded at once, and granted once this is set."""

    async def lease(
        self, lease_id: str, gpu_uuids: Sequence[str], owner: LeaseOwner, *, sets_clocks: bool = True
    ) -> None:
        """Record it, or refuse."""
        self.sets_clocks = sets_clocks
        self.calls.append(("lease", tuple(gpu_uuids)))
        self.owner = owner
        assert lease_id == owner.job_id
        if self.refusal is not None:
            raise GpuError(self.refusal)
        if self.may_lease is not None:
            await self.may_lease.wait()

    async def lower_power_limit(
        self, lease_id: str, gpu_uuid: str, power_limit_w: float | None, owner: LeaseOwner
    ) -> float:
        """Record it, or refuse."""
        assert (lease_id, owner) == (owner.job_id, self.owner)
        if self.limit_refusal is not None:
            raise GpuError(self.limit_refusal)
        self.power_limits.append((gpu_uuid, power_limit_w))
        return DEFAULT_LIMIT_W if power_limit_w is None else power_limit_w

    async def set_power_profile(
        self, lease_id: str, gpu_uuid: str, power_profile: int | None, owner: LeaseOwner
    ) -> tuple[int, ...]:
        """Record it, or refuse."""
        assert (lease_id, owner) == (owner.job_id, self.owner)
        if self.limit_refusal is not None:
            raise GpuError(self.limit_refusal)
        self.power_profiles.append((gpu_uuid, power_profile))
        return () if power_profile is None else (power_profile,)

    async def restore(self, gpu_uuids: Sequence[str], reason: str) -> tuple[RestoreOutcome, ...]:
        """Record it, or refuse."""
        assert reason
        if self.restore_refusal is not None:
            raise GpuError(self.restore_refusal)
        self.calls.append(("restore", tuple(gpu_uuids)))
        return tuple(
            RestoreOutcome(uuid, Control.SM_CLOCK_LOCK, self.restore_result, "clock lock removed") for uuid in gpu_uuids
        )

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        assert request.sent_mono_ns
        later_mhz = request.later[0].sm_clock_mhz if request.later else 0
        self.requested_clocks.append((gpu_uuid, request.sm_clock_mhz, later_mhz))
        self.timetables.append(tuple(clock.sm_clock_mhz for clock in request.later))


@dataclass
class FakePolicy:
    """Returns scripted answers in order, then repeats the plan in force."""

    answers: list[ClockPlan | PolicyFailure] = field(default_factory=list)
    views: list[JobView] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """The policy of each question."""
    forgotten: list[str] = field(default_factory=list)

    activity = None

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        """Return the next scripted answer."""
        assert job_id == view.job_id
        assert policy.partition(":")[0] == "scripted"
        self.asked.append(policy)
        self.views.append(view)
        return self.answers.pop(0) if self.answers else view.issued_plans[-1]

    async def preload(self, policy: str) -> None:
        """Accept the scripted policy only."""
        assert policy == "scripted"

    async def check(self, policy: str) -> str | None:
        """Accept any option but `broken`."""
        return "UsageError: no such option" if policy.endswith("broken=1") else None

    async def drop_job(self, job_id: str) -> None:
        """Record the call."""
        self.forgotten.append(job_id)


@dataclass
class FakeHistory:
    """Keeps all records."""

    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.records.append(record)


def plan(plan_id: str, clock_mhz: int, purpose: PlanPurpose = PlanPurpose.TUNED) -> ClockPlan:
    return ClockPlan(
        plan_id,
        purpose,
        tuple(
            RankClocks(r, (clock_mhz,) * len(order), constant_clock_changes(order, clock_mhz))
            for r, order in enumerate(SCHEDULE.orders)
        ),
        reason="as scripted",
    )


class Stage:
    """Two ranks of one job in this process, on two GPUs, with faked services; the end of the test ends the job."""

    num_stage_ranks = 1

    def __init__(self, *answers: ClockPlan | PolicyFailure, is_observing: bool = False) -> None:
        self.worker, self.policy, self.history = FakeWorker(), FakePolicy(list(answers)), FakeHistory()
        self.gpus = Gpus()
        self.gpus.update(
            GpuIdentity(
                f"GPU-{r}",
                r,
                "A100",
                CLOCKS_MHZ,
                is_simulated=True,
                blocking_power_w=80.0,
                default_power_limit_w=DEFAULT_LIMIT_W,
                min_power_limit_w=100.0,
                power_profiles=(0, 1),
            )
            for r in range(3)
        )
        self.jobs = Jobs(
            services=JobServices(
                worker=self.worker,
                policy=self.policy,
                history=self.history,
                gpus=self.gpus,
                observation_limit_s=0.0,
                is_observing=is_observing,
            ),
            rules=JobRules(
                warmup_iterations=0,
                baseline_iterations=2,
                fallback_iterations=3,
                account=AccountRules(first_income_s=60.0),  # plans begin at once
            ),
            default_policy="scripted",
            default_max_slowdown_ratio=0.0,
            policies=PolicyNames(lambda: ("scripted",)),
            clock_socket_path="/clock",
            max_ranks_per_user=8,
            max_jobs_per_user_per_h=1000,
            silence_limit_s=0.001,
        )
        self.jobs.pipelines = PipelineMembers(self.jobs)
        self.tokens: list[str] = []
        self.next_index = 0
        self.sequence = 0
        AT_END.append(lambda: self.jobs.close("the test is over"))

    def join(self) -> str:
        """Register both ranks; return the job's id."""
        for pp_rank in range(2):
            registered = self.jobs.register(registration(pp_rank), ME, os.pidfd_open(ME.pid))
            self.tokens.append(registered.rank_token)
        return registered.job_id

    async def iterate(self, *, plan_epoch: int = 0, times: int = 1) -> list[tuple[PlanSlice, ...]]:
        """Report iterations of all ranks; return the plans that each rank was given."""
        given: list[tuple[PlanSlice, ...]] = [() for _ in self.tokens]
        for _ in range(times):
            for r, token in enumerate(self.tokens):
                own = report(token, r // self.num_stage_ranks, self.next_index, plan_epoch)
                reply = self.jobs.handle_report(own, ME)
                assert reply is not None
                given[r] += reply.plans
            self.next_index += 1
            await settle()
        return given

    async def begin(self, *, times: int = 1) -> JobRunner:
        """Register all ranks and report iterations; return the only job."""
        self.join()
        await self.iterate(times=times)
        (runner,) = self.jobs
        return runner

    def send(self, *, pp_rank: int = 0, clock_mhz: int = 1200, plan_epoch: int) -> Admission:
        self.sequence += 1
        request = ClockRequest(clock_mhz, time.monotonic_ns(), plan_epoch=plan_epoch)
        token = bytes.fromhex(self.tokens[pp_rank])
        return self.jobs.clock_requests.admit(RankClockRequest(token, self.sequence, request), ME)

    def events(self, action: str) -> list[ControlEventRecord]:
        return [r for r in self.history.records if isinstance(r, ControlEventRecord) and r.action == action]

    @property
    def phase(self) -> str:
        """The phase of the only job."""
        (runner,) = self.jobs
        return runner.job.phase


def registration(pp_rank: int) -> RankRegistration:
    return RankRegistration(
        protocol_version=1,
        job_name="job",
        run_key="1",
        pp_rank=pp_rank,
        num_pp_ranks=2,
        dp_rank=0,
        schedule_name="1f1b",
        num_microbatches=2,
        num_chunks=1,
        order=tuple((str(i.kind), i.microbatch_index, i.chunk_index) for i in SCHEDULE.orders[pp_rank]),
        gpu_uuid=f"GPU-{pp_rank}",
    )


_WAITING_STEPS = 3
"""Time in which a rank waits for the other one, in instructions: more than the pipeline needs."""


def report(token: str, pp_rank: int, index: int, plan_epoch: int) -> IterationReport:
    end_ns = time.monotonic_ns()
    step_ns = 100_000_000  # long enough that no test takes the time after a report for a gap
    order = SCHEDULE.orders[pp_rank]
    begin_ns = end_ns - step_ns * (len(order) + _WAITING_STEPS)
    return IterationReport(
        rank_token=token,
        iteration_index=index,
        plan_epoch=plan_epoch,
        begin_mono_ns=begin_ns,
        end_mono_ns=end_ns,
        next_begin_mono_ns=end_ns,
        instructions=tuple(
            (str(i.kind), i.microbatch_index, 0, begin_ns + k * step_ns, begin_ns + (k + 1) * step_ns)
            for k, i in enumerate(order)
        ),
    )


async def settle() -> None:
    """Let the event loop run all pending callbacks."""
    for _ in range(20):
        await asyncio.sleep(0)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario on an event loop of its own."""

    async def run() -> None:
        try:
            await scenario()
        finally:
            await close_all()

    asyncio.run(run())
