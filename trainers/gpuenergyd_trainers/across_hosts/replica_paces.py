"""What the replicas of a training say to each other through the job's store: what each takes by itself.

A replica that spans hosts has its leader say it, beside everything else that leads it (across_hosts). Of one that sits
whole on a host the first pipeline rank does, from a thread of its own: what its daemon found goes to the store, what
the slowest of the others takes goes to its daemon, which slows down for it or does not. Nobody waits for anybody, what
nobody says imposes nothing, and a word that was heard before is no second reading.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.client.rank import RankClient
from gpuenergyd_trainers.across_hosts.job_store import JobStore, Store, find_store_address
from gpuenergyd_trainers.across_hosts.local_daemon import OwnDaemon
from gpuenergyd_trainers.across_hosts.store_thread import PERIOD_S, STORE_LIMIT_S, StoreThread
from gpuenergyd_trainers.joining.handle import Handle

_COUNTER = "replicas"
_MAX_REPLICAS = 1024
_PAUSE_PER_REPLICA_S = 0.005
_SILENT_S = 10.0
_SILENT_ITERATIONS = 5.0


@dataclass(frozen=True, slots=True)
class OtherPaces:
    """What the other replicas take by themselves, as far as they have said so lately."""

    slowest_time_s: float | None = None
    age_s: float = 0.0
    """How long ago the slowest was last heard of."""
    is_news: bool = False
    """Whether it is a reading that was not there when it was asked for last."""
    least_overhead_s: float | None = None
    """The least time that any of them spends outside its instructions."""


@dataclass(slots=True)
class _Heard:
    """What a replica said last, since when, and by which reading."""

    said: bytes
    at_s: float
    num_readings: int


@dataclass(slots=True)
class ReplicaPaces:
    """One replica's side of it."""

    _index: int | None = None
    _ask_at_s: float = 0.0
    _known: OtherPaces = field(default_factory=OtherPaces)
    _heard: dict[int, _Heard] = field(default_factory=dict)

    def say(
        self,
        store: Store,
        own_time_s: float | None,
        *,
        num_readings: int,
        iteration_index: int,
        overhead_s: float | None = None,
    ) -> None:
        """Say what this replica takes by itself, by which reading that is known, and that it lives."""
        if self._index is None:
            self._index = store.add(_COUNTER, 1) - 1
        said = {
            "own_time_s": own_time_s,
            "num_readings": num_readings,
            "iteration_index": iteration_index,
            "overhead_s": overhead_s,
        }
        store.set(_key(self._index), json.dumps(said))

    def others(self, store: Store, now_s: float) -> OtherPaces:
        """Return what is known of the others; those that have fallen silent count no more.

        The more replicas there are, the less often they are asked for: the store is the job's, and every one asks.
        """
        if now_s < self._ask_at_s:
            return replace(self._known, is_news=False)
        num_replicas = min(store.add(_COUNTER, 0), _MAX_REPLICAS)
        self._ask_at_s = now_s + _PAUSE_PER_REPLICA_S * num_replicas
        indices = [index for index in range(num_replicas) if index != self._index]
        values = store.get_all([_key(index) for index in indices])
        # None: one has begun to speak and not said anything yet.
        said = zip(indices, values, strict=True) if values is not None else ()
        heard = [self._hear(index, raw, now_s) for index, raw in said]
        self._known = _slowest([other for other in heard if other is not None])
        return self._known

    def _hear(self, index: int, raw: bytes, now_s: float) -> OtherPaces | None:
        """Return what one replica says; None if it does not know its pace, or has said so for too long."""
        said, before = json.loads(raw), self._heard.get(index)
        if said["own_time_s"] is None:
            return None
        if before is None or before.said != raw:
            self._heard[index] = _Heard(raw, now_s, said["num_readings"])
        is_news = before is None or before.num_readings != said["num_readings"]
        age_s = now_s - self._heard[index].at_s
        if age_s > max(_SILENT_S, _SILENT_ITERATIONS * said["own_time_s"]):
            return None
        return OtherPaces(float(said["own_time_s"]), age_s, is_news, said["overhead_s"])


def _slowest(paces: list[OtherPaces]) -> OtherPaces:
    overheads_s = [pace.least_overhead_s for pace in paces if pace.least_overhead_s is not None]
    slowest = max(paces, key=lambda pace: pace.slowest_time_s or 0.0, default=OtherPaces())
    return replace(slowest, least_overhead_s=min(overheads_s, default=None))


def _key(index: int) -> str:
    return f"pace/{index}"


class WholeReplica:
    """The first rank of a replica that sits on one host, as the one that speaks for it."""

    def __init__(
        self,
        client: RankClient,
        connect: Callable[[], Store],
        *,
        dp_rank: int,
        socket_path: str | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._client = client
        self._daemon = OwnDaemon(find_socket_path(socket_path))
        self._paces = ReplicaPaces()
        self._thread = StoreThread(
            self._speak,
            connect,
            who=f"replica {dp_rank}",
            without_it="and stragglers among the replicas on other hosts are not seen",
            period_s=period_s,
            at_end=self._daemon.close,
        )

    def stop(self) -> None:
        """Say nothing any more; the others forget this replica after a while."""
        self._thread.stop()

    def _speak(self, store: Store) -> None:
        token = self._client.rank_token
        if token is None:
            return
        others = self._paces.others(store, monotonic())
        reply = self._daemon.post("/v1/pace", _report(token, others))
        if reply is not None:
            self._paces.say(
                store,
                reply["own_time_s"],
                num_readings=reply["num_readings"],
                iteration_index=self._client.iteration_index,
                overhead_s=reply["overhead_s"],
            )


def join_replicas(
    handle: Handle, client: RankClient, *, dp_rank: int, run_key: str, socket_path: str | None = None
) -> None:
    """Speak for a replica that sits on one host, if this is its first rank and others may sit elsewhere."""
    address = find_store_address()
    if client.pp_rank != 0 or address is None or not _has_other_hosts():
        return
    host, port = address

    def connect() -> Store:
        return JobStore(host, port, f"gpuenergyd/{run_key}", limit_s=STORE_LIMIT_S)

    def begin() -> None:
        handle.on_detach.append(WholeReplica(client, connect, dp_rank=dp_rank, socket_path=socket_path).stop)

    handle.shielded(begin)


def _has_other_hosts(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the training has processes on other hosts, as far as the launcher says."""
    here, everywhere = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("WORLD_SIZE", "")
    return here.isdecimal() and everywhere.isdecimal() and int(everywhere) > int(here)


def _report(token: str, others: OtherPaces) -> dict[str, Any]:
    return {
        "rank_token": token,
        "slowest_other_time_s": others.slowest_time_s,
        "age_s": others.age_s,
        "is_news": others.is_news,
        "least_other_overhead_s": others.least_overhead_s,
    }
