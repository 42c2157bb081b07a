"""Compiled simulation of iterations in which clock changes take effect late.

Clocks are indices into a list of all ranks' clocks. Changes are numbered in the order in which nodes are visited: those
of the i-th node in this order are first_change[i] to first_change[i + 1].
"""

from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled


class SimulatedPipeline(NamedTuple):
    """A pipeline: nodes in program order, `order` is a topological one; predecessors of v at pred[v]:pred[v + 1].

    Node v at clock c takes times[k] and energies[k] with k = row[v] + c - first_clock[rank[v]].
    """

    order: list[int]
    pred: list[int]
    pred_node: list[int]
    pred_latency: list[float]
    epilogue: list[float]
    rank: list[int]
    row: list[int]
    times: list[float]
    energies: list[float]
    first_clock: list[int]
    waiting_power: list[float]
    """Power of a waiting GPU by clock; if empty, waits are not charged."""


class RequestedClocks(NamedTuple):
    """Clock changes by number: offset from the start of their node, clock, wait for the driver, typical latency.

    A change to the clock already requested has a negative latency and no effect.
    """

    first_change: list[int]
    offset: list[float]
    clock: list[int]
    wait: list[float]
    latency: list[float]


class ClockStates(NamedTuple):
    """State of the GPUs by rank: the clock in force, and when the rank's last node ended.

    Changes of rank r that have not taken effect are pending_first[r] to pending_end[r] in `pending_at` and
    `pending_clock`; calls whose stall is still to come are in `stalled_at`. Both are sorted by time.
    """

    clock: list[int]
    idle_since: list[float]
    pending_first: list[int]
    pending_end: list[int]
    pending_at: list[float]
    pending_clock: list[int]
    stall_first: list[int]
    stall_end: list[int]
    stalled_at: list[float]
    stall: list[float]
    """How long a call stalls the rank's work."""


class SimulatedNodes(NamedTuple):
    """Results of the last iteration: end, time and energy of each node, and the scheduled time of each change."""

    finish: list[float]
    duration: list[float]
    energy: list[float]
    due: list[float]


@compiled
def simulate_iteration(
    pipeline: SimulatedPipeline,
    changes: RequestedClocks,
    states: ClockStates,
    nodes: SimulatedNodes,
    stalled_power: float,
) -> tuple[float, float]:
    """Simulate the next iteration, and return its time and the energy of its waits."""
    order, pred, pred_node, pred_latency, epilogue, rank, _, _, _, _, waiting_power = pipeline
    num_ranks = len(states.clock)
    is_charged = len(waiting_power) > 0
    waiting_energy = 0.0
    makespan = 0.0
    for r in range(num_ranks):
        states.idle_since[r] = 0.0
    for i in range(len(order)):
        v = order[i]
        begin = 0.0
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, nodes.finish[pred_node[k]] + pred_latency[k])
        r = rank[v]
        for change in range(changes.first_change[i], changes.first_change[i + 1]):
            _request(changes, states, nodes, change, r, begin)
        if is_charged:
            waiting_energy += _wait(states, waiting_power, r, begin)
        _run(pipeline, states, nodes, stalled_power, v, begin)
        states.idle_since[r] = nodes.finish[v]
        makespan = max(makespan, nodes.finish[v] + epilogue[v])
    for r in range(num_ranks):
        if is_charged:
            waiting_energy += _wait(states, waiting_power, r, makespan)
        for k in range(states.pending_first[r], states.pending_end[r]):
            states.pending_at[k] -= makespan
        for k in range(states.stall_first[r], states.stall_end[r]):
            states.stalled_at[k] -= makespan
    return makespan, waiting_energy


@compiled
def _request(
    changes: RequestedClocks, states: ClockStates, nodes: SimulatedNodes, change: int, r: int, begin: float
) -> None:
    """Request a clock, and drop pending changes that would take effect later."""
    due = begin + changes.offset[change]
    nodes.due[change] = due
    if changes.latency[change] < 0.0:
        return
    called = due + changes.wait[change]
    effective = called + changes.latency[change]
    end = states.pending_end[r]
    while end > states.pending_first[r] and states.pending_at[end - 1] >= effective:
        end -= 1
    states.pending_at[end] = effective
    states.pending_clock[end] = changes.clock[change]
    states.pending_end[r] = end + 1
    if states.stall[r] > 0.0:
        end = states.stall_end[r]
        states.stall_end[r] = end + 1
        while end > states.stall_first[r] and states.stalled_at[end - 1] > called:
            states.stalled_at[end] = states.stalled_at[end - 1]
            end -= 1
        states.stalled_at[end] = called


@compiled
def _wait(states: ClockStates, waiting_power: list[float], r: int, until: float) -> float:
    """Let a rank wait from its last node's end, and return the energy at the clocks in force."""
    now = states.idle_since[r]
    energy = 0.0
    first = states.pending_first[r]
    while first < states.pending_end[r] and states.pending_at[first] <= until:
        then = max(now, states.pending_at[first])
        energy += waiting_power[states.clock[r]] * (then - now)
        now = then
        states.clock[r] = states.pending_clock[first]
        first += 1
    states.pending_first[r] = first
    return energy + waiting_power[states.clock[r]] * (until - now)


@compiled
def _run(
    pipeline: SimulatedPipeline, states: ClockStates, nodes: SimulatedNodes, stalled_power: float, v: int, begin: float
) -> None:
    """Run one node; it continues at the speed and power of each clock that takes effect during it."""
    r = pipeline.rank[v]
    row = pipeline.row[v] - pipeline.first_clock[r]
    now = begin
    left = 1.0
    energy = 0.0
    while True:
        stalled = states.stall_first[r]
        while stalled < states.stall_end[r] and states.stalled_at[stalled] <= now:
            # If the call was made before this node, only the rest of its stall delays the node.
            then = max(now, states.stalled_at[stalled] + states.stall[r])
            energy += stalled_power * (then - now)
            now = then
            stalled += 1
        states.stall_first[r] = stalled
        first = states.pending_first[r]
        while first < states.pending_end[r] and states.pending_at[first] <= now:
            states.clock[r] = states.pending_clock[first]
            first += 1
        states.pending_first[r] = first
        option = row + states.clock[r]
        end = now + left * pipeline.times[option]
        until = states.pending_at[first] if first < states.pending_end[r] else end
        if stalled < states.stall_end[r]:
            until = min(until, states.stalled_at[stalled])
        if end <= until:
            nodes.finish[v] = end
            nodes.duration[v] = end - begin
            nodes.energy[v] = energy + left * pipeline.energies[option]
            return
        done = (until - now) / pipeline.times[option]
        energy += done * pipeline.energies[option]
        left -= done
        now = until
