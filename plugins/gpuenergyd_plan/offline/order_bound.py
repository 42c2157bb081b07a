"""Lower bound on the energy of any order that fits in memory, with full or split backwards, by a linear program.

Theory of operation. Microbatches cost the same on a rank, so they can be relabelled there by the order in which they
start. First in, first out then loses nothing, and the m-th forward, input gradient and weight gradient of each rank
satisfy these constraints in any order:

- data edges between ranks, F to I to W on a rank, and memory: forward m + limit starts after weight gradient m;
- load windows: if instruction u of a rank must precede v, everything on that rank that must run between them fits in
  between, since a rank runs one instruction at a time;
- convex costs: a duration costs at least what the hull of its class gives. A full backward is an input gradient that
  ends with it, without a weight gradient; every microbatch may mix both ways, at the cost of the mixture.

Instructions of the same kind and neighbouring microbatches may form a cell, of which only the first start, the last end
and the sum of the durations are variables. This keeps long pipelines tractable at some loss. There are too many windows
to list; they are added where a solution violates them. The bound is recomputed from the program's multipliers by weak
duality, so it is valid for any solver tolerance.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd_plan.offline.load_bound import load_bound_j, stage_loads
from gpuenergyd_policies.planning.exact.tables import FloatArray, HullChain, IntArray, under_hull
from gpuenergyd_policies.planning.orders.relaxation import OrderTask

KINDS = (InstructionKind.F, InstructionKind.I, InstructionKind.W)
MOST_CELLS, FEW_CELLS = 1200, 400
"""Maximum cells of the program; pipelines with more instructions have cells of several microbatches."""
MANY_INSTRUCTIONS = 2_500
"""Pipelines with more instructions use few cells, so that the bound does not take longer than the plan."""
MOST_RANKS = 32
"""Maximum ranks for the program; with more, the loads of the ranks give a looser bound (see `load_bound`)."""
MOST_ROUNDS = 8
MOST_NEW_WINDOWS = 600
"""Maximum number of windows added in each round, the most violated ones first."""
_HULL_TOLERANCE = 2e-4
"""Maximum underestimate of hulls, as a share of the least energy of the class."""
_VIOLATED_S = 1e-6
_SETTLED_RATIO = 1e-6


def any_order_bound(task: OrderTask, *, num_cells: int | None = None) -> float | None:
    """Return a proven lower bound for plans that meet a deadline, with waits charged up to the end of each plan.

    If the profile has no input and weight gradients, the bound is only for full backwards. With a forced wait, the time
    until the deadline passes anyway. None if the solver fails. `num_cells` overrides the default limit on cells: more
    cells give a tighter bound and take longer.
    """
    num_ranks = len(task.limits)
    if num_ranks > MOST_RANKS:
        waiting_w = task.profile.blocking_power_w * num_ranks
        loads = stage_loads(task.profile, task.num_microbatches)
        return load_bound_j(loads, waiting_w, task.deadline_s, forced=task.forced)
    if num_cells is None:
        num_cells = MOST_CELLS if 3 * num_ranks * task.num_microbatches <= MANY_INSTRUCTIONS else FEW_CELLS
    return _Program(task, num_cells).bound_j()


def cell_starts(num_microbatches: int, num_cells: int) -> IntArray:
    """Return the first microbatch of each cell: single microbatches at both ends, groups of equal size in between."""
    if num_microbatches <= num_cells:
        return np.arange(num_microbatches)
    ends = num_cells // 3
    middle = np.linspace(ends, num_microbatches - ends, num_cells - 2 * ends, endpoint=False)
    return np.unique(np.concatenate([
        np.arange(ends), np.floor(middle).astype(np.int64), np.arange(num_microbatches - ends, num_microbatches),
    ]))  # fmt: skip


class _Program:
    """The linear program: columns are starts and ends of cells, mixtures of vertices, and the iteration time."""

    def __init__(self, task: OrderTask, num_cells: int) -> None:
        self.limits = [min(limit, task.num_microbatches) for limit in task.limits]
        self.num_ranks = len(self.limits)
        self.deadline_s, self.forced = task.deadline_s, task.forced
        self.first = cell_starts(task.num_microbatches, max(12, num_cells // (3 * self.num_ranks)))
        self.num_cells = len(self.first)
        self.last = np.append(self.first[1:], task.num_microbatches) - 1
        self.size = self.last - self.first + 1
        self.idle_w = task.profile.blocking_power_w * self.num_ranks
        self._rows: list[IntArray] = []
        self._columns: list[IntArray] = []
        self._values: list[FloatArray] = []
        self._limits: list[float] = []
        self._add_columns(task.profile)
        latency_s = task.communication_latency_s
        assert not callable(latency_s), "the program has one latency for all ranks"
        self._add_order(latency_s)
        self._known: set[tuple[int, int, int, int, int]] = set()

    def start(self, rank: int, kind: int, cell: int) -> int:
        """Return the column of the first start in a cell."""
        return (rank * 3 + kind) * self.num_cells + cell

    def end(self, rank: int, kind: int, cell: int) -> int:
        """Return the column of the last end in a cell."""
        return self.num_starts + self.start(rank, kind, cell)

    def _add_columns(self, profile: PipelineProfile) -> None:
        """Number the columns: starts, ends, mixture of hull vertices of each cell, iteration time."""
        self.num_starts = self.num_ranks * 3 * self.num_cells
        costs: list[FloatArray] = [np.zeros(2 * self.num_starts)]
        self.fastest_s = np.zeros((self.num_ranks, 3))
        self.duration: list[tuple[IntArray, FloatArray]] = [
            (np.zeros(0, dtype=np.int64), np.zeros(0))
        ] * self.num_starts
        equal_rows: list[IntArray] = []
        equal_columns: list[IntArray] = []
        equal_limits: list[float] = []
        column = 2 * self.num_starts
        for rank in range(self.num_ranks):
            hulls, whole_hull = _hulls(profile, rank)
            self.fastest_s[rank] = [hull.times_s[0] for hull in hulls]
            if whole_hull is not None:
                self.fastest_s[rank, 1] = min(self.fastest_s[rank, 1], whole_hull.times_s[0])
                self.fastest_s[rank, 2] = 0.0
            for cell in range(self.num_cells):
                shares: list[IntArray] = []
                count = float(self.size[cell])
                for kind, hull in enumerate(hulls):
                    parts = [hull] if kind != 1 or whole_hull is None else [hull, whole_hull]
                    columns: list[IntArray] = []
                    for part in parts:
                        columns.append(np.arange(column, column + len(part.times_s)))
                        costs.append(part.costs_j)
                        column += len(part.times_s)
                    shares.append(np.concatenate(columns))
                    self.duration[self.start(rank, kind, cell)] = (
                        shares[kind],
                        np.concatenate([part.times_s for part in parts]),
                    )
                if whole_hull is not None:  # forwards; input gradient or whole; weight gradient or whole
                    shares[2] = np.concatenate([shares[2], shares[1][len(hulls[1].times_s) :]])
                for columns_of_kind in shares:
                    equal_rows.append(np.full(len(columns_of_kind), len(equal_limits)))
                    equal_columns.append(columns_of_kind)
                    equal_limits.append(count)
        self.time_column = column
        self.cost = np.concatenate([*costs, [0.0 if self.forced else self.idle_w]])
        self.upper = np.full(column + 1, self.deadline_s)
        self.upper[2 * self.num_starts : column] = float(self.size.max())
        rows = np.concatenate(equal_rows)
        self.equal = csr_array(
            coo_array(
                (np.ones(len(rows)), (rows, np.concatenate(equal_columns))), shape=(len(equal_limits), column + 1)
            )
        )
        self.equal_limits = np.array(equal_limits)

    def _add(self, before: int, after: int, least_s: float, cells: Sequence[int] = ()) -> None:
        """Require that column `after` is at least column `before` plus the durations of some cells plus a time."""
        parts = [self.duration[cell] for cell in cells]
        columns = [np.array([before, after]), *(part[0] for part in parts)]
        values = [np.array([1.0, -1.0]), *(part[1] for part in parts)]
        together = np.concatenate(columns)
        self._rows.append(np.full(len(together), len(self._limits)))
        self._columns.append(together)
        self._values.append(np.concatenate(values))
        self._limits.append(-least_s)

    def _add_order(self, latency_s: float) -> None:
        for rank in range(self.num_ranks):
            fastest_s = self.fastest_s[rank]
            for cell in range(self.num_cells):
                for kind in range(3):
                    here = self.start(rank, kind, cell)
                    self._add(here, self.end(rank, kind, cell), 0.0, [here])
                    if cell + 1 < self.num_cells:
                        self._add(self.end(rank, kind, cell), self.start(rank, kind, cell + 1), 0.0)
                    if kind < 2:
                        self._follow(rank, kind, cell, rank, kind + 1, cell, 0.0)
                if rank + 1 < self.num_ranks:
                    self._follow(rank, 0, cell, rank + 1, 0, cell, latency_s)
                    self._follow(rank + 1, 1, cell, rank, 1, cell, latency_s)
                self._add_memory(rank, cell, float(fastest_s[0]))
                # Everything from the first forward of a cell on must run before the end of the iteration.
                rest = [self.start(rank, kind, later) for kind in range(3) for later in range(cell, self.num_cells)]
                self._add(self.start(rank, 0, cell), self.time_column, 0.0, rest)
            self._add(self.end(rank, 2, self.num_cells - 1), self.time_column, 0.0)

    def _follow(self, rank: int, kind: int, cell: int, to: int, to_kind: int, to_cell: int, latency_s: float) -> None:
        """Require that a cell's microbatches run on another rank, or as another kind, after they have run here."""
        if self.size[cell] == 1:
            self._add(self.end(rank, kind, cell), self.start(to, to_kind, to_cell), latency_s)
            return
        self._add(
            self.start(rank, kind, cell),
            self.start(to, to_kind, to_cell),
            float(self.fastest_s[rank, kind]) + latency_s,
        )
        self._add(
            self.end(rank, kind, cell), self.end(to, to_kind, to_cell), float(self.fastest_s[to, to_kind]) + latency_s
        )

    def _add_memory(self, rank: int, cell: int, fastest_s: float) -> None:
        limit = self.limits[rank]
        before_first = int(np.searchsorted(self.last, self.first[cell] - limit, side="right")) - 1
        if before_first >= 0:
            self._add(self.end(rank, 2, before_first), self.start(rank, 0, cell), 0.0)
        before_last = int(np.searchsorted(self.last, self.last[cell] - limit, side="right")) - 1
        if before_last > before_first:
            self._add(self.end(rank, 2, before_last), self.end(rank, 0, cell), fastest_s)

    def bound_j(self) -> float | None:
        """Return the bound after rounds of adding violated windows; None if the solver fails."""
        best_j: float | None = None
        for _ in range(MOST_ROUNDS):
            matrix = csr_array(
                coo_array(
                    (np.concatenate(self._values), (np.concatenate(self._rows), np.concatenate(self._columns))),
                    shape=(len(self._limits), len(self.cost)),
                )
            )
            limits = np.array(self._limits)
            bounds = np.stack([np.zeros(len(self.cost)), self.upper], axis=1)
            result = linprog(
                self.cost, A_ub=matrix, b_ub=limits, A_eq=self.equal, b_eq=self.equal_limits, bounds=bounds,
                method="highs-ds",
            )  # fmt: skip
            if result.status != 0:
                return best_j
            prices, equal_prices = np.minimum(result.ineqlin.marginals, 0.0), result.eqlin.marginals
            reduced = self.cost - matrix.T @ prices - self.equal.T @ equal_prices
            proven_j = float(limits @ prices + self.equal_limits @ equal_prices)
            proven_j += float(np.minimum(reduced * self.upper, 0.0).sum())
            proven_j += self.idle_w * self.deadline_s if self.forced else 0.0
            settled = best_j is not None and proven_j - best_j < _SETTLED_RATIO * abs(best_j)
            best_j = proven_j if best_j is None else max(best_j, proven_j)
            if settled or not self._add_violated(result.x):
                break
        return best_j

    def _add_violated(self, solution: FloatArray) -> int:
        """Add the windows most violated by a solution, and return the number of violated ones."""
        durations = np.array([float(values @ solution[columns]) for columns, values in self.duration])
        found: list[tuple[float, tuple[int, int, int, int, int]]] = []
        for rank in range(self.num_ranks):
            sums = [
                np.concatenate(
                    [[0.0], np.cumsum(durations[self.start(rank, k, 0) : self.start(rank, k, 0) + self.num_cells])]
                )
                for k in range(3)
            ]
            for kind in range(3):
                for to_kind in range(3):
                    late_s, is_ordered = self._late_s(rank, kind, to_kind, sums, solution)
                    late_s = np.where(is_ordered, late_s, 0.0)
                    for cell, to_cell in enumerate(np.argmax(late_s, axis=1).tolist()):
                        key = (rank, kind, cell, to_kind, to_cell)
                        if late_s[cell, to_cell] > _VIOLATED_S and key not in self._known:
                            found.append((float(late_s[cell, to_cell]), key))
        found.sort(reverse=True)
        for _, key in found[:MOST_NEW_WINDOWS]:
            self._known.add(key)
            rank, kind, cell, to_kind, to_cell = key
            begins, ends = self._between(rank, kind, to_kind)
            cells = [
                self.start(rank, k, between)
                for k in range(3)
                for between in range(int(begins[k][cell]), int(ends[k][to_cell]))
            ]
            self._add(self.start(rank, kind, cell), self.end(rank, to_kind, to_cell), 0.0, cells)
        return len(found)

    def _between(self, rank: int, kind: int, to_kind: int) -> tuple[list[IntArray], list[IntArray]]:
        """Return, by kind, the first cell that must follow each cell's start, and the number of cells before each end.

        An input gradient releases memory on this rank and those before it; the forward that needs this memory follows.
        """
        own, any_before = self.limits[rank], min(self.limits[: rank + 1])
        after = ((0, 0, 0), (any_before, 0, 0), (own, own, 0))[kind]
        before = ((0, any_before, own), (0, 0, own), (0, 0, 0))[to_kind]
        begins = [np.searchsorted(self.first, self.first + offset, side="left") for offset in after]
        ends = [np.searchsorted(self.last, self.last - offset, side="right") for offset in before]
        return begins, ends

    def _late_s(
        self, rank: int, kind: int, to_kind: int, sums: Sequence[FloatArray], solution: FloatArray
    ) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Return, for pairs of cells, by how much a window is too short, and whether the first precedes the second."""
        begins, ends = self._between(rank, kind, to_kind)
        between_s = np.zeros((self.num_cells, self.num_cells))
        for k in range(3):
            between_s += np.maximum(0.0, sums[k][ends[k]][None, :] - sums[k][begins[k]][:, None])
        first = self.start(rank, kind, 0)
        end = self.end(rank, to_kind, 0)
        window_s = solution[end : end + self.num_cells][None, :] - solution[first : first + self.num_cells][:, None]
        own, any_before = self.limits[rank], min(self.limits[: rank + 1])
        distance = ((0, 0, 0), (any_before, 0, 0), (own, own, 0))[kind][to_kind]
        is_ordered = self.first[None, :] - self.first[:, None] >= distance
        return between_s - window_s, is_ordered


def _hulls(profile: PipelineProfile, rank: int) -> tuple[list[HullChain], HullChain | None]:
    """Return the hulls of forward, input and weight gradient, and of the full backward if it is an alternative.

    If splitting was not measured, the full backward is treated as an input gradient with a free weight gradient.
    """
    whole, *parts = (InstructionClass(rank, kind) for kind in (InstructionKind.B, *KINDS))
    if parts[1] not in profile.classes:
        nothing = HullChain(np.zeros(1), np.zeros(1))
        return [_hull(profile, parts[0]), _hull(profile, whole), nothing], None
    hulls = [_hull(profile, key) for key in parts]
    if whole not in profile.classes or is_no_cheaper(profile, rank):
        return hulls, None
    return hulls, _hull(profile, whole)


def _hull(profile: PipelineProfile, key: InstructionClass) -> HullChain:
    options = profile[key].lower_hull(profile.blocking_power_w)
    times_s = np.array([option.time_s for option in options])
    costs_j = np.array([option.effective_energy_j(profile.blocking_power_w) for option in options])
    return under_hull(HullChain(times_s, costs_j), _HULL_TOLERANCE * min(option.energy_j for option in options))


def is_no_cheaper(profile: PipelineProfile, rank: int) -> bool:
    """Return whether a rank's full backward equals its two halves in a row, so that splitting it costs nothing."""
    whole, *halves = (
        profile.classes[InstructionClass(rank, kind)].options
        for kind in (InstructionKind.B, InstructionKind.I, InstructionKind.W)
    )
    for option, first, second in zip(whole, *halves, strict=False):
        same_clock = option.sm_clock_mhz == first.sm_clock_mhz == second.sm_clock_mhz
        if not same_clock or option.time_s < (first.time_s + second.time_s) * (1 - 1e-12):
            return False
        if option.energy_j < (first.energy_j + second.energy_j) * (1 - 1e-12):
            return False
    return len(whole) == len(halves[0]) == len(halves[1])
