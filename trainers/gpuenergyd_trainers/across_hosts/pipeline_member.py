"""One rank of a pipeline across hosts: a thread between the job's store and this host's daemon.

    every member  its daemon's observations, its iteration and its installed plans -> store
                  its slice of the wanted plan from the store -> its own daemon, which checks and installs it
                  the agreed plan windows -> the training thread, which reads them at iteration boundaries
    the leader    all members' reports -> its own daemon, which plans for the pipeline -> slices and windows -> store

The training thread never waits for any of this, and no failure here reaches it: with a store that hangs, a link that
is cut or a leader that died, no plan window is extended, and the rank trains at full speed after the present one.
"""

import json
from collections.abc import Callable

from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.client.plans import AgreedPlans, prepare
from gpuenergyd.client.rank import RankClient
from gpuenergyd.core.distributed.plan_windows import PlanWindow
from gpuenergyd.wire.client_codec import decode_iteration_reply
from gpuenergyd_trainers.across_hosts.job_store import Store
from gpuenergyd_trainers.across_hosts.local_daemon import LocalDaemon
from gpuenergyd_trainers.across_hosts.pipeline_leader import LeaderRank
from gpuenergyd_trainers.across_hosts.pipeline_place import PipelinePlace
from gpuenergyd_trainers.across_hosts.store_thread import PERIOD_S, StoreThread


class PipelineMember:
    """A rank's membership in its pipeline, in a thread of its own."""

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
        self._daemon = LocalDaemon(find_socket_path(socket_path))
        self._leader = LeaderRank(place, self._daemon, period_s) if place.is_leader else None
        self._posted: tuple[str | None, str] | None = None
        self._agreement: bytes = b""
        self._thread = StoreThread(
            self._exchange,
            connect,
            name=f"rank {place.name} of its pipeline",
            consequence="training continues at full speed after the present plan window",
            period_s=period_s,
            at_end=self._daemon.close,
        )

    def stop(self) -> None:
        """Leave the pipeline; the present plan window expires."""
        self._thread.stop()

    def _exchange(self, store: Store) -> None:
        token = self._client.rank_token
        state = self._daemon.post("/v1/members", {"rank_token": token}) if token is not None else None
        report = {
            "iteration": self._client.iteration_index,
            "installed": sorted(self._plans.installed) if state is not None else [],
            "state": state if state is not None and state["order"] else None,
        }
        store.set(self._place.own_report_key, json.dumps(report))
        if self._leader is not None:
            self._leader.lead(store, token)
        agreement = store.get(self._place.agreement_key)
        if agreement is not None:
            self._follow(store, agreement, token)

    def _follow(self, store: Store, agreement: bytes, token: str | None) -> None:
        agreed = json.loads(agreement)
        if agreement != self._agreement:
            self._plans.add_windows(PlanWindow(plan_id, begin, end) for plan_id, begin, end in agreed["windows"])
            if agreed["revoked"] is not None:
                self._plans.drop(agreed["revoked"])
            self._agreement = agreement
        wanted = agreed["wanted"]
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
