"""Simulator of iterations whose clocks change late: the cost of clock changes in time and energy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.timeline import iteration_energy_j
from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray
from gpuenergyd_policies.planning.switching.driver_queue import QueuedClockCall, driver_waits_s, longest_busy_s
from gpuenergyd_policies.planning.switching.requests import Latency, rank_latencies
from gpuenergyd_policies.planning.switching.simulation_kernel import (
    ClockStates,
    RequestedClocks,
    SimulatedNodes,
    SimulatedPipeline,
    simulate_iteration,
)


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    """Time and energy of an iteration whose clocks change late, and how often they change."""

    iteration_time_s: float
    energy_j: float
    driver_busy_s: float = 0.0
    """Time for which the iteration's calls occupy the driver."""
    waiting_energy_j: float = 0.0
    """Energy of waits at the clocks in force; 0 if waiting costs the same at all clocks."""
    waiting_s: float = 0.0
    """Total time of these waits on all ranks."""
    shortest_dwell_ratio: float = math.inf
    """Shortest time between two requests for the same GPU, in typical latencies of the first one."""


def simulate_switching(
    graph: DependencyGraph,
    profile: PipelineProfile,
    changes: Sequence[Sequence[ClockChange]],
    *,
    latency: Latency,
    num_iterations: int = 3,
) -> SimulatedIteration:
    """Return the last of several successive iterations, with each clock in effect after its typical latency.

    A running instruction continues at the speed and power of the new clock; a call stops it for the stall of the GPU's
    latency, at waiting power. A barrier separates iterations. Every rank starts at the highest clock of its first
    instruction. If driver calls take time, the iterations run a second time with the waits for the driver found in the
    first run.
    """
    simulation = _Simulation(graph, profile, changes, rank_latencies(latency, graph.num_ranks))
    simulated = simulation.run({}, num_iterations)
    if sum(own.num_calls for own in simulation.latencies if own.call_s) < 2:
        return simulated
    calls = simulation.calls()
    waits_s = driver_waits_s([call for _, call in calls])
    wait_of = {key: wait_s for (key, _), wait_s in zip(calls, waits_s, strict=True) if wait_s > 0}
    return simulation.run(wait_of, num_iterations) if wait_of else simulated


_ChangeKey = tuple[Instruction, float]
_NO_CHANGE_S = -1.0
"""Latency of a request for the clock already requested, which has no effect."""


class _Simulation:
    """Successive iterations on simulated GPUs, and the driver calls made in the last of them."""

    def __init__(
        self,
        graph: DependencyGraph,
        profile: PipelineProfile,
        changes: Sequence[Sequence[ClockChange]],
        latencies: Sequence[SwitchLatency],
    ) -> None:
        self._graph, self._profile, self.latencies = graph, profile, latencies
        requested: dict[Instruction, list[ClockChange]] = {}
        for change in chain.from_iterable(changes):
            requested.setdefault(change.instruction, []).append(change)
        of_nodes = [requested.get(graph.instructions[v], ()) for v in graph.topological_order]
        self._changes = list(chain.from_iterable(of_nodes))
        """All changes in the order in which nodes run."""
        self._first_change = [0, *accumulate(map(len, of_nodes))]
        self._requested = [(change.instruction.pp_rank, change.sm_clock_mhz) for change in self._changes]
        """Rank and clock of each change."""
        self._rank_of = np.array([rank for rank, _ in self._requested], dtype=np.int64)
        first_class = {graph.instructions[v].pp_rank: c for v, c in reversed(list(enumerate(graph.class_of)))}
        self._first_mhz = {rank: profile[graph.classes[c]].at_max_clock.sm_clock_mhz for rank, c in first_class.items()}
        """Clock at which each rank starts."""
        self._clocks = sorted({*self._requested, *self._first_mhz.items()})
        """(Rank, clock) pairs for all clocks at which a rank may run."""
        self._place_of = {own: place for place, own in enumerate(self._clocks)}
        self._pipeline = _pipeline(graph, profile, self._clocks)
        finish, duration, energy = (floats(np.zeros(len(graph.instructions))) for _ in range(3))
        self._nodes = SimulatedNodes(finish, duration, energy, due=floats(np.zeros(len(self._changes))))
        self._before_mhz: list[int] = []
        """Clock requested before each change of the last iteration."""
        self._latencies_s: list[float] = []

    def run(self, wait_of: Mapping[_ChangeKey, float], num_iterations: int) -> SimulatedIteration:
        """Return the last of `num_iterations` iterations, in which requests wait for the driver as given."""
        changes = self._changes
        waits_s = [wait_of.get((c.instruction, c.offset_s), 0.0) for c in changes] if wait_of else [0.0] * len(changes)
        requested = RequestedClocks(
            first_change=ints(self._first_change),
            offset=floats([change.offset_s for change in changes]),
            clock=ints([self._place_of[own] for own in self._requested]),
            wait=floats(waits_s),
            latency=floats(np.zeros(len(changes))),
        )
        states = self._initial_states(num_iterations)
        in_force_mhz = dict(self._first_mhz)
        iteration_time_s = waiting_j = 0.0
        for number in range(num_iterations):
            if number < 2:  # later iterations begin like the second one
                self._set_latencies(in_force_mhz)
                requested = requested._replace(latency=floats(self._latencies_s))
            iteration_time_s, waiting_j = simulate_iteration(
                self._pipeline, requested, states, self._nodes, self._profile.blocking_power_w
            )
        return self._simulated(iteration_time_s, waiting_j)

    def calls(self) -> list[tuple[_ChangeKey, QueuedClockCall]]:
        """Return the driver calls of the last iteration, each with the change that it makes."""
        calls = []
        for change, due_s, before_mhz, latency_s in zip(
            self._changes, self._nodes.due, self._before_mhz, self._latencies_s, strict=True
        ):
            if latency_s != _NO_CHANGE_S:
                rank, is_raise = change.instruction.pp_rank, change.sm_clock_mhz > before_mhz
                own = self.latencies[rank]
                call = QueuedClockCall(float(due_s), own.call_s, rank, is_raise, own.num_calls, own.host)
                calls.append(((change.instruction, change.offset_s), call))
        return calls

    def _set_latencies(self, in_force_mhz: dict[int, int]) -> None:
        """Set each change's previous clock and typical latency; update `in_force_mhz` to the end of the iteration."""
        known_s: dict[tuple[int, int, int], float] = {}
        self._before_mhz, self._latencies_s = [], []
        for rank, mhz in self._requested:
            before_mhz, in_force_mhz[rank] = in_force_mhz[rank], mhz
            key = (rank, before_mhz, mhz)
            latency_s = known_s.get(key)
            if latency_s is None:
                latency_s = _NO_CHANGE_S if mhz == before_mhz else self.latencies[rank].typical_s(before_mhz, mhz)
                known_s[key] = latency_s
            self._before_mhz.append(before_mhz)
            self._latencies_s.append(latency_s)

    def _initial_states(self, num_iterations: int) -> ClockStates:
        """Return GPUs at their first clocks, with memory for all changes of this number of iterations."""
        num_ranks = self._graph.num_ranks
        num_changes = num_iterations * np.bincount(self._rank_of, minlength=num_ranks)
        room_from = np.cumsum(num_changes) - num_changes
        room = int(num_changes.sum())
        clocks = [self._place_of.get((rank, self._first_mhz.get(rank, 0)), 0) for rank in range(num_ranks)]
        return ClockStates(
            clock=ints(clocks),
            idle_since=floats(np.zeros(num_ranks)),
            pending_first=ints(room_from.copy()),
            pending_end=ints(room_from.copy()),
            pending_at=floats(np.zeros(room)),
            pending_clock=ints(np.zeros(room)),
            stall_first=ints(room_from.copy()),
            stall_end=ints(room_from.copy()),
            stalled_at=floats(np.zeros(room)),
            stall=floats([latency.stall_s for latency in self.latencies]),
        )

    def _simulated(self, iteration_time_s: float, waiting_j: float) -> SimulatedIteration:
        durations_s = np.asarray(self._nodes.duration).tolist()
        energy_j = iteration_energy_j(
            energies_j=np.asarray(self._nodes.energy).tolist(),
            durations_s=durations_s,
            iteration_time_s=iteration_time_s,
            num_ranks=self._graph.num_ranks,
            blocking_power_w=self._profile.blocking_power_w if self._profile.waiting_power is None else 0.0,
        )
        is_call = any(latency.call_s for latency in self.latencies)
        return SimulatedIteration(
            iteration_time_s,
            energy_j + waiting_j,
            waiting_energy_j=waiting_j,
            waiting_s=self._graph.num_ranks * iteration_time_s - sum(durations_s),
            driver_busy_s=longest_busy_s([call for _, call in self.calls()]) if is_call else 0.0,
            shortest_dwell_ratio=_shortest_dwell_ratio(
                self._rank_of, np.array(self._nodes.due), np.array(self._latencies_s), iteration_time_s
            ),
        )


def _pipeline(graph: DependencyGraph, profile: PipelineProfile, clocks: Sequence[tuple[int, int]]) -> SimulatedPipeline:
    """Return a pipeline and its profile as arrays, with time and energy of each class at the clocks of its rank."""
    clocks_of: dict[int, list[int]] = {}
    for rank, mhz in clocks:
        clocks_of.setdefault(rank, []).append(mhz)
    options = [[profile[key].interpolated(mhz) for mhz in clocks_of[key.pp_rank]] for key in graph.classes]
    num_clocks = [len(clocks_of.get(rank, ())) for rank in range(graph.num_ranks)]
    row_of_class = np.array([0, *accumulate(map(len, options))], dtype=np.int64)
    rank_of_class = np.array([key.pp_rank for key in graph.classes], dtype=np.int64)
    class_of = np.array(graph.class_of, dtype=np.int64)
    edges = np.array(list(chain.from_iterable(graph.predecessors)), dtype=np.float64).reshape(-1, 2)
    power = profile.waiting_power
    return SimulatedPipeline(
        order=ints(graph.topological_order),
        pred=ints([0, *accumulate(map(len, graph.predecessors))]),
        pred_node=ints(edges[:, 0]),
        pred_latency=floats(edges[:, 1]),
        epilogue=floats(graph.epilogues_s),
        rank=ints(rank_of_class[class_of]),
        row=ints(row_of_class[class_of]),
        times=floats([option.time_s for own in options for option in own]),
        energies=floats([option.energy_j for own in options for option in own]),
        first_clock=ints([0, *accumulate(num_clocks)]),
        waiting_power=floats([] if power is None else [power.at(mhz) for _, mhz in clocks]),
    )


def _shortest_dwell_ratio(
    rank_of: IntArray, due_s: FloatArray, latency_s: FloatArray, iteration_time_s: float
) -> float:
    """Return the shortest time between requests for one GPU, in latencies, including the next iteration's first."""
    order = np.lexsort((latency_s, due_s, rank_of))
    order = order[latency_s[order] != _NO_CHANGE_S]
    rank_of, due_s, latency_s = rank_of[order], due_s[order], latency_s[order]
    is_first = np.append(True, rank_of[1:] != rank_of[:-1])[: len(order)]
    first_of_rank = np.flatnonzero(is_first)
    last_of_rank = np.append(first_of_rank[1:], len(order))[: len(first_of_rank)] - 1
    next_due_s = np.roll(due_s, -1)
    next_due_s[last_of_rank] = due_s[first_of_rank] + iteration_time_s
    takes_time = latency_s > 0
    return float(min((next_due_s - due_s)[takes_time] / latency_s[takes_time], default=math.inf))
