"""A pipeline across virtual hosts whose true times and energies are known: members, leader and exchange are real."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd.daemon import registration
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.jobs import training_budget
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.ports import IterationWatcher, PastJobPort, PolicyPort
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.store.records import Record
from gpuenergyd_across_hosts.host import leader_records
from gpuenergyd_across_hosts.host.pipeline_leader import PipelineLeader
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, a100_waiting_power_w
from tests.support.large_job import LATENCY_S, STEP_OVERHEAD_S, FirstPolicy, JobSize, LargeJob

FIRST_AT = datetime(2024, 1, 1, tzinfo=UTC)
"""The virtual instant 0."""


def at(now_s: float) -> datetime:
    """Return the host time of a virtual instant."""
    return FIRST_AT + timedelta(seconds=now_s)


@dataclass
class KeptRecords:
    """A history that keeps its records in memory, and may pass them on."""

    records: list[Record] = field(default_factory=list)
    writes: list[Callable[[Record], None]] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.records.append(record)
        for write in self.writes:
            write(record)


class PolicyHere(FirstPolicy):
    """The leader's policy, in this process."""

    activity = None

    def __init__(self, policy: ClockPolicy) -> None:
        super().__init__()
        self.policy = policy

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        assert job_id == view.job_id
        assert policy
        plan = self.policy.next_plan(view)
        self.plans.append(plan)
        return plan

    async def preload(self, policy: str) -> None:
        """Know it already."""

    async def drop_job(self, job_id: str) -> None:
        """Keep the policy."""


class VirtualPipeline(LargeJob):
    """A pipeline with one stage on each host; time passes as iterations take."""

    def __init__(
        self,
        num_pp_ranks: int,
        policy: ClockPolicy,
        *,
        num_tp_ranks: int = 1,
        num_microbatches: int = 6,
        max_slowdown_ratio: float = 0.0,
        rules: JobRules | None = None,
        past_jobs: PastJobPort | None = None,
        watcher: IterationWatcher | None = None,
        zones: tuple[str | None, ...] = (),
        noise_seed: int = 0,
    ) -> None:
        size = JobSize(num_pp_ranks, num_tp_ranks, 1, num_microbatches)
        super().__init__(size, rules=rules, policy="under-test", max_slowdown_ratio=max_slowdown_ratio)
        self.random = random.Random(noise_seed)
        self.policy = PolicyHere(policy)
        self.past_jobs = past_jobs
        self.watcher = watcher
        self.zones = zones or (None,) * num_pp_ranks
        self.histories: list[KeptRecords] = []
        self.followed: list[tuple[str, ...]] = []
        """The plans that all ranks followed, by iteration."""
        self._learn_plan("baseline")
        self.iteration_s = self.truth("baseline")[0]

    def _jobs(self, name: str, policy: PolicyPort) -> Jobs:
        jobs, number = super()._jobs(name, policy), len(self.histories)
        gpus = Gpus(host=f"host-{number}")
        gpus.update(
            GpuIdentity(
                f"GPU-{name}-{k}", k, "A100 (virtual)", CLOCKS_MHZ, is_simulated=True, switch_latency_s=LATENCY_S,
                blocking_power_w=a100_waiting_power_w(CLOCKS_MHZ[0]),
            )
            for k in range(self.size.num_tp_ranks)
        )  # fmt: skip
        self.histories.append(KeptRecords())
        services = replace(
            jobs.services,
            gpus=gpus,
            history=self.histories[-1],
            past_jobs=self.past_jobs,
            watcher=self.watcher if number == 0 else None,
            carbon_zone=self.zones[number],
        )
        return replace(jobs, services=services)

    @property
    def leader(self) -> PipelineLeader:
        return self.leaders()[0]

    async def train(self, num_iterations: int, after_each: Callable[[], object] = lambda: None) -> None:
        if not self.hosts:
            self.join()
        for _ in range(num_iterations):
            self.followed.append(tuple(await asyncio.to_thread(self._iteration)))
            self.iteration_s = self.truth(self.followed[-1][0])[0]
            for _ in range(10):
                await asyncio.sleep(0)
            after_each()

    async def close(self) -> None:
        """End all jobs."""
        for host in self.hosts:
            await host.members.jobs.close("the test has ended")

    def truth(self, plan_id: str) -> tuple[float, float]:
        """Return the iteration time and the energy of an iteration under a plan, without noise."""
        if plan_id not in self._iteration_s:
            self._learn_plan(plan_id)
        iteration_s = self._iteration_s[plan_id] + STEP_OVERHEAD_S
        energy_j = 0.0
        for pp_rank, clocks in enumerate(self._clocks[plan_id]):
            work = {(kind, mhz): self.work[pp_rank, kind] for kind, mhz in clocks}
            busy_s = sum(work[key].time_s(key[1]) * count for key, count in clocks.items())
            energy_j += sum(work[key].power_w(key[1]) * work[key].time_s(key[1]) * n for key, n in clocks.items())
            energy_j += a100_waiting_power_w(CLOCKS_MHZ[0]) * max(0.0, iteration_s - busy_s)
        return iteration_s, energy_j * self.size.num_tp_ranks

    def virtual_time(self) -> AbstractContextManager[None]:
        """Let the leader date iterations in virtual time, and name jobs alike in each run."""
        return leaders_in_virtual_time(lambda: self.now_s)


@contextmanager
def leaders_in_virtual_time(now_s: Callable[[], float]) -> Iterator[None]:
    """Let leaders date iterations, and replicas their messages, in virtual time; jobs are numbered."""
    numbers = count(1)
    clock = SimpleNamespace(monotonic_ns=lambda: round(now_s() * 1e9), monotonic=now_s)
    with (
        patch.object(registration, "secrets", SimpleNamespace(token_hex=lambda _: f"{next(numbers)}")),
        patch.object(leader_records, "time", clock),
        patch.object(training_budget, "time", clock),
        patch.object(leader_records, "utc_at", lambda mono_ns: at(cast("int", mono_ns) / 1e9)),
    ):
        yield
