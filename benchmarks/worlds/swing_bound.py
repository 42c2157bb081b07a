"""Lower bound on the swing of a pipeline's power that any clocks can reach, for a given order, time and energy.

Method. Let g be a wave in the band with mean square 1. For every plan, the band energy is at least the square of the
scalar product of its wave with g (Cauchy-Schwarz), and that product is linear in the plan: each instruction adds its
power above waiting, times the integral of g over its run. So the least product over a relaxation of all plans, squared,
bounds the band energy of all plans. g is the band part of the flattest plan found, for which the bound is tightest.

The relaxation is a time-indexed linear program. A variable stands for an instruction at a clock, begun in a slot of
time; instructions may be mixtures of these, and may begin later than they could, which plans cannot. The window of
each begin is exact, from longest paths at the fastest clocks. Within a slot the coefficient is the least of sampled
begins. Precedence holds for the slots, with the earliest end of each begin, and for the mean begins. Energy is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.power_swing import PowerWave, harmonics_in_band
from gpuenergyd.core.pipeline.profile import PipelineProfile

NUM_SLOTS = 200
_SAMPLES = 9
"""Begins within a slot at which the product is computed."""
_SAME_S = 1e-9


@dataclass(frozen=True)
class _Runs:
    """The variables: an instruction at a clock, begun in a slot, with the earliest and latest begin in it."""

    node: np.ndarray
    time_s: np.ndarray
    energy_j: np.ndarray
    slot: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray


def least_band_energy_w2(
    graph: DependencyGraph, profile: PipelineProfile, flattest: PowerWave, *, limit_j: float, num_slots: int = NUM_SLOTS
) -> float:
    """Return a band energy below which no plan gets that takes as long as this wave and needs at most this energy.

    Args:
        graph: the pipeline, with its order.
        profile: its profile, with one power of waiting.
        flattest: the wave of the flattest plan known; the better it is, the tighter is the bound.
        limit_j: energy of an iteration, waiting included.
        num_slots: slots of time in an iteration; more give a tighter bound.

    Raises:
        ValueError: the linear program could not be solved, for instance because no plan needs so little energy.
    """
    period_s, waiting_w = flattest.iteration_time_s, profile.blocking_power_w
    runs = _runs(graph, profile, period_s, period_s / num_slots)
    above_w = runs.energy_j / runs.time_s - waiting_w
    product = np.full(len(runs.node), np.inf)
    integral = _Integral.of_band(flattest)
    for part in np.linspace(0.0, 1.0, _SAMPLES):
        begin_s = runs.first_s + part * (runs.last_s - runs.first_s)
        product = np.minimum(product, above_w * (integral.until(begin_s + runs.time_s) - integral.until(begin_s)))
    num_runs, num_nodes = len(runs.node), len(graph.instructions)
    upper, bounds = _precedence(graph, runs, period_s / num_slots)
    energies_j = np.concatenate([runs.energy_j - waiting_w * runs.time_s, np.zeros(num_nodes)])
    solved = linprog(
        np.concatenate([product / period_s, np.zeros(num_nodes)]),
        A_ub=sparse.vstack([upper, sparse.csr_matrix(energies_j)]).tocsr(),
        b_ub=np.append(bounds, limit_j - waiting_w * graph.num_ranks * period_s),
        A_eq=sparse.csr_matrix(
            (np.ones(num_runs), (runs.node, np.arange(num_runs))), shape=(num_nodes, num_runs + num_nodes)
        ),
        b_eq=np.ones(num_nodes),
        method="highs-ipm",
    )
    if not solved.success:
        raise ValueError(f"no bound on the swing: {solved.message}")
    return max(0.0, float(solved.fun)) ** 2


@dataclass(frozen=True)
class _Integral:
    """The integral over time of a wave in the band, from its coefficients."""

    angular: np.ndarray
    coefficients: np.ndarray

    @classmethod
    def of_band(cls, wave: PowerWave) -> "_Integral":
        """Return that of the band part of a wave, with mean square 1."""
        period_s = wave.iteration_time_s
        angular = 2 * np.pi * np.array(harmonics_in_band(period_s)) / period_s
        turns = np.exp(-1j * np.outer(angular, np.array(wave.times_s)))
        coefficients = (turns[:, :-1] - turns[:, 1:]) @ np.array(wave.powers_w) / (1j * angular * period_s)
        return cls(angular, coefficients / np.sqrt(2 * np.sum(np.abs(coefficients) ** 2)))

    def until(self, at_s: np.ndarray) -> np.ndarray:
        """Return the integral until some instants, less a constant."""
        turns = np.exp(1j * np.outer(self.angular, at_s))
        return 2 * np.real((self.coefficients / (1j * self.angular)) @ turns)


def _runs(graph: DependencyGraph, profile: PipelineProfile, period_s: float, slot_s: float) -> _Runs:
    options = [profile[i.instruction_class].options for i in graph.instructions]
    fastest_s = [min(option.time_s for option in own) for own in options]
    earliest_s, latest_end_s = _windows(graph, fastest_s, period_s)
    found = []
    for node, own in enumerate(options):
        for option in own:
            first_s, last_s = earliest_s[node], latest_end_s[node] - option.time_s
            if last_s < first_s - _SAME_S:
                continue
            last_s = max(first_s, last_s)
            for slot in range(int(first_s / slot_s + _SAME_S), int(last_s / slot_s + _SAME_S) + 1):
                begin_s = max(first_s, slot * slot_s)
                end_s = max(begin_s, min(last_s, (slot + 1) * slot_s))
                found.append((node, option.time_s, option.energy_j, slot, begin_s, end_s))
    columns = [np.array(column) for column in zip(*found, strict=True)]
    return _Runs(*columns)


def _windows(
    graph: DependencyGraph, fastest_s: Sequence[float], period_s: float
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the earliest begin and the latest end of each instruction."""
    order = list(graph.topological_order)
    earliest_s, latest_end_s = [0.0] * len(order), [period_s] * len(order)
    for node in order:
        for before, latency_s in graph.predecessors[node]:
            earliest_s[node] = max(earliest_s[node], earliest_s[before] + fastest_s[before] + latency_s)
    for node in reversed(order):
        for before, latency_s in graph.predecessors[node]:
            latest_end_s[before] = min(latest_end_s[before], latest_end_s[node] - fastest_s[node] - latency_s)
    return earliest_s, latest_end_s


def _precedence(graph: DependencyGraph, runs: _Runs, slot_s: float) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Return rows over the runs and the mean begins: for slots, and for the means."""
    num_runs, num_nodes = len(runs.node), len(graph.instructions)
    of = [np.flatnonzero(runs.node == node) for node in range(num_nodes)]
    end_slot = np.floor((runs.first_s + runs.time_s) / slot_s + _SAME_S).astype(int)
    rows: list[tuple[np.ndarray, np.ndarray, float]] = []
    for after in range(num_nodes):
        own = of[after]
        rows.append((np.append(own, num_runs + after), np.append(runs.first_s[own], -1.0), 0.0))
        rows.append((np.append(own, num_runs + after), np.append(-runs.last_s[own], 1.0), 0.0))
        for before, latency_s in graph.predecessors[after]:
            first = of[before]
            for slot in np.union1d(runs.slot[own], end_slot[first]):
                begun, ended = own[runs.slot[own] <= slot], first[end_slot[first] <= slot]
                if len(begun) and len(ended) < len(first):
                    ones = np.concatenate([np.ones(len(begun)), -np.ones(len(ended))])
                    rows.append((np.concatenate([begun, ended]), ones, 0.0))
            columns = np.append(first, [num_runs + before, num_runs + after])
            rows.append((columns, np.append(runs.time_s[first], [1.0, -1.0]), -latency_s))
    numbers = np.repeat(np.arange(len(rows)), [len(columns) for columns, _, _ in rows])
    matrix = sparse.csr_matrix(
        (np.concatenate([own for _, own, _ in rows]), (numbers, np.concatenate([columns for columns, _, _ in rows]))),
        shape=(len(rows), num_runs + num_nodes),
    )
    return matrix, np.array([bound for _, _, bound in rows])
