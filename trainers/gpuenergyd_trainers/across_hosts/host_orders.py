"""Agreement of all hosts of a training on running other orders of instructions, through the job's store.

One rank of each host carries: a thread publishes what its host offers, promises windows and fetches verdicts
(`gpuenergyd.core.distributed.order_windows`); the first host's thread proposes windows and has them decided. The
training thread waits for it only while its host is in doubt about an iteration.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic

from gpuenergyd.client.order_agreement import OrderAgreement
from gpuenergyd.core.distributed.order_windows import HostOffer, OrderWindow, WindowProposer, iterations_ahead
from gpuenergyd_trainers.across_hosts.iteration_pace import IterationPace
from gpuenergyd_trainers.across_hosts.job_store import Store
from gpuenergyd_trainers.across_hosts.run_agreement import RunAgreement, RunStore
from gpuenergyd_trainers.across_hosts.store_thread import PERIOD_S, StoreThread

_FIRST_HOST = 0
_FOLDER = "orders"
_GRANTED, _REFUSED = "granted", "refused"
_KEPT = 4
"""Verdicts that stay in the store; no host can be in doubt about one before."""
_PAUSE_PER_HOST_S = 0.005
"""Pause between two exchanges, per host: the store belongs to the job, and the first host reads all offers."""
_LEAVING_LIMIT_S = 0.5


@dataclass(frozen=True, slots=True)
class TrainingHosts:
    """This process's place among the hosts of its training."""

    host: int
    num_hosts: int
    local_rank: int
    num_local_ranks: int


def find_hosts(environ: Mapping[str, str] = os.environ) -> TrainingHosts | None:
    """Return this process's place by the launcher's variables; None if they do not tell, or hosts differ in size."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        return None
    rank, size, local_rank, per_host = map(int, values)
    if per_host < 1 or size % per_host or rank % per_host != local_rank:
        return None
    return TrainingHosts(rank // per_host, size // per_host, local_rank, per_host)


@dataclass(slots=True)
class HostExchange:
    """One host's side of the agreement; each call may fail at any operation of the store, and is repeated."""

    agreement: OrderAgreement
    host: int
    num_hosts: int
    is_leaving: bool = False
    """Whether this host promises nothing any more."""
    _proposer: WindowProposer = field(default_factory=WindowProposer)
    _published: str = ""

    def exchange(self, store: Store, ahead: int) -> None:
        """Fetch verdicts, promise what is proposed, publish the offer; on the first host, propose and decide."""
        if self._published or self.agreement.offer() is not None:
            head = store.get("head")
            self._settle(store)
            if head is not None and not self.is_leaving:
                self.agreement.promise(OrderWindow(*json.loads(head)))
            self._publish(store)
        if self.host == _FIRST_HOST:
            self._lead(store, ahead)

    def _settle(self, store: Store) -> None:
        """Fetch the verdict on an open window; while a rank waits for it, it is refused unless it is granted."""
        found = self.agreement.open_window()
        if found is None:
            return
        window, is_in_doubt = found
        key = _verdict_key(window.number)
        verdict = store.set_once(key, _REFUSED) if is_in_doubt or self.is_leaving else store.get(key)
        if verdict is not None:
            self.agreement.settle(window.number, is_granted=verdict.decode() == _GRANTED)

    def _publish(self, store: Store) -> None:
        offer = self.agreement.offer()
        if offer is None:
            return
        turns = () if self.is_leaving else offer.turns
        text = json.dumps([offer.newest_iteration, turns, offer.promised])
        if text != self._published:
            store.set(_offer_key(self.host), text)
            self._published = text

    def _lead(self, store: Store, ahead: int) -> None:
        values = store.get_all([_offer_key(host) for host in range(self.num_hosts)])
        if values is None:  # a host has no plan with an order yet
            return
        offers = [_offer(value) for value in values]
        proposer = self._proposer
        is_granted = proposer.decision(offers)
        if is_granted is not None and proposer.proposed is not None:
            store.set_once(_verdict_key(proposer.proposed.number), _GRANTED if is_granted else _REFUSED)
            proposer.is_decided = True
            if proposer.proposed.number >= _KEPT:
                store.delete(_verdict_key(proposer.proposed.number - _KEPT))
        window = proposer.propose(offers, ahead)
        if window is not None:
            store.set("head", json.dumps([window.number, window.begin_iteration, window.end_iteration]))


class HostOrders:
    """The thread of a host's carrying rank that agrees with the other hosts."""

    def __init__(
        self,
        agreement: OrderAgreement,
        hosts: TrainingHosts,
        connect: Callable[[], Store],
        iteration_index: Callable[[], int],
        *,
        period_s: float = PERIOD_S,
    ) -> None:
        """Start the thread; `iteration_index` returns the newest iteration of this rank."""
        self._exchange = HostExchange(agreement, hosts.host, hosts.num_hosts)
        self._iteration_index = iteration_index
        self._run = RunAgreement(_FIRST_HOST, is_first=hosts.host == _FIRST_HOST)
        self._pace = IterationPace()
        self._period_s = max(period_s, _PAUSE_PER_HOST_S * hosts.num_hosts)
        self._has_left = threading.Event()
        self._thread = StoreThread(
            self._act,
            connect,
            name=f"host {hosts.host}",
            consequence="the order of instructions stays as it is",
            period_s=self._period_s,
            at_end=self._has_left.set,
        )

    def stop(self) -> None:
        """Give open windows up, so that no rank waits for this thread, and end it."""
        self._exchange.is_leaving = True
        self._has_left.wait(_LEAVING_LIMIT_S)
        self._thread.stop()

    def _act(self, store: Store) -> None:
        now_s, is_leaving = monotonic(), self._exchange.is_leaving
        self._pace.update(now_s, self._iteration_index())
        of_run = self._run.find(RunStore(store, _FOLDER), now_s)
        if of_run is not None:
            self._exchange.exchange(of_run, iterations_ahead(self._period_s, self._pace.iteration_s))
        if is_leaving:
            self._has_left.set()


def _offer(raw: bytes) -> HostOffer:
    newest, turns, promised = json.loads(raw)
    return HostOffer(newest, tuple((begin, bool(is_ordered)) for begin, is_ordered in turns), promised)


def _offer_key(host: int) -> str:
    return f"offer/{host}"


def _verdict_key(number: int) -> str:
    return f"verdict/{number}"
