"""A pipeline of two hosts with one stage each, led by a `PipelineLeader` whose policy answers at once."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, cast

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import AccountRules
from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.pipeline.reorder import ReorderOffer
from gpuenergyd.core.policy_api.policy import GpuView, JobView, Lever
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.ports import JobServices, WorkerPort
from gpuenergyd.store.records import Record
from gpuenergyd_across_hosts.host.host_stage import stage_classes
from gpuenergyd_across_hosts.host.pipeline_leader import PipelineLeader
from gpuenergyd_across_hosts.messages.compact_observations import pack, plans_of
from gpuenergyd_across_hosts.messages.patterns import to_blocks
from gpuenergyd_across_hosts.messages.pipeline_messages import PipelineReply, PipelineReport, StageFacts, StageReport
from tests.support.job_run import CLOCKS, SCHEDULE, WORK, new_job
from tests.support.job_run import plan as uniform_plan

NUM_MICROBATCHES = 4


@dataclass
class UniformPolicy:
    """A policy port that answers every question with the same plan and keeps the questions."""

    plan: ClockPlan = field(default_factory=uniform_plan)
    views: list[JobView] = field(default_factory=list)

    activity = None

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan:
        assert job_id
        assert policy == "p"
        self.views.append(view)
        return self.plan

    async def preload(self, policy: str) -> None:
        """Do nothing."""

    async def drop_job(self, job_id: str) -> None:
        """Do nothing."""


@dataclass
class ListedHistory:
    """A history port that keeps the records."""

    events: list[Record] = field(default_factory=list)

    def write(self, record: Any) -> None:
        self.events.append(record)


class LedPipeline:
    """Two members that report each iteration and follow the newest plan from the next iteration on."""

    def __init__(
        self,
        *,
        is_observing: bool = False,
        policy: UniformPolicy | None = None,
        levers: frozenset[Lever] = frozenset(Lever),
    ) -> None:
        self.policy = policy or UniformPolicy()
        self.history = ListedHistory()
        self.tasks: set[asyncio.Task[None]] = set()
        services = JobServices(
            worker=cast("WorkerPort", None),  # a leader has no GPU
            policy=self.policy,
            history=self.history,
            gpus=Gpus(),
            observation_limit_s=1.0,
            is_observing=is_observing,
            levers=levers,
        )
        description = new_job(job_id="whole").description
        rules = JobRules(account=AccountRules(first_income_s=100.0))  # any plan can be paid
        self.leader = PipelineLeader(description, rules, services, "own", 0, {}, self._spawn)
        self.are_facts_known = False
        self.index = 0
        self.plan_id: str | None = "baseline"
        self.clocks_mhz: tuple[int, ...] = (CLOCKS[0],)
        """The clocks that the ranks report, each of equally many instructions of a kind."""
        self.iteration_time_s = 1.0

    def facts(self, pp_rank: int, tp_ranks: tuple[int, ...] = (0,), **changes: Any) -> StageFacts:
        """Return the facts of a stage's ranks on one host."""
        rows = [((str(i.kind), i.chunk_index), i.microbatch_index) for i in SCHEDULE.orders[pp_rank]]
        gpu = GpuView(f"GPU-{pp_rank}", "A100", CLOCKS, 0.01)
        facts = StageFacts(f"facts-{pp_rank}.{tp_ranks}", pp_rank, tp_ranks, gpu, to_blocks(rows))
        return replace(facts, **changes)

    def part(self, pp_rank: int, tp_ranks: tuple[int, ...] = (0,), **changes: Any) -> tuple[int, int, StageReport]:
        """Return the report of a stage's ranks on one host about the current iteration."""
        kinds = sorted({i.kind for i in SCHEDULE.orders[pp_rank]})
        pairs = [(kind, mhz) for kind in kinds for mhz in self.clocks_mhz]
        shares = {(kind, mhz): ClockShare(mhz, WORK[pp_rank, kind].time_s(mhz)) for kind, mhz in pairs}
        count = NUM_MICROBATCHES // len(self.clocks_mhz)
        samples = tuple(InstructionSample(0, kind, (share,), count) for (kind, _), share in shares.items())
        energy_j = 100.0 * len(tp_ranks)
        observation = IterationObservation(
            self.index,
            self.plan_id,
            self.iteration_time_s,
            samples,
            (RankEnergy(0, 1.0, energy_j, ()),),
            turnarounds_s=(0.0,),
        )
        plan_ids = plans_of([observation])
        text = pack([observation], stage_classes(SCHEDULE.orders[pp_rank], ReorderOffer()), plan_ids)
        facts_id = self.facts(pp_rank, tp_ranks).facts_id
        report = StageReport(facts_id, tp_ranks, self.index, self.index, (), plan_ids, text)
        return pp_rank, tp_ranks[0], report._replace(**changes)

    async def report(self, *parts: tuple[int, int, StageReport], **changes: Any) -> PipelineReply:
        """Report the given parts, or both stages, to the leader, and let its tasks end; facts with the first report."""
        reported = parts or tuple(self.part(pp_rank) for pp_rank in range(2))
        facts = () if self.are_facts_known else tuple(self.facts(pp_rank) for pp_rank in range(2))
        content: dict[str, Any] = {"num_pp_ranks": 2, "parts": reported, "facts": facts, **changes}
        reply = await self.leader.handle_report(PipelineReport("token", **content))
        self.are_facts_known = True
        await asyncio.gather(*self.tasks)
        return reply

    async def train(self, num_iterations: int, **changes: Any) -> PipelineReply:
        """Run iterations; each follows the plan of the reply before it."""
        reply = None
        for _ in range(num_iterations):
            reply = await self.report(**changes)
            self.index += 1
            self.plan_id = reply.plan_id or self.plan_id
        assert reply is not None
        return reply

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
