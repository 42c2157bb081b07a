"""The leading rank of a pipeline across hosts: its daemon plans for all members, and it grants plan windows.

See core/distributed/plan_windows.py for the agreement that keeps two plans out of one iteration.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from gpuenergyd.core.distributed.plan_windows import MemberState, PlanWindow, PlanWindowGrantor
from gpuenergyd.core.distributed.stragglers import StragglerRules
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_trainers.across_hosts.job_store import Store
from gpuenergyd_trainers.across_hosts.local_daemon import LocalDaemon
from gpuenergyd_trainers.across_hosts.pipeline_place import PipelinePlace, member_name
from gpuenergyd_trainers.across_hosts.replica_paces import ReplicaPaces

_ROUNDS_AHEAD = 6
"""Rounds of the store threads between granting a plan window and its first iteration."""
_UNKNOWN_AHEAD = 4
"""The same in iterations, while the iteration time is unknown."""
_PACE_ITERATIONS = 8
"""Iterations over which the iteration time is measured."""
_SUSPECT_RATIO = 1 + StragglerRules().enter_ratio


@dataclass(slots=True)
class LeaderRank:
    """The leader's state: what it last offered and published, and the pace of its pipeline and of the replicas."""

    place: PipelinePlace
    daemon: LocalDaemon
    period_s: float
    grantor: PlanWindowGrantor = field(init=False)
    pipeline_id: str | None = None
    _offered: str | None = None
    _published: str = ""
    _pace: tuple[float, int] | None = None
    _iteration_s: float = 0.0
    _replicas: ReplicaPaces = field(default_factory=ReplicaPaces)
    _straggler_time_s: float | None = None
    _offered_at_pace_s: float | None = None
    """The straggler's iteration time when the newest plan was offered; None without a straggler."""

    def __post_init__(self) -> None:
        self.grantor = PlanWindowGrantor(frozenset(member_name(*member) for member in self.place.members))

    def lead(self, store: Store, rank_token: str | None) -> None:
        """Collect the members' reports, have the daemon plan, and publish the plan windows."""
        place, grantor = self.place, self.grantor
        found = {member: store.get(place.report_key(*member)) for member in place.members}
        reports = {member: json.loads(value) for member, value in found.items() if value is not None}
        grantor.update(
            {member_name(*m): MemberState(r["iteration"], frozenset(r["installed"])) for m, r in reports.items()}
        )
        states = {member: report["state"] for member, report in reports.items() if report["state"] is not None}
        if rank_token is not None and len(states) == len(place.members):
            self._plan(store, rank_token, states)
        grantor.grant(self._iterations_ahead())
        windows = [_row(window) for window in grantor.windows]
        text = json.dumps({"wanted": grantor.plan_to_install, "windows": windows, "revoked": grantor.revoked})
        if text != self._published:
            store.set(place.agreement_key, text)
            self._published = text

    def _plan(self, store: Store, rank_token: str, states: dict[tuple[int, int], Any]) -> None:
        others = self._replicas.others(store, monotonic())
        report = {
            "rank_token": rank_token,
            "members": [{"pp_rank": pp, "tp_rank": tp, "state": state} for (pp, tp), state in states.items()],
            "num_pp_ranks": self.place.num_pp_ranks,
            "num_tp_ranks": self.place.num_tp_ranks,
            "slowest_other_time_s": others.slowest_time_s,
            "age_s": others.age_s,
            "is_news": others.is_news,
        }
        reply = self.daemon.post("/v1/pipelines", report)
        if reply is None:
            return
        if self.pipeline_id not in {None, reply["pipeline_id"]}:
            self.grantor.let_expire()  # the daemon has restarted without the plan that it made
        self.pipeline_id = reply["pipeline_id"]
        self._replicas.publish(
            store,
            reply["own_time_s"],
            num_readings=reply["num_readings"],
            iteration_index=self.grantor.newest_iteration,
        )
        self.grantor.is_change_near = _is_new_straggler(others.slowest_time_s, reply, self._offered_at_pace_s)
        before_s, self._straggler_time_s = self._straggler_time_s, reply["straggler_time_s"]
        has_recovered = before_s is not None and (self._straggler_time_s is None or self._straggler_time_s < before_s)
        if reply["plan_id"] not in {None, self._offered}:
            if has_recovered:
                self.grantor.revoke()  # full speed until all members have agreed on the faster plan
            self._offer(store, reply["plan_id"], reply["slices"])

    def _offer(self, store: Store, plan_id: str, slices: list[dict[str, Any]]) -> None:
        for pp_rank, plan_slice in enumerate(slices):
            store.set(self.place.slice_key(plan_id, pp_rank), json.dumps(plan_slice))
        self.grantor.propose(plan_id, is_short=slices[0]["purpose"] == PlanPurpose.PROFILE)
        self._offered, self._offered_at_pace_s = plan_id, self._straggler_time_s

    def _iterations_ahead(self) -> int:
        """Return how many iterations ahead of the newest one all members are sure to know a new plan window."""
        now_s, newest = monotonic(), self.grantor.newest_iteration
        if self._pace is None or newest < self._pace[1]:
            self._pace = now_s, newest
        elif newest >= self._pace[1] + _PACE_ITERATIONS:
            self._iteration_s = (now_s - self._pace[0]) / (newest - self._pace[1])
            self._pace = now_s, newest
        return math.ceil(_ROUNDS_AHEAD * self.period_s / self._iteration_s) if self._iteration_s else _UNKNOWN_AHEAD


def _is_new_straggler(slowest_s: float | None, reply: Mapping[str, Any], offered_at_pace_s: float | None) -> bool:
    """Return whether a replica looks like a straggler for which no plan has been offered yet."""
    own_s = reply["own_time_s"]
    is_slow = own_s is not None and slowest_s is not None and slowest_s > own_s * _SUSPECT_RATIO
    return is_slow and offered_at_pace_s is None


def _row(window: PlanWindow) -> tuple[str, int, int]:
    return window.plan_id, window.begin_iteration, window.end_iteration
