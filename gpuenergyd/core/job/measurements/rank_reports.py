"""Assembles the ranks' reports into whole iterations, and decides which iterations are used for measurements."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.measurements.knowledge import JobKnowledge
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.measurement.stages import stage_iteration
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.reorder import Orders

_NS_PER_S = 1e9
_UNFINISHED_KEPT = 16
"""Number of iterations that may wait for reports of other ranks, whose GPUs may lag further behind their programs."""
_MAX_RUN_AHEAD = 32
"""Larger values are implausible, because driver and program bound their queues."""
_RUN_AHEAD_OVER = 64
"""Number of newest reports whose largest run-ahead is used."""
_PAUSE_AT_SIGMA = 4.0
"""A gap that exceeds the usual one by less than this many standard deviations is noise of a busy host."""
_MAX_NOISE_RATIO = 0.25
"""A gap that exceeds the usual one by this share of an iteration is a pause, however much gaps scatter."""

_LAUNCHED_AHEAD = 2
"""Number of launched iterations that may still end after the one last reported."""


@dataclass(slots=True)
class PowerCut:
    """Tracks iterations at lower clocks than planned, due to the host's power budget."""

    is_cut: bool = False
    last_index: int = -1

    def change(self, *, is_cut: bool, last_reported: int) -> None:
        """Begin or end a cut after iteration `last_reported`."""
        if self.is_cut and not is_cut:
            self.last_index = last_reported + _LAUNCHED_AHEAD
        self.is_cut = is_cut

    def touches(self, iteration_index: int) -> bool:
        """Return whether an iteration may have run at lower clocks than planned."""
        return self.is_cut or iteration_index <= self.last_index


@dataclass(frozen=True, slots=True)
class WholeIteration:
    """An iteration that all ranks have reported; `ranks` has one report per stage, in pipeline order."""

    ranks: tuple[RankIteration, ...]
    plan_id: str | None
    """None if the ranks did not all follow the same plan."""
    is_in_order: bool
    """Whether every rank ran its registered or planned instructions in order."""
    is_regular: bool
    pause_s: float | None
    """Excess over the usual gap between this iteration and the next; None if there was no pause."""

    @property
    def iteration_index(self) -> int:
        return self.ranks[0].iteration_index

    @property
    def disturbance(self) -> tuple[str, str]:
        """Kind of disturbance and log message, for an iteration that ran out of order or was followed by a pause."""
        index = self.iteration_index
        if not self.is_in_order:
            line = f"iteration {index} ran other instructions, or in another order, than were registered"
            return "order", f"{line}: it is not planned for"
        assert self.pause_s is not None
        line = f"{self.pause_s:.3g} s passed between iterations {index} and {index + 1}"
        return "pause", f"{line} (evaluation, checkpoint, waiting for others): not counted"


@dataclass(frozen=True, slots=True)
class RankReportsSnapshot:
    """All state of `RankReports`."""

    last_index: int
    num_iterations: int
    num_foreign_orders: int
    first_index: int | None
    unfinished: dict[int, dict[int, RankIteration]]
    gaps_ns: tuple[int, ...]
    run_ahead: tuple[int, ...]


@dataclass(slots=True)
class RankReports:
    """Collects the reports of a job's ranks until an iteration is complete."""

    rules: JobRules
    num_stage_ranks: int = 1
    """Number of ranks per stage, whose reports are merged."""
    last_index: int = -1
    """Newest iteration that any rank has reported."""
    num_iterations: int = 0
    """Number of complete iterations."""
    num_foreign_orders: int = 0
    """Consecutive iterations whose instructions or their order differ from those registered or planned."""
    cut: PowerCut = field(default_factory=PowerCut)
    _first_index: int | None = None
    _unfinished: dict[int, dict[int, RankIteration]] = field(default_factory=dict)
    _gaps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=32))
    _run_ahead: deque[int] = field(default_factory=lambda: deque(maxlen=_RUN_AHEAD_OVER))

    @property
    def run_ahead(self) -> int:
        """Maximum number of recent iterations launched beyond the one beginning on the GPU, until a reply arrives.

        Across hosts it includes the iterations that the ranks need to agree on a plan.
        """
        return max(self._run_ahead, default=0)

    def record_run_ahead(self, num_iterations: int) -> None:
        """Record how many iterations later than usual a plan took effect."""
        self._run_ahead.append(min(max(0, num_iterations), _MAX_RUN_AHEAD))

    def _launched_before_reply(self, report: RankIteration, *, num_ranks: int) -> int:
        """Return how many iterations a program launches beyond the one that begins, until it has the reply.

        On a busy host a reply takes about as long as its report. Of reports that waited in the rank's queue, only the
        newest shows that time.
        """
        launched = max(0, report.launched_iteration_index - report.iteration_index - 1)
        is_newest = launched <= min(self._run_ahead, default=0)
        if num_ranks == 1 or not is_newest or not (report.arrived_ns and report.next_begin_ns > report.begin_ns):
            return launched
        return launched + 2 * (report.arrived_ns - report.next_begin_ns) // (report.next_begin_ns - report.begin_ns)

    def assemble(
        self,
        report: RankIteration,
        ranks: JobRanks,
        knowledge: JobKnowledge,
        account: TimeAccount | None,
        *,
        counts_from: int,
    ) -> WholeIteration | None:
        """Add a report of one of the job's ranks; return the iteration that it completes, or None.

        Iterations during a power cut, or while GPUs adopt other limits or profiles, are irregular. The client's
        overhead on the slowest rank is charged to the account.
        """
        plans = knowledge.plans
        index = ranks.description.rank_index(report.pp_rank, report.stage_rank)
        is_plain = not plans.orders_of(plans.id_of(report.plan_epoch))
        knowledge.reordering.record(index, report, is_plain=is_plain)
        whole = self.add(report, ranks.orders, plans.id_of, counts_from=counts_from, plan_orders=plans.orders_of)
        if whole is None:
            return None
        costs_s = [rank.client_cost_s for rank in whole.ranks if rank.client_cost_s is not None]
        if costs_s and account is not None:  # the slowest rank makes all of them as slow
            account.add_client_cost(whole.iteration_index, max(costs_s))
        is_set = not (plans.is_settling(whole.iteration_index) or self.cut.touches(whole.iteration_index))
        return replace(whole, is_regular=whole.is_regular and is_set)

    def add(
        self,
        report: RankIteration,
        orders: Mapping[int, tuple[Instruction, ...]],
        plan_id_of: Callable[[int | None], str | None],
        *,
        counts_from: int,
        plan_orders: Callable[[str | None], Orders] = lambda _: (),
    ) -> WholeIteration | None:
        """Add a report; return the iteration that it completes, which is regular only from index `counts_from` on.

        `orders` are the registered orders; `plan_orders` returns those of a plan, if it has any.
        """
        index = report.iteration_index
        self.last_index = max(self.last_index, index)
        reports = self._unfinished.setdefault(index, {})
        reports[report.pp_rank * self.num_stage_ranks + report.stage_rank] = report
        self.record_run_ahead(self._launched_before_reply(report, num_ranks=len(orders) * self.num_stage_ranks))
        for stale in [i for i in self._unfinished if i < index - _UNFINISHED_KEPT]:
            del self._unfinished[stale]
        if len(reports) < len(orders) * self.num_stage_ranks:
            return None
        del self._unfinished[index]
        epochs = {r.plan_epoch for r in reports.values()}
        plan_id = plan_id_of(epochs.pop()) if len(epochs) == 1 else None
        is_warm = self.count(index)
        planned = {epoch: plan_orders(plan_id_of(epoch)) for epoch in {r.plan_epoch for r in reports.values()}}
        is_in_order = all(
            r.ran_in_order(planned[r.plan_epoch][r.pp_rank] if planned[r.plan_epoch] else orders[r.pp_rank])
            for r in reports.values()
        )
        self.num_foreign_orders = 0 if is_in_order else self.num_foreign_orders + 1
        in_order = [reports[r] for r in sorted(reports)]
        if not all(r.is_timed for r in in_order):  # times of only some of the ranks are of no use
            in_order = [replace(r, instructions=(), is_in_order=is_in_order) for r in in_order]
        first_of_stages = range(0, len(in_order), self.num_stage_ranks)
        ranks = tuple(stage_iteration(in_order[k : k + self.num_stage_ranks]) for k in first_of_stages)
        is_countable = (
            plan_id is not None and is_warm and index >= counts_from and is_in_order and ranks[0].next_begin_ns > 0
        )
        pause_s = self._pause_s(ranks[0]) if is_countable else None
        return WholeIteration(ranks, plan_id, is_in_order, is_countable and pause_s is None, pause_s)

    def count(self, iteration_index: int) -> bool:
        """Count a complete iteration; return whether it comes after the warm-up."""
        self.last_index = max(self.last_index, iteration_index)
        self.num_iterations += 1
        if self._first_index is None:
            self._first_index = iteration_index
        return iteration_index >= self._first_index + self.rules.warmup_iterations

    def snapshot(self) -> RankReportsSnapshot:
        """Return a copy of all state."""
        return RankReportsSnapshot(
            last_index=self.last_index,
            num_iterations=self.num_iterations,
            num_foreign_orders=self.num_foreign_orders,
            first_index=self._first_index,
            unfinished={index: dict(reports) for index, reports in self._unfinished.items()},
            gaps_ns=tuple(self._gaps_ns),
            run_ahead=tuple(self._run_ahead),
        )

    def restore(self, snapshot: RankReportsSnapshot) -> None:
        """Replace all state."""
        self.last_index, self.num_iterations = snapshot.last_index, snapshot.num_iterations
        self.num_foreign_orders, self._first_index = snapshot.num_foreign_orders, snapshot.first_index
        self._unfinished = {index: dict(reports) for index, reports in snapshot.unfinished.items()}
        self._gaps_ns = deque(snapshot.gaps_ns, self._gaps_ns.maxlen)
        self._run_ahead = deque(snapshot.run_ahead, self._run_ahead.maxlen)

    def _pause_s(self, rank_0: RankIteration) -> float | None:
        gap_ns = rank_0.next_begin_ns - rank_0.end_ns
        usual_ns = median(self._gaps_ns) if self._gaps_ns else gap_ns
        scatter_ns = robust_sigma(abs(gap - usual_ns) for gap in self._gaps_ns) if self._gaps_ns else 0.0
        self._gaps_ns.append(gap_ns)
        iteration_ns = rank_0.end_ns - rank_0.begin_ns
        noise_ns = min(_PAUSE_AT_SIGMA * scatter_ns, _MAX_NOISE_RATIO * iteration_ns)
        is_pause = gap_ns > usual_ns + max(self.rules.pause_ratio * iteration_ns, noise_ns)
        return (gap_ns - usual_ns) / _NS_PER_S if is_pause else None
