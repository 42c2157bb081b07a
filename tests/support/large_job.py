"""A large training job with synthetic ranks: the real code of members, of leaders and of their daemons in one process.

Each host holds the tensor-parallel ranks of one stage. Their measurements are arithmetic; everything between them and a
plan is real: the jobs of all ranks, the merge on each host, the exchange through the store, the leader, and the policy
in its own process. Time is virtual: an iteration is a number of rounds of all ranks, and what is reported are bytes and
CPU seconds. Replicas after the first get the plans of the first one's policy, which would be the same.
"""

import asyncio
import json
import math
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast
from unittest.mock import patch

from gpuenergyd.client.plans import NO_PLAN, PreparedPlan
from gpuenergyd.client.rank import RankClient
from gpuenergyd.core.job.messages import IterationObserved
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.ports import JobServices, PolicyPort
from gpuenergyd.daemon.processes.launch import POLICY_HOST_COMMAND, start_policy_child
from gpuenergyd.daemon.processes.plugins import PolicyNames
from gpuenergyd.daemon.processes.policy_client import PolicyClient, PolicyFailure
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.wire import MAX_ITERATION_REPORT_BYTES
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd.wire.messages import RankRegistration
from gpuenergyd_across_hosts.host.pipeline_leader import PipelineLeader
from gpuenergyd_across_hosts.host.pipeline_member import PipelineMembers
from gpuenergyd_across_hosts.messages.pipeline_messages import MemberPlan, MemberQuery, PipelineReport
from gpuenergyd_across_hosts.ranks import pipeline_leader, pipeline_member
from gpuenergyd_across_hosts.ranks.agreed_plans import AgreedPlans
from gpuenergyd_across_hosts.ranks.job_store import Store
from gpuenergyd_across_hosts.ranks.local_daemon import LocalDaemon
from gpuenergyd_across_hosts.ranks.pipeline_member import MemberExchange
from gpuenergyd_across_hosts.ranks.pipeline_place import PipelinePlace
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, a100_stages, a100_waiting_power_w
from tests.support.job_stage import ME, FakeHistory, FakeWorker
from tests.support.memory_store import MemoryStore

ITERATION_S = 1.0
"""Virtual time between iterations, as the exchange sees it: one a second."""
ROUNDS = 8
"""Exchanges of a carrying rank in one iteration: the most there are."""
SIBLING_ROUNDS = 2
"""Those of the other ranks, which do not use the store."""
OPERATION_BYTES = 64
"""Counted for each store operation in addition to key and value: lengths, framing and packet headers."""
NOISE_RATIO = 0.002
STEP_OVERHEAD_S = 0.02
COMMUNICATION_LATENCY_S = 0.001
LATENCY_S = 0.0005
"""Of clock changes: so short that an instruction runs at one clock, which keeps the arithmetic of 2,048 ranks cheap."""


@dataclass(frozen=True, slots=True)
class JobSize:
    """Size of a job."""

    num_pp_ranks: int
    num_tp_ranks: int
    num_dp_ranks: int
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """Training processes."""
        return self.num_pp_ranks * self.num_tp_ranks * self.num_dp_ranks


@dataclass
class CountingStore:
    """One host's connection to the job's store, which counts what the host sends and receives."""

    store: MemoryStore
    num_bytes: int = 0
    num_operations: int = 0

    @property
    def prefix(self) -> str:
        return self.store.prefix

    def within(self, folder: str) -> "CountingStore":
        return replace(self, store=self.store.within(folder))

    def set(self, key: str, value: str) -> None:
        self._count(key, len(value))
        self.store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """Read a key: a check, then the value."""
        found = self.store.get(key)
        self._count(key, 0)
        if found is not None:
            self._count(key, len(found))
        return found

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Read keys in two operations."""
        found = self.store.get_all(keys)
        names = "".join(f"{self.prefix}/{key}" for key in keys)
        self._count(names, 0)
        if found is not None:
            self._count(names, sum(map(len, found)) + 8 * len(found))
        return found

    def add(self, key: str, amount: int) -> int:
        self._count(key, 8)
        return self.store.add(key, amount)

    def _count(self, key: str, value_bytes: int) -> None:
        self.num_bytes += OPERATION_BYTES + len(self.prefix) + len(key) + value_bytes
        self.num_operations += 1


class FirstPolicy:
    """The policy host of the first replica's leader; measures how long its answers take."""

    activity = None

    def __init__(self) -> None:
        self.client = PolicyClient(lambda: start_policy_child(None, POLICY_HOST_COMMAND))
        self.plans: list[ClockPlan | PolicyFailure] = []
        self.answer_s: list[float] = []
        self.answer_cpu_s: list[float] = []
        """CPU time of the policy host: on a busy machine much less than the answer takes."""
        self.num_open = 0

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        self.num_open += 1
        began_s, began_cpu_s = time.monotonic(), self._cpu_s()
        plan = await self.client.next_plan(job_id, policy, view)
        self.answer_s.append(time.monotonic() - began_s)
        self.answer_cpu_s.append(self._cpu_s() - began_cpu_s)
        self.plans.append(plan)
        self.num_open -= 1
        return plan

    def _cpu_s(self) -> float:
        try:
            return int(Path(f"/proc/{self.client.pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9
        except (OSError, ValueError):
            return 0.0

    async def preload(self, policy: str) -> str | None:
        """Load the policy: only the leader's daemon would be asked for a plan."""
        return await self.client.preload(policy)

    async def drop_job(self, job_id: str) -> None:
        await self.client.drop_job(job_id)


class FollowingPolicy:
    """Answers as the first replica's policy did to the same question, by its number."""

    activity = None

    def __init__(self, first: FirstPolicy) -> None:
        self._first = first
        self._num_asked = 0

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        """Return the plan of the first replica, or the plan in force while there is none."""
        del job_id, policy
        known = self._first.plans
        self._num_asked = min(self._num_asked + 1, len(known))
        return known[self._num_asked - 1] if known else PolicyFailure(f"no plan yet for {view.job_id}")

    async def preload(self, policy: str) -> None:
        """Do nothing."""

    async def drop_job(self, job_id: str) -> None:
        """Do nothing."""


class InProcessDaemon(LocalDaemon):
    """A daemon called through its real codecs, from the thread of the ranks; counts the CPU time of the leader."""

    def __init__(self, members: PipelineMembers, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__("")
        self._members = members
        self._loop = loop
        self.leader_cpu_s = 0.0
        self.refusals: list[str] = []

    def post(self, path: str, message: dict[str, Any]) -> dict[str, Any] | None:
        body = json.dumps(message, separators=(",", ":")).encode()
        answer = asyncio.run_coroutine_threadsafe(self._answer(path, body), self._loop).result()
        reply: dict[str, Any] | None = json.loads(answer) if answer is not None else None
        return reply

    async def _answer(self, path: str, body: bytes) -> bytes | None:
        began_s = time.thread_time()
        reply: object
        match path:
            case "/v1/members":
                reply = self._members.state(decode(body, MemberQuery, max_bytes=65_536), ME)
            case "/v1/members/plan":
                plan = decode(body, MemberPlan, max_bytes=MAX_ITERATION_REPORT_BYTES)
                reply = await self._members.post_plan(plan, ME)
            case _:
                report = decode(body, PipelineReport, max_bytes=MAX_ITERATION_REPORT_BYTES)
                reply = await self._members.plan_pipeline(report, ME)
        answer = None if reply is None else encode(reply)
        if path == "/v1/pipelines":
            self.leader_cpu_s += time.thread_time() - began_s
        return answer


@dataclass
class FakeClient:
    """What the exchange uses of a rank's client."""

    rank_token: str
    iteration_index: int = -1


class Exchange(Protocol):
    """The exchange of a rank with the store and its daemon."""

    def run(self, store: Store, paces: Store | None) -> None:
        """Exchange once."""
        ...


@dataclass
class LargeRank:
    """One training process."""

    place: PipelinePlace
    runner: JobRunner | None
    """None where only the messages of a host exist."""
    client: FakeClient
    plans: AgreedPlans
    exchange: Exchange
    registration: RankRegistration | None = None
    plan: PreparedPlan = NO_PLAN
    """The plan of the present iteration."""


@dataclass
class LargeHost:
    """A host with the tensor-parallel ranks of one stage."""

    store: CountingStore
    members: PipelineMembers
    daemon: Any
    """The daemon of the host, or what answers in its place; with `leader_cpu_s`."""
    ranks: list[LargeRank] = field(default_factory=list)
    bytes_of_iteration: list[int] = field(default_factory=list)
    leader_cpu_of_iteration_s: list[float] = field(default_factory=list)


class LargeJob:
    """The job: `run` trains it for iterations until a tuned plan has run for some."""

    def __init__(
        self,
        size: JobSize,
        *,
        seed: int = 0,
        rules: JobRules | None = None,
        policy: str = "bubble-aware",
        max_slowdown_ratio: float = 0.0,
    ) -> None:
        self.size = size
        self.policy_name = policy
        self.max_slowdown_ratio = max_slowdown_ratio
        self.random = random.Random(seed)
        self.rules = rules or JobRules()
        self.schedule = one_forward_one_backward(size.num_pp_ranks, size.num_microbatches)
        self.graph = dependency_graph(self.schedule, communication_latency_s=COMMUNICATION_LATENCY_S)
        weights = [1.0 + 0.1 * self.random.random() for _ in range(size.num_pp_ranks)]
        weights[size.num_pp_ranks // 3] = 1.15
        self.work = a100_stages(weights, scale=1.0)
        self.policy = FirstPolicy()
        self.store = MemoryStore()
        self.hosts: list[LargeHost] = []
        self.now_s = 1000.0
        self.iteration_s = ITERATION_S
        self.index = -1
        self.wall_s_of_iteration: list[float] = []
        self._iteration_s: dict[str, float] = {}
        self._clocks: dict[str, list[Counter[tuple[InstructionKind, int]]]] = {}
        self._codec_cpu_s = 0.0

    # --- joining ---

    def join(self) -> None:
        """Register all ranks with the daemons of their hosts; call in the event loop."""
        self._loop = asyncio.get_running_loop()
        for dp in range(self.size.num_dp_ranks):
            for pp in range(self.size.num_pp_ranks):
                self.hosts.append(self._host(dp, pp))

    def _host(self, dp: int, pp: int) -> LargeHost:
        """Return the host of a stage, with its ranks registered."""
        size, loop = self.size, asyncio.get_running_loop()
        rows = tuple((str(i.kind), i.microbatch_index, i.chunk_index) for i in self.schedule.orders[pp])
        policy: PolicyPort = self.policy if dp == 0 and pp == 0 else FollowingPolicy(self.policy)
        jobs = self._jobs(f"{dp}-{pp}", policy)
        members = jobs.pipelines = PipelineMembers(jobs)
        host = LargeHost(CountingStore(self.store), members, InProcessDaemon(members, loop))
        for tp in range(size.num_tp_ranks):
            place = PipelinePlace(pp, size.num_pp_ranks, tp, size.num_tp_ranks, dp)
            host.ranks.append(self._register(host, jobs, place, rows))
        return host

    def _jobs(self, name: str, policy: PolicyPort) -> Jobs:
        gpus = Gpus()
        gpus.update(
            GpuIdentity(
                f"GPU-{name}-{k}", k, "A100 (virtual)", CLOCKS_MHZ, is_simulated=True, switch_latency_s=LATENCY_S,
                blocking_power_w=a100_waiting_power_w(CLOCKS_MHZ[0]),
            )
            for k in range(self.size.num_tp_ranks)
        )  # fmt: skip
        services = JobServices(FakeWorker(), policy, DroppedHistory(), gpus, observation_limit_s=60.0)
        return Jobs(
            services=services,
            rules=self.rules,
            default_policy=self.policy_name,
            default_max_slowdown_ratio=self.max_slowdown_ratio,
            policies=PolicyNames(lambda: (self.policy_name,)),
            clock_socket_path="/clock",
            max_ranks_per_user=self.size.num_tp_ranks,
            max_jobs_per_user_per_h=1000,
            silence_limit_s=3600.0,
        )

    def _register(
        self, host: LargeHost, jobs: Jobs, place: PipelinePlace, order: tuple[tuple[str, int, int], ...]
    ) -> LargeRank:
        (gpu,) = (gpu for gpu in jobs.services.gpus if gpu.identity.index == place.tp_rank)
        registration = RankRegistration(
            protocol_version=1, job_name="large", run_key=f"{place.name},run-1", pp_rank=0, num_pp_ranks=1,
            dp_rank=place.dp_rank, schedule_name="1f1b", num_microbatches=self.size.num_microbatches, num_chunks=1,
            order=order, gpu_uuid=gpu.identity.gpu_uuid, is_pipeline_member=True,
        )  # fmt: skip
        registered = jobs.register(registration, ME, os.pidfd_open(ME.pid))
        runner = jobs.runner(registered.job_id)
        assert runner is not None
        client, plans = FakeClient(registered.rank_token), AgreedPlans()
        exchange = MemberExchange(cast("RankClient", client), plans, place, host.daemon)
        return LargeRank(place, runner, client, plans, exchange, registration)

    def change_microbatches(self, num_microbatches: int) -> None:
        """Have all ranks register again, as in a ramp-up of the batch size; the iteration before is not observed."""
        self.size = replace(self.size, num_microbatches=num_microbatches)
        self.schedule = one_forward_one_backward(self.size.num_pp_ranks, num_microbatches)
        self.graph = dependency_graph(self.schedule, communication_latency_s=COMMUNICATION_LATENCY_S)
        self._iteration_s, self._clocks, self._last_followed = {}, {}, ()
        for host in self.hosts:
            for rank in host.ranks:
                assert rank.registration is not None
                order = tuple(
                    (str(i.kind), i.microbatch_index, i.chunk_index) for i in self.schedule.orders[rank.place.pp_rank]
                )
                rank.registration = replace(rank.registration, num_microbatches=num_microbatches, order=order)
                rank.plans.clear()
                host.members.jobs.register(rank.registration, ME, os.pidfd_open(ME.pid))

    # --- training ---

    async def run(self, *, num_tuned: int, max_iterations: int, log: Callable[[str], None] = lambda _: None) -> None:
        """Train until one tuned plan has run for so many iterations; another plan begins the count anew."""
        self.join()
        log(f"{self.size.num_ranks} ranks joined")
        tuned, last_followed = 0, set[str]()
        while tuned < num_tuned and self.index + 1 < max_iterations:
            began_s = time.monotonic()
            followed = await asyncio.to_thread(self._iteration)
            await self._settle()
            purposes = Counter(self._purpose(plan_id) for plan_id in followed)
            is_same = set(followed) == last_followed
            tuned = (tuned + 1 if is_same else 1) if set(purposes) == {PlanPurpose.TUNED} else 0
            last_followed = set(followed)
            self.wall_s_of_iteration.append(time.monotonic() - began_s)
            leader = self.leaders()[0] if self.leaders() else None
            phase = f"{leader.job.phase}: {leader.job.phase_reason}" if leader is not None else "no leader"
            log(
                f"iteration {self.index}: {dict(purposes)}, {phase}, policy {self.policy.answer_s[-1:]} s,"
                f" {max(host.bytes_of_iteration[-1] for host in self.hosts)} bytes,"
                f" leader {max(host.leader_cpu_of_iteration_s[-1] for host in self.hosts):.3f} s"
            )

    def leaders(self) -> list[PipelineLeader]:
        return [leader for host in self.hosts for leader in host.members._leaders.values()]

    async def close(self) -> None:
        """End all jobs and the policy host."""
        for host in self.hosts:
            await host.members.jobs.close("the benchmark has ended")
        await self.policy.client.close()

    async def _settle(self) -> None:
        """Wait until the policy has answered: what it takes is measured, not simulated."""
        await asyncio.sleep(0)
        while self.policy.num_open:  # noqa: ASYNC110  an answer may lead to the next question
            await asyncio.sleep(0.005)

    def _iteration(self) -> list[str]:
        """Run one iteration of all ranks, in a thread; return the plans that they followed."""
        self.index += 1
        bytes_before = [host.store.num_bytes for host in self.hosts]
        cpu_before_s = [host.daemon.leader_cpu_s for host in self.hosts]
        lead_cpu_s: dict[int, float] = defaultdict(float)
        followed = []
        for host in self.hosts:
            for rank in host.ranks:
                rank.client.iteration_index = self.index
                rank.plan = plan = rank.plans.plan_for(self.index)
                followed.append("baseline" if plan.is_full_speed else plan.plan_id or "baseline")
        with (
            patch.object(pipeline_member, "monotonic", lambda: self.now_s),
            patch.object(pipeline_leader, "monotonic", lambda: self.now_s),
        ):
            for k in range(ROUNDS):
                if k == ROUNDS // 4:
                    self._observe_all(followed)
                for number, host in enumerate(self.hosts):
                    is_for_siblings = k % (ROUNDS // SIBLING_ROUNDS) == 0
                    for rank in host.ranks if is_for_siblings else host.ranks[:1]:
                        began_s = time.thread_time()
                        rank.exchange.run(host.store, host.store)
                        if rank.place.is_leader:
                            lead_cpu_s[number] += time.thread_time() - began_s
                self._end_round()
                self.now_s += self.iteration_s / ROUNDS
        for number, host in enumerate(self.hosts):
            host.bytes_of_iteration.append(host.store.num_bytes - bytes_before[number])
            cpu_s = host.daemon.leader_cpu_s - cpu_before_s[number] + lead_cpu_s[number]
            host.leader_cpu_of_iteration_s.append(cpu_s)
        return followed

    def _observe_all(self, followed: Sequence[str]) -> None:
        """Have each rank's job observe the iteration before: readings take a while to cover it."""
        is_lost = not self._last_followed
        plan_ids, self._last_followed = iter(self._last_followed), list(followed)
        if is_lost:
            return
        done = threading.Event()
        loop = self._loop

        def observe() -> None:
            for host in self.hosts:
                for rank in host.ranks:
                    self._observe_rank(host, rank, next(plan_ids))
            done.set()

        loop.call_soon_threadsafe(observe)
        done.wait()

    def _observe_rank(self, host: LargeHost, rank: LargeRank, plan_id: str) -> None:
        del host
        assert rank.runner is not None
        rank.runner.handle(IterationObserved(self._observation(rank.place.pp_rank, plan_id), 1, ()))

    def _end_round(self) -> None:
        """Do nothing more in a round of all ranks."""

    _last_followed: Sequence[str] = ()

    def _purpose(self, plan_id: str) -> PlanPurpose | None:
        for leader in self.leaders():
            plan = self._plan(leader, plan_id)
            if plan is not None:
                return plan.purpose
        return PlanPurpose.BASELINE

    @staticmethod
    def _plan(leader: PipelineLeader, plan_id: str) -> ClockPlan | None:
        epoch = leader._delivery.epoch_of(plan_id)
        plans = leader.job.knowledge.plans
        return None if not epoch else plans.by_id(plans.id_of(epoch))

    # --- measurements ---

    def _observation(self, pp_rank: int, plan_id: str, *, num_ranks: int = 1) -> IterationObservation:
        """Return what a rank measures, or so many ranks of a stage as one: the slowest times and all their energy."""
        if plan_id not in self._iteration_s:
            self._learn_plan(plan_id)
        clocks = self._clocks[plan_id][pp_rank]
        iteration_s = self._iteration_s[plan_id] + STEP_OVERHEAD_S
        samples, times_at = [], []
        energy_j = busy_s = 0.0
        for (kind, mhz), count in sorted(clocks.items()):
            work = self.work[pp_rank, kind]
            time_s = work.time_s(mhz) * (1 + max(self.random.gauss(0, NOISE_RATIO) for _ in range(num_ranks)))
            samples.append(InstructionSample(0, kind, (ClockShare(mhz, time_s),), count))
            times_at.append(TimeAtClock(kind, mhz, time_s * count))
            energy_j += work.power_w(mhz) * time_s * count
            busy_s += time_s * count
        top_mhz = CLOCKS_MHZ[0]
        times_at.append(TimeAtClock(None, top_mhz, max(0.0, iteration_s - busy_s)))
        energy_j += a100_waiting_power_w(top_mhz) * max(0.0, iteration_s - busy_s)
        energy_j *= num_ranks * (1 + self.random.gauss(0, NOISE_RATIO) / math.sqrt(num_ranks))
        return IterationObservation(
            iteration_index=self.index - 1,
            plan_id=plan_id,
            iteration_time_s=iteration_s * (1 + self.random.gauss(0, NOISE_RATIO / 10)),
            instruction_samples=tuple(samples),
            ranks=(RankEnergy(0, iteration_s, energy_j, tuple(times_at)),),
            turnarounds_s=(STEP_OVERHEAD_S,),
            lead_s=0.0 if pp_rank == 0 else None,
        )

    def _learn_plan(self, plan_id: str) -> None:
        """Compute iteration time and clocks of a plan, all clocks in effect in time."""
        found = (self._plan(leader, plan_id) for leader in self.leaders())
        plan = next((plan for plan in found if plan is not None), None)
        planned = {rank.pp_rank: rank.sm_clocks_mhz for rank in plan.ranks} if plan is not None else {}
        durations_s: list[float] = []
        clocks = []
        for pp_rank, order in enumerate(self.schedule.orders):
            own = [mhz or CLOCKS_MHZ[0] for mhz in planned.get(pp_rank, (None,) * len(order))]
            pairs = [(i.kind, mhz) for i, mhz in zip(order, own, strict=True)]
            time_s = {pair: self.work[pp_rank, pair[0]].time_s(pair[1]) for pair in set(pairs)}
            durations_s += [time_s[pair] for pair in pairs]
            clocks.append(Counter(pairs))
        self._iteration_s[plan_id] = makespan_s(self.graph, durations_s)
        self._clocks[plan_id] = clocks


class DroppedHistory(FakeHistory):
    """Drops all records."""

    def write(self, record: object) -> None:
        """Drop a record."""
