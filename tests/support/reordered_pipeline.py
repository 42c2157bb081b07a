"""A pipeline across virtual hosts whose order of instructions may change: members, leader and agreement are real."""

import os
from collections import Counter
from dataclasses import dataclass
from typing import cast

from gpuenergyd.client.rank import RankClient
from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph
from gpuenergyd.core.pipeline.reorder import RankMemory
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.wire.messages import RankRegistration
from gpuenergyd_across_hosts.messages.pipeline_messages import member_run_key
from gpuenergyd_across_hosts.ranks.agreed_plans import AgreedPlans
from gpuenergyd_across_hosts.ranks.job_store import Store
from gpuenergyd_across_hosts.ranks.pipeline_member import MemberExchange
from gpuenergyd_across_hosts.ranks.pipeline_place import PipelinePlace
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, A100Work
from tests.support.job_stage import ME
from tests.support.large_job import COMMUNICATION_LATENCY_S, FakeClient, LargeHost, LargeRank
from tests.support.virtual_pipeline import VirtualPipeline

GIB = 2**30
ROOMY = RankMemory(20 * GIB, 4 * GIB, 80 * GIB)


@dataclass
class CutExchange:
    """A rank's exchange, which does nothing while its host does not reach the store."""

    exchange: MemberExchange
    cut_hosts: set[int]
    host: int

    def run(self, store: Store, paces: Store | None) -> None:
        if self.host not in self.cut_hosts:
            self.exchange.run(store, paces)


class ReorderedPipeline(VirtualPipeline):
    """A pipeline with one stage on each host, whose ranks allow other orders and know their memory."""

    def __init__(self, num_pp_ranks: int, policy: ClockPolicy, *, num_microbatches: int = 8) -> None:
        self.is_split: list[tuple[bool, ...]] = []
        """Whether each rank ran split backwards, by iteration."""
        self.cut_hosts: set[int] = set()
        """Hosts that do not reach the store."""
        super().__init__(num_pp_ranks, policy, num_microbatches=num_microbatches)
        self.split_backwards()

    def split_backwards(self, cost_ratio: float = 1.0) -> None:
        """Let input and weight gradients take half of the backward each, times a cost of splitting."""
        for pp_rank in range(self.size.num_pp_ranks):
            whole = cast("A100Work", self.work[pp_rank, InstructionKind.B])
            half = 0.5 * cost_ratio
            for kind in (InstructionKind.I, InstructionKind.W):
                self.work[pp_rank, kind] = A100Work(
                    whole.memory_time_s * half, whole.compute_time_s * half, whole.power_w_per_mhz
                )
        self._iteration_s, self._clocks = {}, {}

    def report_memory(self, memory: RankMemory, *, pp_rank: int | None = None) -> None:
        """Let ranks report their memory."""
        for host in self.hosts if pp_rank is None else [self.hosts[pp_rank]]:
            for rank in host.ranks:
                assert rank.runner is not None
                rank.runner.job.knowledge.reordering.record_stage(0, memory)

    def _register(
        self, host: LargeHost, jobs: Jobs, place: PipelinePlace, order: tuple[tuple[str, int, int], ...]
    ) -> LargeRank:
        (gpu,) = jobs.services.gpus
        registration = RankRegistration(
            protocol_version=1, job_name="large", run_key=member_run_key(place.name, "run-1"), pp_rank=0,
            num_pp_ranks=1, dp_rank=0, schedule_name="1f1b", num_microbatches=self.size.num_microbatches,
            num_chunks=1, order=order, gpu_uuid=gpu.identity.gpu_uuid, is_pipeline_member=True, allow_reorder=True,
            reorder_refusal="",
        )  # fmt: skip
        registered = jobs.register(registration, ME, os.pidfd_open(ME.pid))
        runner = jobs.runner(registered.job_id)
        assert runner is not None
        runner.job.knowledge.reordering.record_stage(0, ROOMY)
        client, plans = FakeClient(registered.rank_token), AgreedPlans()
        member = MemberExchange(cast("RankClient", client), plans, place, host.daemon)
        exchange = CutExchange(member, self.cut_hosts, place.pp_rank)
        return LargeRank(place, runner, client, plans, exchange, registration)

    def _iteration(self) -> list[str]:
        followed = super()._iteration()
        self.is_split.append(tuple(bool(host.ranks[0].plan.order) for host in self.hosts))
        return followed

    def _learn_plan(self, plan_id: str) -> None:
        found = (self._plan(leader, plan_id) for leader in self.leaders())
        plan = next((plan for plan in found if plan is not None), None)
        if plan is None or not plan.orders:
            super()._learn_plan(plan_id)
            return
        schedule = plan.schedule(self.schedule)
        durations_s: list[float] = []
        clocks = []
        for pp_rank, order in enumerate(schedule.orders):
            pairs = [
                (i.kind, mhz or CLOCKS_MHZ[0]) for i, mhz in zip(order, plan.ranks[pp_rank].sm_clocks_mhz, strict=True)
            ]
            durations_s += [self.work[pp_rank, kind].time_s(mhz) for kind, mhz in pairs]
            clocks.append(Counter(pairs))
        graph = dependency_graph(schedule, communication_latency_s=COMMUNICATION_LATENCY_S)
        self._iteration_s[plan_id] = makespan_s(graph, durations_s)
        self._clocks[plan_id] = clocks
