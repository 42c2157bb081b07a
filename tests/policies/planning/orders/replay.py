"""An independent evaluator of plans: runs orders instruction by instruction, and measures time, memory and energy.

It shares no code with the planner: ranks are queues, data and memory are counted, and a rank waits until its next
instruction has its inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Cost = Callable[[int, str, int], tuple[float, float]]
"""Time in seconds and energy in joules of (rank, kind, microbatch)."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a plan did: iteration time, energy with waiting to the end, most microbatches held by each rank."""

    iteration_time_s: float
    energy_j: float
    held_microbatches: tuple[int, ...]


def replayed(
    orders: Sequence[Sequence[tuple[str, int]]],
    cost: Cost,
    *,
    num_microbatches: int,
    blocking_power_w: float,
    latency_s: float = 0.0,
) -> Replay:
    """Run one order of (kind, microbatch) per rank; fails on a deadlock and on missing or repeated work."""
    num_ranks = len(orders)
    for order in orders:
        assert len(set(order)) == len(order), "an instruction runs twice"
        for m in range(num_microbatches):
            assert ("F", m) in order
            assert (("B", m) in order) != (("I", m) in order and ("W", m) in order)
    arrived: dict[tuple[str, int, int], float] = {("F", 0, m): 0.0 for m in range(num_microbatches)}
    at, now_s = [0] * num_ranks, [0.0] * num_ranks
    held, peak, work_s, energy_j = [0] * num_ranks, [0] * num_ranks, 0.0, 0.0
    forwards: set[tuple[int, int]] = set()
    gradients: set[tuple[int, int]] = set()
    while any(at[r] < len(orders[r]) for r in range(num_ranks)):
        progressed = False
        for r in range(num_ranks):
            while at[r] < len(orders[r]):
                kind, m = orders[r][at[r]]
                if kind == "F":
                    ready_s = arrived.get(("F", r, m))
                elif kind == "W":
                    ready_s = now_s[r] if (r, m) in gradients else None
                elif (r, m) not in forwards:
                    ready_s = None
                else:
                    ready_s = now_s[r] if r == num_ranks - 1 else arrived.get(("I", r, m))
                if ready_s is None:
                    break
                time_s, own_j = cost(r, kind, m)
                now_s[r] = max(now_s[r], ready_s) + time_s
                work_s, energy_j = work_s + time_s, energy_j + own_j
                if kind == "F":
                    forwards.add((r, m))
                    held[r] += 1
                    peak[r] = max(peak[r], held[r])
                    arrived["F", r + 1, m] = now_s[r] + latency_s
                if kind in "BI":
                    gradients.add((r, m))
                    arrived["I", r - 1, m] = now_s[r] + latency_s
                if kind in "BW":
                    held[r] -= 1
                at[r] += 1
                progressed = True
        assert progressed, "deadlock"
    end_s = max(now_s)
    waited_s = num_ranks * end_s - work_s
    return Replay(end_s, energy_j + blocking_power_w * waited_s, tuple(peak))
