"""Exchange of iteration times between the replicas of a training, through the job's store.

Each replica publishes its own iteration time, without waits for other replicas. Of a replica that spans hosts, the
leader does so; of a replica on one host, the first pipeline rank does, in a thread of its own: it publishes the pace
that its daemon measured, and passes the slowest other pace to its daemon, which decides whether to slow down to it.
Each rank of a data-parallel loop is a replica: there, the first rank of each host does so for all ranks of the host.
No replica waits for another, one that publishes nothing has no effect, and a value read again is not a new reading.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.client.rank import RankClient
from gpuenergyd_trainers.across_hosts.job_store import STORE_VARIABLE, Store, find_store_address
from gpuenergyd_trainers.across_hosts.local_daemon import LocalDaemon
from gpuenergyd_trainers.across_hosts.run_agreement import RunAgreement
from gpuenergyd_trainers.across_hosts.store_thread import PERIOD_S, StoreThread, connection_to
from gpuenergyd_trainers.across_hosts.training_budget import BudgetReadings

logger = logging.getLogger("gpuenergyd.trainers")

_COUNTER = "replicas"
_MAX_REPLICAS = 1024
FIRST_REPLICA = 0
"""The replica whose first rank names the run in which paces are exchanged."""
_PAUSE_PER_REPLICA_S = 0.005
"""Pause between two readings, per replica: the store belongs to the job, and every replica reads it."""
_EXPIRY_S = 10.0
_EXPIRY_ITERATIONS = 5.0
"""Age from which an unchanged message no longer counts: the longer of this time and this many of its iterations."""


@dataclass(frozen=True, slots=True)
class OtherPaces:
    """The slowest own iteration time among the other replicas, as published lately."""

    slowest_time_s: float | None = None
    age_s: float = 0.0
    """Age of the message of the slowest replica."""
    is_news: bool = False
    """Whether that message holds a new measurement since the last reading."""
    least_overhead_s: float | None = None
    """The shortest time that any of them spends outside its instructions."""


@dataclass(slots=True)
class _Message:
    """The newest message of a replica, the time of its arrival, and the number of measurements behind it."""

    raw: bytes
    at_s: float
    num_readings: int


@dataclass(slots=True)
class ReplicaPaces:
    """One replica's side of the exchange."""

    is_first: bool = False
    """Whether this is the first replica, whose host keeps the budget of the training."""
    budgets: BudgetReadings = field(init=False)
    _index: int | None = None
    _published: str = ""
    _next_reading_at_s: float = 0.0
    _known: OtherPaces = field(default_factory=OtherPaces)
    _messages: dict[int, _Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budgets = BudgetReadings(self.is_first)

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
        if text != self._published:  # the same again is no news to anybody
            store.set(_key(self._index), text)
            self._published = text

    def others(self, store: Store, now_s: float) -> OtherPaces:
        """Return the slowest pace of the other replicas, expired messages left out; the store is read now and then."""
        if now_s < self._next_reading_at_s:
            return replace(self._known, is_news=False)
        num_replicas = min(store.add(_COUNTER, 0), _MAX_REPLICAS)
        self._next_reading_at_s = now_s + _PAUSE_PER_REPLICA_S * num_replicas
        indices = [index for index in range(num_replicas) if index != self._index]
        values = store.get_all([_key(index) for index in indices])
        # None while a replica has counted itself and published nothing yet.
        found = dict(zip(indices, values, strict=True)) if values is not None else {}
        messages = {index: json.loads(raw) for index, raw in found.items()}
        self.budgets.read(messages, now_s)
        paces = [self._read(index, message, found[index], now_s) for index, message in messages.items()]
        self._known = _slowest([pace for pace in paces if pace is not None])
        return self._known

    def _read(self, index: int, message: Mapping[str, Any], raw: bytes, now_s: float) -> OtherPaces | None:
        """Return one replica's pace; None if the replica does not know it, or its message has expired."""
        before = self._messages.get(index)
        if message["own_time_s"] is None:
            return None
        if before is None or before.raw != raw:
            self._messages[index] = _Message(raw, now_s, message["num_readings"])
        is_news = before is None or before.num_readings != message["num_readings"]
        age_s = now_s - self._messages[index].at_s
        if age_s > max(_EXPIRY_S, _EXPIRY_ITERATIONS * message["own_time_s"]):
            return None
        return OtherPaces(float(message["own_time_s"]), age_s, is_news, message["overhead_s"])


def _slowest(paces: list[OtherPaces]) -> OtherPaces:
    overheads_s = [pace.least_overhead_s for pace in paces if pace.least_overhead_s is not None]
    slowest = max(paces, key=lambda pace: pace.slowest_time_s or 0.0, default=OtherPaces())
    return replace(slowest, least_overhead_s=min(overheads_s, default=None))


def _key(index: int) -> str:
    return f"pace/{index}"


class ReplicaOnOneHost:
    """The exchange of a replica that is on one host, run by its first rank in a thread of its own.

    With `covers_host` it is that of all replicas of the training on this host.
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
        """End the exchange; this replica's message expires for the others."""
        self._thread.stop()

    def _exchange(self, store: Store) -> None:
        token, of_run = self._client.rank_token, self._run.find(store, monotonic())
        if token is None or of_run is None:
            return
        now_s = monotonic()
        others = self._paces.others(of_run, now_s)
        report = {
            **_report(token, others),
            "budget": self._paces.budgets.report(now_s),
            "covers_host": self._covers_host,
        }
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


def exchange_of_loop(
    client: RankClient, *, run_key: str, dp_rank: int, socket_path: str | None
) -> Callable[[], None] | None:
    """Start the exchange of all ranks of a data-parallel loop on this host; return a function that ends it."""
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
