"""Time account of one training: the time that the daemon may cost it, has cost it, and may still spend.

Theory of operation. Income is what the user permits, plus a small share of the elapsed time, plus one second at the
start. Every iteration is charged with its time minus full speed, whatever its purpose. Full speed is interpolated
between the full-speed blocks before and after it (until there is a later block, it is the time of the earlier one).
Noise averages out, because iterations faster than full speed are credited. The charge of an iteration is limited to
what its clocks can explain plus noise, and that of a disturbed one (evaluation, checkpoint) to what others under its
plan have cost. Stalls of the program's own code therefore do not use up the account.

An experiment reserves its maximum cost before it begins, and is paid for as its iterations are observed. Replicas that
end each iteration together share one account. Each reports from which iteration on its plans are in force. An iteration
is counted once, from the first report: the slowest replica makes all of them equally slow. Simultaneous experiments of
several replicas therefore cost as much as the most expensive one. Replicas on several hosts exchange what they have
spent and reserved, and each host reserves at most its share of the rest. While one host is silent, the others
spend only their shares of the income.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, median_low

_NOISE_SIGMAS = 3.0
"""Number of standard deviations by which an iteration may differ from what its plan explains."""
_CHANGED_RATIO = 0.02
"""If two full-speed blocks differ by more, the job changed abruptly between them. An iteration is then compared with
the slower block, or with the faster one if it was itself faster than the slower block."""
_MIN_BLOCK = 3
"""Minimum iterations of a full-speed block, without its first one, to be a reference even if one of them stalls."""
_MAX_NOISE_RATIO = 0.05
"""Upper limit of an iteration's noise, as a share of its time."""
_BLOCK_KEPT = 32
"""A full-speed block's time is the median of this number of its newest iterations."""
_MAX_OPEN = 256
"""Maximum number of iterations since the last full-speed block whose cost the next block may still revise."""
_MAX_SPANS = 256


@dataclass(frozen=True, slots=True)
class AccountRules:
    """Income of a time account in addition to what the user permits."""

    income_ratio: float = 0.005
    first_income_s: float = 1.0


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Iteration time in a block at full speed, and the position of the block."""

    iteration_index: float
    time_s: float


@dataclass(frozen=True, slots=True)
class OpenIteration:
    """An iteration whose comparison time at full speed may still be revised."""

    iteration_index: int
    time_s: float
    given_pace_s: float
    """Pace set by a straggler or a power budget; time up to it is not caused by a plan."""
    explained_s: float
    noise_s: float
    is_disturbed: bool = False
    is_typical: bool = True
    """Whether its plan was in force from start to end, so that its cost is a reference for disturbed iterations."""

    def cost_s(self, full_speed_s: float) -> float:
        excess_s = self.time_s - max(full_speed_s, self.given_pace_s)
        return min(max(excess_s, -self.noise_s), self.explained_s + self.noise_s)


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """First iteration of a job's plan, and the time beyond full speed that the plan can explain per iteration."""

    job_id: str
    from_index: int
    explained_s: float
    """Time beyond full speed that the plan explains; 0 at full speed."""


@dataclass(frozen=True, slots=True)
class Commitment:
    """Amount reserved for an experiment: iterations `first` to `last` of a job."""

    job_id: str
    first: int
    last: int
    cost_s: float

    def part(self, first: int, last: int) -> "Commitment | None":
        """Return the part reserved for these iterations; None if nothing is."""
        first, last = max(first, self.first), min(last, self.last)
        if first > last:
            return None
        share = (last - first + 1) / (self.last - self.first + 1)
        return Commitment(self.job_id, first, last, share * self.cost_s)


@dataclass(frozen=True, slots=True)
class AccountTotals:
    """Total income and spending of a training, without reservations; costs are signed, in seconds."""

    time_s: float = 0.0
    permitted_s: float = 0.0
    cost_s: float = 0.0
    client_cost_s: float | None = None
    num_iterations: int = 0
    num_experiments: int = 0


@dataclass(slots=True)
class TimeAccount:
    """Income and spending of one training; all times in seconds."""

    rules: AccountRules = field(default_factory=AccountRules)
    time_s: float = 0.0
    """Total time of the iterations."""
    permitted_s: float = 0.0
    """Total time that the user has permitted."""
    num_iterations: int = 0
    num_experiments: int = 0
    client_cost_s: float | None = None
    """Overhead measured by the clients; None if not measured."""
    num_hosts: int = 1
    """Number of hosts whose replicas share the income."""
    elsewhere_s: float | None = 0.0
    """Time that replicas on other hosts have spent or reserved; None while one of them is silent."""
    last_index: int = -1
    _client_index: int = -1
    _closed_s: float = 0.0
    _before: BlockTime | None = None
    _block: list[tuple[int, float]] = field(default_factory=list)
    _open: list[OpenIteration] = field(default_factory=list)
    _open_s: float = 0.0
    """Known cost of the open iterations."""
    _spans: list[PlanSpan] = field(default_factory=list)
    _commitments: list[Commitment] = field(default_factory=list)

    # --- what is left ---

    @property
    def income_s(self) -> float:
        """Total income of the training."""
        return self.permitted_s + self.rules.first_income_s + self.rules.income_ratio * self.time_s

    @property
    def cost_s(self) -> float:
        """Total time that the daemon has cost the training on this host; at least 0."""
        return max(0.0, self._closed_s + self._open_s) + (self.client_cost_s or 0.0)

    @property
    def cost_ratio(self) -> float | None:
        """`cost_s` as a share of the time at full speed; None before the first iteration."""
        full_s = self.time_s - self.cost_s
        return self.cost_s / full_s if self.num_iterations and full_s > 0 else None

    @property
    def balance_s(self) -> float:
        """Income not spent yet; while another host is silent, the rest of this host's share."""
        if self.elsewhere_s is None:
            return self.income_s / self.num_hosts - self.cost_s
        return self.income_s - self.cost_s - self.elsewhere_s

    @property
    def left_s(self) -> float:
        """Income neither spent nor reserved; each host may reserve its share of the rest."""
        return self.balance_s / self.num_hosts - self._committed_s

    @property
    def spent_or_committed_s(self) -> float:
        """Time that this host has spent, or has reserved for experiments that have begun."""
        return self.cost_s + self._committed_s

    def earned_ratio(self, permitted_ratio: float) -> float:
        """Return this host's income per time at full speed."""
        is_silent = self.elsewhere_s is None
        return (permitted_ratio / self.num_hosts if is_silent else permitted_ratio) + (
            self.rules.income_ratio / self.num_hosts
        )

    def hear(self, num_hosts: int, elsewhere_s: float | None) -> None:
        """Record how many hosts share the income and what the others have spent; None if one of them is silent."""
        self.num_hosts, self.elsewhere_s = num_hosts, elsewhere_s

    # --- experiments ---

    def left_beside_s(self, job_id: str, first: int, last: int) -> float:
        """Return the maximum cost of an experiment in these iterations; simultaneous experiments share their cost."""
        return self.left_s + max(
            (
                commitment.cost_s
                for commitment in self._commitments
                if commitment.job_id != job_id and (commitment.first, commitment.last) == (first, last)
            ),
            default=0.0,
        )

    def next_experiment(self, job_id: str, not_before: int) -> int:
        """Return the first iteration of another replica's experiment that can be shared, otherwise `not_before`."""
        own = {due.first for due in self._commitments if due.job_id == job_id}
        shared = (due.first for due in self._commitments if due.first not in own)
        return min((first for first in shared if first >= not_before), default=not_before)

    def commit(self, job_id: str, first: int, last: int, cost_s: float) -> None:
        """Reserve the maximum cost of an experiment."""
        self.num_experiments += 1
        self._commitments.append(Commitment(job_id, first, last, cost_s))

    def plan_sent(self, job_id: str, from_index: int, explained_s: float) -> None:
        """Record the plan that a job follows from an iteration on; drop reservations of plans that it replaces."""
        self._keep(lambda due: due if due.job_id != job_id else due.part(due.first, from_index - 1))
        self._spans = [span for span in self._spans if span.job_id != job_id or span.from_index < from_index]
        self._spans.append(PlanSpan(job_id, from_index, explained_s))
        del self._spans[:-_MAX_SPANS]

    def leave(self, job_id: str) -> None:
        """Remove the plans of a job that has ended."""
        self._spans = [span for span in self._spans if span.job_id != job_id]
        self._keep(lambda commitment: commitment if commitment.job_id != job_id else None)

    # --- iterations ---

    def add(
        self,
        iteration_index: int,
        time_s: float,
        *,
        is_regular: bool,
        explained_s: float = 0.0,
        permitted_ratio: float = 0.0,
        given_pace_s: float = 0.0,
        sigma_s: float = 0.0,
    ) -> None:
        """Charge an iteration once, whichever replica reports it first.

        Args:
            iteration_index: index of the iteration, which is the same for all replicas.
            time_s: how long it took.
            is_regular: whether it was undisturbed; at full speed it is then a reference.
            explained_s: time beyond full speed that the job's plan can explain.
            permitted_ratio: the slowdown that the user permits now.
            given_pace_s: pace set by a straggler or a power budget.
            sigma_s: standard deviation of an iteration at full speed.
        """
        if iteration_index <= self.last_index:
            return
        self.last_index = iteration_index
        self.num_iterations += 1
        full_s = self._before.time_s if self._before is not None else time_s
        own_s, explained_s = explained_s, max(explained_s, self._explained_s(iteration_index))
        noise_s = min(_NOISE_SIGMAS * sigma_s, _MAX_NOISE_RATIO * full_s)
        self.time_s += min(time_s, full_s + explained_s + noise_s)
        self.permitted_s += permitted_ratio * full_s
        self._keep(lambda commitment: commitment.part(iteration_index + 1, commitment.last))
        self._spans = self._without_past_spans(iteration_index)
        if explained_s:
            if len(self._block) >= _MIN_BLOCK:
                self._end_block()
            self._open.append(
                OpenIteration(
                    iteration_index,
                    time_s,
                    given_pace_s,
                    explained_s,
                    noise_s,
                    is_disturbed=not is_regular,
                    is_typical=is_regular and explained_s == own_s,
                )
            )
            if len(self._open) > _MAX_OPEN:
                self._closed_s += self._cost_s(self._open[: _MAX_OPEN // 2], None)
                self._open = self._open[_MAX_OPEN // 2 :]
            self._open_s = self._cost_s(self._open, None)
        elif is_regular and not given_pace_s:  # at a straggler's pace, full speed cannot be measured
            self._block.append((iteration_index, time_s))
            del self._block[:-_BLOCK_KEPT]
            if len(self._block) >= _MIN_BLOCK:
                self._open_s = self._cost_s(self._open, self._full_speed_of_block())

    def add_client_cost(self, iteration_index: int, cost_s: float) -> None:
        """Add the clients' own overhead in one iteration, on the slowest rank; counted once for all replicas."""
        if iteration_index > self._client_index:
            self._client_index = iteration_index
            self.client_cost_s = (self.client_cost_s or 0.0) + cost_s

    @property
    def totals(self) -> "AccountTotals":
        """The part of the account that survives if its daemon is killed."""
        cost_s = self._closed_s + self._open_s
        counts = self.num_iterations, self.num_experiments
        return AccountTotals(self.time_s, self.permitted_s, cost_s, self.client_cost_s, *counts)

    def take_over(self, totals: "AccountTotals") -> None:
        """Continue the account that an earlier daemon kept for the same training."""
        self.time_s, self.permitted_s, self._closed_s = totals.time_s, totals.permitted_s, totals.cost_s
        self.client_cost_s = totals.client_cost_s
        self.num_iterations, self.num_experiments = totals.num_iterations, totals.num_experiments

    def forget_iterations(self) -> None:
        """Expect iterations from the first one again, because the training restarts in other processes."""
        self._closed_s, self._open_s = self._closed_s + self._open_s, 0.0
        self._open, self._block, self._before = [], [], None
        self.last_index = self._client_index = -1
        self._spans, self._commitments = [], []

    def copy(self) -> "TimeAccount":
        """Return a copy that is not changed by later iterations."""
        lists = {name: list(getattr(self, name)) for name in ("_block", "_open", "_spans", "_commitments")}
        return replace(self, **lists)  # type: ignore[arg-type]

    # --- inside ---

    def _keep(self, part: Callable[[Commitment], Commitment | None]) -> None:
        """Replace each reservation by the part still to be paid."""
        self._commitments = [left for commitment in self._commitments if (left := part(commitment)) is not None]

    def _explained_s(self, iteration_index: int) -> float:
        """Return the time explained by the plans of this and the previous iteration, as clocks change within one."""
        by_job: dict[str, list[PlanSpan]] = {}
        for span in self._spans:
            by_job.setdefault(span.job_id, []).append(span)
        found = 0.0
        for spans in by_job.values():
            begun = [span for span in spans if span.from_index <= iteration_index]
            in_force = begun[-1:] if begun and begun[-1].from_index < iteration_index else begun[-2:]
            found = max([found, *(span.explained_s for span in in_force)])
        return found

    def _without_past_spans(self, iteration_index: int) -> list[PlanSpan]:
        """Return the spans that may still apply to the next iterations."""
        latest: dict[str, list[int]] = {}
        for span in self._spans:
            if span.from_index <= iteration_index:
                latest.setdefault(span.job_id, []).append(span.from_index)
        return [span for span in self._spans if span.from_index >= min(latest.get(span.job_id, [0])[-2:])]

    def _full_speed_of_block(self) -> BlockTime:
        return BlockTime(fmean(index for index, _ in self._block), median_low(time_s for _, time_s in self._block))

    def _end_block(self) -> None:
        """Settle the charges of all iterations before a full-speed block."""
        after = self._full_speed_of_block()
        self._closed_s += self._cost_s(self._open, after)
        self._before, self._block, self._open = after, [], []

    def _cost_s(self, iterations: Sequence[OpenIteration], after: BlockTime | None) -> float:
        """Return the cost of iterations; for disturbed ones, at most the typical cost under their plan."""
        costs_s = [iteration.cost_s(self._full_speed_s(iteration, after)) for iteration in iterations]
        typical: dict[float, list[float]] = {}
        for iteration, cost_s in zip(iterations, costs_s, strict=True):
            if iteration.is_typical:
                typical.setdefault(iteration.explained_s, []).append(cost_s)
        usual_s = {explained_s: max(0.0, median(known)) for explained_s, known in typical.items()}
        return sum(
            min(cost_s, usual_s.get(iteration.explained_s, iteration.explained_s)) if iteration.is_disturbed else cost_s
            for iteration, cost_s in zip(iterations, costs_s, strict=True)
        )

    def _full_speed_s(self, own: OpenIteration, after: BlockTime | None) -> float:
        before = self._before or after
        if before is None:
            return own.time_s
        if after is None or after.iteration_index <= before.iteration_index:
            return before.time_s
        if abs(after.time_s / before.time_s - 1) > _CHANGED_RATIO:
            fitting = [known.time_s for known in (before, after) if known.time_s <= own.time_s + own.noise_s]
            return max(fitting, default=min(before.time_s, after.time_s))
        share = (own.iteration_index - before.iteration_index) / (after.iteration_index - before.iteration_index)
        return before.time_s + min(max(share, 0.0), 1.0) * (after.time_s - before.time_s)

    @property
    def _committed_s(self) -> float:
        """Sum of all reservations; of several for the same iterations, only the largest."""
        by_span: dict[tuple[int, int], float] = {}
        for due in self._commitments:
            by_span[due.first, due.last] = max(due.cost_s, by_span.get((due.first, due.last), 0.0))
        return sum(by_span.values())
