"""Hosts of a large job whose messages are computed once per stage, in place of a daemon with a job for each rank.

A host holds the tensor-parallel ranks of one stage, of which one carries the messages. Those are made by the real code
(`HostStage`, packing, facts, and the exchange of the carrying rank) from one observation of the whole stage, drawn as
the merge of all its ranks would be. What is left out is what stays on a host: the ranks' own jobs, and the checks of a
posted plan. Benchmarks compare such hosts with real ones.
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from gpuenergyd.client.rank import RankClient
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.measurements.reordering import Reordering
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.wire.daemon_codec import encode
from gpuenergyd_across_hosts.host.host_stage import HostStage, Sibling
from gpuenergyd_across_hosts.host.pipeline_member import PipelineMembers
from gpuenergyd_across_hosts.messages.pipeline_messages import PlanAgreement
from gpuenergyd_across_hosts.ranks.agreed_plans import AgreedPlans
from gpuenergyd_across_hosts.ranks.job_store import Store
from gpuenergyd_across_hosts.ranks.local_daemon import LocalDaemon
from gpuenergyd_across_hosts.ranks.pipeline_member import MemberExchange
from gpuenergyd_across_hosts.ranks.pipeline_place import PipelinePlace
from tests.support.large_job import CountingStore, FakeClient, LargeHost, LargeJob, LargeRank

_KEPT = 12
"""Observations that a stage looks at for its report."""


class EncodedStage(HostStage):
    """A stage whose ranks are described by one job, with observations of all of them together."""

    def _new_observations(self, own: Sequence[Sibling], known: int) -> list[IterationObservation]:  # type: ignore[override]  # ranks are not merged
        return [o for o in own[0].job.observations if o.iteration_index > known][-(_KEPT // 2) :]


class EncodedDaemon(LocalDaemon):
    """The daemon of a host of which only the messages exist; `gpus` by tensor-parallel rank."""

    leader_cpu_s = 0.0

    def __init__(self, stage: EncodedStage, order: tuple[Instruction, ...], gpus: tuple[GpuView, ...]) -> None:
        super().__init__("")
        self.stage, self.order, self.gpus = stage, order, gpus
        self._observations: deque[IterationObservation] = deque(maxlen=_KEPT)
        self._purposes: dict[str | None, PlanPurpose] = {BASELINE_PLAN_ID: PlanPurpose.BASELINE}
        self._facts: tuple[str, dict[str, Any]] = ("", {})
        self.wanted: str | None = None
        """The plan that the leader wants installed, as the carrying rank has passed it on."""
        self.installed_by_others: set[str] = set()
        """Plans that the other ranks of the stage have installed."""
        self._stand_in = SimpleNamespace(
            is_ended=False,
            description=SimpleNamespace(num_microbatches=max(i.microbatch_index for i in order) + 1),
            ranks=SimpleNamespace(schedule=SimpleNamespace(orders=(order,))),
            observations=(),
            knowledge=SimpleNamespace(plans=SimpleNamespace(purpose_of=self._purposes.get), reordering=Reordering()),
        )

    def observe(self, observation: IterationObservation) -> None:
        """Add an observation of the stage."""
        self._observations.append(observation)
        self._stand_in.observations = tuple(self._observations)

    def post(self, path: str, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply to the carrying rank."""
        if path == "/v1/members":
            return self._state(message)
        assert path == "/v1/members/plan", path
        return self._install(message["plan"])

    def _state(self, message: dict[str, Any]) -> dict[str, Any]:
        stage, agreement = self.stage, message["agreement"]
        if agreement is not None:
            windows = tuple((plan_id, begin, end) for plan_id, begin, end in agreement["windows"])
            stage.agreement = PlanAgreement(agreement["wanted"], windows, None, agreement["merged_iteration"])
            self.wanted = agreement["wanted"]
        installed = frozenset(message["installed"])
        if len(self.gpus) > 1:
            installed &= self.installed_by_others
        job = cast("Job", self._stand_in)
        for tp_rank, gpu in enumerate(self.gpus):
            stage.siblings[tp_rank] = Sibling(job, gpu, message["iteration_index"], installed)
        facts = stage.facts()
        if self._facts[0] != facts.facts_id:
            self._facts = facts.facts_id, json.loads(encode(facts))
        is_known = facts.facts_id == message["known_facts"]
        report = list(stage.report())
        # As they are after JSON.
        plain = [list(value) if isinstance(value, tuple) else value for value in report]
        return {"is_carrier": True, "report": plain, "facts": None if is_known else self._facts[1], "agreement": None}

    def _install(self, posted: dict[str, Any]) -> dict[str, Any]:
        """Accept a plan; only its id matters here, and whether it sets clocks."""
        self._purposes[posted["plan_id"]] = PlanPurpose(posted["purpose"])
        first = self.order[0]
        change = [
            str(first.kind),
            first.microbatch_index,
            first.chunk_index,
            0,
            self.gpus[0].supported_sm_clocks_mhz[0],
        ]
        plan = {"plan_id": posted["plan_id"], "plan_epoch": 1, "apply_at_iteration": 0}
        return {"plans": [{**plan, "changes": [change] if posted["clocks"] else []}]}


class OtherRanks:
    """The exchange of the ranks of a stage that do not carry: each fetches its slice of a new plan and installs it."""

    def __init__(self, daemon: EncodedDaemon, place: PipelinePlace) -> None:
        self._daemon, self._place = daemon, place

    def run(self, store: Store, paces: Store | None) -> None:
        """Exchange once."""
        del paces
        wanted, installed = self._daemon.wanted, self._daemon.installed_by_others
        if wanted is None or wanted in installed:
            return
        key = self._place.slice_key(wanted, self._place.pp_rank)
        if all(store.get(key) is not None for _ in range(self._place.num_tp_ranks - 1)):
            installed.add(wanted)


class EncodedLargeJob(LargeJob):
    """The job with real daemons' code on the leader's host and on the last one; of all others only messages exist.

    Replicas after the first do what the first one does: only their paces are written, which its leader reads.
    """

    _paces: bytes | None = None

    @property
    def num_real_hosts(self) -> int:
        """Hosts that run the daemon's real code."""
        return sum(not isinstance(host.daemon, EncodedDaemon) for host in self.hosts)

    def join(self) -> None:
        """Make the hosts of the first replica; call in the event loop."""
        self._loop = asyncio.get_running_loop()
        last = self.size.num_pp_ranks - 1
        self.hosts += [
            self._host(0, pp) if pp in {0, last} else self._encoded_host(pp) for pp in range(self.size.num_pp_ranks)
        ]

    def _encoded_host(self, pp: int) -> LargeHost:
        size, order = self.size, self.schedule.orders[pp]
        jobs = self._jobs(f"0-{pp}", self.policy)
        views = tuple(jobs.services.gpus.view(gpu) for gpu in jobs.services.gpus)
        stage = EncodedStage(pp, size.num_pp_ranks, size.num_tp_ranks)
        own_order = tuple(replace(instruction, pp_rank=0) for instruction in order)
        daemon = EncodedDaemon(stage, own_order, views)
        place = PipelinePlace(pp, size.num_pp_ranks, 0, size.num_tp_ranks, 0)
        client, plans = FakeClient(f"{pp:064x}"), AgreedPlans()
        exchange = MemberExchange(cast("RankClient", client), plans, place, daemon)
        ranks = [LargeRank(place, None, client, plans, exchange)]
        if size.num_tp_ranks > 1:
            ranks.append(replace(ranks[0], exchange=OtherRanks(daemon, place)))
        return LargeHost(CountingStore(self.store), PipelineMembers(jobs), daemon, ranks)

    def _observe_rank(self, host: LargeHost, rank: LargeRank, plan_id: str) -> None:
        if isinstance(host.daemon, EncodedDaemon):
            if rank is not host.ranks[0]:
                return
            own = self._observation(rank.place.pp_rank, plan_id, num_ranks=self.size.num_tp_ranks)
            host.daemon.observe(own)
        else:
            super()._observe_rank(host, rank, plan_id)

    def _end_round(self) -> None:
        """Publish the pace of the other replicas whenever the first one has published its own."""
        own = self.store.get("pace/0")
        if own is None or own == self._paces:
            return
        if self._paces is None:
            self.store.add("replicas", self.size.num_dp_ranks - 1)
        self._paces = own
        for dp in range(1, self.size.num_dp_ranks):
            self.store.set(f"pace/{dp}", own.decode())
