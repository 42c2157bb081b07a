"""What the replicas of a training tell each other through the job's store: iteration times and slowdown budgets.

Each replica publishes a statement with its own iteration time, without waits for other replicas, and its `BudgetShare`.
For a replica that spans hosts, the leader does this. For a replica on one host, the first pipeline rank does, in a
thread of its own: it publishes what its daemon measured, and passes the slowest other iteration time and the budget to
its daemon, which decides whether to slow down. In a data-parallel loop each rank is a replica, and the first rank of
each host does this for all ranks of the host.

Replicas need not agree on anything: they number iterations differently, and each decides by itself. A statement holds
until the next one, or until it is so old that the replica counts as silent. It then has no effect, which is safe: only
the own iteration time counts, and the replica runs at full speed if another replica's host decides the budget. No
replica waits for another, and reading a statement twice does not count as a new measurement.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.client.rank import RankClient
from gpuenergyd.core.distributed.stragglers import StragglerRules
from gpuenergyd.log_lines import safe_logger
from gpuenergyd_across_hosts.ranks.job_store import STORE_VARIABLE, Store, find_store_address
from gpuenergyd_across_hosts.ranks.local_daemon import LocalDaemon
from gpuenergyd_across_hosts.ranks.run_agreement import RunAgreement
from gpuenergyd_across_hosts.ranks.store_thread import PERIOD_S, StoreThread, connection_to

logger = safe_logger("gpuenergyd.trainers")

_COUNTER = "replicas"
_MAX_REPLICAS = 1024
FIRST_REPLICA = 0
"""The replica whose first rank chooses the name of the run, under which statements are exchanged."""
_RULES = StragglerRules()
_PAUSE_PER_REPLICA_S = 0.005
"""Pause between two readings, per replica, to spare the store, which belongs to the job and is read by all replicas."""


@dataclass(frozen=True, slots=True)
class OtherPaces:
    """The longest recent iteration time of the other replicas, without their waits."""

    slowest_time_s: float | None = None
    age_s: float = 0.0
    """Age of the slowest replica's statement."""
    is_news: bool = False
    """Whether that statement contains a measurement made since the last reading."""
    least_overhead_s: float | None = None
    """The shortest time that any of the replicas spends outside its instructions."""


@dataclass(frozen=True, slots=True)
class _Statement:
    """The newest statement of a replica, and when it arrived."""

    content: Mapping[str, Any]
    share: Mapping[str, Any]
    """The replica's newest `BudgetShare`; empty before the first one."""
    at_s: float


@dataclass(slots=True)
class ReplicaPaces:
    """The exchange of statements as one replica takes part in it."""

    is_first: bool = False
    """Whether this is the first replica, whose host keeps the training's budget."""
    _index: int | None = None
    _published: str = ""
    _next_reading_at_s: float = 0.0
    _paces: OtherPaces = field(default_factory=OtherPaces)
    _statements: dict[int, _Statement] = field(default_factory=dict)
    _excess_s: float = 0.0
    """Time that the plans of other replicas have cost."""
    _spent_s: float = 0.0
    """What other replicas have spent from the training's time account."""

    def publish(
        self,
        store: Store,
        own_time_s: float | None,
        *,
        num_readings: int,
        iteration_index: int,
        overhead_s: float | None = None,
        budget: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish this replica's own iteration time, the number of measurements behind it, and its `BudgetShare`."""
        if self._index is None:
            self._index = store.add(_COUNTER, 1) - 1
        message = {
            "own_time_s": own_time_s,
            "num_readings": num_readings,
            "iteration_index": iteration_index,
            "overhead_s": overhead_s,
            "is_first": self.is_first,
            "budget": budget,
        }
        text = json.dumps(message, separators=(",", ":"))
        if text != self._published:  # nobody needs the same statement again
            store.set(_key(self._index), text)
            self._published = text

    def others(self, store: Store, now_s: float) -> OtherPaces:
        """Return the slowest pace of the other replicas that has not expired; the store is read only at intervals."""
        if now_s < self._next_reading_at_s:
            return replace(self._paces, is_news=False)
        num_replicas = min(store.add(_COUNTER, 0), _MAX_REPLICAS)
        self._next_reading_at_s = now_s + _PAUSE_PER_REPLICA_S * num_replicas
        indices = [index for index in range(num_replicas) if index != self._index]
        # `get_all` returns None while a replica has counted itself but has not published anything yet.
        found = [json.loads(raw) for raw in store.get_all([_key(index) for index in indices]) or ()]
        before = dict(self._statements)
        for index, content in zip(indices, found, strict=False):
            known = before.get(index)
            if known is None or content != known.content:
                share = content["budget"] or (known.share if known is not None else {})
                self._statements[index] = _Statement(content, share, now_s)
        heard = {index: self._statements[index] for index in indices[: len(found)]}
        self._add_costs(heard, before)
        paces = [_pace(statement, before.get(index), now_s) for index, statement in heard.items()]
        self._paces = _slowest([pace for pace in paces if pace is not None])
        return self._paces

    def budget(self, now_s: float) -> dict[str, Any]:
        """Return the fields of `TrainingBudget`: the first replica's target, and what the plans of others have cost."""
        known = self._statements.values()
        of_first = [statement for statement in known if statement.content["is_first"] and statement.share]
        first = max(of_first, key=lambda statement: statement.at_s, default=None)
        return {
            "is_first": self.is_first,
            "permitted_slowdown_ratio": None if first is None else first.share["permitted_slowdown_ratio"],
            "is_decided": first is not None and first.share["is_decided"],
            "age_s": 0.0 if first is None else now_s - first.at_s,
            "excess_s": self._excess_s,
            "num_replicas": 1 + len(known),
            "others_spent_s": self._spent_s,
            "others_age_s": max((now_s - statement.at_s for statement in known), default=0.0),
        }

    def _add_costs(self, heard: Mapping[int, _Statement], before: Mapping[int, _Statement]) -> None:
        """Add what the plans of others have cost since the last reading.

        Replicas end each iteration together, so only the slowest plan costs time. The account of a daemon that was
        restarted without it begins at 0 again. What a replica cost before its first statement arrived is unknown.
        """
        most_s = most_spent_s = 0.0
        for index, statement in heard.items():
            now, then = statement.share, before[index].share if index in before else {}
            excess_s = now.get("excess_s", 0.0)
            most_s = max(most_s, excess_s - then.get("excess_s", excess_s))
            most_spent_s = max(most_spent_s, now.get("spent_s", 0.0) - then.get("spent_s", 0.0))
        self._excess_s += most_s
        self._spent_s += most_spent_s


def _pace(own: _Statement, before: _Statement | None, now_s: float) -> OtherPaces | None:
    """Return the pace of one replica; None if the replica does not know it or its statement has expired."""
    own_time_s, age_s = own.content["own_time_s"], now_s - own.at_s
    if own_time_s is None or age_s > _RULES.counts_for_s(own_time_s):
        return None
    is_news = before is None or before.content["num_readings"] != own.content["num_readings"]
    return OtherPaces(float(own_time_s), age_s, is_news, own.content["overhead_s"])


def _slowest(paces: list[OtherPaces]) -> OtherPaces:
    overheads_s = [pace.least_overhead_s for pace in paces if pace.least_overhead_s is not None]
    slowest = max(paces, key=lambda pace: pace.slowest_time_s or 0.0, default=OtherPaces())
    return replace(slowest, least_overhead_s=min(overheads_s, default=None))


def _key(index: int) -> str:
    return f"pace/{index}"


class ReplicaOnOneHost:
    """The exchange of a replica on a single host, which its first rank runs in a thread of its own.

    With `covers_host`, it is the exchange of all replicas of the training on this host.
    """

    def __init__(
        self,
        client: RankClient,
        connect: Callable[[], Store],
        *,
        dp_rank: int,
        socket_path: str | None = None,
        period_s: float = PERIOD_S,
        covers_host: bool = False,
    ) -> None:
        self._client = client
        self._covers_host = covers_host
        self._daemon = LocalDaemon(find_socket_path(socket_path))
        self._paces = ReplicaPaces(is_first=dp_rank == FIRST_REPLICA)
        self._run = RunAgreement(FIRST_REPLICA, is_first=dp_rank == FIRST_REPLICA)
        self._thread = StoreThread(
            self._exchange,
            connect,
            name=f"replica {dp_rank}",
            consequence="training continues without following stragglers on other hosts",
            period_s=period_s,
            at_end=self._daemon.close,
        )

    def stop(self) -> None:
        """End the exchange; this replica's statement expires for the others."""
        self._thread.stop()

    def _exchange(self, store: Store) -> None:
        token, of_run = self._client.rank_token, self._run.find(store, monotonic())
        if token is None or of_run is None:
            return
        now_s = monotonic()
        others = self._paces.others(of_run, now_s)
        report = {**_report(token, others), "budget": self._paces.budget(now_s), "covers_host": self._covers_host}
        reply = self._daemon.post("/v1/pace", report)
        if reply is not None:
            self._paces.publish(
                of_run,
                reply["own_time_s"],
                num_readings=reply["num_readings"],
                iteration_index=self._client.iteration_index,
                overhead_s=reply["overhead_s"],
                budget=reply["budget"],
            )


def exchange_of_replica(
    client: RankClient, *, run_key: str, dp_rank: int, socket_path: str | None
) -> Callable[[], None] | None:
    """Start the exchange of a pipeline on this host; return a function that ends it, or None without a store."""
    address = find_store_address()
    if address is None:
        return None
    return ReplicaOnOneHost(client, connection_to(address, run_key), dp_rank=dp_rank, socket_path=socket_path).stop


def exchange_of_loop(
    client: RankClient, *, run_key: str, dp_rank: int, socket_path: str | None
) -> Callable[[], None] | None:
    """Start the exchange for all ranks of a data-parallel loop on this host; return a function that ends it."""
    address = find_store_address()
    if address is None:
        logger.warning(
            "gpuenergyd: ranks on other hosts are not compared with those of this one, since the job's store cannot be"
            " found: set MASTER_ADDR and MASTER_PORT, or %s",
            STORE_VARIABLE,
        )
        return None
    connect = connection_to(address, run_key)
    return ReplicaOnOneHost(client, connect, dp_rank=dp_rank, socket_path=socket_path, covers_host=True).stop


def _report(token: str, others: OtherPaces) -> dict[str, Any]:
    return {
        "rank_token": token,
        "slowest_other_time_s": others.slowest_time_s,
        "age_s": others.age_s,
        "is_news": others.is_news,
        "least_other_overhead_s": others.least_overhead_s,
    }
