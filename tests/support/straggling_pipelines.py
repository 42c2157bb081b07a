"""Two replicas of one training, each a pipeline across hosts, in virtual time: one becomes slower for a while.

Everything between measurements and plan windows is real, as in `large_job.py`: the jobs of all ranks with their guards,
the merge on each host, the exchange through the store, both leaders, and a policy for each. An iteration lasts as long
as the slower replica takes, and its ranks report what they computed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

from gpuenergyd.client.plans import prepare
from gpuenergyd.core.job.messages import MergedIterationObserved
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.ports import PolicyPort
from gpuenergyd_across_hosts.host.pipeline_leader import PipelineLeader
from gpuenergyd_across_hosts.ranks import pipeline_leader, pipeline_member
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, a100_stages, a100_waiting_power_w
from tests.support.job_stage import settle
from tests.support.large_job import ROUNDS, STEP_OVERHEAD_S, JobSize, LargeJob

STAGE_WEIGHTS = (1.0, 1.0, 1.0, 1.4)
OBSERVED_IN_ROUND = 2
"""The round of an iteration in which daemons have all readings of the one before."""


@dataclass
class ThinkingPolicy:
    """A policy of one replica, whose answers take a number of exchanges; until then its plan is not known."""

    policy: ClockPolicy
    rounds: int
    _waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    round: int = 0

    activity = None

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan:
        del job_id, policy
        plan = self.policy.next_plan(view)
        if self.rounds:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((self.round + self.rounds, done))
            await done
        return plan

    def advance(self) -> None:
        """Let one round pass; call in the event loop."""
        self.round += 1
        for at, done in self._waiting:
            if at <= self.round and not done.done():
                done.set_result(None)
        self._waiting = [(at, done) for at, done in self._waiting if not done.done()]

    async def preload(self, policy: str) -> None:
        """Do nothing."""

    async def drop_job(self, job_id: str) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class StragglingIteration:
    """One iteration as the replicas ran it."""

    time_s: float
    own_s: tuple[float, ...]
    """By replica, what it took by itself under its plan."""
    plan_ids: tuple[tuple[str, ...], ...]
    """By replica and stage."""
    pace_s: tuple[float | None, ...]
    """By replica, the straggler's pace that it was told."""


class StragglingPipelines(LargeJob):
    """The replicas; `run_iterations` trains them, and `slower` says how much slower a stage of one is."""

    def __init__(
        self,
        policy: Callable[[], ClockPolicy],
        *,
        seed: int = 0,
        num_replicas: int = 2,
        noise_ratio: float = 0.005,
        max_slowdown_ratio: float = 0.05,
        thinking_rounds: int = 3,
        rules: JobRules | None = None,
        num_microbatches: int = 3,
        slower: Callable[[int, int, int], float] = lambda _dp, _pp, _iteration: 1.0,
    ) -> None:
        size = JobSize(len(STAGE_WEIGHTS), 1, num_replicas, num_microbatches)
        super().__init__(size, seed=seed, rules=rules, max_slowdown_ratio=max_slowdown_ratio)
        self.work = a100_stages(STAGE_WEIGHTS)
        self.noise_ratio = noise_ratio
        self.slower = slower
        self.history: list[StragglingIteration] = []
        self.policies = [ThinkingPolicy(policy(), thinking_rounds) for _ in range(num_replicas)]
        self._measured_before: list[tuple[IterationObservation, int]] = []

    def join(self) -> None:
        """Register all ranks; call in the event loop."""
        super().join()
        self.loop = asyncio.get_running_loop()

    def _jobs(self, name: str, policy: PolicyPort) -> Jobs:
        del policy
        return super()._jobs(name, self.policies[int(name.partition("-")[0])])

    async def run_iterations(self, num_iterations: int) -> None:
        """Train for so many iterations."""
        if not self.hosts:
            self.join()
        for _ in range(num_iterations):
            await asyncio.to_thread(self._iteration)

    async def close(self) -> None:
        """End all jobs."""
        for host in self.hosts:
            await host.members.jobs.close("the test is over")

    def leader(self, dp_rank: int) -> PipelineLeader | None:
        """Return the leader of a replica, None before it has joined."""
        host = self.hosts[dp_rank * self.size.num_pp_ranks]
        return next(iter(host.members._leaders.values()), None)

    # --- one iteration ---

    def _iteration(self) -> list[str]:
        """Run one iteration of all ranks, in a thread; return the plans that they followed."""
        self.index += 1
        ranks = [rank for host in self.hosts for rank in host.ranks]
        plans = []
        for rank in ranks:
            rank.client.iteration_index = self.index
            plans.append(rank.plans.plan_for(self.index))
        followed = ["baseline" if plan.is_full_speed else plan.plan_id or "baseline" for plan in plans]
        epochs = [0 if plan.is_full_speed else plan.plan_epoch for plan in plans]
        before, self._measured_before = self._measured_before, list(zip(self._run(followed), epochs, strict=True))
        with (
            patch.object(pipeline_member, "monotonic", lambda: self.now_s),
            patch.object(pipeline_leader, "monotonic", lambda: self.now_s),
        ):
            for k in range(ROUNDS):
                if k == OBSERVED_IN_ROUND:
                    self._in_loop(lambda: self._observe(before))
                for host in self.hosts:
                    for rank in host.ranks:
                        rank.exchange.run(host.store, host.store)
                self._in_loop(self._end_round)
                self.now_s += self.iteration_s / ROUNDS
        return followed

    def _observe(self, measured: Sequence[tuple[IterationObservation, int]]) -> None:
        """Have each rank's job observe the iteration before: readings take a while to cover it."""
        ranks = [rank for host in self.hosts for rank in host.ranks]
        for rank, (observation, epoch) in zip(ranks, measured, strict=False):
            assert rank.runner is not None
            rank.runner.handle(MergedIterationObserved(observation, epoch))

    def _end_round(self) -> None:
        """Let policies think on, and give each rank the plans that its own daemon has for it."""
        for policy in self.policies:
            policy.advance()
        for host in self.hosts:
            for rank in host.ranks:
                assert rank.runner is not None
                slices = rank.runner.delivery.pop(0)
                rank.plans.add(prepare(plan_slice, bytes.fromhex(rank.client.rank_token)) for plan_slice in slices)

    def _in_loop(self, act: Callable[[], None]) -> None:
        """Call a function in the event loop and wait for it, and for what it makes the daemons do."""

        async def call() -> None:
            act()
            await settle()

        asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def _run(self, followed: list[str]) -> list[IterationObservation]:
        """Return what each rank measures in this iteration."""
        size, samples, own_s = self.size, [], []
        for dp in range(size.num_dp_ranks):
            plan_ids = followed[dp * size.num_pp_ranks : (dp + 1) * size.num_pp_ranks]
            durations_s: list[float] = []
            for pp, order in enumerate(self.schedule.orders):
                slower = self.slower(dp, pp, self.index)
                clocks = self._planned(plan_ids[pp], pp, len(order))
                times_s = [
                    self.work[pp, i.kind].time_s(mhz) * slower * (1 + self.random.gauss(0, self.noise_ratio))
                    for i, mhz in zip(order, clocks, strict=True)
                ]
                durations_s += times_s
                samples.append([(i.kind, mhz, time_s) for i, mhz, time_s in zip(order, clocks, times_s, strict=True)])
            own_s.append(makespan_s(self.graph, durations_s))
        time_s = max(own_s) + STEP_OVERHEAD_S
        n = size.num_pp_ranks
        leaders = [self.leader(dp) for dp in range(size.num_dp_ranks)]
        self.history.append(
            StragglingIteration(
                time_s,
                tuple(own + STEP_OVERHEAD_S for own in own_s),
                tuple(tuple(followed[dp * n : (dp + 1) * n]) for dp in range(size.num_dp_ranks)),
                tuple(leader.job.target.straggler_time_s if leader else None for leader in leaders),
            )
        )
        return [self._measured(number % n, own, time_s, followed[number]) for number, own in enumerate(samples)]

    def _planned(self, plan_id: str, pp_rank: int, num_instructions: int) -> list[int]:
        found = (self._plan(leader, plan_id) for leader in self.leaders())
        plan = next((plan for plan in found if plan is not None), None)
        clocks = {rank.pp_rank: rank.sm_clocks_mhz for rank in plan.ranks} if plan is not None else {}
        return [mhz or CLOCKS_MHZ[0] for mhz in clocks.get(pp_rank, (None,) * num_instructions)]

    def _measured(
        self, pp_rank: int, own: list[tuple[InstructionKind, int, float]], iteration_s: float, plan_id: str
    ) -> IterationObservation:
        of_kind: dict[tuple[InstructionKind, int], list[float]] = {}
        for kind, mhz, time_s in own:
            of_kind.setdefault((kind, mhz), []).append(time_s)
        samples, times_at, energy_j, busy_s = [], [], 0.0, 0.0
        for (kind, mhz), times_s in sorted(of_kind.items()):
            total_s = sum(times_s)
            samples.append(InstructionSample(0, kind, (ClockShare(mhz, total_s / len(times_s)),), len(times_s)))
            times_at.append(TimeAtClock(kind, mhz, total_s))
            energy_j += self.work[pp_rank, kind].power_w(mhz) * total_s
            busy_s += total_s
        idle_s = max(0.0, iteration_s - busy_s)
        times_at.append(TimeAtClock(None, CLOCKS_MHZ[0], idle_s))
        energy_j += a100_waiting_power_w(CLOCKS_MHZ[0]) * idle_s
        return IterationObservation(
            iteration_index=self.index,
            plan_id=plan_id,
            iteration_time_s=iteration_s,
            instruction_samples=tuple(samples),
            ranks=(RankEnergy(0, iteration_s, energy_j, tuple(times_at)),),
            turnarounds_s=(STEP_OVERHEAD_S,),
            lead_s=0.0 if pp_rank == 0 else None,
        )
