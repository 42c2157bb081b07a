"""The leading rank of a pipeline across hosts: its daemon plans for all members, and the rank grants plan windows.

It reads the reports of the stages from the store, at most a few times per iteration, and sends what is new to its
daemon; facts are sent only if they have changed or the daemon lacks them. See rules/plan_windows.py for the
agreement that keeps members from following two plans in one iteration.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from gpuenergyd.core.distributed.stragglers import StragglerRules
from gpuenergyd.core.pipeline.plan import TRIALS
from gpuenergyd_across_hosts.messages.pipeline_messages import StageReport
from gpuenergyd_across_hosts.ranks.job_store import Store
from gpuenergyd_across_hosts.ranks.local_daemon import LocalDaemon
from gpuenergyd_across_hosts.ranks.pipeline_place import PipelinePlace, member_name
from gpuenergyd_across_hosts.ranks.replica_paces import FIRST_REPLICA, OtherPaces, ReplicaPaces
from gpuenergyd_across_hosts.rules.plan_windows import MemberState, PlanWindowGrantor

_ROUNDS_AHEAD = 6
"""How many rounds of the store threads lie between granting a plan window and its first iteration."""
_UNKNOWN_AHEAD = 4
"""How many iterations lie between them while the iteration time is unknown."""
_READS_PER_ITERATION = 2
"""How often all reports are read in one iteration, at most."""
_MAX_MESSAGE_BYTES = 262_144
"""Size limit for parts and facts in one message to the daemon; large pipelines need several messages."""
_SUSPECT_RATIO = 1 + StragglerRules().enter_ratio

_Part = tuple[int, int]
"""Pipeline rank and tensor-parallel rank of the rank that carries the report."""


_PACE_ITERATIONS = 8
"""Number of iterations over which the iteration time is measured."""


@dataclass(slots=True)
class IterationPace:
    """Measures the iteration time from iteration numbers and the times at which they were read."""

    iteration_s: float = 0.0
    """Iteration time; 0 while unknown."""
    _since: tuple[float, int] | None = None

    def update(self, now_s: float, iteration_index: int) -> None:
        """Record the number of the newest iteration at a point in time."""
        if self._since is None or iteration_index < self._since[1]:
            self._since = now_s, iteration_index
        elif iteration_index >= self._since[1] + _PACE_ITERATIONS:
            self.iteration_s = (now_s - self._since[0]) / (iteration_index - self._since[1])
            self._since = now_s, iteration_index


@dataclass(slots=True)
class LeaderRank:
    """State of the leader: what it last offered and published, and the iteration times of its pipeline and replicas."""

    place: PipelinePlace
    daemon: LocalDaemon
    period_s: float
    grantor: PlanWindowGrantor = field(init=False)
    pipeline_id: str | None = None
    _offered: str | None = None
    _published: str = ""
    _pace: IterationPace = field(default_factory=IterationPace)
    _replicas: ReplicaPaces = field(init=False)
    _straggler_time_s: float | None = None
    _offered_at_pace_s: float | None = None
    """The straggler's iteration time when the newest plan was offered; None if there was no straggler."""
    _reports: dict[_Part, StageReport] = field(default_factory=dict)
    """The newest reports; those of ranks that no longer carry are dropped."""
    _raw: dict[_Part, bytes] = field(default_factory=dict)
    _new: set[_Part] = field(default_factory=set)
    """Parts whose reports the daemon has not received yet."""
    _facts_sent: dict[_Part, str] = field(default_factory=dict)
    """IDs of the facts that the daemon has received."""
    _block: str | None = None
    """ID of the block at full speed that was requested last."""
    _own: MemberState | None = None
    """The state of this rank by its last report."""
    _num_news: int = 0
    _news_since_s: float | None = None
    """When the oldest report that has not been read was published."""
    _merged_iteration: int = -1

    def __post_init__(self) -> None:
        self.grantor = PlanWindowGrantor(frozenset(member_name(*member) for member in self.place.members))
        self._replicas = ReplicaPaces(is_first=self.place.dp_rank == FIRST_REPLICA)

    def lead(
        self, store: Store, rank_token: str | None, iteration_index: int, *, paces: Store | None
    ) -> dict[str, Any]:
        """Read the stages' reports, have the daemon plan, publish the plan windows, and return them.

        Args:
            store: the part of the store for the pipeline's run.
            rank_token: the token of this rank; None before it has registered.
            iteration_index: the present iteration of this rank, which is newer than those in the reports.
            paces: the part of the store for the iteration times of replicas; None until it is known.
        """
        grantor = self.grantor
        self._pace.update(monotonic(), iteration_index)
        self._read_reports(store, iteration_index)
        if rank_token is not None and self._num_reported() == len(self.place.members):
            self._plan(store, rank_token, paces)
        grantor.grant(self._iterations_ahead())
        agreement = {
            "wanted": grantor.plan_to_install,
            "windows": [[window.plan_id, window.begin_iteration, window.end_iteration] for window in grantor.windows],
            "revoked": grantor.revoked,
            "merged_iteration": self._merged_iteration,
        }
        text = _json(agreement)
        if text != self._published:
            store.set(self.place.agreement_key, text)
            self._published = text
        return agreement

    def _read_reports(self, store: Store, iteration_index: int) -> None:
        """Read all reports once as many new ones have been published, or some time after the first new one.

        While a straggler is suspected or a plan for it is being installed, each new report is read at once.
        """
        num_news, now_s = store.add(self.place.news_key, 0), monotonic()
        num_new = num_news - self._num_news
        if num_new and self._news_since_s is None:
            self._news_since_s = now_s
        waited_s = now_s - self._news_since_s if self._news_since_s is not None else 0.0
        is_due = num_new >= len(self._reports) or waited_s >= self._pace.iteration_s / _READS_PER_ITERATION
        is_due = is_due or self.grantor.is_change_near
        is_due = is_due or (self.grantor.is_proposing and self._straggler_time_s is not None)
        own = member_name(self.place.pp_rank, self.place.tp_rank)
        if not num_new or not is_due:
            self.grantor.update({own: replace(self._own, farthest_index=iteration_index)} if self._own else {})
            return
        self._num_news, self._news_since_s = num_news, None
        found = self._found(store)
        self._reports = {part: report for part, report in self._reports.items() if part in found}
        states: dict[str, MemberState] = {}
        for (pp_rank, carrier), raw in found.items():
            if self._raw.get((pp_rank, carrier)) != raw:
                self._reports[pp_rank, carrier] = StageReport(*json.loads(raw))
                self._raw[pp_rank, carrier] = raw
                self._new.add((pp_rank, carrier))
            report = self._reports[pp_rank, carrier]
            state = MemberState(report.oldest_iteration, frozenset(report.installed), report.newest_iteration)
            states.update({member_name(pp_rank, tp_rank): state for tp_rank in report.tp_ranks})
        if own in states:
            self._own = states[own]
            states[own] = replace(states[own], farthest_index=iteration_index)
        self.grantor.update(states)

    def _found(self, store: Store) -> dict[_Part, bytes]:
        """Return the reports in the store: that of rank 0 of each stage, and those of ranks that it does not cover."""
        place = self.place
        known = list(self._reports)
        values = store.get_all([place.report_key(*part) for part in known]) if self._is_covered(known) else None
        if values is not None:
            return dict(zip(known, values, strict=True))
        found: dict[_Part, bytes] = {}
        for pp_rank in range(place.num_pp_ranks):
            covered: set[int] = set()
            for tp_rank in range(place.num_tp_ranks):
                if tp_rank not in covered and (raw := store.get(place.report_key(pp_rank, tp_rank))) is not None:
                    found[pp_rank, tp_rank] = raw
                    covered.update(StageReport(*json.loads(raw)).tp_ranks)
        return found

    def _is_covered(self, parts: list[_Part]) -> bool:
        return sum(len(self._reports[part].tp_ranks) for part in parts) == len(self.place.members)

    def _num_reported(self) -> int:
        """Return how many ranks the reports with facts cover; a report has no facts if its rank has no daemon."""
        return sum(len(report.tp_ranks) for report in self._reports.values() if report.facts_id)

    def _plan(self, store: Store, rank_token: str, paces: Store | None) -> None:
        now_s = monotonic()
        others = OtherPaces() if paces is None else self._replicas.others(paces, now_s)
        budget = None if paces is None else self._replicas.budget(now_s)
        reply = None
        for content in self._messages(store):
            report = {
                "rank_token": rank_token,
                "num_pp_ranks": self.place.num_pp_ranks,
                "num_tp_ranks": self.place.num_tp_ranks,
                **content,
                "known_plan_id": self._offered,
                "slowest_other_time_s": others.slowest_time_s,
                "age_s": others.age_s,
                "is_news": others.is_news,
                "least_other_overhead_s": others.least_overhead_s,
                "budget": budget,
            }
            reply = self.daemon.post("/v1/pipelines", report)
            if reply is None:
                self._new = set(self._reports)
                return
            for pp_rank, carrier in reply["missing_facts"]:
                self._facts_sent.pop((pp_rank, carrier), None)
                self._new.add((pp_rank, carrier))
            if reply["slices"]:
                break  # the rest follows in the next round
        assert reply is not None
        self._handle(store, reply, others.slowest_time_s)
        if paces is not None:
            self._replicas.publish(
                paces,
                reply["own_time_s"],
                num_readings=reply["num_readings"],
                iteration_index=self.grantor.newest_iteration,
                overhead_s=reply["overhead_s"],
                budget=reply["budget"],
            )

    def _messages(self, store: Store) -> Iterator[dict[str, Any]]:
        """Yield what is new, in messages of limited size, at least one; each must be sent before the next is made."""
        parts: list[tuple[int, int, StageReport]] = []
        facts: list[Any] = []
        num_bytes = 0
        for part in sorted(self._new & set(self._reports)):
            report = self._reports[part]
            if report.facts_id and self._facts_sent.get(part) != report.facts_id:
                raw = store.get(self.place.facts_key(*part))
                if raw is None:
                    continue
                own = json.loads(raw)
                if own["facts_id"] != report.facts_id:
                    continue  # these are newer facts, and the report that refers to them follows
                facts.append(own)
                num_bytes += len(raw)
                self._facts_sent[part] = report.facts_id
            if report.facts_id:
                parts.append((*part, report))
                num_bytes += len(self._raw[part])
            self._new.discard(part)
            if num_bytes > _MAX_MESSAGE_BYTES:
                yield {"parts": parts, "facts": facts}
                parts, facts, num_bytes = [], [], 0
        yield {"parts": parts, "facts": facts}

    def _handle(self, store: Store, reply: dict[str, Any], slowest_other_time_s: float | None) -> None:
        is_other_pipeline = self.pipeline_id not in {None, reply["pipeline_id"]}
        if is_other_pipeline or reply["merged_iteration"] < self._merged_iteration:
            # The daemon was restarted and has lost the plan that it made; it measures again.
            self.grantor.let_expire()
            self._offered = None
        self.pipeline_id = reply["pipeline_id"]
        self._merged_iteration = self.grantor.guarded_index = reply["merged_iteration"]
        self.grantor.is_change_near = _is_new_straggler(slowest_other_time_s, reply, self._offered_at_pace_s)
        before_s, self._straggler_time_s = self._straggler_time_s, reply["straggler_time_s"]
        has_recovered = before_s is not None and (self._straggler_time_s is None or self._straggler_time_s < before_s)
        if reply["slices"] and reply["plan_id"] not in {None, self._offered}:
            if has_recovered:
                self.grantor.revoke()  # run at full speed until all members have agreed on the faster plan
            self._offer(store, reply)
        if reply["block"] is not None and reply["plan_id"] == self._offered and reply["block"][0] != self._block:
            self._block, num_iterations = reply["block"]
            self.grantor.request_block(num_iterations)

    def _offer(self, store: Store, reply: dict[str, Any]) -> None:
        plan_id, slices = reply["plan_id"], reply["slices"]
        for pp_rank, plan_slice in enumerate(slices):
            store.set(self.place.slice_key(plan_id, pp_rank), _json(plan_slice))
        # A different order must be tried for several iterations.
        is_short = slices[0]["purpose"] in TRIALS and not any(piece["order"] for piece in slices)
        self.grantor.propose(plan_id, is_short=is_short, replaces=frozenset(reply["replaces"]))
        self._offered, self._offered_at_pace_s = plan_id, self._straggler_time_s

    def _iterations_ahead(self) -> int:
        """Return how many iterations after the newest one all members are sure to know a new plan window."""
        iteration_s = self._pace.iteration_s
        if not iteration_s:
            return _UNKNOWN_AHEAD
        return math.ceil(_ROUNDS_AHEAD * self.period_s / iteration_s)


def _is_new_straggler(slowest_s: float | None, reply: Mapping[str, Any], offered_at_pace_s: float | None) -> bool:
    """Return whether a replica looks like a straggler for which no plan has been offered yet."""
    own_s = reply["own_time_s"]
    is_slow = own_s is not None and slowest_s is not None and slowest_s > own_s * _SUSPECT_RATIO
    return is_slow and offered_at_pace_s is None


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
