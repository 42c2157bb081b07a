"""One rank of a pipeline across hosts: a thread that exchanges messages with the job's store and this host's daemon.

    every rank    sends its iteration and installed plans to its daemon, which merges the ranks of a stage on its host
                  passes its slice of the wanted plan from the store to its daemon, which checks and installs it
                  passes the agreed plan windows to the training thread, which reads them at iteration boundaries
    the carrying  publishes the report of its stage, and new facts, from its daemon in the store
    rank          passes the leader's agreement from the store to its daemon, and so to the other ranks of the stage
    the leader    sends what is new in all stages to its daemon, which plans for all; publishes slices and windows

On each host, one rank of a stage carries its messages, so that traffic does not grow with the number of tensor-parallel
ranks. The training thread never waits for this thread, and no failure here affects it: if the store hangs, a link is
cut or the leader dies, no plan window is extended, and the rank trains at full speed after the present window.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from time import monotonic
from typing import Any

from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.client.exchanges import Membership
from gpuenergyd.client.plans import prepare
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.wire.client_codec import decode_iteration_reply
from gpuenergyd_across_hosts.messages.pipeline_messages import StageReport, member_run_key
from gpuenergyd_across_hosts.ranks.agreed_plans import AgreedPlans
from gpuenergyd_across_hosts.ranks.job_store import STORE_VARIABLE, Store, find_store_address
from gpuenergyd_across_hosts.ranks.local_daemon import LocalDaemon
from gpuenergyd_across_hosts.ranks.pipeline_leader import IterationPace, LeaderRank
from gpuenergyd_across_hosts.ranks.pipeline_place import PipelinePlace
from gpuenergyd_across_hosts.ranks.replica_paces import FIRST_REPLICA
from gpuenergyd_across_hosts.ranks.run_agreement import RunAgreement
from gpuenergyd_across_hosts.ranks.store_thread import PERIOD_S, StoreThread, connection_to, logger
from gpuenergyd_across_hosts.rules.plan_windows import PlanWindow

_ROUNDS_PER_ITERATION = 8
"""Exchanges per iteration, at most; this bounds the traffic per iteration, however long iterations are."""
_SILENT_ITERATIONS = 2
"""A rank without new observations reports its iteration this often: the leader takes a silent rank for lost."""


class PipelineMember:
    """Makes a rank a member of its pipeline, in a thread of its own."""

    def __init__(
        self,
        client: RankClient,
        plans: AgreedPlans,
        place: PipelinePlace,
        connect: Callable[[], Store],
        *,
        socket_path: str | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        daemon = LocalDaemon(find_socket_path(socket_path))
        self._exchange = MemberExchange(client, plans, place, daemon, period_s=period_s)
        self._run_of_pipeline = RunAgreement(place.dp_rank, is_first=place.is_leader)
        self._run_of_paces = self._run_of_pipeline
        if place.is_leader and place.dp_rank != FIRST_REPLICA:
            self._run_of_paces = RunAgreement(FIRST_REPLICA, is_first=False)
        self._thread = StoreThread(
            self._run,
            connect,
            name=f"rank {place.name} of its pipeline",
            consequence="training continues at full speed after the present plan window",
            period_s=period_s,
            at_end=daemon.close,
        )

    def stop(self) -> None:
        """Leave the pipeline; the present plan window expires."""
        self._thread.stop()

    def _run(self, store: Store) -> None:
        now_s = monotonic()
        of_pipeline, of_paces = self._run_of_pipeline.find(store, now_s), self._run_of_paces.find(store, now_s)
        if of_pipeline is not None:
            self._exchange.run(of_pipeline, of_paces)
            self._thread.period_s = self._exchange.period_s


class MemberExchange:
    """The exchange of one rank with the store and its daemon; each call of `run` is one round of it."""

    def __init__(
        self,
        client: RankClient,
        plans: AgreedPlans,
        place: PipelinePlace,
        daemon: LocalDaemon,
        *,
        period_s: float = PERIOD_S,
    ) -> None:
        self._client = client
        self._plans = plans
        self._place = place
        self._daemon = daemon
        self._leader = LeaderRank(place, daemon, period_s) if place.is_leader else None
        self._shortest_period_s = period_s
        self._pace = IterationPace()
        self._is_carrier = False
        self._tp_ranks: list[int] = [place.tp_rank]
        self._facts_id: str | None = None
        self._published: StageReport | None = None
        self._posted: tuple[str | None, str] | None = None
        self._agreement: dict[str, Any] | None = None

    @property
    def period_s(self) -> float:
        """Pause until the next round."""
        return max(self._shortest_period_s, self._pace.iteration_s / _ROUNDS_PER_ITERATION)

    def run(self, store: Store, paces: Store | None) -> None:
        """Run one round; exceptions of the store are passed on to the caller.

        Args:
            store: the part of the store for the pipeline's run.
            paces: the part for the training's run, with the iteration times of its replicas; None until it is known.
        """
        token, index = self._client.rank_token, self._client.iteration_index
        self._pace.update(monotonic(), index)
        agreement = self._read_agreement(store) if self._is_carrier else None
        reply = self._query(store, token, agreement) if token is not None else None
        if reply is not None:
            self._is_carrier = reply["is_carrier"]
            agreement = reply["agreement"] if agreement is None else agreement
        if self._is_carrier:
            self._publish(store, reply)
        if self._leader is not None:
            agreement = self._leader.lead(store, token, index, paces=paces)
        if agreement is not None:
            self._follow(store, agreement, token)

    def _read_agreement(self, store: Store) -> dict[str, Any] | None:
        found = store.get(self._place.agreement_key)
        agreement: dict[str, Any] | None = json.loads(found) if found is not None else None
        return agreement

    def _query(self, store: Store, token: str, agreement: dict[str, Any] | None) -> dict[str, Any] | None:
        return self._daemon.post(
            "/v1/members",
            {
                "rank_token": token,
                "place": {**asdict(self._place), "run": store.prefix},
                "iteration_index": self._client.iteration_index,
                "installed": sorted(self._plans.installed),
                "agreement": agreement,
                "known_facts": self._facts_id,
            },
        )

    def _publish(self, store: Store, reply: dict[str, Any] | None) -> None:
        """Publish the stage's report if it has changed, and before it any new facts that it refers to."""
        if reply is None:  # without a daemon, ranks have no plan installed
            index = self._client.iteration_index
            report: Any = ["", self._tp_ranks, index, index, [], [], ""]
        elif (report := reply["report"]) is None:
            return
        own = self._place.pp_rank, self._place.tp_rank
        if reply is not None and (facts := reply["facts"]) is not None:
            store.set(self._place.facts_key(*own), _json(facts))
            self._facts_id = facts["facts_id"]
            self._tp_ranks = facts["tp_ranks"]
        report = StageReport(*report)
        if self._is_news(report):
            store.set(self._place.report_key(*own), _json(report))
            store.add(self._place.news_key, 1)
            self._published = report

    def _is_news(self, report: StageReport) -> bool:
        """Return whether the leader needs a report; it does not if only the iteration has advanced, or nothing has."""
        before = self._published
        if before is None or report._replace(**_passing(before)) != before:
            return True
        has_new_observations = report.observations not in {"", before.observations}
        return has_new_observations or report.oldest_iteration >= before.oldest_iteration + _SILENT_ITERATIONS

    def _follow(self, store: Store, agreement: dict[str, Any], token: str | None) -> None:
        if agreement != self._agreement:
            self._plans.add_windows(PlanWindow(plan_id, begin, end) for plan_id, begin, end in agreement["windows"])
            if agreement["revoked"] is not None:
                self._plans.drop(agreement["revoked"])
            self._agreement = agreement
        wanted = agreement["wanted"]
        if wanted is None or token is None or self._posted == (token, wanted):
            return
        plan = store.get(self._place.slice_key(wanted, self._place.pp_rank))
        if plan is None:
            return
        reply = self._daemon.post("/v1/members/plan", {"rank_token": token, "plan": json.loads(plan)})
        if reply is not None:
            self._posted = token, wanted
            slices = decode_iteration_reply(json.dumps(reply).encode()).plans
            self._plans.add(prepare(plan_slice, bytes.fromhex(token)) for plan_slice in slices)


def find_membership(rank: RankDescription) -> Membership | None:
    """Return the membership of a rank whose pipeline spans hosts, a job of its own for its host's daemon.

    None, after a warning, if the job's store cannot be found.
    """
    address = find_store_address()
    if address is None:
        logger.warning(
            "gpuenergyd: the pipeline spans hosts, but its ranks cannot find the job's store: set MASTER_ADDR and"
            " MASTER_PORT, or %s; training continues at full speed",
            STORE_VARIABLE,
        )
        return None
    place = PipelinePlace(rank.pp_rank, rank.num_pp_ranks, rank.stage_rank, rank.num_stage_ranks, rank.dp_rank)
    plans, connect = AgreedPlans(), connection_to(address, rank.run_key)

    def start_exchange(client: RankClient, socket_path: str | None) -> Callable[[], None]:
        return PipelineMember(client, plans, place, connect, socket_path=socket_path).stop

    member = RankDescription(
        run_key=member_run_key(place.name, rank.run_key),
        dp_rank=rank.dp_rank,
        is_first=rank.is_first,
        tags=(("pp_rank", str(place.pp_rank)), ("tp_rank", str(place.tp_rank))),
    )
    return Membership(rank=member, start_exchange=start_exchange, plans=plans)


def _passing(report: StageReport) -> dict[str, Any]:
    """Return the fields of a report that change in every iteration."""
    names = ("oldest_iteration", "newest_iteration", "plan_ids", "observations")
    return {name: getattr(report, name) for name in names}


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
