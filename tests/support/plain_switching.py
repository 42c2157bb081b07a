"""The simulator of late clocks in plain Python, instruction by instruction: what the compiled one is compared with.

It is as it was before `planning/switching/simulation_kernel.py`; keep it simple instead of fast.
"""

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from operator import add

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.timeline import iteration_energy_j
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd_policies.planning.switching.driver_queue import QueuedClockCall, driver_waits_s, longest_busy_s
from gpuenergyd_policies.planning.switching.requests import Latency, rank_latencies
from gpuenergyd_policies.planning.switching.simulation import SimulatedIteration


def simulate_plainly(
    graph: DependencyGraph,
    profile: PipelineProfile,
    changes: Sequence[Sequence[ClockChange]],
    *,
    latency: Latency,
    num_iterations: int = 3,
) -> SimulatedIteration:
    """Return the last of several iterations in a row, each clock in effect after its typical latency.

    An instruction under way continues at the speed and power of the new clock; a call stops it for the stall of the
    GPU's latency, at the power of waiting. Iterations are joined by a barrier.
    Every rank starts at the highest clock of its first instruction. If driver calls take time, the iterations run a
    second time with the waits for the driver that the first run shows.
    """
    latencies = rank_latencies(latency, graph.num_ranks)
    simulation = _Simulation(graph, profile, changes, latencies)
    results = [simulation.run({}) for _ in range(num_iterations)]
    if sum(own.num_calls for own in latencies if own.call_s) < 2:
        return results[-1]
    waits_s = driver_waits_s([call for _, call in simulation.calls])
    wait_of = {key: wait_s for (key, _), wait_s in zip(simulation.calls, waits_s, strict=True) if wait_s > 0}
    if not wait_of:
        return results[-1]
    simulation = _Simulation(graph, profile, changes, latencies)
    return [simulation.run(wait_of) for _ in range(num_iterations)][-1]


_ChangeKey = tuple[Instruction, float]
_Request = tuple[float, float]
"""When a clock is requested, and how long it typically takes until it is effective, both in seconds."""


class _Simulation:
    """Iterations in a row on simulated GPUs, and the driver calls made in the last of them."""

    def __init__(
        self,
        graph: DependencyGraph,
        profile: PipelineProfile,
        changes: Sequence[Sequence[ClockChange]],
        latencies: Sequence[SwitchLatency],
    ) -> None:
        self._graph = graph
        self._profile = profile
        self._latencies = latencies
        requested: dict[Instruction, list[ClockChange]] = {}
        for change in (change for rank_changes in changes for change in rank_changes):
            requested.setdefault(change.instruction, []).append(change)
        self._requested = [requested.get(instruction, ()) for instruction in graph.instructions]
        of_class = [profile[key] for key in graph.classes]
        self._options = [of_class[c] for c in graph.class_of]
        first: dict[int, Instruction] = {}
        for instruction in graph.instructions:
            first.setdefault(instruction.pp_rank, instruction)
        self._clocks = {
            rank: PlainRankClock(
                profile[instruction.instruction_class].at_max_clock.sm_clock_mhz,
                latencies[rank],
                waiting_power_w=profile.blocking_power_w,
            )
            for rank, instruction in first.items()
        }
        self.calls: list[tuple[_ChangeKey, QueuedClockCall]] = []

    def run(self, wait_of: Mapping[_ChangeKey, float]) -> SimulatedIteration:
        """Run one iteration in which requests wait this long for the driver."""
        graph, profile, power = self._graph, self._profile, self._profile.waiting_power
        self.calls.clear()
        finish_s = [0.0] * len(graph.instructions)
        durations_s = [0.0] * len(graph.instructions)
        energies_j = [0.0] * len(graph.instructions)
        requests: dict[int, list[_Request]] = {}
        idle_since_s = dict.fromkeys(self._clocks, 0.0)
        waiting_j = 0.0
        for v in graph.topological_order:
            instruction = graph.instructions[v]
            start_s = 0.0
            for u, latency_s in graph.predecessors[v]:
                ready_s = finish_s[u] + latency_s
                if ready_s > start_s:  # noqa: PLR1730  `max` of a generator takes five times as long
                    start_s = ready_s
            clock = self._clocks[instruction.pp_rank]
            for change in self._requested[v]:
                key, due_s = (instruction, change.offset_s), start_s + change.offset_s
                before_mhz = clock.request(due_s, change.sm_clock_mhz, wait_s=wait_of.get(key, 0.0))
                if change.sm_clock_mhz != before_mhz:
                    is_raise, own = change.sm_clock_mhz > before_mhz, self._latencies[instruction.pp_rank]
                    call = QueuedClockCall(due_s, own.call_s, instruction.pp_rank, is_raise, own.num_calls, own.host)
                    self.calls.append((key, call))
                    request = (due_s, own.typical_s(before_mhz, change.sm_clock_mhz))
                    requests.setdefault(instruction.pp_rank, []).append(request)
            if power is not None:
                waiting_j += clock.wait(idle_since_s[instruction.pp_rank], start_s, power)
            finish_s[v], energies_j[v] = clock.run(self._options[v], start_s)
            durations_s[v] = finish_s[v] - start_s
            idle_since_s[instruction.pp_rank] = finish_s[v]
        iteration_time_s = max(map(add, finish_s, graph.epilogues_s))
        for rank, clock in self._clocks.items():
            if power is not None:
                waiting_j += clock.wait(idle_since_s[rank], iteration_time_s, power)
            clock.next_iteration(iteration_time_s)
        energy_j = iteration_energy_j(
            energies_j=energies_j,
            durations_s=durations_s,
            iteration_time_s=iteration_time_s,
            num_ranks=graph.num_ranks,
            blocking_power_w=profile.blocking_power_w if power is None else 0.0,
        )
        return SimulatedIteration(
            iteration_time_s,
            energy_j + waiting_j,
            waiting_energy_j=waiting_j,
            waiting_s=graph.num_ranks * iteration_time_s - sum(durations_s),
            driver_busy_s=longest_busy_s([call for _, call in self.calls]),
            shortest_dwell_ratio=_shortest_dwell_ratio(requests.values(), iteration_time_s),
        )


def _shortest_dwell_ratio(requests_of: Iterable[list[_Request]], iteration_time_s: float) -> float:
    """Return the shortest time between requests for one GPU, in latencies; the first of the next iteration counts."""
    ratios = []
    for requests in requests_of:
        requests.sort()
        next_due_s = [due_s for due_s, _ in requests[1:]] + [requests[0][0] + iteration_time_s]
        ratios += [
            (next_s - due_s) / latency_s
            for (due_s, latency_s), next_s in zip(requests, next_due_s, strict=True)
            if latency_s > 0
        ]
    return min(ratios, default=math.inf)


class PlainRankClock:
    """Clock of one simulated GPU over time; changes are requested in program order."""

    def __init__(self, sm_clock_mhz: int, latency: SwitchLatency, *, waiting_power_w: float = 0.0) -> None:
        self._pending: list[tuple[float, int]] = []
        self._stalls_s: list[float] = []
        self._waiting_power_w = waiting_power_w
        self._sm_clock_mhz = sm_clock_mhz
        self._requested_mhz = sm_clock_mhz
        self._latency = latency
        self._options: dict[tuple[int, int], tuple[InstructionProfile, ClockOption]] = {}

    def request(self, due_s: float, sm_clock_mhz: int, *, wait_s: float) -> int:
        """Request a clock and return the one requested before; pending changes that would come later are dropped.

        Requesting the same clock again has no effect.
        """
        before_mhz, self._requested_mhz = self._requested_mhz, sm_clock_mhz
        if sm_clock_mhz != before_mhz:
            called_s = due_s + wait_s
            effective_s = called_s + self._latency.typical_s(before_mhz, sm_clock_mhz)
            self._pending = [p for p in self._pending if p[0] < effective_s]
            self._pending.append((effective_s, sm_clock_mhz))
            if self._latency.stall_s:
                insort(self._stalls_s, called_s)
        return before_mhz

    def next_iteration(self, iteration_time_s: float) -> None:
        """Restart time at the end of an iteration."""
        self._pending = [(effective_s - iteration_time_s, mhz) for effective_s, mhz in self._pending]
        self._stalls_s = [stall_s - iteration_time_s for stall_s in self._stalls_s]

    def wait(self, begin_s: float, end_s: float, power: WaitingPower) -> float:
        """Wait, and return the energy at the clocks in force."""
        now_s, energy_j = begin_s, 0.0
        while self._pending and self._pending[0][0] <= end_s:
            effective_s, sm_clock_mhz = self._pending.pop(0)
            until_s = max(now_s, effective_s)
            energy_j += power.at(self._sm_clock_mhz) * (until_s - now_s)
            now_s, self._sm_clock_mhz = until_s, sm_clock_mhz
        return energy_j + power.at(self._sm_clock_mhz) * (end_s - now_s)

    def _option(self, options: InstructionProfile) -> ClockOption:
        """Return time and energy at the clock in force; few pairs of both recur in thousands of instructions."""
        key = id(options), self._sm_clock_mhz
        known = self._options.get(key)
        if known is None or known[0] is not options:
            known = self._options[key] = options, options.interpolated(self._sm_clock_mhz)
        return known[1]

    def run(self, options: InstructionProfile, start_s: float) -> tuple[float, float]:
        """Run one instruction from `start_s`; return its end and its energy."""
        now_s, left, energy_j = start_s, 1.0, 0.0
        while True:
            while self._stalls_s and self._stalls_s[0] <= now_s:
                # Of a call before this instruction, only what is left of its stall delays it.
                until_s = max(now_s, self._stalls_s.pop(0) + self._latency.stall_s)
                energy_j += self._waiting_power_w * (until_s - now_s)
                now_s = until_s
            while self._pending and self._pending[0][0] <= now_s:
                self._sm_clock_mhz = self._pending.pop(0)[1]
            option = self._option(options)
            end_s = now_s + left * option.time_s
            next_s = self._pending[0][0] if self._pending else end_s
            if self._stalls_s:
                next_s = min(next_s, self._stalls_s[0])
            if end_s <= next_s:
                return end_s, energy_j + left * option.energy_j
            done = (next_s - now_s) / option.time_s
            energy_j += done * option.energy_j
            left -= done
            now_s = next_s
