"""One rank of a pipeline that spans hosts: a thread that talks to the job's store and to this host's daemon.

    every rank    its daemon's observations, its iteration and what is installed -> store
                  the plan that is wanted -> its slice from the store -> its own daemon, which checks and installs it
                  the terms that are agreed -> the training thread, which reads them at iteration boundaries
    the leader    all ranks' news -> its own daemon, which plans for the whole -> slices and terms -> store

The training thread never waits for any of this and never learns of a failure here: a store that hangs, a link that
is cut or a leader that died mean that no term is prolonged, and when the present one is over it trains at full speed.
See core/distributed/plan_windows.py for why no two ranks ever follow two plans in one iteration.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from gpuenergyd.client.agreed_plans import AgreedPlans
from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.client.following import prepare
from gpuenergyd.client.rank import RankClient
from gpuenergyd.core.distributed.plan_windows import MemberState, PlanWindow, PlanWindowGrantor
from gpuenergyd.core.distributed.stragglers import StragglerRules
from gpuenergyd.wire.client_codec import decode_iteration_reply
from gpuenergyd_trainers.across_hosts.job_store import STORE_VARIABLE, JobStore, Store, find_store_address
from gpuenergyd_trainers.across_hosts.local_daemon import OwnDaemon
from gpuenergyd_trainers.across_hosts.replica_paces import ReplicaPaces
from gpuenergyd_trainers.across_hosts.store_thread import PERIOD_S, STORE_LIMIT_S, StoreThread

logger = logging.getLogger("gpuenergyd.trainers")

_WORDS_AHEAD = 6
_UNKNOWN_AHEAD = 4
"""Iterations ahead while it is not known how long one takes."""
_MAX_RUN_KEY_CHARS = 200
_SUSPECT_RATIO = 1 + StragglerRules().enter_ratio
_HEAD = "head"
_TRIED = "profile"


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """Where a rank stands in its pipeline; tensor-parallel ranks of a stage share its plan."""

    pp_rank: int
    num_pp_ranks: int
    tp_rank: int = 0
    num_tp_ranks: int = 1
    dp_rank: int = 0
    """What tells this pipeline from the other replicas of its training; any number that is its own."""

    def key(self, name: str) -> str:
        """Return a key of this pipeline's own in the store."""
        return f"{self.dp_rank}/{name}"

    @property
    def name(self) -> str:
        """What the members call it."""
        return _name(self.pp_rank, self.tp_rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank's daemon plans for the whole pipeline."""
        return self.pp_rank == 0 and self.tp_rank == 0

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """All ranks of the pipeline."""
        return tuple((pp, tp) for pp in range(self.num_pp_ranks) for tp in range(self.num_tp_ranks))


@dataclass(slots=True)
class Leader:
    """What the leading rank does beside being a member."""

    place: PipelinePlace
    daemon: OwnDaemon
    period_s: float
    giver: PlanWindowGrantor = field(init=False)
    pipeline_id: str | None = None
    _offered: str | None = None
    _said: str = ""
    _pace: tuple[float, int] | None = None
    _iteration_s: float = 0.0
    _replicas: ReplicaPaces = field(default_factory=ReplicaPaces)
    _straggler_time_s: float | None = None
    _offered_at_pace_s: float | None = None
    """What a straggler imposed when the newest plan was offered."""

    def __post_init__(self) -> None:
        self.giver = PlanWindowGrantor(frozenset(_name(*member) for member in self.place.members))

    def lead(self, store: Store, rank_token: str | None) -> None:
        """Hear of all members, have the daemon plan, and say what is agreed."""
        found = {member: store.get(self.place.key(_up(*member))) for member in self.place.members}
        said = {member: json.loads(value) for member, value in found.items() if value is not None}
        self.giver.hear({_name(*m): MemberState(u["iteration"], frozenset(u["installed"])) for m, u in said.items()})
        states = {member: up["state"] for member, up in said.items() if up["state"] is not None}
        if rank_token is not None and len(states) == len(self.place.members):
            self._plan(store, rank_token, states)
        self.giver.give(self._ahead())
        terms = [_row(term) for term in self.giver.terms]
        head = {"wanted": self.giver.wanted, "terms": terms, "released": self.giver.released}
        text = json.dumps(head)
        if text != self._said:
            store.set(self.place.key(_HEAD), text)
            self._said = text

    def _plan(self, store: Store, rank_token: str, states: dict[tuple[int, int], Any]) -> None:
        parts = [{"pp_rank": pp, "tp_rank": tp, "state": state} for (pp, tp), state in states.items()]
        place = self.place
        others = self._replicas.others(store, monotonic())
        report = {
            "rank_token": rank_token,
            "parts": parts,
            "num_pp_ranks": place.num_pp_ranks,
            "num_tp_ranks": place.num_tp_ranks,
            "slowest_other_time_s": others.slowest_time_s,
            "age_s": others.age_s,
            "is_news": others.is_news,
        }
        reply = self.daemon.post("/v1/pipelines", report)
        if reply is None:
            return
        if self.pipeline_id not in {None, reply["pipeline_id"]}:
            self.giver.abandon()  # a daemon that has forgotten the plan that it made
        self.pipeline_id = reply["pipeline_id"]
        self._replicas.say(
            store, reply["own_time_s"], num_readings=reply["num_readings"], iteration_index=self.giver.newest_iteration
        )
        self.giver.is_change_near = _is_straggler_new(others.slowest_time_s, reply, self._offered_at_pace_s)
        before_s, self._straggler_time_s = self._straggler_time_s, reply["straggler_time_s"]
        is_hurried = before_s is not None and (self._straggler_time_s is None or self._straggler_time_s < before_s)
        plan_id = reply["plan_id"]
        if plan_id is not None and plan_id != self._offered:
            if is_hurried:
                self.giver.release()  # a straggler has recovered: full speed until the faster plan is agreed
            for pp_rank, plan in enumerate(reply["slices"]):
                store.set(place.key(_slice(plan_id, pp_rank)), json.dumps(plan))
            self.giver.propose(plan_id, is_brief=reply["slices"][0]["purpose"] == _TRIED)
            self._offered, self._offered_at_pace_s = plan_id, self._straggler_time_s

    def _ahead(self) -> int:
        """Return how many iterations pass while a word goes to all members, with room to spare."""
        now_s, newest = monotonic(), self.giver.newest_iteration
        if self._pace is None or newest < self._pace[1]:
            self._pace = now_s, newest
        elif newest >= self._pace[1] + 8:
            self._iteration_s = (now_s - self._pace[0]) / (newest - self._pace[1])
            self._pace = now_s, newest
        return math.ceil(_WORDS_AHEAD * self.period_s / self._iteration_s) if self._iteration_s else _UNKNOWN_AHEAD


class PipelineMember:
    """Keeps one rank's part in its pipeline, from a thread of its own."""

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
        self._client = client
        self._plans = plans
        self._place = place
        self._daemon = OwnDaemon(find_socket_path(socket_path))
        self._leader = Leader(place, self._daemon, period_s) if place.is_leader else None
        self._posted: tuple[str | None, str] | None = None
        self._heard: bytes = b""
        self._thread = StoreThread(
            self._take_part,
            connect,
            who=f"rank {place.name} of its pipeline",
            without_it="at full speed once what is agreed is over",
            period_s=period_s,
            at_end=self._daemon.close,
        )

    def stop(self) -> None:
        """Take no part any more; what is agreed runs out."""
        self._thread.stop()

    def _take_part(self, store: Store) -> None:
        daemon, token = self._daemon, self._client.rank_token
        state = daemon.post("/v1/parts", {"rank_token": token}) if token is not None else None
        up = {
            "iteration": self._client.iteration_index,
            "installed": sorted(self._plans.installed) if state is not None else [],
            "state": state if state is not None and state["order"] else None,
        }
        store.set(self._place.key(_up(self._place.pp_rank, self._place.tp_rank)), json.dumps(up))
        if self._leader is not None:
            self._leader.lead(store, token)
        head = store.get(self._place.key(_HEAD))
        if head is not None:
            self._follow(store, daemon, head, token)

    def _follow(self, store: Store, daemon: OwnDaemon, head: bytes, token: str | None) -> None:
        said = json.loads(head)
        if head != self._heard:
            self._plans.hear(PlanWindow(plan_id, begin, end) for plan_id, begin, end in said["terms"])
            if said["released"] is not None:
                self._plans.release(said["released"])
            self._heard = head
        wanted = said["wanted"]
        if wanted is None or token is None or self._posted == (token, wanted):
            return
        plan = store.get(self._place.key(_slice(wanted, self._place.pp_rank)))
        if plan is None:
            return
        reply = daemon.post("/v1/parts/plan", {"rank_token": token, "plan": json.loads(plan)})
        if reply is not None:
            self._posted = token, wanted
            slices = decode_iteration_reply(json.dumps(reply).encode()).plans
            self._plans.add(prepare(plan_slice, bytes.fromhex(token)) for plan_slice in slices)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank of a pipeline across hosts, as its adapter makes it."""

    place: PipelinePlace
    run_key: str
    address: tuple[str, int]
    plans: AgreedPlans = field(default_factory=AgreedPlans)

    @property
    def own_run_key(self) -> str:
        """What tells this rank's own job from those of the other ranks, in the daemon of its host."""
        return f"pp{self.place.pp_rank}.{self.place.tp_rank},{self.run_key}"[:_MAX_RUN_KEY_CHARS]

    @property
    def tags(self) -> tuple[tuple[str, str], ...]:
        """What tells in reports which rank it was."""
        return ("pp_rank", str(self.place.pp_rank)), ("tp_rank", str(self.place.tp_rank))

    def join(self, client: RankClient, socket_path: str | None) -> PipelineMember:
        """Take part, from a thread of its own."""
        host, port = self.address

        def connect() -> Store:
            return JobStore(host, port, f"gpuenergyd/{self.run_key}", limit_s=STORE_LIMIT_S)

        return PipelineMember(client, self.plans, self.place, connect, socket_path=socket_path)


def find_part(place: PipelinePlace, run_key: str) -> Part | None:
    """Return this rank's part in a pipeline across hosts; None, and a line in the log, where the job has no store."""
    address = find_store_address()
    if address is None:
        logger.warning(
            "gpuenergyd: the pipeline spans hosts, and neither MASTER_ADDR and MASTER_PORT nor %s say where the job's"
            " store is; it is not tuned",
            STORE_VARIABLE,
        )
        return None
    return Part(place, run_key, address)


def spans_hosts(global_ranks: Sequence[int], environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether these ranks sit on several hosts, as far as the launcher says how many each has."""
    per_host = environ.get("LOCAL_WORLD_SIZE", "")
    if not per_host.isdecimal() or int(per_host) < 1:
        return False
    return len({rank // int(per_host) for rank in global_ranks}) > 1


def _is_straggler_new(slowest_s: float | None, reply: Mapping[str, Any], offered_at_pace_s: float | None) -> bool:
    """Return whether a replica looks like a straggler that no plan has been offered for, unless it only stalled."""
    own_s = reply["own_time_s"]
    is_slow = own_s is not None and slowest_s is not None and slowest_s > own_s * _SUSPECT_RATIO
    return is_slow and offered_at_pace_s is None


def _name(pp_rank: int, tp_rank: int) -> str:
    return f"{pp_rank}.{tp_rank}"


def _up(pp_rank: int, tp_rank: int) -> str:
    return f"up/{_name(pp_rank, tp_rank)}"


def _slice(plan_id: str, pp_rank: int) -> str:
    return f"plan/{plan_id}/{pp_rank}"


def _row(term: PlanWindow) -> tuple[str, int, int]:
    return term.plan_id, term.begin_iteration, term.end_iteration
